/*  test_estimate.c - examples/estimate: its numbers against published counts, closed formulas and
    wrapped models that train; its advice; models from files; that what it writes is JSON and XML;
    what it refuses. */
#ifndef _XOPEN_SOURCE
#define _XOPEN_SOURCE 700
#endif
#include "private.h"

int estimate_main(int argc, char **argv);
#define main estimate_main
#include "../examples/estimate/main.c"
#undef main
#include "testing.h"
#include "testing_nn.h"

#include <unistd.h>

// ------------------------------------------------------------------------------------------------
// running it

enum { MOST_WORDS = 24, TEXT_BYTES = 1 << 18 };

/* Whether sweeps are longer: then models have their full size, and plans offload. Otherwise models that
   are smaller take the same paths. */
static bool is_long(void) {
    return t_environment("MEMSCALE_TEST_SWEEP", 0) > 0;
}

static int64_t of_size(int64_t quick, int64_t full) {
    return is_long() ? full : quick;
}

/* What a run printed. */
typedef struct printed {
    int status;
    char out[TEXT_BYTES], error[4096];
} printed;

static void read_back(FILE *file, char *text, size_t capacity) {
    rewind(file);
    const size_t length = fread(text, 1, capacity, file);
    assert_true(length < capacity);
    text[length] = 0;
    fclose(file);
}

/* The program with these words, which spaces separate ('_' stands for a space within one). */
static void run_words(printed *p, const char *words) {
    char name[] = "build/examples/estimate", copy[512], *argv[MOST_WORDS + 1];
    int argc = 1;
    snprintf(copy, sizeof copy, "%s", words);
    argv[0] = name;
    for (char *word = strtok(copy, " "); word; word = strtok(NULL, " ")) {
        assert_true(argc < MOST_WORDS);
        for (char *c = word; *c; c++) {
            *c = *c == '_' ? ' ' : *c;
        }
        argv[argc++] = word;
    }
    argv[argc] = NULL;
    FILE *out = tmpfile(), *error = tmpfile();
    assert_true(out && error);
    fflush(stdout);
    const int old_out = dup(1), old_error = dup(2);
    assert_true(dup2(fileno(out), 1) == 1 && dup2(fileno(error), 2) == 2);
    p->status = estimate_main(argc, argv);
    fflush(stdout);
    assert_true(dup2(old_out, 1) == 1 && dup2(old_error, 2) == 2);
    close(old_out);
    close(old_error);
    read_back(out, p->out, sizeof p->out);
    read_back(error, p->error, sizeof p->error);
}

/* For what does not depend on offloading, on which most of the time of planning is spent. */
static ms_switch resident_unless_long(void) {
    return is_long() ? MS_SWITCH_DEFAULT : MS_SWITCH_OFF;
}

/* A run in which neither offloading matters nor how many tokens there are, unless its words say so. */
static void run_small(printed *p, const char *words) {
    static const char *const small[][2] = {
        {"--offload", "off"}, {"--batch", "1"}, {"--sequence", "64"}};
    char all[512];
    snprintf(all, sizeof all, "%s", words);
    for (int i = 0; i < 3 && !is_long(); i++) {
        if (!strstr(words, small[i][0])) {
            const size_t used = strlen(all);
            snprintf(all + used, sizeof all - used, " %s %s", small[i][0], small[i][1]);
        }
    }
    run_words(p, all);
}

/* An estimate without its program. */
static void prepare(estimate *e, const char *model, int64_t batch, int64_t sequence) {
    memset(e, 0, sizeof *e);
    e->options.model = model;
    e->options.batch = batch;
    e->options.sequence = sequence;
    e->options.gpu = "24G";
    assert_int_equal(choose_training(&e->options), 0);
    assert_int_equal(choose_shape(&e->options, &e->model), 0);
    e->options.utilization = 0.85f;
    assert_int_equal(choose_target(&e->options, &e->device), 0);
}

// ------------------------------------------------------------------------------------------------
// params

/* Params as published: Radford et al., 2019 (as released), and, with the head for masked words and
   without pooler, Devlin et al., 2018; the model cards of the others, and the sizes of the published
   tensors. */
static const struct {
    const char *name;
    uint64_t params;
} published[] = {
    {"gpt2-124M", 124439808u},        {"gpt2-355M", 354823168u},
    {"gpt2-774M", 774030080u},        {"gpt2-1558M", 1557611200u},
    {"bert-base", 109514298u},        {"bert-large", 335174458u},
    {"smollm2-135M", 134515008u},     {"smollm2-360M", 361821120u},
    {"smollm2-1.7B", 1711376384u},    {"tinyllama-1.1B", 1100048384u},
    {"llama3.2-1B", 1235814400u},     {"llama3.2-3B", 3212749824u},
    {"llama2-7B", 6738415616u},       {"mistral-7B", 7241732096u},
    {"mistral-7B-v0.3", 7248023552u}, {"mistral-nemo-12B", 12247782400u},
    {"llama3-8B", 8030261248u},       {"llama2-13B", 13015864320u},
    {"llama2-70B", 68976648192u},     {"llama3-70B", 70553706496u},
    {"qwen2.5-0.5B", 494032768u},     {"qwen2.5-1.5B", 1543714304u},
    {"qwen2.5-3B", 3085938688u},      {"qwen2.5-7B", 7615616512u},
    {"qwen2.5-14B", 14770033664u},    {"qwen2.5-32B", 32763876352u},
    {"qwen3-0.6B", 596049920u},       {"qwen3-1.7B", 1720574976u},
    {"qwen3-4B", 4022468096u},        {"qwen3-8B", 8190735360u},
    {"qwen3-14B", 14768307200u},      {"qwen3-32B", 32762123264u},
    {"gemma2-2B", 2614341888u},       {"gemma2-9B", 9241705984u},
    {"gemma2-27B", 27227128320u},     {"gemma3-270M", 268098176u},
    {"gemma3-1B", 999885952u},        {"phi3-mini", 3821079552u},
    {"phi4", 14659507200u},
};
enum { PUBLISHED = sizeof published / sizeof published[0] };

/* The sizes of a transformer, summed up by hand: each tensor of its params. */
static uint64_t closed_params(const shape *s) {
    const nn_llama_config *c = &s->of.llama;
    const uint64_t C = (uint64_t)c->channels, F = (uint64_t)c->feed_forward,
                   V = (uint64_t)c->vocabulary, P = (uint64_t)s->of.positions;
    const uint64_t size = (uint64_t)c->head_size, layers = (uint64_t)c->layers;
    const uint64_t Q = size * (uint64_t)c->heads, K = size * (uint64_t)c->kv_heads;
    if (s->of.family == MODEL_LLAMA) {
        const uint64_t biases = c->qkv_bias ? Q + 2 * K : 0;
        const uint64_t norms = (c->post_norms ? 4 : 2) * C + (c->qk_norm ? 2 * size : 0);
        return V * C * (c->tied ? 1 : 2) +
               layers * (2 * C * Q + 2 * C * K + 3 * C * F + norms + biases) + C;
    }
    const uint64_t block = 4 * C * C + 2 * C * F + 4 * C + F + C + 4 * C; // weights, biases, norms
    if (s->of.family == MODEL_BERT) {
        return V * C + P * C + 2 * C + 2 * C + layers * block + C * C + C + 2 * C + V;
    }
    return V * C + P * C + layers * block + 2 * C;
}

static void params_are_as_published(void **state) {
    (void)state;
    const char *names[MOST_MODELS];
    assert_int_equal(PUBLISHED, list_models(names));
    for (int i = 0; i < PUBLISHED; i++) {
        estimate e;
        plan p;
        prepare(&e, published[i].name, 1, 64);
        assert_int_equal(plan_plain(&e, 1, &p), 0);
        assert_int_equal(p.report.param_count, published[i].params);
        assert_int_equal(closed_params(&e.model), published[i].params);
        /* AdamW in f32: the param, its gradient and two moments, 4 bytes each; each tensor rounded
           up to 64 bytes. */
        const uint64_t bytes =
            row_bytes(p.largest, 0) + row_bytes(p.largest, 1) + row_bytes(p.largest, 2);
        assert_true(bytes >= 16 * published[i].params);
        assert_true(bytes < 16 * published[i].params + 4 * 64 * (uint64_t)p.report.tensor_count);
    }
}

/* An estimate with these formats. */
static void prepare_formats(estimate *e, const char *model, int64_t batch, int64_t sequence,
                            const char *of_layers, const char *gradients, const char *state) {
    memset(e, 0, sizeof *e);
    e->options.model = model;
    e->options.batch = batch;
    e->options.sequence = sequence;
    e->options.precision = of_layers;
    e->options.gradients = gradients;
    e->options.state = state;
    e->options.gpu = "4090";
    assert_int_equal(choose_training(&e->options), 0);
    assert_int_equal(choose_shape(&e->options, &e->model), 0);
    e->options.utilization = 0.85f;
    assert_int_equal(choose_target(&e->options, &e->device), 0);
}

/* Bytes that a param takes, its gradient and its optimizer state, by what was asked for. Biases and
   norms stay in f32, and the gradient of the token table, which no product makes. */
static void a_param_takes_the_bytes_of_its_formats(void **state) {
    (void)state;
    static const struct {
        const char *model, *precision, *gradients, *state;
        uint64_t param, gradient, optimizer;
    } all[] = {{"qwen2.5-0.5B", "f32", NULL, NULL, 4, 4, 8},
               {"qwen2.5-0.5B", "tf32", NULL, "bf16", 4, 4, 4},
               {"qwen2.5-0.5B", "bf16", NULL, NULL, 2, 4, 12},
               {"qwen2.5-7B", "bf16", "bf16", "bf16", 2, 2, 8},
               {"qwen2.5-7B", "bf16-alone", "bf16", "bf16", 2, 2, 4},
               {"llama3.2-1B", "bf16-alone", "f32", "f32", 2, 4, 8},
               {"qwen2.5-3B", "f16", "f16", "bf16", 2, 2, 8},
               {"qwen2.5-1.5B", "f16-alone", "f16", NULL, 2, 2, 8},
               {"gpt2-124M", "bf16-alone", "bf16", "bf16", 2, 2, 4},
               {"bert-base", "BF16", "f32", "bf16", 2, 4, 8}};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        estimate e;
        plan p;
        prepare_formats(&e, all[i].model, 1, 64, all[i].precision, all[i].gradients, all[i].state);
        assert_int_equal(plan_plain(&e, 1, &p), 0);
        const uint64_t params = p.report.param_count;
        const uint64_t table =
            (uint64_t)((e.model.of.llama.vocabulary + e.model.of.positions + 2) * //
                       e.model.of.llama.channels);
        const uint64_t rounded = 64 * (uint64_t)p.report.tensor_count;
        const uint64_t f32 = params / 500 + rounded; // biases and norms
        const uint64_t halved = all[i].gradient == 2;
        const nn_llama_config *s = &e.model.of.llama;
        const int64_t keys = s->kv_heads * s->head_size;
        const int64_t small =
            s->layers * (2 * s->channels + (s->qkv_bias ? s->channels + 2 * keys : 0)) +
            s->channels; // of llama: norms and biases, 4 bytes in any case
        const uint64_t more =
            e.model.of.family == MODEL_LLAMA ? (uint64_t)small * (4 - all[i].param) : 0;
        assert_true(p.report.peak_bytes[MS_CATEGORY_PARAM] >= all[i].param * params + more);
        assert_true(e.model.of.family != MODEL_LLAMA || p.report.peak_bytes[MS_CATEGORY_PARAM] <=
                                                            all[i].param * params + more + rounded);
        assert_true(p.report.peak_bytes[MS_CATEGORY_PARAM] <= all[i].param * params + 2 * f32);
        assert_true(p.largest[MS_CATEGORY_GRADIENT] >= all[i].gradient * params);
        assert_true(p.largest[MS_CATEGORY_GRADIENT] <=
                    all[i].gradient * params + halved * 2 * table + 2 * f32);
        /* What has no 16 bits has no master either, but its state is as that of all. */
        assert_true(p.largest[MS_CATEGORY_OPTIMIZER] >= all[i].optimizer * params - 4 * f32);
        assert_true(p.largest[MS_CATEGORY_OPTIMIZER] <= all[i].optimizer * params + 3 * rounded);
    }
}

/* In 16 bits a block has half of the bytes, except what stays in f32: 1 / deviation of both norms,
   and a sum for each head. */
