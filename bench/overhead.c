// The library's own time: the executor's per instruction, with callbacks that do nothing, and that
// of ms_wrap over the number of layers, for plain plans and for those that need checkpointing:
// chains, and an LSTM of two layers unrolled over 280 time steps, with the planner's memory.
#include "bench.h"

#define MEMSCALE_IMPLEMENTATION
#include "memscale.h"
#include "nn.h"
#include "models.h"

enum { REPEATS_MAX = 100, CHECKPOINTED_MAX = 1000 };

static int zero_loss(const ms_call *call) {
    *(float *)call->out[0].data = 0.0f;
    return 0;
}

static double time_instruction(int64_t layers) {
    return bench_instruction(NULL, layers, 200000, zero_loss);
}

/* Milliseconds of ms_wrap. */
static double time_wrap(const ms_config *config, int64_t layers, ms_memory_report *report) {
    ms_model *model = bench_chain(config, layers, true, zero_loss);
    const double start = bench_seconds();
    bench_check(model, ms_wrap(model));
    const double seconds = bench_seconds() - start;
    bench_check(model, ms_report(model, report));
    ms_destroy(model);
    return 1e3 * seconds;
}

static double time_plain_wrap(int64_t layers) {
    ms_memory_report report;
    return time_wrap(NULL, layers, &report);
}

/* The budget leaves room for half of the activations of a plan with early updates. */
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
        fprintf(stderr, "the budget should force checkpointing, but nothing is recomputed\n");
        exit(1);
    }
    return milliseconds;
}

// ---- an unrolled LSTM, every operator a layer ----------------------------------------------------

/* Bytes of host memory that the library holds, now and at most. */
typedef struct heap {
    uint64_t bytes, peak_bytes;
} heap;

static void *heap_alloc(uint64_t bytes, void *user) {
    heap *h = (heap *)user;
    h->bytes += bytes;
    h->peak_bytes = h->bytes > h->peak_bytes ? h->bytes : h->peak_bytes;
    return malloc((size_t)bytes);
}

static void heap_release(void *memory, uint64_t bytes, void *user) {
    ((heap *)user)->bytes -= bytes;
    free(memory);
}

enum { LSTM_STEPS = 280, LSTM_LAYERS = 2, LSTM_GATES = 4, LSTM_BATCH = 64, LSTM_WIDTH = 512 };

/* out = f(a, b, param), b and param optional; reads what a product or an activation would. */
static ms_tensor lstm_op(ms_model *model, ms_tensor a, ms_tensor b, ms_tensor param) {
    ms_layer_desc layer;
    memset(&layer, 0, sizeof layer);
    layer.forward = layer.backward = bench_nothing;
    layer.in[0] = a;
    layer.in[1] = b;
    layer.param[0] = param;
    layer.out[0] = ms_activation(model, "x", MS_DTYPE_F32, ms_shape2(LSTM_BATCH, LSTM_WIDTH));
    layer.backward_reads.in = b.id ? 3 : 1;
    layer.backward_reads.param = param.id ? 1 : 0;
    ms_register_layer(model, &layer);
    return layer.out[0];
}

/* 53 operators: each of four gates has two products, each normalized (2), their sum, the bias, a
   bound, the activation and zoneout; then the cell. */
static ms_tensor lstm_cell(ms_model *model, ms_tensor x, ms_tensor *h, ms_tensor *c,
                           const ms_tensor *weights) {
    const ms_tensor none = {0};
    ms_tensor gate[LSTM_GATES];
    for (int g = 0; g < LSTM_GATES; g++, weights += 3) {
        ms_tensor from_x = lstm_op(model, x, none, weights[0]);
        ms_tensor from_h = lstm_op(model, *h, none, weights[1]);
        for (int k = 0; k < 2; k++) {
            from_x = lstm_op(model, from_x, none, none);
            from_h = lstm_op(model, from_h, none, none);
        }
        gate[g] = lstm_op(model, lstm_op(model, from_x, from_h, none), none, weights[2]);
        for (int k = 0; k < 3; k++) {
            gate[g] = lstm_op(model, gate[g], none, none);
        }
    }
    *c = lstm_op(model, lstm_op(model, *c, gate[0], none), lstm_op(model, gate[1], gate[2], none),
                 none);
    ms_tensor out = *c;
    for (int k = 0; k < 3; k++) {
        out = lstm_op(model, out, none, none);
    }
    *h = lstm_op(model, out, gate[3], none);
    return lstm_op(model, lstm_op(model, *h, none, none), x, none);
}

