// How well the time of a training step is predicted: GPT-2 on the CPU at four budgets, from the
// plain arena down to the smallest. Each model times its own first steps (empirical profiling) and
// plans with these times; the predicted time is then compared with the steps that follow. The
// budgets take turns, so that other work on the machine slows all of them alike.
#include "bench.h"

#define MEMSCALE_IMPLEMENTATION
#include "memscale.h"
#include "nn.h"
#include "models.h"

enum { BUDGET_COUNT = 4, ROUNDS_MAX = BENCH_STEPS, STEPS_MAX = BENCH_STEPS };

typedef struct sizes {
    uint64_t plain_bytes, smallest_bytes;
} sizes;

typedef struct row {
    ms_config config;
    ms_memory_report report; // of the last round
    double predicted_ms[ROUNDS_MAX], measured_ms[ROUNDS_MAX], ratio[ROUNDS_MAX];
    double roofline_ms; // the prediction before anything was timed
} row;

static sizes find_sizes(const nn_transformer_config *shape) {
    sizes found;
    ms_memory_report report;
    ms_config config;
    memset(&config, 0, sizeof config);
    config.dry_run = true;
    config.memory_budget_bytes = (uint64_t)1 << 50;
    bench_model m = bench_model_create(&config, nn_cpu(), "gpt2", shape);
    bench_check(m.model, ms_wrap(m.model));
    bench_check(m.model, ms_report(m.model, &report));
    found.plain_bytes = report.plain_bytes;
    bench_check(m.model, ms_smallest_budget(m.model, &found.smallest_bytes));
    bench_model_destroy(&m);
    return found;
}

/* Milliseconds of writing a batch and a step. */
static double time_step(const bench_model *m) {
    const double start = bench_seconds();
    bench_write_batch(m);
    bench_check(m->model, ms_step(m->model, NULL));
    return 1e3 * (bench_seconds() - start);
}

/* One round of one budget: a new model that learns its times, plans with them, and runs. */
static void run_round(row *r, const nn_transformer_config *shape, int round, int steps) {
    double ms[STEPS_MAX];
    bench_model m = bench_model_create(&r->config, nn_cpu(), "gpt2", shape);
    bench_check(m.model, ms_wrap(m.model));
    bench_check(m.model, ms_report(m.model, &r->report));
    r->roofline_ms = 1e-3 * r->report.step_us;
    bench_check(m.model, nn_init(m.net, 1));
    const int warm = (int)r->config.warmup_steps + 3; // one before, and two by the new plan
    for (int i = 0; i < warm; i++) {
        time_step(&m);
    }
    bench_check(m.model, ms_report(m.model, &r->report));
    for (int i = 0; i < steps; i++) {
        ms[i] = time_step(&m);
    }
    r->predicted_ms[round] = 1e-3 * r->report.step_us;
    r->measured_ms[round] = bench_median(ms, steps);
    r->ratio[round] = r->predicted_ms[round] / r->measured_ms[round];
    bench_model_destroy(&m);
}

static void print_rows(row *rows, int rounds, bool tsv) {
    bench_table table = bench_table_begin(
        tsv, tsv ? "budget_bytes arena_bytes recomputations predicted_ms measured_ms ratio "
                   "ratio_min ratio_max roofline_ms"
                 : "budget arena recomputed predicted measured ratio min max roofline");
    for (int k = 0; k < BUDGET_COUNT; k++) {
        row *r = &rows[k];
        bench_bytes(&table, r->report.budget_bytes);
        bench_bytes(&table, r->report.arena_bytes);
        bench_count(&table, r->report.recompute_count);
        bench_value(&table, bench_median(r->predicted_ms, rounds), 2);
        bench_value(&table, bench_median(r->measured_ms, rounds), 2);
        bench_value(&table, bench_median(r->ratio, rounds), 3);
        bench_value(&table, r->ratio[0], 3);
        bench_value(&table, r->ratio[rounds - 1], 3);
        bench_value(&table, r->roofline_ms, 2);
    }
    if (!tsv) {
        printf("medians of %d rounds, in milliseconds; ratio: predicted over measured\n", rounds);
    }
}

int main(int argc, char **argv) {
    static row rows[BUDGET_COUNT];
    bool tsv = false;
    const char *preset = "gpt2-124M";
    int64_t batch = 4, sequence = 64, steps = 4, rounds = 3, warmup = 3;
    const option_spec options[] = {
        {"--tsv", NULL, OPTION_FLAG, &tsv, "tab-separated output"},
        {"--preset", "NAME", OPTION_TEXT, &preset, "gpt2-124M, -355M, -774M, -1558M, or gpt2-tiny"},
        {"--batch", "N", OPTION_COUNT, &batch, "sequences in a batch"},
        {"--sequence", "N", OPTION_COUNT, &sequence, "tokens in a sequence"},
        {"--warmup", "N", OPTION_COUNT, &warmup, "steps that are sampled, in each round"},
        {"--steps", "N", OPTION_COUNT, &steps, "timed steps in a round, 32 at most"},
        {"--rounds", "N", OPTION_COUNT, &rounds, "rounds of each budget, 32 at most"},
    };
    if (take_options("[options]\nPredicted and measured time of a step of GPT-2 on the CPU.",
                     options, OPTIONS_IN(options), argc, argv, NULL) != 0) {
        return 2;
    }
    const nn_transformer_config shape = bench_gpt2_shape(preset, batch, sequence, steps, rounds);
    const sizes found = find_sizes(&shape);
    for (int k = 0; k < BUDGET_COUNT; k++) {
        const uint64_t between = found.plain_bytes - found.smallest_bytes;
        rows[k].config.memory_budget_bytes =
            found.plain_bytes - between * (uint64_t)k / (BUDGET_COUNT - 1);
        rows[k].config.empirical_profiling = MS_SWITCH_ON;
        rows[k].config.warmup_steps = (uint32_t)warmup;
    }
    for (int round = 0; round < (int)rounds; round++) {
        for (int k = 0; k < BUDGET_COUNT; k++) {
            run_round(&rows[k], &shape, round, (int)steps);
        }
    }
    print_rows(rows, (int)rounds, tsv);
    return 0;
}
