// Five published workloads by dry run: the memory of training them in fp32 with AdamW, by the plain
// plan, by the smallest checkpointed one, by the smallest one of mode BALANCED, which also moves to
// the host, and of mode AGGRESSIVE, which also rounds, and by those of these modes for the published
// peak; with the times on an RTX 3090 whose link copies 25 GB/s each way. No arithmetic is done and
// no arena allocated.
#include "bench.h"

#define MEMSCALE_IMPLEMENTATION
#include "memscale.h"
#include "nn.h"
#include "models.h"

typedef struct plan {
    ms_memory_report report;
    double wrap_seconds;
} plan;

/* What a plan is made for. */
typedef enum purpose {
    PLAIN,
    CHECKPOINTED,
    BALANCED,
    AT_PUBLISHED,
    AGGRESSIVE,
    AGGRESSIVE_AT_PUBLISHED,
    PURPOSES
} purpose;

typedef struct outcome {
    const bench_workload *work;
    plan of[PURPOSES];
} outcome;

static ms_hardware published_device(void) {
    ms_hardware device = *ms_hardware_find("RTX 3090");
    device.to_device_gb_per_s = device.to_host_gb_per_s = 25.0;
    return device;
}

static plan make_plan(const bench_workload *work, nn_granularity granularity, bool save_scores,
                      purpose of) {
    plan made;
    const bool balanced = of >= BALANCED;
    const ms_hardware device = published_device();
    ms_config config;
    nn_transformer_config shape;
    memset(&config, 0, sizeof config);
    if (!bench_shape(work->preset, &shape)) {
        bench_stop("a workload names no preset");
    }
    config.dry_run = true;
    /* Not from the machine: only the switches decide, or the published peak. */
    const bool at_published = of == AT_PUBLISHED || of == AGGRESSIVE_AT_PUBLISHED;
    config.mode = of >= AGGRESSIVE ? MS_MODE_AGGRESSIVE : MS_MODE_BALANCED;
    config.memory_budget_bytes =
        at_published ? (uint64_t)(1e9 * work->published_optimized) : (uint64_t)1 << 50;
    config.force_optimize = of == CHECKPOINTED || of == BALANCED || of == AGGRESSIVE;
    config.checkpointing = of == PLAIN ? MS_SWITCH_OFF : MS_SWITCH_ON;
    config.offloading = balanced ? MS_SWITCH_ON : MS_SWITCH_OFF;
    config.max_host_bytes = (uint64_t)1 << 50;
    shape.batch = work->batch;
    shape.sequence = work->sequence;
    shape.granularity = granularity;
    shape.save_scores = save_scores;

    bench_model m = bench_model_create(&config, nn_cpu(), work->preset, &shape);
    if (balanced) {
        ms_set_hardware(m.model, &device);
    }
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
        const ms_memory_report *plain = &outcomes[i].of[PLAIN].report;
        const ms_memory_report *smallest = &outcomes[i].of[CHECKPOINTED].report;
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

/* A mode that moves to the host: its smallest arena, and what it costs to train within the published
   peak. */
static void print_mode(const outcome *outcomes, int count, purpose small, purpose at_published) {
    printf("\n%s\n", small == AGGRESSIVE ? "AGGRESSIVE" : "BALANCED");
    bench_table table = bench_table_begin(
        false,
        "workload smallest host published arena host in out computed step bound plain kept wrap");
    for (int i = 0; i < count; i++) {
        const ms_memory_report *smallest = &outcomes[i].of[small].report;
        const ms_memory_report *at = &outcomes[i].of[at_published].report;
        const double link = 25e3; // bytes per microsecond
        const double in_us = (double)at->to_device_bytes / link;
        const double out_us = (double)at->to_host_bytes / link;
        const double compute_us = small == AGGRESSIVE
                                      ? at->step_us - at->stall_us // in 16 bits, largely
                                      : at->plain_step_us * (1.0 + at->recompute_share);
        double most_us = compute_us > in_us ? compute_us : in_us;
        most_us = most_us > out_us ? most_us : out_us;
        bench_cell(&table, outcomes[i].work->name);
        bench_bytes(&table, smallest->arena_bytes);
        bench_bytes(&table, smallest->host_bytes);
        bench_bytes(&table, (uint64_t)(1e9 * outcomes[i].work->published_optimized));
        bench_bytes(&table, at->arena_bytes);
        bench_bytes(&table, at->host_bytes);
        bench_value(&table, 1e-3 * in_us, 1);
        bench_value(&table, 1e-3 * out_us, 1);
        bench_value(&table, 1e-3 * compute_us, 1);
        bench_value(&table, 1e-3 * at->step_us, 1);
        bench_value(&table, at->step_us / most_us, 3);
        bench_value(&table, 1e-3 * at->plain_step_us, 1);
        bench_value(&table, at->plain_step_us / at->step_us, 3);
        bench_value(&table, outcomes[i].of[at_published].wrap_seconds, 2);
    }
    printf("smallest, host: the smallest arena of the mode, and what it has on the host\n"
           "from published on: the plan for the published peak, on an RTX 3090 with 25 GB/s each "
           "way;\n"
           "in, out, computed, step, plain: ms of copies to and from the device, of all that is\n"
           "computed, of a step, of a plain one\n"
           "bound: step over the largest of in, out and all that is computed\n"
           "kept: throughput over that of the plain plan; wrap: seconds to plan\n");
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
        plain[i] = &outcomes[i].of[PLAIN];
        smallest[i] = &outcomes[i].of[CHECKPOINTED];
    }
    print_sizes(outcomes, count);
    print_mode(outcomes, count, BALANCED, AT_PUBLISHED);
    print_mode(outcomes, count, AGGRESSIVE, AGGRESSIVE_AT_PUBLISHED);
    print_peak("plain", plain, outcomes, count);
    print_peak("checkpointed", smallest, outcomes, count);
}