static ms_model *make_lstm(const ms_config *config) {
    ms_model *model;
    const ms_result created = ms_create(config, &model);
    bench_check(model, created);
    const ms_shape state = ms_shape2(LSTM_BATCH, LSTM_WIDTH);
    const ms_shape square = ms_shape2(LSTM_WIDTH, LSTM_WIDTH);
    ms_tensor weights[LSTM_LAYERS][3 * LSTM_GATES], h[LSTM_LAYERS], c[LSTM_LAYERS], x = {0};
    ms_tensor loss = {0};
    const ms_tensor none = {0};
    for (int l = 0; l < LSTM_LAYERS; l++) {
        h[l] = ms_buffer(model, "h", MS_DTYPE_F32, state);
        c[l] = ms_buffer(model, "c", MS_DTYPE_F32, state);
        for (int k = 0; k < 3 * LSTM_GATES; k++) {
            weights[l][k] = ms_param(model, "w", MS_DTYPE_F32, square);
        }
    }
    for (int step = 0; step < LSTM_STEPS; step++) {
        x = ms_input(model, "x", MS_DTYPE_F32, state);
        for (int l = 0; l < LSTM_LAYERS; l++) {
            x = lstm_cell(model, x, &h[l], &c[l], weights[l]);
        }
        loss = loss.id ? lstm_op(model, loss, x, none) : x;
    }
    ms_set_loss(model, loss);
    return model;
}

typedef struct lstm_cost {
    double seconds;
    uint64_t bytes, layers;
} lstm_cost;

/* ms_wrap at the budget that leaves room for this share of the activations of the plain plan. */
static lstm_cost wrap_lstm(double share) {
    lstm_cost cost;
    heap h = {0, 0};
    ms_config config;
    ms_memory_report report;
    memset(&config, 0, sizeof config);
    config.dry_run = true;
    config.memory_budget_bytes = UINT64_MAX;
    config.allocator.alloc = heap_alloc;
    config.allocator.release = heap_release;
    config.allocator.user = &h;
    ms_model *model = make_lstm(&config);
    bench_check(model, ms_wrap(model));
    bench_check(model, ms_report(model, &report));
    ms_destroy(model);
    h.peak_bytes = 0;
    config.memory_budget_bytes =
        report.arena_bytes - (uint64_t)((1.0 - share) * (double)report.activation_peak_bytes);
    model = make_lstm(&config);
    const double start = bench_seconds();
    bench_check(model, ms_wrap(model));
    cost.seconds = bench_seconds() - start;
    cost.bytes = h.peak_bytes;
    cost.layers = report.layer_count;
    ms_destroy(model);
    return cost;
}

static void measure_lstm(bench_table *table, int64_t repeats) {
    static const struct {
        const char *time, *memory;
        double share;
    } rows[] = {{"wrap_lstm_plain", "memory_lstm_plain", 1.0},
                {"wrap_lstm_half", "memory_lstm_half", 0.5},
                {"wrap_lstm_third", "memory_lstm_third", 0.35}};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        double seconds[REPEATS_MAX];
        lstm_cost cost = {0.0, 0, 0};
        for (int64_t k = 0; k < repeats; k++) {
            cost = wrap_lstm(rows[i].share);
            seconds[k] = 1e3 * cost.seconds;
        }
        bench_cell(table, rows[i].time);
        bench_count(table, cost.layers);
        bench_value(table, bench_median(seconds, (int)repeats), 3);
        bench_cell(table, "ms");
        bench_cell(table, rows[i].memory);
        bench_count(table, cost.layers);
        bench_value(table, (double)cost.bytes / 1e6, 3);
        bench_cell(table, "MB");
    }
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
    bool tsv = false, no_lstm = false;
    int64_t layers_max = 10000, repeats = 5;
    const option_spec options[] = {
        {"--tsv", NULL, OPTION_FLAG, &tsv, "tab-separated output"},
        {"--no-lstm", NULL, OPTION_FLAG, &no_lstm, "leave out the unrolled LSTM"},
        {"--layers", "N", OPTION_COUNT, &layers_max, "the longest chain"},
        {"--repeats", "N", OPTION_COUNT, &repeats,
         "measurements, of which the median is shown, 100 at most"},
    };
    if (take_options("[options]\nTime of the executor and of ms_wrap.", options,
                     OPTIONS_IN(options), argc, argv, NULL) != 0 ||
        check_most("--repeats", repeats, REPEATS_MAX) != 0) {
        return 2;
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
    if (!no_lstm) {
        measure_lstm(&table, repeats);
    }
    return 0;
}
