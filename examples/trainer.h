/*  trainer.h - what gpt2.c, bert.c and llama.c share: options, text, the model and its budget, the loop.

    A trainer_kind has what differs between the programs: how to build the net, how to draw a batch,
    what to show after training; and, where a model is not one of nn_transformer_config or its tokens
    are not bytes, sizes, options, tokens and initial params of its own. Include memscale.h and nn.h
    first. */
#ifndef MEMSCALE_TRAINER_H
#define MEMSCALE_TRAINER_H

#include "options.h"

#include "checkpoint.h"

#include "ranks.h"

#include <unistd.h>

enum { MAX_SPACES = 12, BYTE_COUNT = 256, WARMUP_STEPS = 60, CUDA_READ_EVERY = 10 };

/* Of the blocks of a text, every so many-th is held out: trained on by no run, and evaluated after
   training in the same batches by every run, whatever its seed. Of short texts blocks are shorter. */
enum { HELD_OUT_BLOCK = 4096, HELD_OUT_EVERY = 10, HELD_OUT_BATCHES = 64 };

static const char *const default_files[] = {
    "memscale.h",    "README.md",         "docs/getting-started.md", "docs/internals.md",
    "examples/nn.h", "examples/nn_cpu.h", "examples/nn_cuda.h"};

typedef struct settings {
    const char *preset, *device, *mode, *off, *offload, *shard, *optimizer, *state, *precision;
    const char *trace, *metrics; // files to write, or NULL
    int64_t batch, sequence, steps, seconds, every, seed, warmup;
    int64_t accumulate; // batches of a step
    option_budget budget;
    float dropout, clip, rate; // 0: none, no limit, as fits the model
    bool random, tf32, graph, automatic, dry, plan, full_plan, profile, verify, debug;
    bool half_gradients;
    option_words files;
    checkpoint saving;
} settings;

typedef struct trainer trainer;

typedef struct trainer_kind {
    const char *title;   // "GPT-2 on bytes"
    const char *prefix;  // of the presets of nn.h: "gpt2-"
    const char *presets; // for people
    int64_t small_vocabulary;
    float beta2; // of AdamW
    nn_transformer (*build)(nn_net *net, const nn_transformer_config *shape);
    void (*draw_batch)(trainer *t); // fills tokens and targets
    int (*show)(trainer *t);        // what it has learnt from a text, by t->logits
    const struct trainer_own *own;  // NULL: all that is own is above
} trainer_kind;

/* What a kind of trainer does by itself; each prints the reason and returns 1 after an error. A trainer
   is the first member of its struct. */
typedef struct trainer_own {
    const char *usage;
    int (*list_options)(trainer *t, option_spec *specs); // adds its options; returns how many
    int (*choose_shape)(trainer *t); // fills t->shape, t->model_name and t->usual_rate
    nn_transformer (*build)(trainer *t);
    bool (*keeps_logits)(const trainer *t); // whether t->kind->show needs them
    int (*encode)(trainer *t);              // t->text becomes t->data
    int (*init)(trainer *t);                // writes the initial params
    int (*finish)(trainer *t);              // after training
} trainer_own;

struct trainer {
    const trainer_kind *kind;
    settings options;
    option_device device;
    nn_transformer_config shape;
    ms_model *model;
    nn_net *net;
    ms_param_group matrices; // that Muon updates; 0: none
    nn_transformer built;
    const char *model_name;
    double usual_rate;
    int held_out_batches;   // 0: HELD_OUT_BATCHES
    bool evaluates_at_once; // before training, too
    uint8_t *text;
    int64_t text_bytes;
    int spaces;    // at the end of the text
    int32_t *data; // the tokens of the text
    int64_t data_count, held_out_block;
    int32_t *tokens, *targets; // (B, T)
    int32_t *window;           // (T + 1)
    float *logits;             // (B, T, V), to show what was learnt
    int64_t held_out;          // number of the next window that is held out; -1 in training
    uint64_t free_bytes;       // of the device, before the training
    uint64_t random;
    double loss; // running mean of those that were read, over about ten steps or the last of more
    bool has_loss;
    double seconds; // that the run has taken, where --seconds limits that
};

// ---- options ------------------------------------------------------------------------------------

enum { TRAINER_OWN_OPTIONS = 8, TRAINER_OPTIONS = 1 + 33 + CHECKPOINT_OPTION_COUNT };