static void a_block_in_16_bits_has_half_of_the_bytes(void **state) {
    (void)state;
    static const char *const precisions_of_runs[] = {"bf16-alone", "f16"};
    const uint64_t C = 3584, qkv = C + 2 * 512, F = 18944, heads = 28;
    for (int i = 0; i < 2; i++) {
        estimate e;
        plan one, two;
        prepare_formats(&e, "qwen2.5-7B", 2, 1024, precisions_of_runs[i], NULL, NULL);
        e.model.of.llama.layers = 1;
        assert_int_equal(plan_plain(&e, 2, &one), 0);
        e.model.of.llama.layers = 2;
        assert_int_equal(plan_plain(&e, 2, &two), 0);
        assert_int_equal(two.report.activation_peak_bytes - one.report.activation_peak_bytes,
                         2 * 1024 * ((4 * C + qkv + C + 3 * F) * 2 + (2 + heads) * 4));
    }
}

/* Plans that the budget alone leads to: the share of a step of gradient accumulation that waits for
   copies, and the forward work of the blocks that runs again, over one forward. */
static void plans_from_the_budget_wait_and_recompute_little(void **state) {
    (void)state;
    static const struct {
        const char *model, *gpu;
        int64_t batch;
        double waits, recomputed;
        int64_t layers; // 0: those of the model, and the budget of the GPU
        uint64_t budget_bytes;
    } all[] = {{"qwen2.5-7B", "5060 Ti 16GB", 8, 0.015, 0.02, 4, 9600000000u},
               {"qwen2.5-7B", "5060 Ti 16GB", 8, 0.015, 0.02, 0, 0},
               {"qwen2.5-14B", "4090", 8, 0.03, 0.15, 0, 0},
               {"qwen2.5-7B", "4090", 8, 0.03, 0.15, 0, 0},
               {"qwen2.5-7B", "5060 Ti 16GB", 16, 0.015, 0.02, 0, 0},
               {"qwen2.5-7B", "4090", 16, 0.03, 0.15, 0, 0},
               {"qwen2.5-14B", "4090", 16, 0.03, 0.15, 0, 0}};
    const uint64_t rows = 1 + t_sweep(0, sizeof all / sizeof all[0] - 1);
    for (uint64_t i = 0; i < rows; i++) {
        estimate e;
        plan p;
        prepare_formats(&e, all[i].model, all[i].batch, 1024, "bf16-alone", "bf16", "bf16");
        e.options.gpu = all[i].gpu;
        e.options.tokens = 524288;
        e.options.utilization = 0.85f;
        assert_int_equal(choose_target(&e.options, &e.device), 0);
        if (all[i].layers) {
            e.model.of.llama.layers = all[i].layers;
            e.device.budget_bytes = all[i].budget_bytes;
        }
        assert_int_equal(
            plan_budget(&e, all[i].batch, MS_MODE_AGGRESSIVE, e.device.budget_bytes, &p), 0);
        assert_true(p.fits && p.report.arena_bytes <= e.device.budget_bytes);
        assert_true(p.report.arena_bytes < (all[i].gpu[0] == '4' ? 24u : 16u) * 1000000000ull);
        assert_true(p.report.stall_us <= all[i].waits * p.report.step_us);
        assert_true(p.times.recompute_us <= all[i].recomputed * p.times.block_us);
    }
}

/* What is forced is in 16 bits in every mode, and half as large; times are relative to that. */
static void what_is_forced_is_in_16_bits_in_every_mode(void **state) {
    (void)state;
    estimate e;
    findings f, g;
    prepare_formats(&e, "qwen2.5-0.5B", 4, 512, "f32", NULL, NULL);
    e.model.of.llama.layers = 4;
    e.options.offloading = resident_unless_long();
    assert_int_equal(find_all(&e, &f), 0);
    prepare_formats(&e, "qwen2.5-0.5B", 4, 512, "bf16-alone", "bf16", "bf16");
    e.model.of.llama.layers = 4;
    e.options.offloading = resident_unless_long();
    assert_int_equal(find_all(&e, &g), 0);
    assert_int_equal(g.same_as[MODES - 1],
                     MODES - 1); // nothing is left to round, but there are tiles
    assert_true(g.plain.report.arena_bytes < f.plain.report.arena_bytes / 10 * 6);
    assert_true(g.plain.report.step_us < f.plain.report.step_us / 10.0 * 6.0);
    for (int i = 0; i < MODES - 1; i++) {
        assert_true(g.smallest[i].report.arena_bytes < f.smallest[i].report.arena_bytes / 10 * 7);
    }
    assert_true(over_plain(&g, &g.plain) - 1.0 == 0.0);
    assert_true(over_plain(&g, &g.smallest[1]) >= 1.0);
}

/* Bytes that one block more adds to the activations of a plain step. */
static uint64_t block_bytes(const char *model, int64_t batch, int64_t sequence) {
    estimate e;
    plan one, two;
    prepare(&e, model, batch, sequence);
    e.model.of.llama.layers = 1;
    assert_int_equal(plan_plain(&e, batch, &one), 0);
    e.model.of.llama.layers = 2;
    assert_int_equal(plan_plain(&e, batch, &two), 0);
    return two.report.activation_peak_bytes - one.report.activation_peak_bytes;
}

/* What backward reads of a block, by hand. */
static void a_block_adds_what_its_backward_reads(void **state) {
    (void)state;
    /* Each token of GPT-2: both normed values and both sums, qkv (3 C), what attention mixed, and
       4 C each before and behind gelu: 16 C; mean and rstd of both norms, and a sum for each head. */
    assert_int_equal(block_bytes("gpt2-124M", 2, 512), 2 * 512 * (16 * 768 + 4 + 12) * 4);
    /* Each token of Llama: both normed values and both sums, qkv (turned in place), what attention
       mixed, gate, up and their product; rstd of both norms, and a sum for each head. */
    const uint64_t C = 4096, qkv = C + 2 * 1024, F = 14336, heads = 32;
    assert_int_equal(block_bytes("llama3-8B", 2, 1024),
                     2 * 1024 * (4 * C + qkv + C + 3 * F + 2 + heads) * 4);
}

// ------------------------------------------------------------------------------------------------
// a model that trains

/* What a trainer may do beside forward, backward and update. */
typedef enum habit { NOTHING_ELSE, CLIPS, ACCUMULATES, TRAINS_ADAPTERS } habit;

static void read_param(ms_model *model, const nn_net *net, const char *name, float *value) {
    t_ok(model, ms_read(model, nn_find_param(net, name)->tensor, value));
}

/* The estimate of a small model against one that is wrapped for good and takes a step. */
static void check_equal(model_family family, bool is_plain, habit also) {
    estimate e;
    plan p;
    ms_memory_report r;
    ms_model *model;
    ms_optimizer_desc optimizer;
    ms_config config = t_device_config();
    memset(&e, 0, sizeof e);
    memset(&optimizer, 0, sizeof optimizer);
#ifdef T_CUDA
    config.backend = ms_backend_cuda(0);
    config.offloading = MS_SWITCH_DEFAULT;
#else
    config.backend = ms_backend_cpu();
#endif
    start_family(&e.model, family);
    e.model.of.llama.layers = 3;
    e.model.of.llama.heads = e.model.of.llama.kv_heads = 2;
    e.model.of.llama.channels = 32;
    e.model.of.llama.vocabulary = 96;
    e.model.of.positions = 24;
    e.options.batch = 3;
    e.options.sequence = 24;
    e.options.clip = also == CLIPS ? 1.0f : 0.0f;
    e.options.accumulate = also == ACCUMULATES ? 2 : 1;
    e.options.frozen = also == TRAINS_ADAPTERS;
    e.options.rank = also == TRAINS_ADAPTERS ? 4 : 0;
    assert_int_equal(choose_training(&e.options), 0);
    config.backend.hardware(config.backend.user, &e.device.hardware);
    e.device.budget_bytes = e.device.memory_bytes = (uint64_t)1 << 40;
    prepare_target(&e.device);
    assert_int_equal(e.device.backend.workspace_bytes, config.backend.workspace_bytes);
    assert_int_equal(plan_plain(&e, 3, &p), 0);
    const uint64_t plain = p.report.arena_bytes;
    assert_int_equal(plan_smallest(&e, 3, MS_MODE_BALANCED, &p), 0);
    const uint64_t budget = p.report.arena_bytes + (plain - p.report.arena_bytes) / 2;
    assert_true(p.report.arena_bytes < plain);
    assert_int_equal(
        is_plain ? plan_plain(&e, 3, &p) : plan_budget(&e, 3, MS_MODE_BALANCED, budget, &p), 0);

    config.accumulation_steps = also == ACCUMULATES ? 2 : 1;
    optimizer.grad_clip_norm = also == CLIPS ? 1.0f : 0.0f;
    config.memory_budget_bytes = is_plain ? (uint64_t)1 << 40 : budget;
    config.early_update = is_plain ? MS_SWITCH_OFF : MS_SWITCH_DEFAULT;
    nn_transformer_config c;
    memset(&c, 0, sizeof c);
    c.vocabulary = 96;
    c.context = c.sequence = 24;
    c.layers = c.batch = 3;
    c.heads = 2;
    c.channels = 32;
    c.adapter_rank = e.options.rank;
    assert_int_equal(ms_create(&config, &model), MS_RESULT_OK);
    nn_net *net = nn_create_on(model, t_nn_device());
    assert_non_null(net);
    ms_set_hardware(model, &e.device.hardware);
    const nn_transformer t = family == MODEL_BERT ? nn_bert(net, &c) : nn_gpt2(net, &c);
    ms_set_optimizer(model, &optimizer);
    t_ok(model, ms_wrap(model));
    t_report(model, &r);
    int32_t ids[72];
    double loss;
    float base[2][32 * 96], adapter[2][4 * 96];
    for (int i = 0; i < 72; i++) {
        ids[i] = i & 1;
    }
    t_ok(model, nn_init(net, 1));
    if (t.segments.id) {
        t_ok(model, ms_write(model, t.segments, ids));
    }
    t_ok(model, ms_write(model, t.tokens, ids));
    t_ok(model, ms_write(model, t.targets, ids));
    for (int i = 0; i < 2; i++) {
        read_param(model, net, "h0.qkv.weight", base[i]);
        if (also == TRAINS_ADAPTERS) {
            read_param(model, net, "h0.qkv.adapter.up.weight", adapter[i]);
        }
        for (int k = 0; k < (also == ACCUMULATES ? 2 : 1); k++) {
            t_ok(model, ms_step(model, &loss));
        }
        assert_true(loss > 0.0);
    }
    assert_true((memcmp(base[0], base[1], sizeof base[0]) == 0) == (also == TRAINS_ADAPTERS));
    assert_true(also != TRAINS_ADAPTERS || memcmp(adapter[0], adapter[1], sizeof adapter[0]) != 0);
    assert_true(e.options.frozen == (p.trained_count < r.param_count / 2));
    assert_true(!needs_all_gradients(&e.options) || !r.early_update);
    assert_int_equal(p.report.arena_bytes, r.arena_bytes);
    assert_int_equal(p.report.lower_bound_bytes, r.lower_bound_bytes);
    assert_int_equal(p.report.activation_peak_bytes, r.activation_peak_bytes);
    assert_int_equal(p.report.recompute_count, r.recompute_count);
    assert_int_equal(p.report.plan_hash, r.plan_hash);
    assert_true(is_plain || r.recompute_count > 0 || r.to_host_bytes > 0);
    assert_true(p.report.step_us > 0.0 && p.report.step_us - r.step_us == 0.0);
    for (int k = 0; k < MS_CATEGORY_COUNT; k++) {
        assert_int_equal(p.report.peak_bytes[k], r.peak_bytes[k]);
    }
    ms_destroy(model);
    nn_destroy(net);
}

static void an_estimate_equals_a_model_that_trains(void **state) {
    (void)state;
    check_equal(MODEL_GPT2, true, NOTHING_ELSE);
    check_equal(MODEL_GPT2, false, NOTHING_ELSE);
    check_equal(MODEL_BERT, true, NOTHING_ELSE);
    check_equal(MODEL_BERT, false, NOTHING_ELSE);
    check_equal(MODEL_GPT2, false, CLIPS);
    check_equal(MODEL_GPT2, false, ACCUMULATES);
    check_equal(MODEL_BERT, false, TRAINS_ADAPTERS);
}

/* Clipping and accumulation forbid early updates: all gradients exist at the end of backward, and
   with accumulation during forward too. Momentum takes 4 bytes a param less than AdamW, SGD 8. */
