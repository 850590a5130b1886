// Five published workloads by dry run: training them with AdamW, by the plain plan in F32, by the
// smallest plan of each mode, and by the plan of each mode for the published peak. Sizes, what is
// copied to and from the host, and predicted times, on an RTX 3090 whose link copies 25 GB/s each
// way; times also on an H200; and what a Jetson Orin with 8 GB can hold. No arithmetic is done and
// no arena allocated.
#include "bench.h"

#define MEMSCALE_IMPLEMENTATION
#include "memscale.h"
#include "nn.h"
#include "models.h"

/* From the mode that may do least to the one that may do most. */
static const ms_mode modes[MS_MODE_COUNT] = {MS_MODE_CONSERVATIVE, MS_MODE_BALANCED,
                                             MS_MODE_AGGRESSIVE};

/* What a plan is made for. */
typedef enum purpose { SMALLEST, AT_PUBLISHED, ON_H200, ON_ORIN, PURPOSES } purpose;

typedef enum part { SUMMARY, TABLES, TSV } part;

typedef struct plan {
    ms_memory_report report; // if it fits
    bool fits;
    uint64_t smallest_bytes; // if it does not: what the mode needs there
    double wrap_seconds;     // 0: known without planning
} plan;

typedef struct outcome {
    const bench_workload *work;
    plan plain, checkpointed; // checkpointed: on the CPU
    plan of[MS_MODE_COUNT][PURPOSES];
} outcome;

typedef struct settings {
    nn_granularity granularity;
    bool save_scores, cuda_scratch;
} settings;

static const uint64_t no_limit = (uint64_t)1 << 50;

// ---- plans --------------------------------------------------------------------------------------

static ms_hardware device_of(purpose of) {
    static const char *const names[PURPOSES] = {"RTX 3090", "RTX 3090", "H200", "Orin Nano 8GB"};
    ms_hardware device = *ms_hardware_find(names[of]);
    if (of == SMALLEST || of == AT_PUBLISHED) {
        device.to_device_gb_per_s = device.to_host_gb_per_s = 25.0;
    }
    return device;
}

/* What training may take of a device that has other users too. */
static uint64_t orin_budget(void) {
    return (uint64_t)(0.85 * (double)device_of(ON_ORIN).total_bytes);
}

static uint64_t published_bytes(const bench_workload *work) {
    return (uint64_t)(1e9 * work->published_optimized);
}

/* As ms_backend_cuda asks for, and the scratch memory of nn_cuda; see examples/estimate/device.h. */
static const nn_device *use_cuda_scratch(const ms_hardware *device, ms_backend *backend) {
    const uint64_t mebibytes = device->compute_major < 9 ? 4 : 32;
    *backend = ms_backend_cpu();
    backend->workspace_bytes = (mebibytes << 20) + 8192;
    backend->device_is_host = false;
    return nn_cuda_dry();
}

/* device NULL: the CPU. */
static plan make_plan(const bench_workload *work, const settings *s, const ms_hardware *device,
                      ms_config *config) {
    plan made;
    nn_transformer_config shape;
    memset(&made, 0, sizeof made);
    if (!bench_shape(work->preset, &shape)) {
        bench_stop("a workload names no preset");
    }
    shape.batch = work->batch;
    shape.sequence = work->sequence;
    shape.granularity = s->granularity;
    shape.save_scores = s->save_scores;
    config->dry_run = true;
    config->max_host_bytes = no_limit; // not from the machine
    const nn_device *kernels = nn_cpu();
    if (device && s->cuda_scratch) {
        kernels = use_cuda_scratch(device, &config->backend);
    }
    bench_model m;
    bench_model_begin(&m, config, kernels);
    nn_half_gradients(m.net, config->mode == MS_MODE_AGGRESSIVE);
    bench_model_build(&m, work->preset, &shape);
    if (device) {
        ms_set_hardware(m.model, device);
    }
    const double start = bench_seconds();
    const ms_result result = ms_wrap(m.model);
    made.wrap_seconds = bench_seconds() - start;
    made.fits = result != MS_RESULT_BUDGET;
    if (made.fits) {
        bench_check(m.model, result);
        bench_check(m.model, ms_report(m.model, &made.report));
        made.report.peak_layer = made.report.overflow_layer = ""; // belong to the model
        made.smallest_bytes = made.report.arena_bytes;
    } else {
        bench_check(m.model, ms_smallest_budget(m.model, &made.smallest_bytes));
    }
    bench_model_destroy(&m);
    return made;
}