static void print_tsv(const outcome *outcomes, int count) {
    bench_table table =
        bench_table_begin(true, "name params plain_bytes checkpointed_bytes lower_bound_bytes "
                                "plain_activation_bytes activation_bytes recompute "
                                "balanced_bytes balanced_host_bytes published_bytes "
                                "at_published_bytes at_published_step_ratio "
                                "aggressive_bytes aggressive_host_bytes "
                                "aggressive_at_published_bytes "
                                "aggressive_at_published_step_ratio");
    for (int i = 0; i < count; i++) {
        bench_cell(&table, outcomes[i].work->name);
        bench_count(&table, outcomes[i].of[PLAIN].report.param_count);
        bench_count(&table, outcomes[i].of[PLAIN].report.arena_bytes);
        bench_count(&table, outcomes[i].of[CHECKPOINTED].report.arena_bytes);
        bench_count(&table, outcomes[i].of[CHECKPOINTED].report.lower_bound_bytes);
        bench_count(&table, outcomes[i].of[PLAIN].report.activation_peak_bytes);
        bench_count(&table, outcomes[i].of[CHECKPOINTED].report.activation_peak_bytes);
        bench_value(&table, outcomes[i].of[CHECKPOINTED].report.recompute_share, 3);
        const ms_memory_report *at = &outcomes[i].of[AT_PUBLISHED].report;
        bench_count(&table, outcomes[i].of[BALANCED].report.arena_bytes);
        bench_count(&table, outcomes[i].of[BALANCED].report.host_bytes);
        bench_count(&table, (uint64_t)(1e9 * outcomes[i].work->published_optimized));
        bench_count(&table, at->arena_bytes);
        bench_value(&table, at->step_us / at->plain_step_us, 3);
        const ms_memory_report *round = &outcomes[i].of[AGGRESSIVE_AT_PUBLISHED].report;
        bench_count(&table, outcomes[i].of[AGGRESSIVE].report.arena_bytes);
        bench_count(&table, outcomes[i].of[AGGRESSIVE].report.host_bytes);
        bench_count(&table, round->arena_bytes);
        bench_value(&table, round->step_us / round->plain_step_us, 3);
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
            for (int of = PLAIN; of < PURPOSES; of++) {
                outcomes[count].of[of] = make_plan(work, granularity, save_scores, (purpose)of);
            }
            count++;
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
