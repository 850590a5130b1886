// Five published workloads by dry run: the memory of training them in fp32 with AdamW, by the plain
// plan and by the smallest checkpointed one. No arithmetic is done and no arena allocated.
#include "bench.h"

#define MEMSCALE_IMPLEMENTATION
#include "memscale.h"
#include "nn.h"
#include "models.h"

typedef struct plan {
    ms_memory_report report;
    double wrap_seconds;
} plan;

typedef struct outcome {
    const bench_workload *work;
    plan plain, smallest;
} outcome;

static plan make_plan(const bench_workload *work, nn_granularity granularity, bool save_scores,
                      bool smallest) {
    plan made;
    ms_config config;
    nn_transformer_config shape;
    memset(&config, 0, sizeof config);
    if (!bench_shape(work->preset, &shape)) {
        bench_stop("a workload names no preset");
    }
    config.dry_run = true;
    config.memory_budget_bytes = (uint64_t)1
                                 << 50; // not from the machine: only the switches decide
    config.force_optimize = smallest;
    config.checkpointing = smallest ? MS_SWITCH_ON : MS_SWITCH_OFF;
    shape.batch = work->batch;
    shape.sequence = work->sequence;
    shape.granularity = granularity;
    shape.save_scores = save_scores;

    bench_model m = bench_model_create(&config, nn_cpu(), work->preset, &shape);
    const double start = bench_seconds();
    bench_check(m.model, ms_wrap(m.model));
    made.wrap_seconds = bench_seconds() - start;
    bench_check(m.model, ms_report(m.model, &made.report));
    made.report.peak_layer = ""; // belongs to the model
    bench_model_destroy(&m);
    return made;
}

static void print_published(bench_table *table, const bench_workload *work) {
    char text[32];
    if (work->published_plain > 0.0) {
        snprintf(text, sizeof text, "%.2f -> %.2f", work->published_plain,
                 work->published_optimized);
    } else {
        snprintf(text, sizeof text, "none -> %.2f", work->published_optimized);
    }
    bench_cell(table, text);
}

static void print_sizes(const outcome *outcomes, int count) {
    bench_table table =
        bench_table_begin(false, "workload params plain checkpointed smaller published recompute");
    for (int i = 0; i < count; i++) {
        const ms_memory_report *plain = &outcomes[i].plain.report;
        const ms_memory_report *smallest = &outcomes[i].smallest.report;
        bench_cell(&table, outcomes[i].work->name);
        bench_count(&table, plain->param_count);
        bench_bytes(&table, plain->arena_bytes);
        bench_bytes(&table, smallest->arena_bytes);
        bench_value(&table, (double)plain->arena_bytes / (double)smallest->arena_bytes, 2);
        print_published(&table, outcomes[i].work);
        bench_value(&table, smallest->recompute_share, 3);
    }
    printf("published: MemScale for Python, GB, on a GPU of 24 GB\n"
           "recompute: estimated work of the recomputations over that of a plain step\n");
}

/* One row: a size of each report, found at offset. */
static void print_bytes(const plan *plans[], int count, const char *name, size_t offset) {
    bench_table table = {false, count + 1, 0};
    bench_cell(&table, name);
    for (int i = 0; i < count; i++) {
        uint64_t bytes;
        memcpy(&bytes, (const char *)&plans[i]->report + offset, sizeof bytes);
        bench_bytes(&table, bytes);
    }
}

/* A column per workload: what is live at the peak, by category, and what the layout adds. */
static void print_peak(const char *title, const plan *plans[], const outcome *outcomes, int count) {
    static const struct {
        const char *name;
        size_t offset;
    } sizes[] = {
        {"lower bound", offsetof(ms_memory_report, lower_bound_bytes)},
        {"arena", offsetof(ms_memory_report, arena_bytes)},
        {"activation peak", offsetof(ms_memory_report, activation_peak_bytes)},
    };
    bench_table table = {false, count + 1, 0};
    putchar('\n');
    bench_cell(&table, title);
    for (int i = 0; i < count; i++) {
        bench_cell(&table, outcomes[i].work->name);
    }
    for (int k = 0; k < MS_CATEGORY_COUNT; k++) {
        print_bytes(plans, count, ms_category_name((ms_category)k),
                    offsetof(ms_memory_report, peak_bytes) + (size_t)k * sizeof(uint64_t));
    }
    for (size_t k = 0; k < sizeof sizes / sizeof sizes[0]; k++) {
        print_bytes(plans, count, sizes[k].name, sizes[k].offset);
    }
    bench_cell(&table, "arena / bound");
    for (int i = 0; i < count; i++) {
        const ms_memory_report *report = &plans[i]->report;
        bench_value(&table, (double)report->arena_bytes / (double)report->lower_bound_bytes, 4);
    }
    bench_cell(&table, "ms_wrap, s");
    for (int i = 0; i < count; i++) {
        bench_value(&table, plans[i]->wrap_seconds, 2);
    }
}

static void print_people(const outcome *outcomes, int count) {
    const plan *plain[BENCH_WORKLOADS], *smallest[BENCH_WORKLOADS];
    for (int i = 0; i < count; i++) {
        plain[i] = &outcomes[i].plain;
        smallest[i] = &outcomes[i].smallest;
    }
    print_sizes(outcomes, count);
    print_peak("plain", plain, outcomes, count);
    print_peak("checkpointed", smallest, outcomes, count);
}

static void print_tsv(const outcome *outcomes, int count) {
    bench_table table =
        bench_table_begin(true, "name params plain_bytes checkpointed_bytes lower_bound_bytes "
                                "plain_activation_bytes activation_bytes recompute");
    for (int i = 0; i < count; i++) {
        bench_cell(&table, outcomes[i].work->name);
        bench_count(&table, outcomes[i].plain.report.param_count);
        bench_count(&table, outcomes[i].plain.report.arena_bytes);
        bench_count(&table, outcomes[i].smallest.report.arena_bytes);
        bench_count(&table, outcomes[i].smallest.report.lower_bound_bytes);
        bench_count(&table, outcomes[i].plain.report.activation_peak_bytes);
        bench_count(&table, outcomes[i].smallest.report.activation_peak_bytes);
        bench_value(&table, outcomes[i].smallest.report.recompute_share, 3);
    }
}

int main(int argc, char **argv) {
    bool tsv = false, blocks = false, save_scores = false;
    const char *only = "all";
    const bench_option options[] = {
        {"--tsv", "tab-separated output", &tsv, NULL, NULL},
        {"--blocks", "a layer per transformer block, not per operator", &blocks, NULL, NULL},
        {"--scores", "keep the attention scores for backward", &save_scores, NULL, NULL},
        {"--model", "one of the workloads", NULL, NULL, &only},
    };
    bench_options(argc, argv, "Memory of five published workloads, by dry run.", options, 4);

    outcome outcomes[BENCH_WORKLOADS];
    int count = 0;
    for (int i = 0; i < BENCH_WORKLOADS; i++) {
        const bench_workload *work = &bench_workloads[i];
        const nn_granularity granularity = blocks ? NN_BLOCKS : NN_OPERATORS;
        if (strcmp(only, "all") == 0 || strcmp(only, work->name) == 0) {
            outcomes[count].work = work;
            outcomes[count].plain = make_plan(work, granularity, save_scores, false);
            outcomes[count++].smallest = make_plan(work, granularity, save_scores, true);
        }
    }
    if (count == 0) {
        fprintf(stderr, "no such workload: %s\n", only);
        return 2;
    }
    if (tsv) {
        print_tsv(outcomes, count);
    } else {
        print_people(outcomes, count);
    }
    return 0;
}
