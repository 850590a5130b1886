// The library's own time: the executor's per instruction, with callbacks that do nothing, and that
// of ms_wrap against the number of layers, for plain plans and for those that need checkpointing.
#include "bench.h"

#define MEMSCALE_IMPLEMENTATION
#include "memscale.h"

enum { REPEATS_MAX = 100, CHECKPOINTED_MAX = 1000 };

static void check(ms_model *model, ms_result result) {
    if (result != MS_RESULT_OK) {
        fprintf(stderr, "%s: %s\n", ms_result_name(result), ms_last_error(model));
        exit(1);
    }
}

static int nothing(const ms_call *call) {
    (void)call;
    return 0;
}

static int zero_loss(const ms_call *call) {
    *(float *)call->out[0].data = 0.0f;
    return 0;
}

/* A chain of layers: x = f(x, w), x (64), w (64); without params: x = f(x). */
static ms_model *make_chain(const ms_config *config, int64_t layers, bool params) {
    ms_model *model;
    check(NULL, ms_create(config, &model));
    ms_layer_desc layer;
    memset(&layer, 0, sizeof layer);
    layer.backward = nothing;
    layer.out[0] = ms_input(model, "x", MS_DTYPE_F32, ms_shape1(64));
    for (int64_t i = 0; i < layers; i++) {
        const bool last = i + 1 == layers;
        layer.forward = last ? zero_loss : nothing;
        layer.in[0] = layer.out[0];
        layer.out[0] = ms_activation(model, "x", MS_DTYPE_F32, ms_shape1(last ? 1 : 64));
        if (params || i == 0) {
            layer.param[0] = ms_param(model, "w", MS_DTYPE_F32, ms_shape1(64));
        } else {
            layer.param[0].id = 0;
        }
        ms_register_layer(model, &layer);
    }
    ms_set_loss(model, layer.out[0]);
    return model;
}

/* Microseconds per instruction of a step. */
static double time_instruction(int64_t layers) {
    const int steps = (int)(200000 / layers) + 1;
    ms_model *model = make_chain(NULL, layers, false);
    ms_memory_report report;
    check(model, ms_wrap(model));
    check(model, ms_report(model, &report));
    check(model, ms_step(model, NULL));
    const double start = bench_seconds();
    for (int i = 0; i < steps; i++) {
        check(model, ms_step(model, NULL));
    }
    const double seconds = bench_seconds() - start;
    ms_destroy(model);
    return 1e6 * seconds / steps / report.instruction_count;
}

/* Milliseconds of ms_wrap. */
static double time_wrap(const ms_config *config, int64_t layers, ms_memory_report *report) {
    ms_model *model = make_chain(config, layers, true);
    const double start = bench_seconds();
    check(model, ms_wrap(model));
    const double seconds = bench_seconds() - start;
    check(model, ms_report(model, report));
    ms_destroy(model);
    return 1e3 * seconds;
}

static double time_plain_wrap(int64_t layers) {
    ms_memory_report report;
    return time_wrap(NULL, layers, &report);
}

/* The budget leaves half of what the activations of an early-update plan take. */
static double time_checkpointed_wrap(int64_t layers) {
    ms_memory_report report;
    ms_config config;
    memset(&config, 0, sizeof config);
    config.early_update = MS_SWITCH_ON;
    config.checkpointing = MS_SWITCH_OFF;
    time_wrap(&config, layers, &report);
    config.checkpointing = MS_SWITCH_ON;
    config.memory_budget_bytes = report.arena_bytes - report.activation_peak_bytes / 2;
    const double milliseconds = time_wrap(&config, layers, &report);
    if (report.recompute_count == 0) {
        fprintf(stderr, "the budget was to force checkpointing, but nothing is recomputed\n");
        exit(1);
    }
    return milliseconds;
}

int main(int argc, char **argv) {
    static const struct {
        const char *what, *unit;
        double (*measure)(int64_t layers);
        int64_t layers_max;
    } rows[] = {
        {"instruction", "us", time_instruction, INT64_MAX},
        {"wrap_plain", "ms", time_plain_wrap, INT64_MAX},
        {"wrap_half", "ms", time_checkpointed_wrap, CHECKPOINTED_MAX},
    };
    bool tsv = false;
    int64_t layers_max = 10000, repeats = 5;
    const bench_option options[] = {
        {"--tsv", "tab-separated output", &tsv, NULL, NULL},
        {"--layers", "the longest chain", NULL, &layers_max, NULL},
        {"--repeats", "measurements, of which the median is shown; 100 at most", NULL, &repeats,
         NULL},
    };
    bench_options(argc, argv, "Time of the executor and of ms_wrap.", options, 3);
    if (repeats > REPEATS_MAX) {
        repeats = REPEATS_MAX;
    }

    bench_table table = bench_table_begin(tsv, "what layers value unit");
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        for (int64_t n = 100; n <= layers_max && n <= rows[i].layers_max; n *= 10) {
            double values[REPEATS_MAX];
            for (int64_t k = 0; k < repeats; k++) {
                values[k] = rows[i].measure(n);
            }
            bench_cell(&table, rows[i].what);
            bench_count(&table, (uint64_t)n);
            bench_value(&table, bench_median(values, (int)repeats), 3);
            bench_cell(&table, rows[i].unit);
        }
    }
    return 0;
}