/* A mode's plan for a purpose. Where its smallest plan tells that there is none, or that of another
   mode is the same, nothing is planned. */
static plan plan_for(const outcome *o, const settings *s, ms_mode mode, purpose of) {
    const ms_hardware device = device_of(of);
    const plan *smallest = &o->of[mode][SMALLEST];
    const bool shares_memory = device.kind == MS_DEVICE_INTEGRATED;
    ms_config config;
    memset(&config, 0, sizeof config);
    config.mode = mode;
    config.force_optimize = of == SMALLEST;
    config.memory_budget_bytes = of == SMALLEST  ? no_limit
                                 : of == ON_ORIN ? orin_budget()
                                                 : published_bytes(o->work);
    if (shares_memory && mode == MS_MODE_BALANCED) { // there is nowhere to offload to
        plan same = o->of[MS_MODE_CONSERVATIVE][of];
        same.wrap_seconds = 0.0;
        return same;
    }
    if (of != SMALLEST && (mode == MS_MODE_CONSERVATIVE || !shares_memory) &&
        smallest->report.arena_bytes > config.memory_budget_bytes) {
        plan none;
        memset(&none, 0, sizeof none);
        none.smallest_bytes = smallest->report.arena_bytes;
        return none;
    }
    return make_plan(o->work, s, &device, &config);
}

/* The plain plan, for its sizes: every report has its time. */
static plan plain_plan(const bench_workload *work, const settings *s) {
    const ms_hardware device = device_of(SMALLEST);
    ms_config config;
    memset(&config, 0, sizeof config);
    config.memory_budget_bytes = no_limit;
    config.checkpointing = config.offloading = MS_SWITCH_OFF;
    return make_plan(work, s, &device, &config);
}

static plan checkpointed_plan(const bench_workload *work, const settings *s) {
    ms_config config;
    memset(&config, 0, sizeof config);
    config.memory_budget_bytes = no_limit;
    config.mode = MS_MODE_CONSERVATIVE;
    config.force_optimize = true;
    return make_plan(work, s, NULL, &config);
}

/* Makes the plans that a part of the output needs, each once. */
static outcome plan_workload(const bench_workload *work, const settings *s, part what) {
    outcome o;
    memset(&o, 0, sizeof o);
    o.work = work;
    o.plain = plain_plan(work, s);
    if (what == TSV) {
        o.checkpointed = checkpointed_plan(work, s);
    }
    for (int k = 0; k < MS_MODE_COUNT; k++) {
        const ms_mode mode = modes[k];
        const int last = what == TABLES ? ON_ORIN : AT_PUBLISHED;
        for (int of = SMALLEST; of <= last; of++) {
            if (of == SMALLEST || mode == MS_MODE_AGGRESSIVE || what == TABLES ||
                (what == TSV && mode == MS_MODE_BALANCED)) {
                o.of[mode][of] = plan_for(&o, s, mode, (purpose)of);
            }
        }
    }
    return o;
}

// ---- tables for people --------------------------------------------------------------------------

static double throughput(const ms_memory_report *report) {
    return report->plain_step_us / report->step_us;
}

static void print_empty(bench_table *table, int cells) {
    while (cells-- > 0) {
        bench_cell(table, "-");
    }
}

static void print_published(bench_table *table, const bench_workload *work) {
    char text[32], plain[16];
    snprintf(plain, sizeof plain, "%.0f", 1e3 * work->published_plain);
    snprintf(text, sizeof text, "%s -> %.0f", work->published_plain > 0.0 ? plain : "none",
             1e3 * work->published_optimized);
    bench_cell(table, text);
}