static void clipping_and_accumulation_keep_all_gradients(void **state) {
    (void)state;
    static const char *const names[] = {"adamw", "momentum", "SGD"};
    uint64_t bytes[3];
    estimate e;
    plan p, clipped, summed;
    prepare(&e, "gpt2-124M", 2, 64);
    const uint64_t params = 4 * 124439808u;
    for (int i = 0; i < 3; i++) {
        e.options.optimizer = names[i];
        assert_int_equal(plan_plain(&e, 2, &p), 0);
        bytes[i] = row_bytes(p.largest, 2);
        assert_true(bytes[i] >= params * (uint64_t)(2 - i));
        assert_true(bytes[i] <= params * (uint64_t)(2 - i) + 64 * p.report.tensor_count * 2);
    }
    e.options.optimizer = NULL;
    e.options.offloading = MS_SWITCH_OFF;
    assert_int_equal(plan_smallest(&e, 2, MS_MODE_BALANCED, &p), 0);
    assert_true(p.report.early_update && row_bytes(p.largest, 1) < params / 2);
    e.options.clip = 1.0f;
    assert_int_equal(plan_smallest(&e, 2, MS_MODE_BALANCED, &clipped), 0);
    e.options.clip = 0.0f;
    e.options.accumulate = 8;
    assert_int_equal(plan_smallest(&e, 2, MS_MODE_BALANCED, &summed), 0);
    assert_true(!clipped.report.early_update && !summed.report.early_update);
    assert_true(clipped.report.arena_bytes >= 4 * params);
    assert_true(p.report.arena_bytes < clipped.report.arena_bytes);
    assert_true(clipped.report.arena_bytes < summed.report.arena_bytes);
}

/* Adapters of rank r of a linear layer in -> out are r (in + out) params; nothing else is trained.
   Of the frozen params there is neither gradient nor state. */
static void only_adapters_have_gradients_and_state(void **state) {
    (void)state;
    estimate e;
    plan p;
    prepare(&e, "llama3.2-1B", 1, 64);
    e.options.frozen = true;
    e.options.rank = 8;
    assert_int_equal(plan_plain(&e, 1, &p), 0);
    const uint64_t C = 2048, qkv = C + 2 * 512, F = 8192, block = C + qkv + 2 * C + 3 * (C + F);
    assert_int_equal(p.trained_count, 8 * 16 * block);
    assert_int_equal(p.report.param_count, 1235814400u + p.trained_count);
    assert_true(row_bytes(p.largest, 2) < 8 * p.trained_count + 64 * p.report.tensor_count);
    assert_true(row_bytes(p.largest, 1) < 4 * p.trained_count + 64 * p.report.tensor_count);
}

// ------------------------------------------------------------------------------------------------
// advice

/* As find_all, for another budget, on which the smallest plans do not depend. */
static void find_again(const estimate *e, findings *f) {
    const uint64_t budget = e->device.budget_bytes;
    if (is_long()) {
        assert_int_equal(find_all(e, f), 0);
        return;
    }
    f->plain.fits = f->plain.report.arena_bytes <= budget;
    f->searched = false;
    for (int i = 0; i < MODES; i++) {
        f->smallest[i].fits = f->smallest[i].report.arena_bytes <= budget;
        f->at_budget[i] = f->smallest[i];
        if (f->smallest[i].fits) {
            assert_int_equal(plan_budget(e, e->options.batch, modes[i], budget, &f->at_budget[i]),
                             0);
        }
    }
    assert_int_equal(advise(e, f), 0);
}

/* The mode that is advised, for budgets that are a share of the plain peak. */
static void the_mode_that_is_advised_follows_the_budget(void **state) {
    (void)state;
    estimate e;
    findings f;
    prepare(&e, "bert-base", of_size(16, 8), 128);
    e.model.of.llama.layers = of_size(2, 12);
    e.options.offloading = MS_SWITCH_OFF;
    assert_int_equal(find_all(&e, &f), 0);
    const uint64_t plain = f.plain.report.arena_bytes;
    const uint64_t least = f.smallest[0].report.arena_bytes;
    assert_true(f.smallest[MODES - 1].report.arena_bytes < least);
    assert_true(f.plain.fits && !f.searched && f.advised == 0 && f.pressure < 1.0);
    assert_true(least < plain);

    e.device.memory_bytes = plain + plain / 20; // below the memory, above 85 % of it
    e.device.budget_bytes = e.device.memory_bytes / 100 * 85;
    assert_int_equal(find_all(&e, &f), 0);
    assert_true(!f.plain.fits && f.pressure < 1.0);
    assert_true(f.at_budget[0].fits && f.at_budget[0].report.arena_bytes <= e.device.budget_bytes);
    assert_true(f.at_budget[0].report.recompute_count > 0);

    /* However small the budget is. State in 8 bits leaves memory for what need not be recomputed. */
    e.device.is_user_size = true;
    e.device.budget_bytes = least;
    assert_int_equal(find_all(&e, &f), 0);
    assert_true(f.pressure > 1.25 && f.advised == 0 && !f.searched);
    assert_true(modes[f.rounding] == MS_MODE_AGGRESSIVE);
    assert_true(is_rounded(&f, &f.at_budget[f.rounding]) && !is_rounded(&f, &f.at_budget[0]));
    assert_true(f.at_budget[f.rounding].report.step_us < f.at_budget[0].report.step_us);
    assert_true(f.at_budget[0].fits && f.at_budget[1].fits && f.same_as[1] == 0);

    /* What fits both ways is faster with copies, and less fits with them alone. */
    e.options.offloading = MS_SWITCH_DEFAULT;
    assert_int_equal(find_all(&e, &f), 0);
    assert_true(f.at_budget[0].fits && f.at_budget[1].fits);
    assert_true(f.at_budget[1].report.step_us < f.at_budget[0].report.step_us);
    assert_true(f.at_budget[2].report.step_us <= f.at_budget[1].report.step_us);
    e.device.budget_bytes = least / 2;
    find_again(&e, &f);
    assert_true(!f.at_budget[0].fits && f.advised > 0 && !f.searched);
    f.at_budget[1].fits = false;
    assert_int_equal(advise(&e, &f), 0);
    assert_true(modes[f.advised] == MS_MODE_AGGRESSIVE && f.rounding == f.advised);
    f.at_budget[1].fits = true;
    f.at_budget[2] = f.at_budget[1]; // which rounds nothing
    assert_int_equal(advise(&e, &f), 0);
    assert_true(f.advised == 1 && f.rounding < 0);
}

/* Both plans that one may want are named, with what the faster one rounds. */
static void advice_says_what_is_rounded(void **state) {
    (void)state;
    static printed p;
    run_words(&p, "--layers 2 --batch 8 --sequence 128 --budget 1000M");
    assert_int_equal(p.status, STATUS_FITS);
    t_text_has(p.out, "\n          same numbers: BALANCED fits, in 1.");
    t_text_has(p.out, "\n          rounding: AGGRESSIVE fits, in 0.");
    t_text_has(p.out, "\n              it rounds to BF16");
    run_words(&p, "--layers 2 --batch 8 --sequence 128 --budget 1000M --json");
    t_text_has(p.out, "\"mode\": \"BALANCED\"");
    t_text_has(p.out, "\"keeps_numbers\": true");
    t_text_has(p.out, "\"rounding_mode\": \"AGGRESSIVE\"");
    t_text_has(p.out, "\"rounds_to\": \"BF16");
    run_words(&p,
              "--layers 2 --batch 8 --sequence 128 --budget 700M --precision bf16 --state bf16");
    t_text_has(p.out, "\n          rounding: no faster\n"); // than the plain plan of this precision
}

/* The largest batch fits, and one more does not. */
static void the_largest_batch_is_the_largest_that_fits(void **state) {
    (void)state;
    estimate e;
    findings f;
    plan p;
    prepare(&e, "bert-base", 96, 128);
    e.model.of.llama.layers = 2;
    e.options.offloading = resident_unless_long();
    e.device.budget_bytes = e.device.memory_bytes = (uint64_t)of_size(512, 256) << 20;
    assert_int_equal(find_all(&e, &f), 0);
    assert_true(f.pressure > 3.0 && f.searched);
    assert_int_equal(f.advised, f.same_as[MODES - 1]);
    assert_in_range(f.largest_batch, 2, 95);
    assert_true(f.largest.fits && f.largest.report.arena_bytes <= e.device.budget_bytes);
    assert_int_equal(plan_smallest(&e, f.largest_batch + 1, MS_MODE_AGGRESSIVE, &p), 0);
    assert_true(p.report.arena_bytes > e.device.budget_bytes);

    e.options.batch = 1; // the largest param alone is more than this
    e.device.budget_bytes = e.device.memory_bytes = (uint64_t)64 << 20;
    assert_int_equal(find_all(&e, &f), 0);
    assert_true(f.searched && f.largest_batch == 0 && !f.single.fits);
    assert_true(f.single.report.arena_bytes > e.device.budget_bytes);
}

// ------------------------------------------------------------------------------------------------
// JSON and XML

/* One value of RFC 8259 and the space after it; NULL where it is none. */
static const char *json_value(const char *c);

static const char *json_space(const char *c) {
    return c + strspn(c, " \t\r\n");
}

static const char *json_quoted(const char *c) {
    for (c++; *c != '"'; c++) {
        if ((unsigned char)*c < 32) {
            return NULL;
        }
        if (*c == '\\') {
            c++;
            if (*c == 'u' ? strspn(c + 1, "0123456789abcdefABCDEF") < 4
                          : *c == 0 || strchr("\"\\/bfnrt", *c) == NULL) {
                return NULL;
            }
        }
    }
    return c + 1;
}

static const char *json_number(const char *c) {
    c += *c == '-';
    const size_t digits = strspn(c, "0123456789");
    if (digits == 0 || (digits > 1 && *c == '0')) {
        return NULL;
    }
    c += digits;
    if (*c == '.') {
        const size_t more = strspn(c + 1, "0123456789");
        if (more == 0) {
            return NULL;
        }
        c += 1 + more;
    }
    if (*c == 'e' || *c == 'E') {
        c += c[1] == '+' || c[1] == '-' ? 2 : 1;
        const size_t more = strspn(c, "0123456789");
        return more ? c + more : NULL;
    }
    return c;
}

static const char *json_list(const char *c, bool has_keys) {
    const char end = has_keys ? '}' : ']';
    c = json_space(c + 1);
    while (*c != end) {
        if (has_keys) {
            c = *c == '"' ? json_quoted(c) : NULL;
            c = c ? json_space(c) : "";
            if (*c != ':') {
                return NULL;
            }
            c = json_space(c + 1);
        }
        c = json_value(c);
        if (!c || (*c != ',' && *c != end)) {
            return NULL;
        }
        c = *c == ',' ? json_space(c + 1) : c;
        if (c[-1] == ',' && *c == end) {
            return NULL;
        }
    }
    return c + 1;
}

static const char *json_value(const char *c) {
    static const char *const words[] = {"true", "false", "null"};
    for (int i = 0; i < 3; i++) {
        if (strncmp(c, words[i], strlen(words[i])) == 0) {
            return json_space(c + strlen(words[i]));
        }
    }
    c = *c == '{' || *c == '[' ? json_list(c, *c == '{')
        : *c == '"'            ? json_quoted(c)
                               : json_number(c);
    return c ? json_space(c) : NULL;
}

static bool is_json(const char *text) {
    const char *end = json_value(json_space(text));
    return end && *end == 0;
}

/* The number behind a key, which stands once. */
static double number_of(const char *text, const char *key) {
    char quoted[64];
    snprintf(quoted, sizeof quoted, "\"%s\": ", key);
    const char *at = strstr(text, quoted);
    assert_non_null(at);
    return strtod(at + strlen(quoted), NULL);
}