/* Fills specs with the options; returns how many there are. */
static int list_options(const trainer_kind *kind, settings *o, option_spec *specs) {
    const option_spec all[TRAINER_OPTIONS] = {
        {"--preset", "NAME", OPTION_TEXT, &o->preset, kind->presets},
        {"--device", "NAME", OPTION_TEXT, &o->device, OPTION_DEVICE_HELP},
        {"--batch", "N", OPTION_COUNT, &o->batch,
         "sequences per step (8; of larger models than small fewer)"},
        {"--sequence", "N", OPTION_COUNT, &o->sequence, "tokens per sequence"},
        {"--budget", "SIZE", OPTION_BUDGET, &o->budget, OPTION_BUDGET_HELP},
        {"--mode", "NAME", OPTION_TEXT, &o->mode, "conservative, balanced or aggressive"},
        {"--off", "NAME", OPTION_TEXT, &o->off, "switch off checkpointing or early-update"},
        {"--offload", "NAME", OPTION_TEXT, &o->offload, OPTION_OFFLOAD_HELP},
        {"--shard", "NAME", OPTION_TEXT, &o->shard,
         "of several ranks (ranks.h): what each has a part of: state of the optimizer; gradients\n"
         "too; values of params too; or off: nothing. By default as the mode and the budget say"},
        {"--optimizer", "NAME", OPTION_TEXT, &o->optimizer,
         "adamw; lion, at a third of the rate; adafactor, at ten times the rate; muon for the\n"
         "matrices of the blocks, and adamw for the rest"},
        {"--state", "NAME", OPTION_TEXT, &o->state,
         "moments of the optimizer: f32, bf16, 8bit where rules allow that, or 8bit-all, of\n"
         "embedding tables too. By default f32, and 8 bits where mode AGGRESSIVE gains by them"},
        {"--precision", "NAME", OPTION_TEXT, &o->precision,
         "f32 (default), bf16 or f16; bf16-alone or f16-alone: without params in F32 beside"},
        {"--half-grads", NULL, OPTION_FLAG, &o->half_gradients,
         "gradients of weights and token tables in 16 bits, where a step computes in these"},
        {"--auto", NULL, OPTION_FLAG, &o->automatic, "let the built-in policy choose the mode"},
        {"--dropout", "X", OPTION_REAL, &o->dropout, "probability of dropout, below 1"},
        {"--accumulate", "N", OPTION_COUNT, &o->accumulate, OPTION_ACCUMULATE_HELP},
        {"--clip", "X", OPTION_REAL, &o->clip, OPTION_CLIP_HELP},
        {"--rate", "X", OPTION_REAL, &o->rate,
         OPTION_RATE_HELP
         "\n(1e-3 for small models, else 3e-4; 2e-5 for what others have trained, adapters 2e-4)"},
        {"--warmup", "N", OPTION_COUNT, &o->warmup, "steps in which the rate rises"},
        {"--steps", "N", OPTION_COUNT, &o->steps, "stop after N steps"},
        {"--seconds", "N", OPTION_COUNT, &o->seconds,
         "stop after N seconds (45, unless --steps is given)"},
        {"--every", "N", OPTION_COUNT, &o->every,
         "read the loss every N steps (1; on cuda 10, since reading it waits)"},
        {"--seed", "N", OPTION_COUNT, &o->seed, "of initial params and batches"},
        CHECKPOINT_OPTIONS(&o->saving),
        {"--random", NULL, OPTION_FLAG, &o->random, "random tokens instead of text"},
        {"--tf32", NULL, OPTION_FLAG, &o->tf32, "cuda: matrix products in TF32"},
        {"--graph", NULL, OPTION_FLAG, &o->graph,
         "cuda: replay the steps from a recording (a CUDA graph)"},
        {"--dry", NULL, OPTION_FLAG, &o->dry, "plan only: allocate and train nothing"},
        {"--plan", NULL, OPTION_FLAG, &o->plan,
         "list the plan, with equal blocks of layers as one"},
        {"--plan=full", NULL, OPTION_FLAG, &o->full_plan,
         "list every layer of it, every value, and its program"},
        {"--profile", NULL, OPTION_FLAG, &o->profile,
         "time the first steps, and plan again with these times"},
        {"--trace", "FILE", OPTION_TEXT, &o->trace,
         "write the timeline of a step, for ui.perfetto.dev; with --profile as\n"
         "measured too; of several ranks, rank 1 writes FILE.1, and so on"},
        {"--metrics", "FILE", OPTION_TEXT, &o->metrics,
         "write sizes and times of the plan, for Prometheus"},
        {"--verify", NULL, OPTION_FLAG, &o->verify,
         "compare the gradients of a step with those of the plain plan, and train\nnothing"},
        {"--debug", NULL, OPTION_FLAG, &o->debug, OPTION_DEBUG_HELP},
    };
    memcpy(specs, all, sizeof all);
    return TRAINER_OPTIONS;
}

/* small and tiny are sizes for bytes; others are those of nn.h, with or without their prefix. */
static int choose_shape(trainer *t) {
    const settings *o = &t->options;
    if (t->kind->own) {
        return t->kind->own->choose_shape(t);
    }
    nn_transformer_config *shape = &t->shape;
    const bool tiny = strcmp(o->preset, "tiny") == 0;
    const bool small = tiny || strcmp(o->preset, "small") == 0;
    if (small) {
        shape->vocabulary = t->kind->small_vocabulary;
        shape->context = 1024;
        shape->layers = tiny ? 2 : 4;
        shape->heads = tiny ? 2 : 4;
        shape->channels = tiny ? 32 : 128;
    } else {
        char name[32];
        const bool has_prefix = strncmp(o->preset, t->kind->prefix, strlen(t->kind->prefix)) == 0;
        snprintf(name, sizeof name, "%s%s", has_prefix ? "" : t->kind->prefix, o->preset);
        if (!nn_preset(name, shape)) {
            return fail("--preset %s: there are %s", o->preset, t->kind->presets);
        }
    }
    shape->batch = o->batch ? o->batch : small ? 8 : 4;
    shape->sequence = o->sequence;
    shape->dropout = o->dropout;
    t->model_name = o->preset;
    t->usual_rate = shape->channels < 512 ? 1e-3 : 3e-4;
    if (shape->sequence > shape->context) {
        return fail("--sequence %lld: the position table of this preset has %lld rows",
                    (long long)shape->sequence, (long long)shape->context);
    }
    return 0;
}

// ---- text ---------------------------------------------------------------------------------------

/* Long runs of spaces, such as the right margin of a macro, are cut: they are easy to learn, and
   the model would soon write nothing else. t->text has room for the byte. */
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

/* Reads the files that are named, or the default ones; returns how many there are, or -1. */
static int load_text(trainer *t) {
    const option_words *named = &t->options.files;
    const char *const *files = named->count ? named->items : default_files;
    const int count =
        named->count ? named->count : (int)(sizeof default_files / sizeof *default_files);
    for (int i = 0; i < count; i++) {
        if (append_file(t, files[i]) != 0) {
            return -1;
        }
    }
    return count;
}

/* A token for each byte. */
static int encode_bytes(trainer *t) {
    t->data = (int32_t *)malloc((size_t)(t->text_bytes + 1) * sizeof *t->data);
    if (!t->data) {
        return fail("no memory for the tokens of the text");
    }
    for (int64_t i = 0; i < t->text_bytes; i++) {
        t->data[i] = t->text[i];
    }
    t->data_count = t->text_bytes;
    return 0;
}

/* Reads the text, and what its tokens are; returns the number of files, or -1. */
static int prepare_text(trainer *t) {
    const bool own = t->kind->own != NULL;
    const int count = load_text(t);
    if (count < 0 || (own ? t->kind->own->encode(t) : encode_bytes(t)) != 0) {
        return -1;
    }
    if (t->data_count <= t->shape.sequence) {
        fail("the text has %lld %s; a sequence of %lld needs at least %lld",
             (long long)t->data_count, own ? "tokens" : "bytes", (long long)t->shape.sequence,
             (long long)t->shape.sequence + 1);
        return -1;
    }
    t->held_out_block = HELD_OUT_BLOCK;
    while (t->held_out_block * HELD_OUT_EVERY > t->data_count &&
           t->held_out_block / 2 > t->shape.sequence) {
        t->held_out_block /= 2;
    }
    return count;
}

static int read_text(trainer *t) {
    const int count = prepare_text(t);
    if (count < 0) {
        return 1;
    }
    printf("text      %lld bytes from %d file%s", (long long)t->text_bytes, count,
           count == 1 ? "" : "s");
    if (t->kind->own) {
        printf(", %lld tokens", (long long)t->data_count);
    }
    printf("\n");
    return 0;
}

