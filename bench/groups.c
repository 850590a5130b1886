// What groups of params cost where all of them update alike: step time and arena of a model whose params
// are in no group, in one, in 4 and each in its own, with equal descs. The models take turns, step by step,
// so that other work on the machine slows all of them alike. GPT-2, and one large param whose layers do
// nothing, of which a step is the update. Their losses must be equal bit for bit.
#include "bench.h"

#define MEMSCALE_IMPLEMENTATION
#include "memscale.h"
#include "nn.h"
#include "models.h"

enum { VARIANTS = 4, SAMPLES_MAX = 1000, PARAMS_MAX = 4096 };

/* Groups; -1: as many as params. */
static const int group_counts[VARIANTS] = {0, 1, 4, -1};
static const char *const variant_names[VARIANTS] = {"none", "one", "4", "own"};

typedef struct variant {
    bench_model gpt2; // or its model alone
    ms_memory_report report;
    double wall[SAMPLES_MAX], processor[SAMPLES_MAX];
    uint64_t losses;
} variant;

static int one_loss(const ms_call *call) {
    *(float *)call->out[0].data = 1.0f;
    return 0;
}

/* Four params of so many elements in all, and a loss. */
static ms_model *make_update(const ms_config *config, int64_t elements, ms_tensor *params) {
    ms_model *model;
    const ms_result created = ms_create(config, &model);
    bench_check(model, created);
    ms_layer_desc layer;
    memset(&layer, 0, sizeof layer);
    layer.forward = one_loss;
    layer.backward = bench_nothing;
    for (int k = 0; k < 4; k++) {
        params[k] = layer.param[k] = ms_param(model, "w", MS_DTYPE_F32, ms_shape1(elements / 4));
    }
    layer.out[0] = ms_activation(model, "loss", MS_DTYPE_F32, ms_shape1(1));
    ms_register_layer(model, &layer);
    ms_set_loss(model, layer.out[0]);
    return model;
}

/* Puts the params in turn into as many groups. */
static void put_in_groups(ms_model *model, const ms_tensor *params, uint32_t count, int groups,
                          const ms_optimizer_desc *desc) {
    ms_param_group made[PARAMS_MAX];
    const uint32_t most = groups < 0 ? count : (uint32_t)groups;
    ms_set_optimizer(model, desc);
    for (uint32_t k = 0; k < most; k++) {
        made[k] = ms_optimizer_group(model, desc);
    }
    for (uint32_t i = 0; i < count && most > 0; i++) {
        ms_set_param_group(model, params[i], made[i % most]);
    }
}

static void open_variant(variant *v, int number, const char *preset, int64_t elements,
                         const nn_transformer_config *shape, const ms_optimizer_desc *desc) {
    static ms_tensor params[PARAMS_MAX];
    ms_config config;
    uint32_t count = 4;
    memset(&config, 0, sizeof config);
    config.memory_budget_bytes = (uint64_t)1 << 50;
    if (preset) {
        v->gpt2 = bench_model_create(&config, nn_cpu(), preset, shape);
        count = (uint32_t)nn_param_count(v->gpt2.net);
        for (uint32_t i = 0; i < count && i < PARAMS_MAX; i++) {
            params[i] = nn_param_at(v->gpt2.net, i)->tensor;
        }
    } else {
        v->gpt2.model = make_update(&config, elements, params);
    }
    ms_model *model = v->gpt2.model;
    put_in_groups(model, params, count, group_counts[number], desc);
    bench_check(model, ms_wrap(model));
    bench_check(model, ms_report(model, &v->report));
    if (preset) {
        bench_check(model, nn_init(v->gpt2.net, 1));
        bench_write_batch(&v->gpt2);
    } else {
        float *zeros = (float *)calloc((size_t)elements / 4, sizeof *zeros);
        for (int k = 0; k < 4 && zeros; k++) {
            bench_check(model, ms_write(model, params[k], zeros));
        }
        free(zeros);
    }
}