static void print_summary(const outcome *outcomes, int count) {
    bench_table table = bench_table_begin(
        false, "workload published plain CONSERVATIVE BALANCED AGGRESSIVE at_published throughput");
    for (int i = 0; i < count; i++) {
        const plan *at = &outcomes[i].of[MS_MODE_AGGRESSIVE][AT_PUBLISHED];
        bench_cell(&table, outcomes[i].work->name);
        print_published(&table, outcomes[i].work);
        bench_bytes(&table, outcomes[i].plain.report.arena_bytes);
        for (int k = 0; k < MS_MODE_COUNT; k++) {
            bench_bytes(&table, outcomes[i].of[modes[k]][SMALLEST].report.arena_bytes);
        }
        if (at->fits) {
            bench_bytes(&table, at->report.arena_bytes);
            bench_value(&table, throughput(&at->report), 2);
        } else {
            print_empty(&table, 2);
        }
    }
    printf(
        "published: MB by MemScale for Python on a GPU of 24 GB, plain -> optimized; none: plain "
        "does not fit\n"
        "plain: arena in F32; then the smallest arena of each mode\n"
        "AGGRESSIVE may round: values, params and gradients to BF16, state of the optimizer to 8 "
        "bits; layers\n"
        "let the gradients of weights and of embedding tables be in 16 bits too "
        "(nn_half_gradients)\n"
        "at_published: arena of AGGRESSIVE for the published peak, and its predicted throughput "
        "over that of\n"
        "the plain F32 step, on an RTX 3090 with 25 GB/s each way; products in BF16 are faster "
        "there\n");
}

static void print_planning(const outcome *outcomes, int count) {
    for (int i = 0; i < count; i++) {
        const plan *plans = outcomes[i].of[MS_MODE_AGGRESSIVE];
        if (strcmp(outcomes[i].work->name, "gpt2-xl") == 0) {
            printf("planning gpt2-xl with all techniques: %.2f s for the published peak, %.2f s "
                   "for the smallest arena\n",
                   plans[AT_PUBLISHED].wrap_seconds, plans[SMALLEST].wrap_seconds);
        }
    }
}

/* A mode's smallest arena, and its plan for the published peak. */
static void print_mode(const outcome *outcomes, int count, ms_mode mode) {
    printf("\n%s\n", ms_mode_name(mode));
    bench_table table = bench_table_begin(
        false, "workload smallest host step/plain by published arena host in out computed step "
               "bound throughput by");
    for (int i = 0; i < count; i++) {
        const plan *at = &outcomes[i].of[mode][AT_PUBLISHED];
        const ms_memory_report *smallest = &outcomes[i].of[mode][SMALLEST].report, *r = &at->report;
        bench_cell(&table, outcomes[i].work->name);
        bench_bytes(&table, smallest->arena_bytes);
        bench_bytes(&table, smallest->host_bytes);
        bench_value(&table, smallest->step_us / smallest->plain_step_us, 2);
        bench_cell(&table, smallest->found_by);
        bench_bytes(&table, published_bytes(outcomes[i].work));
        if (!at->fits) {
            bench_cell(&table, "does not fit");
            print_empty(&table, 8);
            continue;
        }
        const double link = 25e3; // bytes per microsecond
        const double in_us = (double)r->to_device_bytes / link;
        const double out_us = (double)r->to_host_bytes / link;
        const double compute_us = r->step_us - r->stall_us;
        double most_us = compute_us > in_us ? compute_us : in_us;
        most_us = most_us > out_us ? most_us : out_us;
        bench_bytes(&table, r->arena_bytes);
        bench_bytes(&table, r->host_bytes);
        bench_bytes(&table, r->to_device_bytes);
        bench_bytes(&table, r->to_host_bytes);
        bench_value(&table, 1e-3 * compute_us, 1);
        bench_value(&table, 1e-3 * r->step_us, 1);
        bench_value(&table, r->step_us / most_us, 3);
        bench_value(&table, throughput(r), 3);
        bench_cell(&table, r->found_by);
    }
}

static void print_modes(const outcome *outcomes, int count) {
    for (int k = 0; k < MS_MODE_COUNT; k++) {
        print_mode(outcomes, count, modes[k]);
    }
    printf("smallest, host, step/plain: the smallest arena of the mode, what it has on the host, "
           "and how many times\nthe plain F32 step its step takes\n"
           "from published on: the plan for the published peak, on an RTX 3090 with 25 GB/s each "
           "way\n"
           "in, out: bytes of a step that are copied to and from the device\n"
           "computed, step: ms without the waits for copies, and with them\n"
           "bound: step over the largest of computed and of the time of the copies each way\n"
           "throughput: over that of the plain F32 step\n"
           "by: the search that found the plan\n");
}