static uint64_t next_random(trainer *t) {
    t->random ^= t->random << 13;
    t->random ^= t->random >> 7;
    t->random ^= t->random << 17;
    return t->random;
}

static int64_t held_out_blocks(const trainer *t) {
    const bool is_short = t->options.random || t->held_out_block <= t->shape.sequence;
    return is_short ? 0 : t->data_count / (t->held_out_block * HELD_OUT_EVERY);
}

static bool is_held_out(const trainer *t, int64_t token) {
    const int64_t block = token / t->held_out_block;
    return block % HELD_OUT_EVERY == HELD_OUT_EVERY - 1 &&
           block / HELD_OUT_EVERY < held_out_blocks(t);
}

/* Where a window of the text begins: at random where nothing is held out, or the next of those that
   are, which go round the blocks. */
static int64_t place_window(trainer *t, int64_t count) {
    if (t->held_out < 0) {
        int64_t at;
        do {
            at = (int64_t)(next_random(t) % (uint64_t)(t->data_count - count + 1));
        } while (is_held_out(t, at) || is_held_out(t, at + count - 1));
        return at;
    }
    const int64_t blocks = held_out_blocks(t), number = t->held_out++;
    const int64_t block = number % blocks * HELD_OUT_EVERY + HELD_OUT_EVERY - 1;
    return block * t->held_out_block + number / blocks % (t->held_out_block / count) * count;
}

/* Fills the window with `count` tokens: from the text, or random ones. */
static void draw_window(trainer *t, int64_t count) {
    if (t->options.random) {
        for (int64_t i = 0; i < count; i++) {
            t->window[i] = (int32_t)(next_random(t) % (uint64_t)t->shape.vocabulary);
        }
        return;
    }
    memcpy(t->window, t->data + place_window(t, count), (size_t)count * sizeof *t->window);
}

/* Random windows of the text; the target of each token is the next one. */
NN_API void draw_next_tokens(trainer *t) {
    const int64_t sequence = t->shape.sequence;
    for (int64_t b = 0; b < t->shape.batch; b++) {
        draw_window(t, sequence + 1);
        memcpy(t->tokens + b * sequence, t->window, (size_t)sequence * sizeof *t->window);
        memcpy(t->targets + b * sequence, t->window + 1, (size_t)sequence * sizeof *t->window);
    }
}

// ---- model --------------------------------------------------------------------------------------

/* What --shard names: each has what those before it have. */
static const char *const shard_levels[] = {"off", "state", "gradients", "values"};
enum { SHARD_LEVELS = sizeof shard_levels / sizeof shard_levels[0] };

/* Of shard_levels; -1: nothing is said, SHARD_LEVELS: there is none of that name. */
static int level_of(const settings *o) {
    int i = 0;
    while (o->shard && i < SHARD_LEVELS && strcmp(o->shard, shard_levels[i]) != 0) {
        i++;
    }
    return o->shard ? i : -1;
}

/* Applies --mode, --off, --auto and --shard. */
static int choose_techniques(const settings *o, ms_config *config) {
    static const char *const modes[MS_MODE_COUNT] = {"balanced", "conservative", "aggressive"};
    int mode = 0;
    while (o->mode && mode < MS_MODE_COUNT && strcmp(modes[mode], o->mode) != 0) {
        mode++;
    }
    if (mode == MS_MODE_COUNT) {
        return fail("--mode %s: there are conservative, balanced and aggressive", o->mode);
    }
    config->mode = (ms_mode)mode;
    config->auto_policy = o->automatic;
    const bool checkpointing = o->off && strcmp(o->off, "checkpointing") == 0;
    const bool early_update = o->off && strcmp(o->off, "early-update") == 0;
    if (o->off && !checkpointing && !early_update) {
        return fail("--off %s: there are checkpointing and early-update", o->off);
    }
    config->checkpointing = checkpointing ? MS_SWITCH_OFF : MS_SWITCH_DEFAULT;
    config->early_update = early_update ? MS_SWITCH_OFF : MS_SWITCH_DEFAULT;
    config->sharding = level_of(o) == 0 ? MS_SWITCH_OFF : MS_SWITCH_DEFAULT;
    return level_of(o) == SHARD_LEVELS
               ? fail("--shard %s: there are state, gradients, values and off", o->shard)
               : choose_offloading(o->offload, &config->offloading);
}

/* Chooses the dtype that layers compute in; `forces`: whether it is to be another than F32. */
static int choose_precision(const char *name, ms_config *config, bool *forces) {
    static const struct {
        const char *name;
        ms_dtype dtype;
        ms_switch masters;
    } all[] = {{"f32", MS_DTYPE_F32, MS_SWITCH_DEFAULT},
               {"bf16", MS_DTYPE_BF16, MS_SWITCH_DEFAULT},
               {"f16", MS_DTYPE_F16, MS_SWITCH_DEFAULT},
               {"bf16-alone", MS_DTYPE_BF16, MS_SWITCH_OFF},
               {"f16-alone", MS_DTYPE_F16, MS_SWITCH_OFF}};
    const int count = (int)(sizeof all / sizeof *all);
    int i = 0;
    while (name && i < count && strcmp(all[i].name, name) != 0) {
        i++;
    }
    if (i == count) {
        return fail("--precision %s: there are f32, bf16, f16, bf16-alone and f16-alone", name);
    }
    *forces = all[i].dtype != MS_DTYPE_F32;
    config->mixed_dtype = all[i].dtype;
    config->mixed_precision = name && !*forces ? MS_SWITCH_OFF : MS_SWITCH_DEFAULT;
    config->master_weights = all[i].masters;
    return 0;
}

/* Lion takes 3 to 10 times smaller rates than AdamW, and as many times its decay (Chen et al., 2023).
   Muon is for matrices; AdamW updates the rest. */
static const struct {
    const char *name;
    ms_optimizer_kind kind;
    double rate; // times that of AdamW
    float weight_decay;
} trainer_optimizers[] = {{"adamw", MS_OPTIMIZER_ADAMW, 1.0, 0.1f},
                          {"lion", MS_OPTIMIZER_LION, 1.0 / 3.0, 0.3f},
                          {"adafactor", MS_OPTIMIZER_ADAFACTOR, 10.0, 0.0f},
                          {"muon", MS_OPTIMIZER_MUON, 1.0, 0.1f}};