static double processor_seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* One step of each, the first of them another one each time. */
static void run_round(variant *all, int round, int warmup) {
    for (int i = 0; i < VARIANTS; i++) {
        variant *v = &all[(i + round) % VARIANTS];
        double loss;
        uint64_t bits;
        const double wall = bench_seconds(), processor = processor_seconds();
        bench_check(v->gpt2.model, ms_step(v->gpt2.model, &loss));
        if (round >= warmup) {
            v->processor[round - warmup] = processor_seconds() - processor;
            v->wall[round - warmup] = bench_seconds() - wall;
        }
        memcpy(&bits, &loss, sizeof bits);
        v->losses = v->losses * 31 + bits;
    }
}

static void print_variants(variant *all, int samples, bool tsv) {
    double wall = 0.0, processor = 0.0;
    bench_table table = bench_table_begin(
        tsv, tsv ? "groups wall_ms wall_ratio processor_ms processor_ratio fastest_ms slowest_ms "
                   "arena_bytes"
                 : "groups wall_ms ratio processor_ms ratio fastest slowest arena");
    for (int k = 0; k < VARIANTS; k++) {
        variant *v = &all[k];
        const double by_wall = bench_median(v->wall, samples);
        const double by_processor = bench_median(v->processor, samples);
        wall = k == 0 ? by_wall : wall;
        processor = k == 0 ? by_processor : processor;
        bench_cell(&table, variant_names[k]);
        bench_value(&table, 1e3 * by_wall, 4);
        bench_value(&table, by_wall / wall, 3);
        bench_value(&table, 1e3 * by_processor, 4);
        bench_value(&table, by_processor / processor, 3);
        bench_value(&table, 1e3 * v->wall[0], 4);
        bench_value(&table, 1e3 * v->wall[samples - 1], 4);
        bench_count(&table, v->report.arena_bytes);
    }
}

int main(int argc, char **argv) {
    static variant all[VARIANTS];
    bool tsv = false;
    const char *preset = NULL, *kind = "adamw";
    int64_t batch = 4, sequence = 64, steps = 15, elements = 1 << 20;
    const option_spec options[] = {
        {"--tsv", NULL, OPTION_FLAG, &tsv, "tab-separated output"},
        {"--preset", "NAME", OPTION_TEXT, &preset, "of GPT-2; otherwise a model that only updates"},
        {"--optimizer", "NAME", OPTION_TEXT, &kind, "adamw, or sgd without momentum"},
        {"--elements", "N", OPTION_COUNT, &elements, "of the params of a model that only updates"},
        {"--batch", "N", OPTION_COUNT, &batch, "sequences in a batch"},
        {"--sequence", "N", OPTION_COUNT, &sequence, "tokens in a sequence"},
        {"--steps", "N", OPTION_COUNT, &steps, "timed steps of each model, 1000 at most"},
    };
    if (take_options("[options]\nStep time and arena with groups of params that update alike.",
                     options, OPTIONS_IN(options), argc, argv, NULL) != 0 ||
        check_most("--steps", steps, SAMPLES_MAX) != 0) {
        return 2;
    }
    ms_optimizer_desc desc =
        ms_optimizer_defaults(strcmp(kind, "sgd") == 0 ? MS_OPTIMIZER_SGD : MS_OPTIMIZER_ADAMW);
    nn_transformer_config shape;
    memset(&shape, 0, sizeof shape);
    if (preset) {
        shape = bench_gpt2_shape(preset, batch, sequence, 1, 1);
    }
    for (int k = 0; k < VARIANTS; k++) {
        open_variant(&all[k], k, preset, elements, &shape, &desc);
    }
    const int warmup = 2;
    for (int round = 0; round < (int)steps + warmup; round++) {
        run_round(all, round, warmup);
    }
    print_variants(all, (int)steps, tsv);
    for (int k = 0; k < VARIANTS; k++) {
        if (all[k].losses != all[0].losses) {
            bench_stop("the losses differ");
        }
    }
    return 0;
}