/* Steps of the plans for the published peak on one device. */
static void print_device(const outcome *outcomes, int count, purpose of) {
    bench_table table =
        bench_table_begin(false, "workload plain CONSERVATIVE throughput BALANCED throughput "
                                 "AGGRESSIVE throughput");
    for (int i = 0; i < count; i++) {
        bench_cell(&table, outcomes[i].work->name);
        bench_value(&table, 1e-3 * outcomes[i].of[MS_MODE_AGGRESSIVE][of].report.plain_step_us, 1);
        for (int k = 0; k < MS_MODE_COUNT; k++) {
            const plan *at = &outcomes[i].of[modes[k]][of];
            if (at->fits) {
                bench_value(&table, 1e-3 * at->report.step_us, 1);
                bench_value(&table, throughput(&at->report), 3);
            } else {
                print_empty(&table, 2);
            }
        }
    }
}

/* The memory of a device that shares it with its host. */
static void print_orin(const outcome *outcomes, int count) {
    bench_table table = bench_table_begin(
        false, "workload plain step CONSERVATIVE step throughput AGGRESSIVE step throughput");
    for (int i = 0; i < count; i++) {
        const plan *checkpointed = &outcomes[i].of[MS_MODE_CONSERVATIVE][ON_ORIN];
        const plan *rounded = &outcomes[i].of[MS_MODE_AGGRESSIVE][ON_ORIN];
        const plan *columns[2] = {checkpointed, rounded};
        const uint64_t plain_bytes = outcomes[i].plain.report.arena_bytes;
        const ms_memory_report *known = rounded->fits ? &rounded->report : &checkpointed->report;
        char text[32];
        bench_cell(&table, outcomes[i].work->name);
        snprintf(text, sizeof text, "%s%.1f MB", plain_bytes > orin_budget() ? "no, " : "",
                 (double)plain_bytes / 1e6);
        bench_cell(&table, text);
        if (rounded->fits || checkpointed->fits) {
            bench_value(&table, 1e-3 * known->plain_step_us, 1);
        } else {
            print_empty(&table, 1);
        }
        for (int k = 0; k < 2; k++) {
            if (columns[k]->fits) {
                bench_bytes(&table, columns[k]->report.arena_bytes);
                bench_value(&table, 1e-3 * columns[k]->report.step_us, 1);
                bench_value(&table, throughput(&columns[k]->report), 3);
            } else {
                snprintf(text, sizeof text, "no, %.1f MB",
                         (double)columns[k]->smallest_bytes / 1e6);
                bench_cell(&table, text);
                print_empty(&table, 2);
            }
        }
    }
}

static void print_devices(const outcome *outcomes, int count) {
    for (int of = AT_PUBLISHED; of <= ON_H200; of++) {
        const ms_hardware device = device_of((purpose)of);
        printf("\n%s, %.0f GB/s each way: ms of a step at the published peak, and throughput over "
               "the plain F32 step\n",
               device.name, device.to_device_gb_per_s);
        print_device(outcomes, count, (purpose)of);
    }
    const ms_hardware orin = device_of(ON_ORIN);
    printf("\n%s, within 85 %% of its memory, %.1f MB\n", orin.name, (double)orin_budget() / 1e6);
    print_orin(outcomes, count);
    printf("no: does not fit; the smallest arena of the mode there\n"
           "Memory is shared with the host, so offloading frees nothing: BALANCED is as "
           "CONSERVATIVE.\n"
           "Throughput is over that of the plain F32 step, whether or not that fits. Where plain "
           "fits, it is the plan.\n");
}

/* One row: a size of each report, found at offset. None if all are 0. */
static void print_bytes(const ms_memory_report *reports[], int count, const char *name,
                        size_t offset) {
    bench_table table = {false, count + 1, 0, false};
    uint64_t bytes[BENCH_WORKLOADS], all = 0;
    for (int i = 0; i < count; i++) {
        memcpy(&bytes[i], (const char *)reports[i] + offset, sizeof bytes[i]);
        all |= bytes[i];
    }
    if (all == 0) {
        return;
    }
    bench_cell(&table, name);
    for (int i = 0; i < count; i++) {
        bench_bytes(&table, bytes[i]);
    }
}