enum { TRAINER_OPTIMIZERS = sizeof trainer_optimizers / sizeof trainer_optimizers[0] };

/* Of trainer_optimizers; TRAINER_OPTIMIZERS: there is none of that name. */
static int optimizer_of(const settings *o) {
    int i = 0;
    while (o->optimizer && i < TRAINER_OPTIMIZERS &&
           strcmp(o->optimizer, trainer_optimizers[i].name) != 0) {
        i++;
    }
    return i;
}

/* Chooses the optimizer and the format of its state before registration. A plan may code only state
   whose format nobody has named. */
static int choose_optimizer(const trainer *t, ms_optimizer_desc *desc, ms_config *config) {
    const settings *o = &t->options;
    const int i = optimizer_of(o);
    if (i == TRAINER_OPTIMIZERS) {
        return fail("--optimizer %s: there are adamw, lion, adafactor and muon", o->optimizer);
    }
    const ms_optimizer_kind kind = trainer_optimizers[i].kind;
    *desc = ms_optimizer_defaults(kind == MS_OPTIMIZER_MUON ? MS_OPTIMIZER_ADAMW : kind);
    desc->beta2 = desc->kind == MS_OPTIMIZER_ADAMW ? t->kind->beta2 : desc->beta2;
    desc->weight_decay = trainer_optimizers[i].weight_decay;
    const bool bf16 = o->state && strcmp(o->state, "bf16") == 0;
    const bool coded = o->state && strncmp(o->state, "8bit", 4) == 0 &&
                       (!o->state[4] || strcmp(o->state + 4, "-all") == 0);
    if (o->state && !bf16 && !coded && strcmp(o->state, "f32") != 0) {
        return fail("--state %s: there are f32, bf16, 8bit and 8bit-all", o->state);
    }
    if ((kind == MS_OPTIMIZER_ADAFACTOR && (bf16 || coded)) ||
        (kind == MS_OPTIMIZER_MUON && coded)) {
        return fail("--state %s: adafactor has f32, muon f32 and bf16", o->state);
    }
    desc->state_format[0] = desc->state_format[1] =
        bf16 ? MS_STATE_FORMAT_BF16 : MS_STATE_FORMAT_F32;
    config->optimizer_8bit = o->state && !coded ? MS_SWITCH_OFF : MS_SWITCH_DEFAULT;
    return 0;
}

static bool has_adapters(const nn_net *net) {
    bool has = false;
    for (int64_t i = 0; i < nn_param_count(net); i++) {
        has = has || nn_is_adapter(nn_param_at(net, i));
    }
    return has;
}

/* Whether the rows of a param are looked up. */
static bool is_table(const nn_param_info *param) {
    static const char *const names[] = {"wte", "wpe", "wse", "tokens.weight"};
    bool is = false;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        is = is || strcmp(param->name, names[i]) == 0;
    }
    return is;
}

/* With --optimizer muon: the group of the matrices that it updates. */
static void group_matrices(trainer *t, const ms_optimizer_desc *others) {
    ms_optimizer_desc muon = ms_optimizer_defaults(MS_OPTIMIZER_MUON);
    if (trainer_optimizers[optimizer_of(&t->options)].kind != MS_OPTIMIZER_MUON) {
        return;
    }
    muon.weight_decay = others->weight_decay;
    muon.state_format[0] = others->state_format[0];
    t->matrices = ms_optimizer_group(t->model, &muon);
    for (int64_t i = 0; i < nn_param_count(t->net); i++) {
        const nn_param_info *param = nn_param_at(t->net, i);
        if (param->shape.rank == 2 && !is_table(param)) {
            ms_set_param_group(t->model, param->tensor, t->matrices);
        }
    }
}

/* With --state 8bit or 8bit-all: codes the state of the params of all matrix products that are
   trained, whatever the budget. By itself, a plan would do so where the budget asks for it. */
static void force_codes(trainer *t) {
    const bool is_frozen = has_adapters(t->net); // all params except theirs
    for (int64_t i = 0; i < nn_param_count(t->net); i++) {
        const nn_param_info *param = nn_param_at(t->net, i);
        const char *state = t->options.state ? t->options.state : "f32";
        if (strncmp(state, "8bit", 4) == 0 && param->shape.rank == 2 &&
            (!is_frozen || nn_is_adapter(param)) && ms_shape_count(&param->shape) >= 4096 &&
            (!is_table(param) || state[4])) {
            ms_set_tensor_technique(t->model, param->tensor, MS_TECHNIQUE_OPTIMIZER_8BIT,
                                    MS_SWITCH_ON);
        }
    }
}

/* With --shard: divides among ranks what belongs to the params that are trained, whatever the budget. */
static void force_shards(trainer *t) {
    const int level = level_of(&t->options);
    const bool is_frozen = has_adapters(t->net); // all params except theirs
    for (int64_t i = 0; i < nn_param_count(t->net) && level > 0; i++) {
        const nn_param_info *param = nn_param_at(t->net, i);
        const ms_tensor of = level == 1   ? ms_optimizer_state(t->model, param->tensor, 0)
                             : level == 2 ? ms_gradient(t->model, param->tensor)
                                          : param->tensor;
        if (!is_frozen || nn_is_adapter(param)) {
            ms_set_tensor_technique(t->model, of, MS_TECHNIQUE_SHARDING, MS_SWITCH_ON);
        }
    }
}

/* Applies all options that name something of memscale.h. */
static int choose_training(const trainer *t, ms_config *config, ms_optimizer_desc *optimizer,
                           bool *half) {
    return choose_techniques(&t->options, config) != 0 ||
           choose_optimizer(t, optimizer, config) != 0 ||
           choose_precision(t->options.precision, config, half) != 0;
}

/* Chooses the device and the shape; prints the reason and returns 1 if an option names something
   that there is not. */
static int check_options(trainer *t) {
    ms_config config;
    ms_optimizer_desc optimizer;
    bool half;
    memset(&config, 0, sizeof config);
    return choose_device(&t->device, t->options.device) != 0 || choose_shape(t) != 0 ||
           choose_training(t, &config, &optimizer, &half) != 0;
}