static void the_numbers_for_programs_are_json(void **state) {
    (void)state;
    static printed p;
    assert_true(is_json("{\"a\": [1, -2.5e3, \"\\u0041\", {}], \"b\": null}\n"));
    static const char *const wrong[] = {"{\"a\": 1,}",  "{a: 1}",  "[1 2]", "\"\n\"", "01",
                                        "{\"a\": inf}", "{\"a\"}", "[1]]",  "1.",     ""};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        assert_false(is_json(wrong[i]));
    }
    const char *const runs[] = {
        "--json --layers 2", "--json --model bert-large --layers 3 --gpu H200",
        "--json --model llama2-7B --gpu 24G --offload off --batch 4 --sequence 512",
        is_long() ? "--json --model gpt2-355M --layers 2 --batch 1999 --gpu 4G --offload off"
                  : "--json --layers 1 --channels 64 --heads 2 --vocabulary 512 --batch 1999 "
                    "--sequence 64 --gpu 40M --offload off",
        "--json --family llama --layers 3 --channels 96 --heads 6 --kv-heads 2 --precision tf32 "
        "--offload "
        "auto"};
    for (size_t i = 0; i < sizeof runs / sizeof runs[0]; i++) {
        run_small(&p, runs[i]);
        assert_int_equal(p.status, i == 2 || i == 3 ? STATUS_NO_FIT : STATUS_FITS);
        assert_int_equal(p.error[0], 0);
        assert_true(is_json(p.out));
    }
    run_small(&p, "--json --model gpt2-355M --batch 4 --sequence 512 --budget 6G");
    assert_true(is_json(p.out));
    assert_true(number_of(p.out, "params") == 354823168.0);
    assert_true(number_of(p.out, "budget_bytes") == 6.0 * 1073741824.0);
    t_text_has(p.out, "\"mode\": \"CONSERVATIVE\"");
    assert_true(number_of(p.out, "accumulation_steps") == 1.0);
    run_small(&p, "--json --layers 2 --clip 1 --accumulate 3 --frozen --optimizer sgd --gpu 8GB");
    assert_true(is_json(p.out));
    assert_true(number_of(p.out, "accumulation_steps") == 3.0);
    assert_true(number_of(p.out, "adapter_rank") == 8.0);
    t_text_has(p.out, "\"between_steps\": true");
    t_text_has(p.out, "\"between_steps\": false");
    t_text_has(p.out, "\"clip\": true");
    t_text_has(p.out, "\"optimizer\": \"SGD\"");
}

/* Tokens of a step make micro-batches, rounded up; a whole step has all of them and one update. */
static void tokens_of_a_step_make_micro_batches(void **state) {
    (void)state;
    static const struct {
        int64_t tokens, batch, sequence, count;
    } all[] = {{524288, 16, 1024, 32},
               {524288, 32, 1024, 16},
               {524288, 5, 1024, 103},
               {4096, 4, 1024, 1},
               {4097, 4, 1024, 2},
               {1, 4, 1024, 1},
               {2147483647, 2, 1024, 1048576}};
    static printed p;
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        settings o;
        memset(&o, 0, sizeof o);
        o.tokens = all[i].tokens;
        o.batch = all[i].batch;
        o.sequence = all[i].sequence;
        assert_int_equal(choose_training(&o), 0);
        assert_int_equal(batches_of_step(&o, o.batch), all[i].count);
        assert_true(needs_all_gradients(&o) == (all[i].count > 1));
    }
    estimate e;
    plan one, many;
    prepare_formats(&e, "qwen2.5-0.5B", 2, 1024, "bf16-alone", "bf16", "bf16");
    e.model.of.llama.layers = of_size(3, e.model.of.llama.layers);
    e.options.accumulate = 2;
    assert_int_equal(plan_plain(&e, 2, &one), 0);
    e.options.accumulate = 1;
    e.options.tokens = 100 * 2 * 1024;
    assert_int_equal(plan_plain(&e, 2, &many), 0);
    const ms_memory_report *a = &one.report, *b = &many.report;
    assert_true(b->micro_us < b->last_micro_us && many.times.block_us > 0.0);
    assert_true(b->micro_us > 3.0 * many.times.block_us);
    assert_true(fabs(a->step_us - a->last_micro_us - a->micro_us) < 1.0);
    assert_true(fabs(b->step_us - b->last_micro_us - 99.0 * b->micro_us) < 1.0);
    assert_true(many.times.recompute_us <= 0.0);
    assert_int_equal(plan_smallest(&e, 2, MS_MODE_CONSERVATIVE, &many), 0);
    assert_true(many.times.recompute_us > 0.0);
    assert_int_equal(plan_smallest(&e, 2, MS_MODE_BALANCED, &many), 0);
    assert_true(b->stall_us > 0.0 && b->stall_us < b->step_us);

    run_small(&p, "--json --layers 2 --batch 3 --sequence 100 --tokens 1000");
    assert_true(is_json(p.out));
    assert_true(number_of(p.out, "accumulation_steps") == 4.0);
    assert_true(number_of(p.out, "tokens") == 1200.0);
    run_small(&p, "--layers 2 --batch 3 --sequence 100 --tokens 1000");
    t_text_has(p.out, "4 micro-batches of 3 x 100 tokens (1200 a step), f32, AdamW;");
    t_text_has(p.out, "\n  whole step  ");
    run_small(&p, "--layers 2 --batch 3 --sequence 100");
    assert_null(strstr(p.out, "\n  whole step  "));
}

/* What it says of formats. */
static void formats_are_said(void **state) {
    (void)state;
    static printed p;
    static const struct {
        const char *words, *text, *json;
    } all[] = {
        {"", "params f32, gradients f32, optimizer state f32; AGGRESSIVE may round all of these",
         "\"mixed_precision\": \"default\""},
        {"--precision f32", "optimizer state f32; AGGRESSIVE may round state to 8 bits",
         "\"mixed_precision\": \"off\""},
        {"--precision f32 --state f32", "params f32, gradients f32, optimizer state f32\n",
         "\"state_in_8_bits\": \"off\""},
        {"--precision bf16 --state bf16",
         "params bf16 with masters in f32, gradients f32, optimizer state bf16\n",
         "\"master_weights\": true"},
        {"--precision bf16-alone --gradients bf16", "params bf16 without masters, gradients bf16",
         "\"gradients\": \"bf16\""},
        {"--precision f16-alone --clip 1",
         "activations f16; f32: biases, norms, statistics, losses", "\"precision\": \"f16-alone\""},
        {"--optimizer sgd --precision bf16", "params bf16 with masters in f32, gradients f32\n",
         "\"state\": \"none\""},
        {"--frozen --precision bf16-alone", "params bf16 without masters",
         "\"master_weights\": false"},
        {"--frozen --precision bf16", "frozen params f32, trained params bf16 with masters in f32",
         "\"master_weights\": true"}};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        char words[256];
        snprintf(words, sizeof words, "--model qwen2.5-0.5B --layers 2 --gpu 4090 %s",
                 all[i].words);
        run_small(&p, words);
        assert_int_equal(p.status, STATUS_FITS);
        t_text_has(p.out, all[i].text);
        t_text_has(p.out, "BF16 and F16 165.2 TFLOP/s");
        snprintf(words, sizeof words, "--json --model qwen2.5-0.5B --layers 2 --gpu 4090 %s",
                 all[i].words);
        run_small(&p, words);
        assert_true(is_json(p.out));
        t_text_has(p.out, all[i].json);
        t_text_has(p.out, "\"qkv_bias\": true");
    }
}

/* Plans of a rank: what it holds, what it exchanges with the others, and the tokens of all of them. */
static void several_ranks_share_a_model(void **state) {
    (void)state;
    static printed p;
    estimate e, alone;
    plan one, all, least;
    prepare(&alone, "gpt2-124M", 1, 64);
    prepare(&e, "gpt2-124M", 1, 64);
    e.options.ranks = 4;
    e.options.offloading = alone.options.offloading = MS_SWITCH_OFF;
    assert_int_equal(choose_target(&e.options, &e.device), 0);
    assert_string_equal(e.device.network, "pcie");
    assert_int_equal(plan_plain(&e, 1, &all), 0);
    assert_int_equal(plan_smallest(&e, 1, MS_MODE_BALANCED, &least), 0);
    assert_int_equal(plan_smallest(&alone, 1, MS_MODE_BALANCED, &one), 0);
    /* Plain: nothing is divided, and each gradient crosses the network twice, as Thakur et al. have it. */
    const double gradients = 4.0 * (double)all.report.param_count;
    assert_true((double)all.report.reduce_bytes >= 2.0 * gradients);
    assert_true((double)all.report.reduce_bytes < 2.01 * gradients);
    assert_int_equal(all.report.gather_bytes, 0);
    for (int k = 0; k < SHARD_KINDS; k++) {
        assert_int_equal(all.shards[k].divided, 0);
        assert_int_equal(one.shards[k].divided, 0);
    }
    assert_int_equal(one.report.reduce_bytes + one.report.gather_bytes, 0);
    assert_int_equal(all.shards[SHARD_STATE].all, all.report.param_count);
    assert_int_equal(all.shards[SHARD_VALUE].all, all.report.param_count);
    /* Smallest: all is but scales and biases, and values are gathered, those of weights twice. */
    const double params = (double)least.report.param_count;
    assert_true((double)least.shards[SHARD_VALUE].divided > 0.99 * params);
    assert_true(least.shards[SHARD_VALUE].divided < least.report.param_count);
    assert_true((double)least.shards[SHARD_STATE].divided > 0.99 * params);
    assert_true((double)least.report.gather_bytes > 1.5 * gradients);
    assert_true((double)least.report.reduce_bytes < 1.01 * gradients);
    assert_true(2 * least.report.arena_bytes < one.report.arena_bytes);
    run_small(&p, "--model gpt2-124M --gpu H100_80GB_SXM --ranks 8 --network nvlink --tokens 1024 "
                  "--json");
    assert_int_equal(p.status, STATUS_FITS);
    assert_true(is_json(p.out));
    t_text_has(p.out, "\"ranks\": 8");
    t_text_has(p.out, "\"network\": \"nvlink\"");
    t_text_has(p.out, "\"network_gb_per_s\": 360");
    t_text_has(p.out, "\"accumulation_steps\": 2"); // of 64 tokens, by 8 ranks
    t_text_has(p.out, "\"tokens\": 1024");
    t_text_has(p.out, "\"params_divided\": ");
    run_small(&p, "--model gpt2-124M --gpu 24G --ranks 2 --network 7.5");
    assert_int_equal(p.status, STATUS_FITS);
    t_text_has(p.out, "as given: each rank 7.5 GB/s");
    t_text_has(p.out, "on each of 2 ranks (128 a step)");
    t_text_has(p.out, "network busy");
    static const char *const wrong[][2] = {
        {"--network pcie", "--ranks counts"},
        {"--ranks 2 --network none", "give 1e9 bytes a second"},
        {"--ranks 2 --network nvlink --gpu 4090", "nvlink is that of"},
        {"--ranks 1001", "at most 1000"},
    };
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        run_words(&p, wrong[i][0]);
        assert_int_equal(p.status, STATUS_USAGE);
        t_text_has(p.error, wrong[i][1]);
    }
}

/* However many kinds of values there are, the largest are among those that are kept. */
static void the_largest_groups_are_kept(void **state) {
    (void)state;
    static plan p;
    ms_lifetime l;
    memset(&l, 0, sizeof l);
    l.name = "small";
    l.is_at_peak = true;
    for (uint64_t i = 1; i <= MOST_GROUPS; i++) {
        l.bytes = 1000 + i;
        keep_value(&l, &p);
    }
    keep_value(&l, &p); // again, so that the first is the smallest
    l.name = "large";
    l.bytes = 1u << 20;
    keep_value(&l, &p);
    keep_value(&l, &p);
    l.name = "smallest";
    l.bytes = 1;
    keep_value(&l, &p);
    assert_int_equal(p.group_count, MOST_GROUPS);
    assert_string_equal(p.groups[0].name, "large");
    assert_true(p.groups[0].bytes == 1u << 20 && p.groups[0].count == 2);
    assert_true(p.groups[1].bytes == 1002 && p.groups[1].count == 1);
    assert_true(p.groups[MOST_GROUPS - 1].count == 2);
}

/* Text that no model or device has now is written so that it can be read. */
static void any_text_is_escaped(void **state) {
    (void)state;
    char text[256];
    json j;
    memset(&j, 0, sizeof j);
    j.file = tmpfile();
    assert_non_null(j.file);
    json_open(&j, NULL, '{');
    json_text(&j, "a \"quoted\"\n\\ name", "\x01\x7f \xc3\xa4 tab\t"); // "a" with two dots
    json_real(&j, "nothing", (double)NAN);
    json_real(&j, "endless", (double)INFINITY);
    json_close(&j, '}');
    read_back(j.file, text, sizeof text);
    assert_true(is_json(text));
    t_text_has(
        text,
        "\"a \\u0022quoted\\u0022\\u000a\\u005c name\": \"\\u0001\\u007f \xc3\xa4 tab\\u0009\"");
    t_text_has(text, "\"nothing\": null");
    t_text_has(text, "\"endless\": null");
    FILE *svg = tmpfile();
    assert_non_null(svg);
    svg_escaped(svg, "<\x01\x7f&\xc3\xa4>");
    read_back(svg, text, sizeof text);
    assert_string_equal(text, "&#60;&#63;&#63;&#38;\xc3\xa4&#62;");
}