/* A column per workload: what is live at the peak, by category, what the layout adds, and what is
   on the host. */
static void print_peak(const char *title, const ms_memory_report *reports[], const char *columns[],
                       int count) {
    static const struct {
        const char *name;
        size_t offset;
    } sizes[] = {
        {"lower bound", offsetof(ms_memory_report, lower_bound_bytes)},
        {"arena", offsetof(ms_memory_report, arena_bytes)},
        {"activation peak", offsetof(ms_memory_report, activation_peak_bytes)},
        {"on the host", offsetof(ms_memory_report, host_bytes)},
    };
    bench_table table = {false, count + 1, 0, false};
    putchar('\n');
    bench_cell(&table, title);
    for (int i = 0; i < count; i++) {
        bench_cell(&table, columns[i]);
    }
    for (int k = 0; k < MS_CATEGORY_COUNT; k++) {
        print_bytes(reports, count, ms_category_name((ms_category)k),
                    offsetof(ms_memory_report, peak_bytes) + (size_t)k * sizeof(uint64_t));
    }
    for (size_t k = 0; k < sizeof sizes / sizeof sizes[0]; k++) {
        print_bytes(reports, count, sizes[k].name, sizes[k].offset);
    }
    for (int k = 0; k < MS_CATEGORY_COUNT; k++) {
        char name[64];
        snprintf(name, sizeof name, "- %.17s", ms_category_name((ms_category)k));
        print_bytes(reports, count, name,
                    offsetof(ms_memory_report, host_bytes_of) + (size_t)k * sizeof(uint64_t));
    }
}

static void print_peaks(const outcome *outcomes, int count) {
    static const char *const names[MS_MODE_COUNT] = {"BALANCED", "CONSERV.", "AGGRESSIVE"};
    const ms_memory_report *reports[BENCH_WORKLOADS];
    const char *columns[BENCH_WORKLOADS];
    for (int i = 0; i < count; i++) {
        columns[i] = outcomes[i].work->name;
        reports[i] = &outcomes[i].plain.report;
    }
    print_peak("plain", reports, columns, count);
    for (int k = 0; k < MS_MODE_COUNT; k++) {
        for (int of = SMALLEST; of <= AT_PUBLISHED; of++) {
            char title[32];
            int fit = 0;
            for (int i = 0; i < count; i++) {
                const plan *made = &outcomes[i].of[modes[k]][of];
                if (made->fits) {
                    columns[fit] = outcomes[i].work->name;
                    reports[fit++] = &made->report;
                }
            }
            snprintf(title, sizeof title, "%s, %s", names[modes[k]],
                     of == SMALLEST ? "least" : "publ.");
            if (fit > 0) {
                print_peak(title, reports, columns, fit);
            }
        }
    }
    printf("least, publ.: the smallest arena, and that for the published peak; workloads that do "
           "not fit are left out\n");
}

/* Seconds of ms_wrap. */
static void print_seconds(const outcome *outcomes, int count) {
    static const char *const names[PURPOSES] = {"smallest", "at the published peak", "on the H200",
                                                "on the Orin"};
    printf("\nSeconds to plan: CONSERVATIVE, BALANCED, AGGRESSIVE; -: known without planning\n");
    bench_table table = {false, count + 1, 0, false};
    bench_cell(&table, "");
    for (int i = 0; i < count; i++) {
        bench_cell(&table, outcomes[i].work->name);
    }
    for (int of = 0; of < PURPOSES; of++) {
        bench_cell(&table, names[of]);
        for (int i = 0; i < count; i++) {
            char text[64];
            size_t length = 0;
            for (int k = 0; k < MS_MODE_COUNT; k++) {
                const double seconds = outcomes[i].of[modes[k]][of].wrap_seconds;
                char number[16] = "-";
                if (seconds > 0.0) {
                    snprintf(number, sizeof number, "%.2f", seconds);
                }
                length += (size_t)snprintf(text + length, sizeof text - length, "%s%s",
                                           k > 0 ? " " : "", number);
            }
            bench_cell(&table, text);
        }
    }
}

// ---- main ---------------------------------------------------------------------------------------