/* Registers the model with memscale.h; `dry`: to plan without allocating. */
static int make_model(trainer *t, uint64_t budget_bytes, bool dry) {
    ms_config config;
    ms_optimizer_desc optimizer;
    memset(&config, 0, sizeof config);
    config.backend = t->device.backend;
    config.memory_budget_bytes = budget_bytes;
    config.dry_run = dry;
    config.log = log_warnings;
    config.debug = t->options.debug;
    config.seed = (uint64_t)t->options.seed;
    config.tf32 = t->options.tf32;
    config.cuda_graph = t->options.graph;
    config.accumulation_steps = (uint32_t)t->options.accumulate;
    config.empirical_profiling = t->options.profile ? MS_SWITCH_ON : MS_SWITCH_DEFAULT;
    bool half = false;
    if (choose_training(t, &config, &optimizer, &half) != 0 ||
        ranks_comm(config.backend.is_asynchronous, &config.comm) != 0) {
        return 1;
    }
    if (ms_create(&config, &t->model) != MS_RESULT_OK) {
        return fail("%s", ms_last_error(t->model));
    }
    t->net = nn_create_on(t->model, t->device.kernels);
    if (!t->net) {
        return fail("no memory for a net");
    }
    nn_force_half(t->net, half);
    nn_half_gradients(t->net, t->options.half_gradients);
    const trainer_own *own = t->kind->own;
    t->built = own ? own->build(t) : t->kind->build(t->net, &t->shape);
    if (own ? own->keeps_logits(t) : !t->options.random) {
        ms_add_eval_output(t->model, t->built.logits);
    }
    optimizer.grad_clip_norm = t->options.clip;
    ms_set_optimizer(t->model, &optimizer);
    group_matrices(t, &optimizer);
    force_codes(t);
    force_shards(t);
    return 0;
}

static void free_model(trainer *t) {
    ms_destroy(t->model);
    nn_destroy(t->net);
    t->model = NULL;
    t->net = NULL;
    t->matrices.id = 0;
}

static int print_machine(trainer *t) {
    ms_hardware h;
    if (ms_hardware_report(t->model, &h) != MS_RESULT_OK) {
        return fail("%s", ms_last_error(t->model));
    }
    t->free_bytes = h.free_bytes;
    if (h.name[0] == 0) {
        printf("machine   there is no such device here, so only a dry run is possible\n");
        return 0;
    }
    printf("machine   %s, %u processors, %.1f GiB, %.1f GiB free\n", h.name, h.processor_count,
           mebibytes(h.total_bytes) / 1024.0, mebibytes(h.free_bytes) / 1024.0);
    if (h.compute_major > 0) {
        printf("          compute capability %u.%u, driver for CUDA %u.%u, runtime %u.%u\n",
               h.compute_major, h.compute_minor, h.driver_version / 1000,
               h.driver_version % 1000 / 10, h.runtime_version / 1000,
               h.runtime_version % 1000 / 10);
    }
    return 0;
}

/* Also of params in blocks, of which a report counts the bytes. */
static double param_elements(const nn_net *net) {
    double elements = 0.0;
    for (int64_t i = 0; i < nn_param_count(net); i++) {
        elements += nn_elements(nn_param_at(net, i)->shape);
    }
    return elements;
}

/* Plans without memory, to learn the smallest and the plain arena, and chooses a budget, half way
   between the smallest and that of the plan without a budget if none was given. */
static int choose_budget(trainer *t, uint64_t *budget_bytes) {
    uint64_t smallest;
    ms_memory_report plain;
    if (make_model(t, UINT64_MAX, true) != 0) {
        return 1;
    }
    if (ms_wrap(t->model) != MS_RESULT_OK || ms_report(t->model, &plain) != MS_RESULT_OK ||
        ms_smallest_budget(t->model, &smallest) != MS_RESULT_OK) {
        return fail("%s", ms_last_error(t->model));
    }
    if (choose_bytes(&t->options.budget, t->model, budget_bytes) != 0 || print_machine(t) != 0) {
        return 1;
    }
    printf("model     %s: %lld layers, %lld channels, %lld heads, vocabulary %lld: %.2f M params; "
           "batch %lld x %lld",
           t->model_name, (long long)t->shape.layers, (long long)t->shape.channels,
           (long long)t->shape.heads, (long long)t->shape.vocabulary, param_elements(t->net) / 1e6,
           (long long)t->shape.batch, (long long)t->shape.sequence);
    printf(ranks_count() > 1 ? ", on each of %u ranks\n" : "\n", (unsigned)ranks_count());
    printf("plain     %9.1f MiB, what training takes without a plan\n",
           rounded_up(mebibytes(plain.plain_bytes), 1));
    if (plain.arena_bytes != plain.plain_bytes) {
        printf("most      %9.1f MiB, what the plan takes without a budget\n",
               rounded_up(mebibytes(plain.arena_bytes), 1));
    }
    printf("smallest  %9.1f MiB, the smallest arena of any plan in this mode\n",
           rounded_up(mebibytes(smallest), 1));
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
    printf("budget    %9.1f MiB%s\n", rounded_up(mebibytes(r.budget_bytes), 1),
           t->options.budget.name && strcmp(t->options.budget.name, "half") == 0
               ? ", half way between the two (choose with --budget)"
               : "");
    printf(
        "arena     %9.1f MiB, all that training will ever use: %.0f %% of plain, for %.1f %% more "
        "work\n",
        rounded_up(mebibytes(r.arena_bytes), 1),
        100.0 * (double)r.arena_bytes / (double)r.plain_bytes, 100.0 * r.recompute_share);
    printf("  its peak");
    for (int c = 0; c < MS_CATEGORY_COUNT; c++) {
        if (r.peak_bytes[c] >= r.arena_bytes / 500) {
            printf("  %s %.1f", ms_category_name((ms_category)c), mebibytes(r.peak_bytes[c]));
        }
    }
    printf(" MiB\n");
    printf(
        "decided   mode %s (%s) at pressure %.2f: a step is predicted to take %.1f ms, a plain one "
        "%.1f ms (%s)\n",
        ms_mode_name(r.mode), ms_decision_source_name(r.decision_source), r.pressure,
        r.step_us / 1e3, r.plain_step_us / 1e3, ms_time_source_name(r.time_source));
    const bool full = t->options.full_plan;
    ms_result result = MS_RESULT_OK;
    if (full) {
        result = ms_print_plan_full(t->model, print_text, stdout);
    } else if (t->options.plan) {
        result = ms_print_plan(t->model, print_text, stdout);
    }
    if (result == MS_RESULT_OK && full) {
        result = ms_print_program(t->model, MS_PROGRAM_TRAIN, print_text, stdout);
    }
    return result == MS_RESULT_OK ? 0 : fail("the plan cannot be printed");
}