/* Every tag is closed, in order; attributes are quoted. */
static bool is_xml(const char *text) {
    char names[32][16];
    int depth = 0, roots = 0;
    for (const char *c = text; *c; c++) {
        if (*c == '>' || (*c == '&' && strspn(c + 1, "#0123456789") + 1 != strcspn(c, ";"))) {
            return false;
        }
        if (*c != '<') {
            continue;
        }
        const bool closes = c[1] == '/';
        c += closes ? 2 : 1;
        char name[16];
        const size_t length = strcspn(c, " />\n");
        snprintf(name, sizeof name, "%.*s", length < 15 ? (int)length : 15, c);
        bool quoted = false;
        for (; *c && (quoted || *c != '>'); c++) {
            quoted = quoted != (*c == '"');
            if (quoted && *c == '<') {
                return false;
            }
        }
        if (*c != '>' || (closes && (depth == 0 || strcmp(names[--depth], name) != 0))) {
            return false;
        }
        if (!closes && c[-1] != '/') {
            roots += depth == 0;
            memcpy(names[depth++], name, sizeof name);
        }
    }
    return depth == 0 && roots == 1;
}

static void a_sweep_is_drawn_as_xml(void **state) {
    (void)state;
    static printed p;
    static char text[TEXT_BYTES];
    char path[] = "/tmp/memscale_sweep_XXXXXX";
    const int descriptor = mkstemp(path);
    assert_true(descriptor >= 0);
    close(descriptor);
    assert_true(is_xml("<a b=\"1>2\"><c/>x &#60; y</a>"));
    assert_false(is_xml("<a><c></a></c>"));
    assert_false(is_xml("<a b=\"1></a>"));
    assert_false(is_xml("<a>x & y</a>"));
    estimate e;
    findings f;
    prepare(&e, "gpt2-124M", 8, 64);
    e.model.of.llama.layers = 1;
    e.options.offloading = resident_unless_long();
    e.options.sweep = path;
    assert_int_equal(find_all(&e, &f), 0);
    all_sweeps all;
    memset(&all, 0, sizeof all);
    assert_int_equal(make_sweeps(&e, &f, &all), 0);
    assert_int_equal(write_sweep(&e, &f, &all), 0);
    FILE *file = fopen(path, "rb");
    assert_non_null(file);
    read_back(file, text, sizeof text);
    remove(path);
    assert_true(is_xml(text));
    t_text_has(text, "no plan fits");
    t_text_has(text, "budget, MiB");
    t_text_has(text, "CONSERVATIVE");
    run_small(&p, "--sweep /nowhere/at/all.svg --layers 1");
    assert_int_equal(p.status, 1);
    t_text_has(p.error, "/nowhere/at/all.svg");
}

/* Over budgets, neither the peak nor the time goes the wrong way. A plan that rounds may be faster
   than the plain one, which a larger budget gets. */
static void a_larger_budget_takes_no_more_time_in_a_sweep(void **state) {
    (void)state;
    estimate e;
    findings f;
    sweep s;
    prepare(&e, "gpt2-124M", 8, 64);
    e.model.of.llama.layers = 2;
    e.options.offloading = resident_unless_long();
    assert_int_equal(find_all(&e, &f), 0);
    assert_int_equal(make_sweep(&e, &f, MODES - 1, &s), 0);
    assert_in_range(s.count, 4, SWEEP_POINTS);
    assert_true(s.budget[s.count - 1] == (double)f.plain.report.arena_bytes);
    for (int i = 0; i < s.count; i++) {
        assert_true(s.peak[i] <= s.budget[i]);
        assert_true(i == 0 || s.peak[i] >= s.peak[i - 1]);
        assert_true(i == 0 || s.ratio[i] <= fmax(s.ratio[i - 1], 1.0) * (1.0 + 1e-9));
    }
    assert_true(s.ratio[s.count - 1] <= 1.0 + 1e-9);
}

// ------------------------------------------------------------------------------------------------
// pages

/* The data of a page; the page is cut after it. */
static char *data_of(char *html) {
    char *data = strstr(html, "<script type=\"application/json\" id=\"data\">\n");
    char *end = data ? strstr(data, "\n</script>") : NULL;
    assert_true(data != NULL && end != NULL);
    assert_null(strstr(html, "://")); // it asks for nothing
    *end = 0;
    return strchr(data, '\n') + 1;
}

/* The present plan of a model as a page, to be freed. */
static char *page_of(const ms_model *model, size_t *length) {
    page p;
    FILE *file = tmpfile();
    assert_non_null(file);
    page_begin(&p, file, "a </script> title", "a \"subtitle\"");
    page_add_plan(&p, "one", "", model);
    page_end(&p, 0, 0, NULL, 0);
    assert_int_equal(p.result, MS_RESULT_OK);
    *length = (size_t)ftell(file);
    char *text = (char *)malloc(*length + 1);
    assert_non_null(text);
    read_back(file, text, *length + 1);
    return text;
}

#ifdef MODEL_SHAPE_CJSON
static double item_of(const cJSON *array, int index) {
    return cJSON_GetNumberValue(cJSON_GetArrayItem(array, index));
}

/* The live bytes of every instruction, by category, from the values of a page. */
static void page_has_event(const ms_event *event, void *user) {
    const cJSON *shown = (const cJSON *)user, *value;
    uint64_t live[MS_CATEGORY_COUNT] = {0}, host = 0;
    if (event->kind >= MS_EVENT_DROP) {
        return;
    }
    cJSON_ArrayForEach(value, cJSON_GetObjectItem(shown, "values")) {
        const bool lives = item_of(value, 3) <= event->index && event->index <= item_of(value, 4);
        const uint64_t bytes = lives ? (uint64_t)item_of(value, 2) : 0;
        const bool on_host = item_of(value, 6) > 0.0;
        live[(int)item_of(value, 1)] += on_host ? 0 : bytes;
        host += on_host ? bytes : 0;
    }
    assert_memory_equal(live, event->live_bytes_of, sizeof live);
    assert_true(host == event->host_bytes);
    const cJSON *instruction =
        cJSON_GetArrayItem(cJSON_GetObjectItem(shown, "instructions"), (int)event->index);
    assert_int_equal((int)item_of(instruction, 0), event->kind);
    assert_int_equal((int)item_of(instruction, 1), event->stream);
    assert_true(fabs(item_of(instruction, 3) - event->start_us) <= 1e-6 * event->start_us);
    assert_string_equal(cJSON_GetStringValue(cJSON_GetArrayItem(instruction, 5)), event->name);
}

/* What was decided, and that whoever made a value has a line in that. */
static void page_has_decision(const ms_decision *d, void *user) {
    const cJSON *data = (const cJSON *)user;
    const cJSON *shown = cJSON_GetArrayItem(cJSON_GetObjectItem(data, "plans"), 0);
    const cJSON *layer =
        cJSON_GetArrayItem(cJSON_GetObjectItem(shown, "decisions"), (int)d->layer_index);
    const cJSON *decision = cJSON_GetArrayItem(layer, (int)d->technique);
    const cJSON *rule =
        cJSON_GetArrayItem(cJSON_GetObjectItem(data, "rules"), (int)item_of(decision, 1));
    assert_true((item_of(decision, 0) > 0.0) == d->is_applied);
    assert_true((uint64_t)item_of(decision, 2) == d->saved_bytes);
    assert_string_equal(cJSON_GetStringValue(cJSON_GetArrayItem(rule, 0)), d->rule->id);
    assert_string_equal(cJSON_GetStringValue(cJSON_GetArrayItem(rule, 2)), d->rule->reason);
}
#endif

/* The numbers of a page are those of the plan, for every instruction, value and decision. */
static void a_page_has_the_plan(void **state) {
    (void)state;
    for (int mode = 0; mode < MODES; mode++) {
        estimate e;
        findings f;
        nn_net *net;
        size_t length[2];
        memset(&f, 0, sizeof f);
        prepare(&e, "gpt2-124M", 8, 64);
        e.model.of.llama.layers = 2;
        e.device.budget_bytes = (uint64_t)500 << 20;
        f.smallest[mode].fits = mode > 0; // otherwise the smallest plan
        ms_model *model = wrap_mode(&e, &f, mode, &net);
        assert_non_null(model);
        char *text = page_of(model, &length[0]), *again = page_of(model, &length[1]);
        assert_string_equal(text, again);
        char *said = data_of(text);
        assert_true(is_json(said));
        t_text_has(said, "\"title\": \"a \\u003c/script> title\"");
#ifdef MODEL_SHAPE_CJSON
        ms_memory_report r;
        cJSON *data = cJSON_Parse(said);
        assert_non_null(data);
        cJSON *shown = cJSON_GetArrayItem(cJSON_GetObjectItem(data, "plans"), 0);
        t_report(model, &r);
        assert_true(number_of(said, "arena_bytes") == (double)r.arena_bytes);
        assert_true(number_of(said, "peak_instruction") == (double)r.peak_instruction);
        assert_int_equal(cJSON_GetArraySize(cJSON_GetObjectItem(shown, "instructions")),
                         r.instruction_count);
        assert_int_equal(cJSON_GetArraySize(cJSON_GetObjectItem(shown, "layers")), r.layer_count);
        for (int c = 0; c < MS_CATEGORY_COUNT; c++) {
            assert_true((uint64_t)item_of(cJSON_GetObjectItem(shown, "peak_bytes"), c) ==
                        r.peak_bytes[c]);
        }
        t_ok(model, ms_visit_events(model, MS_PROGRAM_TRAIN, page_has_event, shown));
        t_ok(model, ms_visit_decisions(model, page_has_decision, data));
        cJSON_Delete(data);
#endif
        free(text);
        free(again);
        ms_destroy(model);
        nn_destroy(net);
    }
}

/* Every value that a layer makes or uses has that layer, whose decisions say why it is there. */
static void a_page_is_written_with_budgets(void **state) {
    (void)state;
    static printed p;
    static char text[4 * TEXT_BYTES];
    char path[] = "/tmp/memscale_page_XXXXXX";
    const int descriptor = mkstemp(path);
    assert_true(descriptor >= 0);
    close(descriptor);
    run_small(&p, "--layers 1 --gpu 24G --budget 600M --html /nowhere/at/all.html");
    assert_int_equal(p.status, STATUS_FAILED);
    t_text_has(p.error, "/nowhere/at/all.html");
    estimate e;
    findings f;
    all_sweeps all;
    prepare(&e, "gpt2-124M", 8, 64);
    e.model.of.llama.layers = 1;
    e.options.offloading = resident_unless_long();
    e.options.html = path;
    assert_int_equal(find_all(&e, &f), 0);
    memset(&all, 0, sizeof all);
    assert_int_equal(make_sweeps(&e, &f, &all), 0);
    assert_int_equal(write_page(&e, &f, &all), 0);
    FILE *file = fopen(path, "rb");
    assert_non_null(file);
    read_back(file, text, sizeof text);
    remove(path);
    char *said = data_of(text);
    assert_true(is_json(said));
    t_text_has(said, "\"name\": \"plain\"");
    t_text_has(said, "\"name\": \"AGGRESSIVE\"");
    t_text_has(said, "\"name\": \"CONSERVATIVE\"");
    assert_non_null(strstr(strstr(said, "\"sweep\""), "\"mode\": \"AGGRESSIVE\""));
    assert_null(strstr(said, ",-1,\"f32\"]")); // a value without a layer
}

// ------------------------------------------------------------------------------------------------
// models from files

/* A file with a text in which ' stands for ", to be removed. */
static void write_config(char *path, const char *text) {
    char quoted[4096];
    snprintf(quoted, sizeof quoted, "%s", text);
    for (char *c = quoted; *c; c++) {
        *c = *c == '\'' ? '"' : *c;
    }
    snprintf(path, 64, "/tmp/memscale-config-XXXXXX");
    const int descriptor = mkstemp(path);
    assert_true(descriptor >= 0);
    FILE *file = fdopen(descriptor, "w");
    assert_non_null(file);
    assert_true(fputs(quoted, file) >= 0);
    assert_int_equal(fclose(file), 0);
}