static void print_tsv(const outcome *outcomes, int count) {
    bench_table table =
        bench_table_begin(true, "name params plain_bytes checkpointed_bytes lower_bound_bytes "
                                "plain_activation_bytes activation_bytes recompute "
                                "balanced_bytes balanced_host_bytes published_bytes "
                                "at_published_bytes at_published_step_ratio "
                                "aggressive_bytes aggressive_host_bytes "
                                "aggressive_at_published_bytes "
                                "aggressive_at_published_step_ratio "
                                "balanced_found_by balanced_at_published_found_by "
                                "aggressive_found_by aggressive_at_published_found_by");
    for (int i = 0; i < count; i++) {
        const ms_memory_report *plain = &outcomes[i].plain.report;
        const ms_memory_report *checkpointed = &outcomes[i].checkpointed.report;
        bench_cell(&table, outcomes[i].work->name);
        bench_count(&table, plain->param_count);
        bench_count(&table, plain->arena_bytes);
        bench_count(&table, checkpointed->arena_bytes);
        bench_count(&table, checkpointed->lower_bound_bytes);
        bench_count(&table, plain->activation_peak_bytes);
        bench_count(&table, checkpointed->activation_peak_bytes);
        bench_value(&table, checkpointed->recompute_share, 3);
        for (int k = 1; k < MS_MODE_COUNT; k++) {
            const plan *plans = outcomes[i].of[modes[k]];
            const plan *at = &plans[AT_PUBLISHED];
            bench_count(&table, plans[SMALLEST].report.arena_bytes);
            bench_count(&table, plans[SMALLEST].report.host_bytes);
            if (modes[k] == MS_MODE_BALANCED) {
                bench_count(&table, published_bytes(outcomes[i].work));
            }
            bench_count(&table, at->report.arena_bytes); // 0: does not fit
            bench_value(&table, at->fits ? 1.0 / throughput(&at->report) : 0.0, 3);
        }
        for (int k = 1; k < MS_MODE_COUNT; k++) {
            const plan *plans = outcomes[i].of[modes[k]];
            for (int of = SMALLEST; of <= AT_PUBLISHED; of++) {
                bench_cell(&table, plans[of].fits ? plans[of].report.found_by : "-");
            }
        }
    }
}

static void print_part(part what, const outcome *outcomes, int count) {
    if (what == TSV) {
        print_tsv(outcomes, count);
        return;
    }
    print_summary(outcomes, count);
    print_planning(outcomes, count);
    if (what == TABLES) {
        print_modes(outcomes, count);
        print_devices(outcomes, count);
        print_peaks(outcomes, count);
        print_seconds(outcomes, count);
    }
}

int main(int argc, char **argv) {
    bool tsv = false, blocks = false, summary = false;
    const char *only = "all";
    settings s;
    memset(&s, 0, sizeof s);
    const option_spec options[] = {
        {"--tsv", NULL, OPTION_FLAG, &tsv, "tab-separated output"},
        {"--summary", NULL, OPTION_FLAG, &summary, "the first table alone"},
        {"--blocks", NULL, OPTION_FLAG, &blocks, "a layer per transformer block, not per operator"},
        {"--scores", NULL, OPTION_FLAG, &s.save_scores, "keep the attention scores for backward"},
        {"--cuda", NULL, OPTION_FLAG, &s.cuda_scratch,
         "with the scratch memory of CUDA, not of the CPU"},
        {"--model", "NAME", OPTION_TEXT, &only,
         "all, or bert-base, bert-large, gpt2-medium, gpt2-large or gpt2-xl"},
    };
    if (take_options("[options]\nMemory and times of five published workloads, by dry run.",
                     options, OPTIONS_IN(options), argc, argv, NULL) != 0) {
        return 2;
    }
    s.granularity = blocks ? NN_BLOCKS : NN_OPERATORS;
    const part what = tsv ? TSV : summary ? SUMMARY : TABLES;
    outcome outcomes[BENCH_WORKLOADS];
    int count = 0;
    for (int i = 0; i < BENCH_WORKLOADS; i++) {
        const bench_workload *work = &bench_workloads[i];
        if (strcmp(only, "all") == 0 || strcmp(only, work->name) == 0) {
            outcomes[count++] = plan_workload(work, &s, what);
        }
    }
    if (count == 0) {
        fail("--model %s: there is no such workload; --help lists them", only);
        return 2;
    }
    print_part(what, outcomes, count);
    return 0;
}