static int write_trace(const trainer *t, FILE *file) {
    return ms_print_trace(t->model, print_text, file) != MS_RESULT_OK;
}

static int write_metrics(const trainer *t, FILE *file) {
    return ms_print_metrics(t->model, print_text, file) != MS_RESULT_OK;
}

/* Rank 0 writes the file, another one, such as rank 2, a file of its own: with .2 after the name. */
static int write_file(const trainer *t, const char *name,
                      int (*write)(const trainer *t, FILE *file)) {
    char path[FILENAME_MAX];
    if (!name) {
        return 0;
    }
    snprintf(path, sizeof path, ranks_job.comm.rank > 0 ? "%s.%u" : "%s", name,
             (unsigned)ranks_job.comm.rank);
    FILE *file = fopen(path, "wb");
    const bool written = file && write(t, file) == 0 && !ferror(file);
    const bool closed = file && fclose(file) == 0;
    return written && closed ? 0 : fail("cannot write %s", path);
}

/* Prints the times by --profile, and writes the files of --trace and --metrics. */
static int write_reports(trainer *t) {
    ms_memory_report r;
    if (t->options.profile && !t->options.dry && ms_report(t->model, &r) == MS_RESULT_OK) {
        printf("a step    %9.1f ms, plain %.1f ms, as predicted now (%s)\n", 1e-3 * r.step_us,
               1e-3 * r.plain_step_us, ms_time_source_name(r.time_source));
    }
    return write_file(t, t->options.trace, write_trace) != 0 ||
           write_file(t, t->options.metrics, write_metrics) != 0;
}

/* How much less memory of a GPU is free than before: the arena, and what the driver and cuBLAS keep
   for themselves. */
static int print_device_memory(trainer *t) {
    ms_hardware h;
    if (ms_hardware_report(t->model, &h) != MS_RESULT_OK) {
        return fail("%s", ms_last_error(t->model));
    }
    if (h.kind != MS_DEVICE_CPU && t->free_bytes > h.free_bytes) {
        printf("device    %9.1f MiB taken in all, as the device reports it\n",
               mebibytes(t->free_bytes - h.free_bytes));
    }
    return 0;
}

// ---- training -----------------------------------------------------------------------------------

/* Writes the next batch of this rank: of one for each, which all ranks draw alike, its own. */
static int write_own_batch(trainer *t) {
    for (uint32_t r = 0; r < ranks_count(); r++) {
        t->kind->draw_batch(t);
        if (r == ranks_job.comm.rank &&
            (ms_write(t->model, t->built.tokens, t->tokens) != MS_RESULT_OK ||
             ms_write(t->model, t->built.targets, t->targets) != MS_RESULT_OK)) {
            return fail("%s", ms_last_error(t->model));
        }
    }
    return 0;
}

typedef struct progress {
    int64_t step, first;     // first: the step that this process began with
    double started, earlier; // earlier: seconds before it was resumed
    double begun, done;      // from 0 to 1: where this process began, and now
    bool terminal;
    int printed; // tenths of the run that have a line already
} progress;

/* On all ranks alike. */
static int advance(const trainer *t, progress *p) {
    const settings *o = &t->options;
    const double by_steps = o->steps ? (double)p->step / (double)o->steps : 0.0;
    double by_time =
        o->seconds ? (p->earlier + seconds_now() - p->started) / (double)o->seconds : 0.0;
    if (o->seconds && ranks_share(t->model, &by_time) != MS_RESULT_OK) {
        return fail("%s", ms_last_error(t->model));
    }
    p->done = by_steps > by_time ? by_steps : by_time;
    p->done = p->done < 1.0 ? p->done : 1.0;
    return 0;
}

/* On a terminal one line that is rewritten; elsewhere a line for every tenth of the run. */
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
    const double left = p->done > p->begun ? seconds * (1.0 - p->done) / (p->done - p->begun) : 0.0;
    printf("%sstep %5lld [%s] loss %.3f  %.0f tokens/s  %.1f MiB", p->terminal ? "\r" : "",
           (long long)p->step, bar, t->loss,
           (double)((p->step - p->first) * t->options.accumulate * t->shape.batch *
                    t->shape.sequence * (int64_t)ranks_count()) /
               seconds,
           mebibytes(arena_bytes));
    if (p->done < 1.0) {
        printf("  %lld:%02lld left", (long long)left / 60, (long long)left % 60);
    }
    printf(p->terminal && p->done < 1.0 ? "  " : "\n");
    fflush(stdout);
}

/* Linear warm-up, then a cosine down to a tenth (Loshchilov and Hutter, "SGDR", 2017, eq. 5). */
static float learning_rate(const trainer *t, const progress *p) {
    const double usual = t->usual_rate * trainer_optimizers[optimizer_of(&t->options)].rate;
    const double top = t->options.rate > 0.0f ? (double)t->options.rate : usual;
    const int64_t warmup = t->options.warmup;
    const double warm = p->step < warmup ? (double)(p->step + 1) / (double)warmup : 1.0;
    return (float)(top * warm * (0.55 + 0.45 * cos(3.14159265358979 * p->done)));
}

/* One step, of one batch or several. Where its loss is not read, a GPU computes it while the next
   batch is drawn. */
static int train_step(trainer *t, progress *p, bool reads) {
    const int64_t batches = t->options.accumulate;
    double sum = 0.0;
    ms_set_learning_rate(t->model, learning_rate(t, p));
    ms_set_group_learning_rate(t->model, t->matrices, learning_rate(t, p));
    for (int64_t i = 0; i < batches; i++) {
        double loss = 0.0;
        if (write_own_batch(t) != 0) {
            return 1;
        }
        if (ms_step(t->model, reads ? &loss : NULL) != MS_RESULT_OK) {
            return fail("%s", ms_last_error(t->model));
        }
        sum += loss / (double)batches;
    }
    if (reads) {
        const double old = t->has_loss ? pow(0.9, (double)t->options.every) : 0.0;
        t->loss = old * t->loss + (1.0 - old) * sum;
        t->has_loss = true;
    }
    p->step++;
    return 0;
}

/* In F16: what the loss scale has come to. */
static void print_loss_scale(const trainer *t) {
    ms_memory_report r;
    if (ms_report(t->model, &r) == MS_RESULT_OK && (r.loss_scale < 1.0 || r.loss_scale > 1.0)) {
        printf("loss scale %.0f; %u steps were skipped, the last for %s\n", r.loss_scale,
               (unsigned)r.skipped_steps, r.overflow_layer[0] ? r.overflow_layer : "none");
    }
}