#define LLAMA3                                                                                     \
    "'hidden_size': 4096, 'num_hidden_layers': 32, 'num_attention_heads': 32, "                    \
    "'num_key_value_heads': 8, 'intermediate_size': 14336, 'vocab_size': 128256"
#define QWEN7                                                                                      \
    "'hidden_size': 3584, 'num_hidden_layers': 28, 'num_attention_heads': 28, "                    \
    "'num_key_value_heads': 4, 'intermediate_size': 18944, 'vocab_size': 152064"
#define GPT2 "'model_type': 'gpt2', 'n_embd': 768, 'n_layer': 12, 'n_head': 12, 'vocab_size': 50257"
#define BERT                                                                                       \
    "'hidden_size': 768, 'num_hidden_layers': 12, 'num_attention_heads': 12, 'vocab_size': "       \
    "30522, "                                                                                      \
    "'max_position_embeddings': 512, 'intermediate_size': 3072, 'type_vocab_size': 2"

/* The keys of published files, and the params of the models. */
static void published_files_give_published_params(void **state) {
    (void)state;
    static const struct {
        const char *text, *more;
        uint64_t params;
        bool tied;
    } models[] = {
        {"{" GPT2 ", 'n_positions': 1024, 'n_ctx': 1024, 'n_inner': null, 'resid_pdrop': 0.1,\n"
         " 'architectures': ['GPT2LMHeadModel'], 'task_specific_params': {'a': {'b': [1, "
         "true]}}}\n",
         "", 124439808u, true},
        {"{" GPT2 ", 'n_ctx': 1024}", "", 124439808u, true},
        {"{'model_type': 'bert', " BERT ", 'pad_token_id': 0}", "", 109514298u, true},
        {"{'architectures': ['BertForMaskedLM'], " BERT "}", "", 109514298u, true},
        {"{" BERT "}", "--family bert", 109514298u, true},
        {"{'model_type': 'llama', " LLAMA3 ", 'tie_word_embeddings': false, 'rope_theta': 5e5,\n"
         " 'head_dim': 128, 'mlp_bias': false, 'max_position_embeddings': 8192, 'num_experts': 1,\n"
         " 'q_lora_rank': null, 'moe_intermediate_size': 0, 'is_encoder_decoder': false,\n"
         " 'quantization_config': {}, 'pruned_heads': [], 'vision_tower': '', 'sliding_window': "
         "4,\n"
         " 'layer_types': ['full_attention', 'sliding_attention']}",
         "--sequence 9000", 8030261248u, false},
        {"{'model_type': 'mistral', 'hidden_size': 4096, 'num_hidden_layers': 32,\n"
         "'num_attention_heads': 32, 'num_key_value_heads': 8, 'intermediate_size': 14336,\n"
         "'vocab_size': 32000, 'sliding_window': 4096}",
         "", 7241732096u, false},
        {"{'model_type': 'llama', 'hidden_size': 4096, 'num_hidden_layers': 32,\n"
         "'num_attention_heads': 32, 'intermediate_size': 11008, 'vocab_size': 32000}",
         "", 6738415616u, false},
        {"{'model_type': 'unheard', " LLAMA3 "}", "--family llama", 8030261248u, false},
        {"{'architectures': ['Qwen2ForCausalLM'], 'model_type': 'qwen2', " QWEN7
         ", 'sliding_window': 131072, 'use_sliding_window': false, 'tie_word_embeddings': false}",
         "", 7615616512u, false},
        {"{'architectures': ['Qwen2ForCausalLM'], " QWEN7 "}", "", 7615616512u, false},
        {"{'model_type': 'qwen2', " QWEN7 "}", "--family llama", 7615616512u - 28u * 4608u, false},
        {"{'model_type': 'llama', " LLAMA3 ", 'tie_word_embeddings': true}", "--layers 32",
         8030261248u - 128256u * 4096u, true},
        {"{'model_type': 'gemma3', 'vision_config': {'hidden_size': 1152}, 'text_config': "
         "{'model_type': 'gemma3_text', 'hidden_size': 2560, 'intermediate_size': 10240, "
         "'num_hidden_layers': 34}}",
         "", 3880263168u, true},
    };
    static printed p;
    for (size_t i = 0; i < sizeof models / sizeof models[0]; i++) {
        char path[64], words[256];
        write_config(path, models[i].text);
        snprintf(words, sizeof words, "--json --batch 1 --offload off %s %s %s", path,
                 models[i].more, is_long() ? "" : "--precision f32 --optimizer sgd --clip 1");
        run_small(&p, words);
        remove(path);
#ifdef MODEL_SHAPE_CJSON
        assert_true(p.status == STATUS_FITS || p.status == STATUS_NO_FIT);
        assert_true(is_json(p.out));
        assert_true(number_of(p.out, "params") == (double)models[i].params);
        t_text_has(p.out, models[i].tied ? "\"tied_head\": true" : "\"tied_head\": false");
        assert_true(number_of(p.out, "kv_heads") >= 4.0);
#else
        assert_int_equal(p.status, STATUS_USAGE);
        t_text_has(p.error, "libcjson-dev");
#endif
    }
}

/* What differs in sizes, and what a trainer must refuse though it changes none. */
static void what_a_family_has_is_said(void **state) {
    (void)state;
    static printed p;
    run_small(&p, "--model gemma3-270M --layers 2 --gpu 24G");
    t_text_has(p.out, "4 heads (1 of keys) of 256, a window of 512");
    t_text_has(p.out, "norms of queries and keys, norms");
    assert_null(strstr(p.out, "does not compute"));
    run_small(&p, "--model qwen3-0.6B --layers 2 --head-size 64 --gpu 24G");
    t_text_has(p.out, "16 heads (8 of keys), feed-forward 3072");
#ifdef MODEL_SHAPE_CJSON
    char path[64], words[128];
    write_config(path, "{'model_type': 'llama', 'hidden_size': 64, 'num_hidden_layers': 1, "
                       "'num_attention_heads': 2, 'intermediate_size': 64, 'vocab_size': 10, "
                       "'rope_scaling': {'rope_type': 'yarn', 'factor': 4.0}}");
    snprintf(words, sizeof words, "%s --gpu 24G", path);
    run_small(&p, words);
    t_text_has(p.out, "nn_llama does not compute it: rotary positions scaled by yarn");
    snprintf(words, sizeof words, "--json %s --gpu 24G", path);
    run_small(&p, words);
    remove(path);
    t_text_has(p.out, "\"untrained\": \"rotary positions scaled by yarn");
#endif
}

/* A window leaves out keys, and so time; the bytes are the same. */
static void a_window_takes_less_time(void **state) {
    (void)state;
    estimate e;
    plan open, with_window;
    prepare(&e, "mistral-7B", 1, 8192);
    e.model.of.llama.layers = 2;
    e.model.of.llama.window = 0;
    assert_int_equal(plan_plain(&e, 1, &open), 0);
    e.model.of.llama.window = 1024;
    assert_int_equal(plan_plain(&e, 1, &with_window), 0);
    assert_true(with_window.times.block_us < 0.95 * open.times.block_us);
    assert_int_equal(with_window.report.arena_bytes, open.report.arena_bytes);
}

/* The end of a long path, from the start of a character on. */
static void a_long_path_is_cut_between_characters(void **state) {
    (void)state;
#ifndef MODEL_SHAPE_CJSON
    print_message("built without cJSON\n");
    skip();
#else
    char path[120] = "/tmp/";
    for (size_t i = strlen(path); i + 3 < sizeof path; i += 2) { // an "a" with two dots, often
        memcpy(path + i, "\xc3\xa4", 3);
    }
    for (int odd = 0; odd < 2; odd++) {
        shape s;
        strcat(path, odd ? "x" : "");
        FILE *file = fopen(path, "w");
        assert_non_null(file);
        fputs("{\"model_type\": \"llama\", \"hidden_size\": 64, \"num_hidden_layers\": 1,"
              "\"num_attention_heads\": 2, \"intermediate_size\": 64, \"vocab_size\": 10}",
              file);
        fclose(file);
        assert_int_equal(read_model(path, NULL, &s), 0);
        remove(path);
        const size_t length = strlen(s.name);
        assert_true(length + 2 > sizeof s.name - 1);
        assert_int_equal((unsigned char)s.name[0], 0xc3);
        assert_string_equal(s.name, path + strlen(path) - length);
    }
#endif
}

static void a_wrong_file_is_refused_with_the_reason(void **state) {
    (void)state;
#ifndef MODEL_SHAPE_CJSON
    print_message("built without cJSON\n");
    skip();
#else
    static const struct {
        const char *text, *error;
    } wrong[] = {
        {"", "line 1 is not JSON"},
        {"{'model_type': 'gpt2',\n'n_embd': }", "line 2 is not JSON"},
        {"{" GPT2 ", 'n_ctx': 1024}\n}", "line 2 is not JSON"},
        {"[1, 2]", "no object"},
        {"{}", "\"model_type\" is missing"},
        {"{'model_type': 'mamba'}", "\"mamba\": there are gpt2, bert, llama, mistral, "
                                    "qwen2, qwen3, gemma2, gemma3_text and phi3"},
        {"{'model_type': 'qwen2_moe', " LLAMA3 "}", "\"qwen2_moe\" is a mixture of experts"},
        {"{'model_type': 7}", "\"model_type\" is missing"},
        {"{'architectures': []}", "\"model_type\" is missing"},
        {"{" GPT2 "}", "\"n_positions\" is missing"},
        {"{" GPT2 ", 'n_ctx': 10.5}", "\"n_ctx\" is not a whole number"},
        {"{" GPT2 ", 'n_ctx': 1e300}", "\"n_ctx\" is not a whole number"},
        {"{" GPT2 ", 'n_ctx': '1024'}", "\"n_ctx\" is not a whole number"},
        {"{" GPT2 ", 'n_ctx': -3}", "\"n_ctx\" is not a whole number"},
        {"{" GPT2 ", 'n_ctx': 1024, 'n_inner': 1000}", "768 channels"},
        {"{" GPT2 ", 'n_ctx': 1024, 'tie_word_embeddings': false}", "tie_word_embeddings"},
        {"{'model_type': 'bert', " BERT ", 'add_cross_attention': true}", "add_cross_attention"},
        {"{'model_type': 'bert', 'hidden_size': 768}", "\"num_hidden_layers\" is missing"},
        {"{'model_type': 'llama', " LLAMA3 ", 'attention_bias': true}", "attention_bias"},
        {"{'model_type': 'llama', " LLAMA3 ", 'num_local_experts': 8, 'num_experts_per_tok': 2}",
         "\"num_local_experts\" is 8, and there is no net with experts"},
        {"{'model_type': 'llama', " LLAMA3 ", 'moe_intermediate_size': 1408}", "with experts"},
        {"{'model_type': 'llama', " LLAMA3 ", 'kv_lora_rank': 512}", "\"kv_lora_rank\" is 512"},
        {"{'model_type': 'llava', 'text_config': {" LLAMA3 "}}", "\"llava\": there are gpt2"},
        {"{'model_type': 'llama', " LLAMA3 ", 'vision_config': {'hidden_size': 1}}", "for images"},
        {"{'model_type': 'llama', " LLAMA3 ", 'cross_attention_layers': [3, 8]}", "is [3,8]"},
        {"{'model_type': 'llama', " LLAMA3 ", 'quantization_config': {'bits': 4}}", "in codes"},
        {"{'model_type': 'llama', " LLAMA3 ", 'num_nextn_predict_layers': 1}", "several tokens"},
        {"{'model_type': 'llama', " LLAMA3 ", 'layer_types': ['full_attention', 'mamba']}",
         "\"layer_types\" has mamba"},
        {"{'model_type': 'llama', " LLAMA3 ", 'layer_types': ['linear_attention']}",
         "has linear_attention"},
        {"{'model_type': 'bert', " BERT ", 'is_encoder_decoder': true}", "is_encoder_decoder"},
        {"{" GPT2 ", 'n_ctx': 1024, 'add_cross_attention': true}", "add_cross_attention"},
        {"{'model_type': 'llama', 'hidden_size': 4096, 'num_hidden_layers': 32, "
         "'num_attention_heads': 32, 'num_key_value_heads': 5, 'intermediate_size': 14336, "
         "'vocab_size': 1}",
         "\"num_key_value_heads\" 5"},
        {"{'model_type': 'llama', 'hidden_size': 4096, 'num_hidden_layers': 1001, "
         "'num_attention_heads': 32, 'intermediate_size': 14336, 'vocab_size': 1}",
         "at most 1000"},
    };
    static printed p;
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        char path[64];
        write_config(path, wrong[i].text);
        run_words(&p, path);
        remove(path);
        assert_int_equal(p.status, STATUS_USAGE);
        assert_int_equal(p.out[0], 0);
        t_text_has(p.error, wrong[i].error);
    }
    run_words(&p, "/nowhere/config.json");
    assert_int_equal(p.status, STATUS_USAGE);
    t_text_has(p.error, "cannot read /nowhere/config.json: No such file");
    run_words(&p, "/tmp");
    assert_int_equal(p.status, STATUS_USAGE);
    t_text_has(p.error, "cannot read /tmp: Is a directory");
    run_words(&p, "/dev/zero");
    assert_int_equal(p.status, STATUS_USAGE);
    t_text_has(p.error, "larger than 1 MiB");
