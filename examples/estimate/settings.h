/*  settings.h - the options of estimate, and what is asked of them in several places. */
#ifndef MEMSCALE_ESTIMATE_SETTINGS_H
#define MEMSCALE_ESTIMATE_SETTINGS_H

#include "memscale.h"
#include "nn.h"
#include "options.h"

typedef struct settings {
    const char *model, *family, *gpu, *network, *optimizer, *offload, *sweep, *html, *mode;
    const char *precision, *gradients, *state; // NULL: not said
    int64_t layers, channels, heads, kv_heads, head_size, feed_forward, vocabulary, positions;
    int64_t batch, sequence, accumulate, tokens, rank, ranks;
    float tflops, tf32_tflops, f16_tflops, bandwidth, link;
    float clip, utilization;
    uint64_t budget_bytes, host_bytes; // 0: a share of the memory; as much as is needed
    bool frozen, plan, full_plan, json, progress, help;
    ms_switch offloading;
    option_words files;
} settings;

enum { ESTIMATE_OPTIONS = 41 };

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
        {"--head-size", "N", OPTION_COUNT, &s->head_size,
         "llama: width of a head (channels / heads)"},
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
         "the same by the tokens of a step, rounded up to whole batches (of all ranks)"},
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
        {"--ranks", "N", OPTION_COUNT, &s->ranks,
         "train on N such devices, with batches of their own in each (1); bytes, times\n"
         "and the budget are those of one of them"},
        {"--network", "NAME|X", OPTION_TEXT, &s->network,
         "between these: a network by its name (see below), or what each sends and\n"
         "receives at the same time, 1e9 bytes a second (pcie; memory on a cpu)"},
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

/* Batches of so many sequences that make up a step of each rank. */
static int64_t batches_of_step(const settings *o, int64_t batch) {
    const int64_t tokens = batch * o->sequence * o->ranks;
    return o->tokens ? (o->tokens + tokens - 1) / tokens : o->accumulate;
}

#endif // MEMSCALE_ESTIMATE_SETTINGS_H