/* Batches of each rank, of which all together have that many. Debug mode takes long, and sees in one
   batch what it would in others. */
static int held_out_batches(const trainer *t) {
    const int count = (int)ranks_count();
    const int all = t->held_out_batches ? t->held_out_batches : HELD_OUT_BATCHES;
    return t->options.debug ? 1 : (all + count - 1) / count;
}

/* The mean loss, over all ranks, on what was held out, of which there must be something. */
static int held_out_loss(trainer *t, double *mean) {
    double sum = 0.0;
    const uint64_t random = t->random;
    t->random = 1;
    t->held_out = 0;
    for (int i = 0; i < held_out_batches(t); i++) {
        double loss;
        if (write_own_batch(t) != 0) {
            return 1;
        }
        if (ms_eval(t->model, &loss) != MS_RESULT_OK) {
            return fail("%s", ms_last_error(t->model));
        }
        sum += loss;
    }
    t->held_out = -1;
    t->random = random;
    *mean = sum / (double)held_out_batches(t);
    return 0;
}

/* Prints it. */
static int evaluate(trainer *t, bool is_trained) {
    double loss = 0.0;
    if (held_out_blocks(t) == 0) {
        return 0;
    }
    if (held_out_loss(t, &loss) != 0) {
        return 1;
    }
    printf("held out  loss %.4f on %d batches of text that training %s\n", loss,
           held_out_batches(t) * (int)ranks_count(), is_trained ? "has not seen" : "will not see");
    fflush(stdout);
    return 0;
}

/* Trains on from where the run was resumed, if it was. */
static int train(trainer *t) {
    settings *o = &t->options;
    ms_memory_report report;
    progress p;
    memset(&p, 0, sizeof p);
    p.started = seconds_now();
    p.earlier = t->seconds;
    p.step = p.first = o->saving.step;
    p.terminal = !ranks_job.comm.size && isatty(STDOUT_FILENO) != 0; // mpirun pretends one
    if (advance(t, &p) != 0) {
        return 1;
    }
    p.begun = p.done;
    p.printed = (int)(p.done * 10.0);
    if (ms_report(t->model, &report) != MS_RESULT_OK) {
        return fail("the model has no plan");
    }
    const clock_t worked = clock();
    while (p.done < 1.0 && !o->saving.is_stopped) {
        const bool reads = p.step % o->every == 0 || p.step + 1 == o->steps;
        if (train_step(t, &p, reads) != 0 || advance(t, &p) != 0) {
            return 1;
        }
        if (p.done >= 1.0 && ms_synchronize(t->model) != MS_RESULT_OK) {
            return fail("%s", ms_last_error(t->model));
        }
        if (reads || p.done >= 1.0) {
            print_progress(t, &p, report.arena_bytes);
        }
        t->seconds = o->seconds ? p.earlier + seconds_now() - p.started : 0.0;
        if (checkpoint_step(&o->saving, t->model, p.step, p.done >= 1.0) != 0) {
            return 1;
        }
    }
    const double busy = (double)(clock() - worked) / CLOCKS_PER_SEC;
    if (ranks_count() > 1 && ranks_print_times(t->model, "processor time in each", busy) != 0) {
        return 1;
    }
    if (o->saving.is_stopped) {
        return 0;
    }
    print_loss_scale(t);
    if (evaluate(t, true) != 0) {
        return 1;
    }
    print_debugged(o->debug);
    return print_device_memory(t);
}

// ---- verification -------------------------------------------------------------------------------

enum { WORST = 16 };

typedef struct worst_row {
    char name[32];
    ms_difference of;
} worst_row;

/* The rows that are shown, the worst first. */
typedef struct worst_table {
    worst_row rows[WORST];
    int count;
} worst_table;

static bool is_worse(const ms_difference *a, const ms_difference *b) {
    return a->relative > b->relative ||
           (a->relative >= b->relative && a->differ_count > b->differ_count);
}

static void add_difference(const ms_difference *difference, void *user) {
    worst_table *t = (worst_table *)user;
    int at = t->count;
    while (at > 0 && is_worse(difference, &t->rows[at - 1].of)) {
        at--;
    }
    if (at == WORST) {
        return;
    }
    t->count += t->count < WORST;
    memmove(t->rows + at + 1, t->rows + at, (size_t)(t->count - at - 1) * sizeof *t->rows);
    t->rows[at].of = *difference;
    snprintf(t->rows[at].name, sizeof t->rows[at].name, "%s", difference->name);
}

/* Verifies the plan on one batch. Returns 1 if gradients differ from those of the plain plan. */
static int verify(trainer *t) {
    worst_table table;
    ms_verify_report r;
    memset(&table, 0, sizeof table);
    if (write_own_batch(t) != 0) {
        return 1;
    }
    if (ms_verify(t->model, add_difference, &table, &r) != MS_RESULT_OK) {
        return fail("%s", ms_last_error(t->model));
    }
    printf("\n%-24s %12s %12s %12s %12s\n", "gradient or buffer", "elements", "differ", "absolute",
           "relative");
    for (int i = 0; i < table.count; i++) {
        const ms_difference *d = &table.rows[i].of;
        printf("%-24s %12llu %12llu %12.3g %12.3g\n", table.rows[i].name,
               (unsigned long long)d->count, (unsigned long long)d->differ_count, d->absolute,
               d->relative);
    }
    if (r.tensor_count > WORST) {
        printf("... and %u more\n", (unsigned)r.tensor_count - WORST);
    }
    printf("\nloss %.9g by the plain plan, %.9g by this one\n", r.plain_loss, r.wrapped_loss);
    if (r.state_count > 0) {
        printf(
            "the next update rounds %u tensors of optimizer state, by %.3g of their size at most\n",
            (unsigned)r.state_count, r.state_error);
    }
    if (r.differ_count == 0) {
        printf("all %u gradients and buffers are equal bit for bit\n", (unsigned)r.tensor_count);
        return 0;
    }
    printf("%u of %u differ, by %.3g at most, %.3g of the value\n", (unsigned)r.differ_count,
           (unsigned)r.tensor_count, r.absolute, r.relative);
    return 1;
}

// ---- main ---------------------------------------------------------------------------------------