#endif
}

// ------------------------------------------------------------------------------------------------
// what it says

static void the_text_says_what_it_assumes(void **state) {
    (void)state;
    static printed p;
    static const struct {
        const char *model, *params, *gpu; // a GPU that is too small
        const char *clipped, *clipped_resident;
    } all[] = {{"gpt2-124M", "124.44 M params", "1G", "232.8 MiB", "1441.2 MiB"},
               {"gpt2-1558M", "1557.61 M params", "12G", "516.7 MiB", "15.0"}};
    for (int i = 0; i < of_size(1, 2); i++) {
        char words[128], text[128];
        snprintf(words, sizeof words, "--model %s --batch 1 --sequence 512 --gpu RTX_3090",
                 all[i].model);
        run_words(&p, words);
        assert_int_equal(p.status, 0);
        t_text_has(p.out, all[i].params);
        t_text_has(p.out, "RTX 3090");
        t_text_has(p.out, "BALANCED");
        t_text_has(p.out, "optimizer state");
        t_text_has(p.out, "no clipping and no accumulation"); // what the figures assume
        snprintf(text, sizeof text, "with --clip the smallest peak is %s, which fits too",
                 all[i].clipped);
        t_text_has(p.out, text);
        strcat(words, " --offload off");
        run_words(&p, words);
        assert_int_equal(p.status, 0);
        snprintf(text, sizeof text, "with --clip the smallest peak is %s", all[i].clipped_resident);
        t_text_has(p.out, text);
        snprintf(words, sizeof words, "--model %s --batch 1 --sequence 512 --gpu %s --offload off",
                 all[i].model, all[i].gpu);
        run_words(&p, words);
        t_text_has(p.out, "does not fit");
        static const char *const not_early[] = {"--clip 1", "--accumulate 4"};
        for (int k = 0; k < 2; k++) {
            snprintf(words, sizeof words, "--model %s --batch 1 --gpu %s --offload off %s",
                     all[i].model, all[i].gpu, not_early[k]);
            run_words(&p, words);
            assert_int_equal(p.status, STATUS_NO_FIT);
            t_text_has(p.out, "all gradients are kept");
        }
    }
    run_small(&p, "--frozen --rank 16 --clip 1 --layers 2");
    t_text_has(p.out, "adapters of rank 16");
    run_words(&p, "--help");
    assert_int_equal(p.status, 0);
    for (int i = 0; i < PUBLISHED; i++) {
        t_text_has(p.out, published[i].name);
    }
    const ms_hardware *h;
    for (uint32_t i = 0; (h = ms_hardware_at(i)) != NULL; i++) {
        t_text_has(p.out, h->name);
    }
}

/* What is listed as alive at the peak is all of it, and the largest come first. */
static void the_largest_values_at_the_peak_come_first(void **state) {
    (void)state;
    static printed p;
    estimate e;
    findings f;
    prepare(&e, "gpt2-124M", 8, 256);
    e.options.offloading = MS_SWITCH_OFF;
    e.device.budget_bytes = (uint64_t)of_size(900, 2200) << 20;
    e.model.of.llama.layers = of_size(2, 12);
    assert_int_equal(find_all(&e, &f), 0);
    assert_true(advised_plan(&f) == &f.at_budget[f.advised]);
    const plan *const both[] = {advised_plan(&f), &f.plain};
    for (int i = 0; i < 2; i++) {
        uint64_t bytes[MS_CATEGORY_COUNT] = {0};
        for (int k = 0; k < both[i]->group_count; k++) {
            bytes[both[i]->groups[k].category] += group_bytes(&both[i]->groups[k]);
        }
        assert_memory_equal(bytes, both[i]->report.peak_bytes, sizeof bytes);
    }
    run_words(&p, is_long() ? "--batch 8 --sequence 256 --gpu 24G --budget 2200M --offload off"
                            : "--batch 8 --sequence 256 --gpu 24G --budget 900M --offload off "
                              "--layers 2");
    assert_int_equal(p.status, STATUS_FITS);
    t_text_has(p.out, "The largest values at the peak of AGGRESSIVE");
    t_text_has(p.out, is_long() ? "24 x 9.0 MiB      params               h0.fc.weight, ..."
                                : "4 x 9.0 MiB      params               h0.fc.weight, ...");
    t_text_has(p.out, "2 x 147.3 MiB    optimizer state      wte, ...");
    run_small(&p, "--gpu 100M --layers 2");
    t_text_has(p.out, "at the peak of the smallest plan");
    run_small(&p, "--gpu 24G --layers 2");
    t_text_has(p.out, "at the peak of the plain plan");
}

/* The smallest peak that is printed is accepted as a budget. */
static void a_printed_peak_is_accepted_as_a_budget(void **state) {
    (void)state;
    static printed p;
    const char *const runs[] = {
        is_long() ? "--batch 1 --layers 3"
                  : "--batch 1 --layers 2 --channels 64 --heads 2 --offload auto",
        "--model tinyllama-1.1B --layers 5 --offload off --batch 4 "
        "--sequence 512",
        "--model bert-base --batch 3 --layers 4", "--model gpt2-355M --batch 2 --offload off"};
    for (int i = 0; i < of_size(2, sizeof runs / sizeof runs[0]); i++) {
        static const char label[] = "smallest peak there is";
        char words[256];
        double cells[COLUMNS];
        run_small(&p, runs[i]);
        const char *at = strstr(p.out, label);
        assert_non_null(at);
        char *end = (char *)(uintptr_t)at + strlen(label);
        for (int c = 0; c < COLUMNS; c++) {
            cells[c] = strtod(end, &end);
        }
        const bool is_gibi = strstr(p.out, "GiB, live at the peak") != NULL;
        for (int c = 1; c < COLUMNS; c++) {
            if (c > 1 && fabs(cells[c] - cells[c - 1]) < 0.001) {
                continue;
            }
            snprintf(words, sizeof words, "%s --budget %.*f%s", runs[i], is_gibi ? 2 : 1, cells[c],
                     is_gibi ? "G" : "M");
            run_small(&p, words);
            assert_int_equal(p.status, STATUS_FITS);
        }
    }
    for (uint64_t i = 0; i < 3000; i++) {
        const uint64_t bytes = i * i * i * 7919 + i;
        assert_true(parse_number(show_bytes(bytes).text, true) >= (double)bytes);
        assert_true(parse_number(msi_size(bytes).text, true) >= (double)bytes || bytes < 1024);
    }
}

/* What people write. */
static void names_and_sizes_are_read_as_people_write_them(void **state) {
    (void)state;
    static const struct {
        const char *text;
        double bytes;
    } sizes[] = {{"24GB", 24.0},  {"24g", 24.0},    {"24G", 24.0},     {"24 GiB", 24.0},
                 {"24gb", 24.0},  {"1.5T", 1536.0}, {"24576MB", 24.0}, {"24X", -1.0},
                 {"24GBs", -1.0}, {"GB", -1.0},     {"", -1.0},        {"-1G", -1.0},
                 {"24G B", -1.0}, {"1e999", -1.0},  {"24i", -1.0},     {"nan", -1.0},
                 {"inf", -1.0},   {"0x10G", -1.0},  {"NaNG", -1.0},    {" +24G", 24.0},
                 {".5G", 0.5}};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        const double bytes = parse_number(sizes[i].text, true);
        const double wanted = sizes[i].bytes < 0.0 ? -1.0 : sizes[i].bytes * 1073741824.0;
        if (bytes < wanted || bytes > wanted) {
            print_error("%s: %g\n", sizes[i].text, bytes);
        }
        assert_true(bytes - wanted == 0.0);
    }
    assert_true(parse_number("24B", true) == 24.0 && parse_number("24G", false) < 0.0);
    static printed p;
    static const char *const runs[][2] = {
        {"--gpu 24GB --layers 2", "a GPU, 24.00 GiB"},
        {"--gpu 24g --layers 2", "a GPU, 24.00 GiB"},
        {"--offload off --model GPT2-124M", "model     gpt2-124M:"},
        {"--offload off --model 124m", "model     gpt2-124M:"},
        {"--offload off --model BERT_base --sequence 32", "model     bert-base:"},
        {"--model llama-3-8b --offload off", "model     llama3-8B:"},
        {"--utilization 0.8 --gpu 10G --layers 2", "8.00 GiB, 80 % of the memory"},
        {"--gpu rtx3090 --layers 2", "GeForce RTX 3090, "},
        {"--gpu nvidia_3090 --layers 2", "GeForce RTX 3090, "},
        {"--gpu 4090 --layers 2", "GeForce RTX 4090, "},
        {"--gpu 5060_Ti_16GB --layers 2",
         "BF16 and F16 47.4 TFLOP/s, memory 448 GB/s,\n          link 31.5 "},
        {"--model Qwen2.5-0.5b --offload off", "model     qwen2.5-0.5B:"},
        {"--gpu a100_sxm --layers 2", "NVIDIA A100 80GB SXM"},
        {"--gpu Orin_Nano_8GB --layers 2", "Jetson Orin Nano 8GB, "},
        {"--family GPT2 --layers 2 --channels 64 --heads 2", "gpt2 of your own"},
        {"--layers 2", "like gpt2-124M"},
    };
    for (size_t i = 0; i < sizeof runs / sizeof runs[0]; i++) {
        run_small(&p, runs[i][0]);
        t_text_has(p.out, runs[i][1]);
    }
}

/* A device of the user's own: half the speed, twice the time. */
static void half_the_speed_takes_twice_the_time(void **state) {
    (void)state;
    static printed p;
    double us[4];
    static const char *const runs[] = {"", "--tflops 17.8", "--bandwidth 468",
                                       "--tflops 17.8 --bandwidth 468"};
    for (int i = 0; i < 4; i++) {
        char words[128];
        snprintf(words, sizeof words, "--json --layers %d --gpu 3090 --offload off %s",
                 (int)of_size(3, 12), runs[i]);
        run_words(&p, words);
        us[i] = number_of(strstr(p.out, "\"plain\""), "step_us");
    }
    assert_true(us[1] > 1.2 * us[0] && us[2] > 1.1 * us[0] && us[3] > us[1] && us[3] > us[2]);
    assert_true(us[3] > 1.9 * us[0] && us[3] <= 2.001 * us[0]);
    run_small(&p, "--gpu 24G --layers 2 --tflops 10 --link 3 --f16-tflops 40");
    t_text_has(p.out, "F32 10 TFLOP/s, BF16 and F16 40 TFLOP/s, link 3 GB/s, where not given");
}

/* What is moved to the host, by the table and for programs. Params, state and gradients of a model
   that does not fit lie there, all of them where the smallest plan is asked for. */