/* Runs one forward on the present batch and reads its logits. */
NN_API int read_logits(trainer *t) {
    if (ms_write(t->model, t->built.tokens, t->tokens) != MS_RESULT_OK ||
        ms_write(t->model, t->built.targets, t->targets) != MS_RESULT_OK ||
        ms_eval(t->model, NULL) != MS_RESULT_OK ||
        ms_read(t->model, t->built.logits, t->logits) != MS_RESULT_OK) {
        return fail("%s", ms_last_error(t->model));
    }
    return 0;
}

/* With random tokens nothing is shown after training, so that no logits are needed. */
static int allocate_batch(trainer *t) {
    const trainer_own *own = t->kind->own;
    const size_t rows = (size_t)(t->shape.batch * t->shape.sequence);
    const bool keeps = own ? own->keeps_logits(t) : !t->options.random;
    const size_t width = keeps ? (size_t)t->shape.vocabulary : 1;
    t->tokens = (int32_t *)malloc(rows * sizeof *t->tokens);
    t->targets = (int32_t *)calloc(rows, sizeof *t->targets);
    t->window = (int32_t *)malloc(((size_t)t->shape.sequence + 1) * sizeof *t->window);
    t->logits = (float *)malloc(rows * width * sizeof *t->logits);
    return t->tokens && t->targets && t->window && t->logits ? 0 : fail("no memory for a batch");
}

/* What decides, beside the step, how the run goes on. */
static int register_position(trainer *t) {
    return ms_save_extra(t->model, "random", &t->random, sizeof t->random) != MS_RESULT_OK ||
           ms_save_extra(t->model, "loss", &t->loss, sizeof t->loss) != MS_RESULT_OK ||
           ms_save_extra(t->model, "seconds", &t->seconds, sizeof t->seconds) != MS_RESULT_OK;
}

/* Resumes a run, or writes initial params; and BERT's segments, once: one sentence, number 0. */
static int start(trainer *t) {
    checkpoint *saving = &t->options.saving;
    if (register_position(t) != 0) {
        return fail("%s", ms_last_error(t->model));
    }
    if (checkpoint_load(saving, t->model) != 0) {
        return 1;
    }
    checkpoint_print(saving);
    t->has_loss = saving->step > 0;
    if (!saving->is_resumed && t->kind->own) {
        return t->kind->own->init(t);
    }
    if ((!saving->is_resumed && nn_init(t->net, (uint64_t)t->options.seed) != MS_RESULT_OK) ||
        (t->built.segments.id &&
         ms_write(t->model, t->built.segments, t->targets) != MS_RESULT_OK)) {
        return fail("%s", ms_last_error(t->model));
    }
    return 0;
}

static int parse_options(trainer *t, int argc, char **argv) {
    const trainer_own *own = t->kind->own;
    const char *const usage =
        own ? own->usage
            : "[options] [text file ...]\n"
              "Trains on text inside a byte budget: on this repository's own, "
              "if it is run there, or on files.";
    settings *o = &t->options;
    option_spec specs[TRAINER_OPTIONS + TRAINER_OWN_OPTIONS];
    o->preset = "small";
    o->device = "cpu";
    o->mode = "balanced";
    o->optimizer = "adamw";
    o->sequence = 64;
    o->accumulate = 1;
    o->seed = 1;
    o->warmup = WARMUP_STEPS;
    o->budget.name = "half";
    int count = own ? own->list_options(t, specs) : 0;
    count += list_options(t->kind, o, specs + count);
    if (take_options(usage, specs, count, argc, argv, &o->files) != 0 ||
        checkpoint_check(&o->saving) != 0 || check_options(t) != 0) {
        return 1;
    }
    if (o->dropout >= 1.0f) {
        return fail("--dropout %g: give a probability below 1", (double)o->dropout);
    }
    if (o->graph && !t->device.backend.recording_begin) {
        return fail("--graph is for --device cuda");
    }
    if (o->graph && o->debug) {
        return fail("--graph and --debug, which runs layers several times: leave one of them out");
    }
    if (o->steps == 0 && o->seconds == 0) {
        o->seconds = 45;
    }
    if (o->every == 0) {
        o->every = t->device.backend.is_asynchronous ? CUDA_READ_EVERY : 1;
    }
    return 0;
}

static int run(trainer *t) {
    uint64_t budget_bytes = 0;
    ranks_name();
    t->random = 0x9e3779b97f4a7c15u ^ (uint64_t)t->options.seed;
    t->held_out = -1;
    printf("memscale.h %d.%d.%d, %s\n\n", MEMSCALE_VERSION_MAJOR, MEMSCALE_VERSION_MINOR,
           MEMSCALE_VERSION_PATCH, t->kind->title);
    if (choose_budget(t, &budget_bytes) != 0 || make_model(t, budget_bytes, t->options.dry) != 0) {
        return 1;
    }
    if (ms_wrap(t->model) != MS_RESULT_OK) {
        return fail("%s", ms_last_error(t->model));
    }
    if (print_plan(t) != 0) {
        return 1;
    }
    if (t->options.dry) {
        return write_reports(t);
    }
    if ((!t->options.random && read_text(t) != 0) || allocate_batch(t) != 0 || start(t) != 0) {
        return 1;
    }
    if (t->options.verify) {
        return verify(t);
    }
    if (t->evaluates_at_once && !t->options.saving.is_resumed && evaluate(t, false) != 0) {
        return 1;
    }
    printf("\n");
    if (train(t) != 0 || write_reports(t) != 0) {
        return 1;
    }
    const trainer_own *own = t->kind->own;
    const bool is_stopped = t->options.saving.is_stopped;
    const bool has_logits = own ? own->keeps_logits(t) : !t->options.random;
    const bool shows = has_logits && !t->options.debug && !is_stopped;
    return (own && !is_stopped && own->finish(t) != 0) || (shows && t->kind->show(t) != 0);
}

static void free_trainer(trainer *t) {
    free_model(t);
    free(t->text);
    free(t->data);
    free(t->tokens);
    free(t->targets);
    free(t->window);
    free(t->logits);
}

/* Trains with a trainer that is all zero, except what is its kind's own. */
NN_API int train_as(trainer *t, const trainer_kind *kind, int argc, char **argv) {
    t->kind = kind;
    const int result = ranks_begin(&argc, &argv) != 0      ? 1
                       : parse_options(t, argc, argv) != 0 ? 2
                                                           : run(t);
    free_trainer(t);
    return ranks_end(result);
}

/* A whole program. */
NN_API int train_program(const trainer_kind *kind, int argc, char **argv) {
    trainer t;
    memset(&t, 0, sizeof t);
    return train_as(&t, kind, argc, argv);
}

#endif // MEMSCALE_TRAINER_H