static void what_is_on_the_host_is_said(void **state) {
    (void)state;
    static printed p;
    static const char *const rows[] = {"\n  on the host  ",   "\n  copied in  ",
                                       "\n  copied out  ",    "\n  link busy  ",
                                       "\n  copies hidden  ", "\n  waits for copies  "};
    const char *const model =
        is_long() ? "--model gpt2-124M --gpu 3090 --budget 1.5G"
                  : "--layers 2 --gpu 3090 --budget 100M --vocabulary 512 --sequence 64 "
                    "--batch 1";
    const char *const of_json =
        is_long() ? "--json --layers 4 --gpu 3090 --budget 1G"
                  : "--json --layers 2 --gpu 3090 --budget 100M --vocabulary 512 --sequence 64 "
                    "--batch 1";
    char words[256];
    snprintf(words, sizeof words, "%s --offload on --host 8G", model);
    run_words(&p, words);
    assert_int_equal(p.status, STATUS_FITS);
    t_text_has(p.out, "; on the host 8.00 GiB\n");
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        t_text_has(p.out, rows[i]);
    }
    snprintf(words, sizeof words, "%s --offload off", model);
    run_words(&p, words);
    assert_null(strstr(p.out, rows[0]));

    estimate e;
    plan resident, moved, slow;
    prepare(&e, "gpt2-124M", 4, of_size(128, 512));
    e.model.of.llama.layers = of_size(3, 12);
    e.model.of.llama.vocabulary = of_size(5000, e.model.of.llama.vocabulary);
    e.options.offloading = MS_SWITCH_OFF;
    assert_int_equal(plan_smallest(&e, 4, MS_MODE_BALANCED, &resident), 0);
    e.options.offloading = MS_SWITCH_ON;
    assert_int_equal(plan_smallest(&e, 4, MS_MODE_BALANCED, &moved), 0);
    assert_true(resident.report.host_bytes == 0 && resident.report.to_device_bytes == 0);
    assert_true(moved.report.arena_bytes < resident.report.arena_bytes / 2);
    assert_true(moved.report.host_bytes > resident.report.arena_bytes / 2);
    assert_true(moved.report.to_device_bytes > moved.report.to_host_bytes);
    e.device.hardware.to_device_gb_per_s = e.device.hardware.to_host_gb_per_s = 1.0; // --link
    assert_int_equal(plan_smallest(&e, 4, MS_MODE_BALANCED, &slow), 0);
    assert_true(slow.report.hidden_share < moved.report.hidden_share);
    assert_true(slow.report.step_us > moved.report.step_us);

    snprintf(words, sizeof words, "%s --offload on", of_json);
    run_words(&p, words);
    assert_true(is_json(p.out));
    t_text_has(p.out, "\"host_bytes\": ");
    t_text_has(p.out, "\"hidden_share\": ");
    t_text_has(p.out, "\"link_share\": ");
    snprintf(words, sizeof words, "%s --host 256M", of_json);
    run_words(&p, words);
    assert_true(is_json(p.out));
    t_text_has(p.out, "\"max_host_bytes\": 268435456");
    e.device.hardware.to_device_gb_per_s = e.device.hardware.to_host_gb_per_s = 25.0;
    e.options.host_bytes = moved.report.host_bytes / 4;
    assert_int_equal(plan_smallest(&e, 4, MS_MODE_BALANCED, &slow), 0);
    assert_true(slow.report.host_bytes <= e.options.host_bytes);
    assert_true(slow.report.arena_bytes > moved.report.arena_bytes);
    run_words(&p, "--offload maybe");
    assert_int_equal(p.status, STATUS_USAGE);
    t_text_has(p.error, "there are auto, on and off");
}

/* Sizes that no machine has are planned too, or refused. */
static void sizes_that_no_machine_has_are_planned_or_refused(void **state) {
    (void)state;
    static printed p;
    run_words(&p, "--family gpt2 --layers 1 --channels 16384 --heads 1 --vocabulary 1 --offload "
                  "off --batch "
                  "1048576 --sequence 1024");
    assert_int_equal(p.status, STATUS_NO_FIT);
    t_text_has(p.out, "not even one sequence fits");
    run_words(&p, "--family bert --layers 1 --channels 64 --heads 64 --vocabulary 1 --batch "
                  "1048576 --offload off");
    assert_int_equal(p.status, STATUS_NO_FIT);
    t_text_has(p.out, "the largest batch that fits");
    run_words(&p,
              "--family llama --layers 1 --channels 2 --heads 1 --feed-forward 1 --vocabulary 1 "
              "--batch 1 --sequence 1 --gpu cpu");
    assert_int_equal(p.status, 0);
    run_words(&p, "--family gpt2 --layers 1 --channels 1048576 --heads 1024");
    assert_int_equal(p.status, STATUS_FAILED);
    t_text_has(p.error, "rows of 1048576 values, and cuda has kernels for up to 16384");
    run_words(&p, "--family llama --layers 1000 --channels 1048576 --heads 65536 --vocabulary "
                  "16777216 --batch 1048576 --sequence 4194304");
    assert_int_equal(p.status, 1);
    t_text_has(p.error, "2^58");
}

static void mistakes_are_refused_with_the_cure(void **state) {
    (void)state;
    static printed p;
    static const struct {
        const char *words, *text;
    } mistakes[] = {
        {"--model gpt5", "llama2-7B"},
        {"--model gpt2", "gpt2-124M, gpt2-355M"},
        {"--model 7B", "llama2-7B, mistral-7B"},
        {"--gpu jetson", "Jetson Orin Nano 4GB, "},
        {"--gpu orin", "Jetson AGX Orin 64GB"},
        {"--gpu H100", "NVIDIA H100 80GB PCIe, NVIDIA H100 80GB SXM"},
        {"--gpu 3080", "could be each of"},
        {"--optimizer lamb", "adamw, lion, sgd and momentum"},
        {"--accumulate 0", "from 1"},
        {"--accumulate 2000000", "at most"},
        {"--json --plan", "text"},
        {"--rank 4", "--frozen"},
        {"--tflops fast", "number"},
        {"--utilization 0", "above 0"},
        {"--budget 80%", "300M"},
        {"--batch nan", "whole number"},
        {"--tflops inf", "number"},
        {"--utilization 1.01", "at most 1"},
        {"--budget 24GBs", "300M"},
        {"--model gpt2-124M --family gpt2", "one of them"},
        {"--family mamba", "gpt2, bert and llama"},
        {"--family gpt2 --layers 2", "--channels and --heads"},
        {"--layers 0", "from 1"},
        {"--layers -3", "from 1"},
        {"--layers 1.5", "whole number"},
        {"--layers 100000", "at most 1000"},
        {"--heads 7", "768 channels"},
        {"--channels 100", "100 channels"},
        {"--model llama3-8B --kv-heads 5", "32 heads"},
        {"--model llama3-8B --heads 12 --channels 1536", "--kv-heads 8"},
        {"--family llama --layers 1 --channels 15 --heads 5", "pairs"},
        {"--model gemma2-2B --head-size 512", "at most 256"},
        {"--model bert-base --head-size 4", "llama"},
        {"--kv-heads 4", "llama"},
        {"--model bert-base --feed-forward 4", "llama"},
        {"--model llama2-7B --positions 4", "positions"},
        {"--sequence 2048", "1024 rows"},
        {"--batch 2000000", "at most"},
        {"--batch", "whole number"},
        {"--precision f8", "f32, tf32, bf16, f16, bf16-alone and f16-alone"},
        {"--gradients bf16", "unless --precision is in 16 bits"},
        {"--gradients bf16 --precision f32", "unless --precision is in 16 bits"},
        {"--gradients f16 --precision bf16", "with --precision bf16 there are f32 and bf16"},
        {"--gradients bf16 --precision f16-alone", "f32 and f16"},
        {"--state 8bit", "f32 and bf16"},
        {"--state f16", "f32 and bf16"},
        {"--state bf16 --optimizer sgd", "without momentum has none"},
        {"--tokens 4096 --accumulate 2", "one of them"},
        {"--tokens 0", "from 1"},
        {"--tokens 1048577 --batch 1 --sequence 1", "at most 1048576"},
        {"--f16-tflops many", "number"},
        {"--gpu 5060_Ti", "5060 Ti 8GB, "},
        {"--gpu Voodoo2", "H200"},
        {"--gpu", "name"},
        {"--gpu _", "24G"},
        {"--gpu Voodoo2", "24G"},
        {"--gpu 0", "from 1M"},
        {"--gpu -1G", "24G"},
        {"--gpu 999999999G", "at most"},
        {"--budget 0", "300M"},
        {"--gpu 8G --budget 9G", "more than"},
        {"--budget many", "300M"},
        {"--mode fast", "conservative, balanced and aggressive"},
        {"--frobnicate", "--help"},
        {"a_b c_d", "give one of them"},
        {"--model 124M word", "give one of them"},
    };
    for (size_t i = 0; i < sizeof mistakes / sizeof mistakes[0]; i++) {
        run_words(&p, mistakes[i].words);
        if (p.status != 2) {
            print_error("%s: status %d\n", mistakes[i].words, p.status);
        }
        assert_int_equal(p.status, 2);
        assert_int_equal(p.out[0], 0);
        t_text_has(p.error, "estimate: ");
        t_text_has(p.error, mistakes[i].text);
    }
}

/* The listing of the advised plan, in which the blocks of a transformer are one entry. */
static void the_plan_is_listed_with_equal_blocks_as_one(void **state) {
    (void)state;
    static const char *const full[] = {"", "=full"};
    static printed p;
    for (int k = 0; k < 2; k++) {
        char words[128];
        int lines = 0;
        snprintf(words, sizeof words, "--model gpt2-124M --batch 1 --gpu 24G --plan%s", full[k]);
        run_small(&p, words);
        assert_int_equal(p.status, 0);
        t_text_has(p.out, "\nplan      the fastest found of mode ");
        t_text_has(p.out, "predicted (roofline): a step ");
        t_text_has(p.out, "\nthe largest of what comes and goes at the peak, in all ");
        for (const char *c = p.out; *c; c += strcspn(c, "\n") + 1) {
            assert_in_range(strcspn(c, "\n"), 0, 100);
            lines++;
        }
        assert_in_range(lines, k == 0 ? 50 : 180, k == 0 ? 130 : 5000);
        t_text_has(p.out, k == 0 ? "  h0..11.fc               12 " : "  h7.fc ");
    }
    run_small(&p, "--layers 2 --gpu 24G --budget 800M --plan --mode aggressive --progress");
    t_text_has(p.out, "\nplan      the fastest found of mode AGGRESSIVE\n");
    t_text_has(p.error, "\restimate: 1 of ");
    t_text_has(p.error, " plans, ");
    run_small(&p, is_long() ? "--model gpt2-1558M --batch 1 --gpu 8G --plan --offload off"
                            : "--layers 2 --gpu 400M --plan");
    assert_int_equal(p.status, 3);
    t_text_has(p.out, "\nplan      the smallest of mode ");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(params_are_as_published),
        cmocka_unit_test(a_block_adds_what_its_backward_reads),
        cmocka_unit_test(a_param_takes_the_bytes_of_its_formats),
        cmocka_unit_test(a_block_in_16_bits_has_half_of_the_bytes),
        cmocka_unit_test(tokens_of_a_step_make_micro_batches),
        cmocka_unit_test(formats_are_said),
        cmocka_unit_test(what_is_forced_is_in_16_bits_in_every_mode),
        cmocka_unit_test(plans_from_the_budget_wait_and_recompute_little),
        cmocka_unit_test(an_estimate_equals_a_model_that_trains),
        cmocka_unit_test(clipping_and_accumulation_keep_all_gradients),
        cmocka_unit_test(only_adapters_have_gradients_and_state),
        cmocka_unit_test(the_mode_that_is_advised_follows_the_budget),
        cmocka_unit_test(advice_says_what_is_rounded),
        cmocka_unit_test(the_largest_batch_is_the_largest_that_fits),
        cmocka_unit_test(the_numbers_for_programs_are_json),
        cmocka_unit_test(several_ranks_share_a_model),
        cmocka_unit_test(the_largest_groups_are_kept),
        cmocka_unit_test(any_text_is_escaped),
        cmocka_unit_test(a_sweep_is_drawn_as_xml),
        cmocka_unit_test(a_larger_budget_takes_no_more_time_in_a_sweep),
        cmocka_unit_test(a_page_has_the_plan),
        cmocka_unit_test(a_page_is_written_with_budgets),
        cmocka_unit_test(the_text_says_what_it_assumes),
        cmocka_unit_test(the_plan_is_listed_with_equal_blocks_as_one),
        cmocka_unit_test(the_largest_values_at_the_peak_come_first),
        cmocka_unit_test(a_printed_peak_is_accepted_as_a_budget),
        cmocka_unit_test(names_and_sizes_are_read_as_people_write_them),
        cmocka_unit_test(half_the_speed_takes_twice_the_time),
        cmocka_unit_test(published_files_give_published_params),
        cmocka_unit_test(what_a_family_has_is_said),
        cmocka_unit_test(a_window_takes_less_time),
        cmocka_unit_test(a_long_path_is_cut_between_characters),
        cmocka_unit_test(a_wrong_file_is_refused_with_the_reason),
        cmocka_unit_test(mistakes_are_refused_with_the_cure),
        cmocka_unit_test(sizes_that_no_machine_has_are_planned_or_refused),
        cmocka_unit_test(what_is_on_the_host_is_said),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
