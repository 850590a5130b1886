// Training on a GPU, in parts that --part chooses among. workloads: the published ones, plain and
// checkpointed: predicted and measured memory, time of a step by the GPU's events and by the clock, time
// of the host to enqueue one, arithmetic, and losses that must be equal bit for bit. steps: GPT-2 with
// 1,024 tokens in BF16 and TF32, in parts of the memory. slices: a step in slices of milliseconds. The
// other parts are copies, matrix products by shape, the library's kernels against a copy of as many
// bytes, and the executor's own time, with callbacks that do nothing.
//
// Arithmetic of a step: 6 N + 12 L C T per token, N params, L layers of C channels, T tokens in a
// sequence (Chowdhery et al., "PaLM", 2022, appendix B). Recomputation does not count.
#include "bench.h"

#define MEMSCALE_IMPLEMENTATION
#include "memscale.h"
#include "nn.h"
#include "models.h"

enum { NOTES_BYTES = 8192, STEPS_MAX = 256, WARMUP_MAX = 64, REPEATS_MAX = 32 };

typedef struct settings {
    bool tsv, markdown, tiny, no_graph;
    const char *part, *only, *commit;
    int64_t steps, warmup, repeats, elements, seconds;
    double started;          // when the program was
    bool good;               // no comparison has failed
    double instruction_us;   // of the executor alone; 0: not measured
    char notes[NOTES_BYTES]; // lines to print after the table of a part
} settings;

/* A mistake ends the program. */
static void parse_options(settings *s, int argc, char **argv) {
    s->part = s->only = "all";
    s->steps = 20;
    s->warmup = 5;
    s->repeats = 1;
    s->elements = (int64_t)1 << 26;
    s->started = bench_seconds();
    s->good = true;
    const option_spec options[] = {
        {"--part", "NAME", OPTION_TEXT, &s->part,
         "machine, copies, executor, kernels, products, workloads, steps, slices,\n"
         "several with commas, or all"},
        {"--model", "NAME", OPTION_TEXT, &s->only,
         "all, one of the workloads, or gpt2-124M or gpt2-774M of the steps"},
        {"--seconds", "N", OPTION_COUNT, &s->seconds, "after which no row begins any more"},
        {"--tsv", NULL, OPTION_FLAG, &s->tsv, "tab-separated output"},
        {"--markdown", NULL, OPTION_FLAG, &s->markdown,
         "tables for bench/results; the header only with --part machine"},
        {"--tiny", NULL, OPTION_FLAG, &s->tiny,
         "tiny models and sizes, which also run in the tests' emulation"},
        {"--no-graph", NULL, OPTION_FLAG, &s->no_graph,
         "leave out the runs by recordings (CUDA graphs)"},
        {"--steps", "N", OPTION_COUNT, &s->steps, "timed steps, 256 at most"},
        {"--warmup", "N", OPTION_COUNT, &s->warmup, "steps before them, in workloads, 64 at most"},
        {"--repeats", "N", OPTION_COUNT, &s->repeats,
         "rounds of all variants of a workload, 32 at most"},
        {"--elements", "N", OPTION_COUNT, &s->elements, "of the arrays of the kernels"},
        {"--commit", "NAME", OPTION_TEXT, &s->commit, "for the header, if not that of git"},
    };
    if (take_options("[options]\nTraining on a GPU: memory, time, arithmetic, bits.", options,
                     OPTIONS_IN(options), argc, argv, NULL) != 0 ||
        check_most("--steps", s->steps, STEPS_MAX) != 0 ||
        check_most("--warmup", s->warmup, WARMUP_MAX) != 0 ||
        check_most("--repeats", s->repeats, REPEATS_MAX) != 0) {
        exit(2);
    }
}

#ifndef NN_CUDA

int main(int argc, char **argv) {
    static settings s;
    parse_options(&s, argc, argv);
    fail("it was built without CUDA; where there is nvcc, `make gpu-build` builds "
         "build/cuda/bench/gpu with it");
    return 2;
}

#else

#include <cublas_v2.h>
#include <cuda_runtime.h>

#include "gpu_device.h"
#include "gpu_steps.h"

typedef enum plan_kind { PLAN_PLAIN, PLAN_HALF, PLAN_SMALLEST } plan_kind;

static const char *const plan_names[] = {"plain", "half", "smallest"};

/* A way to train one workload. Of those with the same arithmetic, the first is the plain plan. */
typedef struct variant {
    plan_kind plan;
    bool tf32, graph;
} variant;

/* Those without TF32 are run for one workload only. */
static const variant variants[] = {
    {PLAN_PLAIN, true, false},     {PLAN_HALF, true, false},    {PLAN_SMALLEST, true, false},
    {PLAN_PLAIN, true, true},      {PLAN_SMALLEST, true, true}, {PLAN_PLAIN, false, false},
    {PLAN_SMALLEST, false, false},
};
enum { VARIANTS = sizeof variants / sizeof variants[0] };

/* Small enough for the emulation of the tests. */
static const bench_workload tiny_workloads[] = {{"gpt2-tiny", "gpt2-tiny", 2, 12, 0.0, 0.0},
                                                {"bert-tiny", "bert-tiny", 2, 12, 0.0, 0.0}};

typedef struct outcome {
    const variant *how;
    bool fits, same_bits;
    uint64_t predicted_bytes;
    uint64_t wrap_bytes, step_bytes; // taken from the device by ms_wrap; and by the first step too
    ms_memory_report report;
    double event_ms[REPEATS_MAX * STEPS_MAX], wall_ms[REPEATS_MAX];
    double enqueue_us[REPEATS_MAX * STEPS_MAX];
    double losses[WARMUP_MAX + 2]; // the first step, those to warm up, the last
    int loss_count, sample_count, wall_count;
} outcome;

// ---- models -------------------------------------------------------------------------------------

static ms_config make_config(const variant *v, const bench_workload *work,
                             const nn_transformer_config *shape) {
    ms_config config;
    memset(&config, 0, sizeof config);
    config.backend = ms_backend_cuda(0);
    config.tf32 = v->tf32;
    config.cuda_graph = v->graph;
    config.memory_budget_bytes =
        v->plan == PLAN_HALF
            ? bench_half_budget(&config.backend, nn_cuda(), work->preset, shape)
            : (uint64_t)1 << 50; // not from the machine: the plan does not depend on what is free
    config.force_optimize = v->plan == PLAN_SMALLEST;
    return config;
}

static uint64_t predict(const ms_config *config, const bench_workload *work,
                        const nn_transformer_config *shape) {
    ms_memory_report report;
    ms_config dry = *config;
    dry.dry_run = true;
    bench_model m = bench_model_create(&dry, nn_cuda(), work->preset, shape);
    bench_check(m.model, ms_wrap(m.model));
    bench_check(m.model, ms_report(m.model, &report));
    bench_model_destroy(&m);
    return report.arena_bytes;
}

/* Steps whose losses are read: the first, and those that warm up. */
static void run_first_steps(outcome *o, const bench_model *m, const settings *s, uint64_t before) {
    for (int i = 0; i <= (int)s->warmup; i++) {
        bench_check(m->model, ms_step(m->model, &o->losses[i]));
        if (i == 0) {
            bench_check(m->model, ms_synchronize(m->model));
            o->step_bytes = taken_since(before);
        }
    }
}

/* Steps as a trainer takes them, one after the other without waiting. */
static void run_timed_steps(outcome *o, const bench_model *m, const settings *s) {
    static cudaEvent_t events[STEPS_MAX + 1];
    const int count = (int)s->steps;
    cudaStream_t stream = (cudaStream_t)ms_stream(m->model);
    for (int i = 0; i <= count; i++) {
        check_cuda(cudaEventCreate(&events[i]));
    }
    bench_check(m->model, ms_synchronize(m->model));
    const double start = bench_seconds();
    check_cuda(cudaEventRecord(events[0], stream));
    for (int i = 0; i < count; i++) {
        bench_check(m->model, ms_step(m->model, NULL));
        check_cuda(cudaEventRecord(events[i + 1], stream));
    }
    bench_check(m->model, ms_synchronize(m->model));
    o->wall_ms[o->wall_count++] = 1e3 * (bench_seconds() - start) / (double)count;
    for (int i = 0; i < count; i++) {
        float ms = 0.0f;
        check_cuda(cudaEventElapsedTime(&ms, events[i], events[i + 1]));
        o->event_ms[o->sample_count + i] = (double)ms;
    }
    for (int i = 0; i <= count; i++) {
        check_cuda(cudaEventDestroy(events[i]));
    }
}

/* Before each step the GPU is idle, so that the host never waits for room in a queue. */
static void run_enqueued_steps(outcome *o, const bench_model *m, const settings *s) {
    for (int i = 0; i < (int)s->steps; i++) {
        bench_check(m->model, ms_synchronize(m->model));
        const double start = bench_seconds();
        bench_check(m->model, ms_step(m->model, NULL));
        o->enqueue_us[o->sample_count + i] = 1e6 * (bench_seconds() - start);
    }
}

static void run_variant(outcome *o, const bench_workload *work, const nn_transformer_config *shape,
                        const settings *s) {
    const ms_config config = make_config(o->how, work, shape);
    const int first_loss = o->loss_count;
    double known[WARMUP_MAX + 2];
    memcpy(known, o->losses, sizeof known);
    o->predicted_bytes = predict(&config, work, shape);
    bench_model m = bench_model_create(&config, nn_cuda(), work->preset, shape);
    const uint64_t before = device_free_bytes();
    const ms_result result = ms_wrap(m.model);
    o->fits = result != MS_RESULT_OUT_OF_MEMORY;
    if (o->fits) {
        bench_check(m.model, result);
        o->wrap_bytes = taken_since(before);
        bench_check(m.model, ms_report(m.model, &o->report));
        o->report.peak_layer = ""; // belongs to the model
        bench_check(m.model, nn_init(m.net, 1));
        bench_write_batch(&m);
        run_first_steps(o, &m, s, before);
        run_timed_steps(o, &m, s);
        run_enqueued_steps(o, &m, s);
        bench_check(m.model, ms_step(m.model, &o->losses[s->warmup + 1]));
        o->sample_count += (int)s->steps;
        o->loss_count = (int)s->warmup + 2;
    }
    bench_model_destroy(&m);
    if (first_loss > 0 && memcmp(known, o->losses, (size_t)first_loss * sizeof *known) != 0) {
        bench_stop("a repetition has other losses than the first run");
    }
}

// ---- tables -------------------------------------------------------------------------------------

static double step_flops(const bench_workload *work, const nn_transformer_config *shape,
                         uint64_t params) {
    const double tokens = (double)(work->batch * work->sequence);
    const double attention = 12.0 * (double)(shape->layers * shape->channels * shape->sequence);
    return tokens * (6.0 * (double)params + attention);
}

/* instruction_us: time of the executor alone for an instruction. */
static void print_outcome(bench_table *table, outcome *o, const bench_workload *work,
                          const nn_transformer_config *shape, double instruction_us) {
    const int n = o->sample_count;
    const double ms = n > 0 ? bench_median(o->event_ms, n) : 0.0;
    const bool timed = ms > 0.0, all = table->tsv;
    const double per_ms = timed ? 1.0 / ms : 0.0, executor_us = 1e-3 * instruction_us;
    if (all) {
        bench_cell(table, "memscale.h");
    }
    bench_cell(table, work->name);
    bench_cell(table, plan_names[o->how->plan]);
    bench_cell(table, o->how->tf32 ? "tf32" : "fp32");
    bench_cell(table, o->how->graph ? "graph" : "stream");
    if (all) {
        bench_count(table, (uint64_t)work->batch);
        bench_count(table, (uint64_t)work->sequence);
        bench_count(table, o->report.param_count);
    }
    bench_bytes(table, o->predicted_bytes);
    optional_bytes(table, o->fits, o->report.arena_bytes);
    optional_bytes(table, o->fits, o->wrap_bytes);
    optional_bytes(table, o->fits, o->step_bytes);
    optional_value(table, timed, ms, 3);
    if (all) {
        optional_value(table, timed, o->event_ms[0], 3);
        optional_value(table, timed, o->event_ms[n > 0 ? n - 1 : 0], 3);
    }
    optional_value(table, o->fits, bench_median(o->wall_ms, o->wall_count), 3);
    optional_value(table, o->fits, bench_median(o->enqueue_us, n), 1);
    if (all) {
        bench_count(table, o->report.instruction_count);
        optional_value(table, timed && instruction_us > 0.0,
                       100.0 * executor_us * per_ms * o->report.instruction_count, 3);
        optional_value(table, o->fits, o->report.recompute_share, 4);
    }
    optional_value(table, timed, 1e-9 * per_ms * step_flops(work, shape, o->report.param_count), 2);
    if (all) {
        optional_value(table, o->fits, o->losses[0], 6);
    }
    optional_value(table, o->fits, o->losses[o->loss_count > 0 ? o->loss_count - 1 : 0], 6);
    bench_cell(table, !o->fits ? "-" : o->same_bits ? "yes" : "NO");
}

/* Compares with the first outcome of the same arithmetic. Prints the reason and returns false if
   the bits are not equal or the arena is not as predicted. */
static bool judge(outcome *outcomes, int index, const bench_workload *work) {
    outcome *o = &outcomes[index];
    const outcome *first = o;
    for (int k = index; k >= 0; k--) {
        const bool alike = outcomes[k].how->tf32 == o->how->tf32 && outcomes[k].fits;
        first = alike ? &outcomes[k] : first;
    }
    o->same_bits = memcmp(o->losses, first->losses, sizeof o->losses) == 0;
    const bool as_predicted = !o->fits || o->predicted_bytes == o->report.arena_bytes;
    if (o->fits && (!o->same_bits || !as_predicted)) {
        fprintf(stderr, "%s, %s: %s\n", work->name, plan_names[o->how->plan],
                as_predicted ? "the losses are not those of the plain plan"
                             : "the arena is not as large as predicted");
    }
    return !o->fits || (o->same_bits && as_predicted);
}

static bool is_wanted(const variant *v, const bench_workload *work, const settings *s) {
    const bool fp32_too = strcmp(work->name, s->tiny ? "gpt2-tiny" : "gpt2-medium") == 0;
    return (v->tf32 || fp32_too) && !(v->graph && s->no_graph);
}

static void run_workload(bench_table *table, const bench_workload *work, settings *s) {
    static outcome outcomes[VARIANTS];
    nn_transformer_config shape;
    int count = 0;
    if (!bench_shape(work->preset, &shape)) {
        bench_stop("a workload names no preset");
    }
    shape.batch = work->batch;
    shape.sequence = work->sequence;
    memset(outcomes, 0, sizeof outcomes);
    for (int k = 0; k < VARIANTS; k++) {
        if (is_wanted(&variants[k], work, s)) {
            outcomes[count++].how = &variants[k];
        }
    }
    for (int repeat = 0; repeat < (int)s->repeats; repeat++) {
        for (int k = 0; k < count; k++) {
            run_variant(&outcomes[k], work, &shape, s);
        }
    }
    for (int k = 0; k < count; k++) {
        s->good = judge(outcomes, k, work) && s->good;
        print_outcome(table, &outcomes[k], work, &shape, s->instruction_us);
    }
}

static void run_workloads(settings *s) {
    load_kernels();
    bench_table table = begin_table(
        s, s->tsv ? "framework model plan arithmetic launch batch sequence params "
                    "predicted_bytes peak_bytes wrap_bytes taken_bytes ms ms_min ms_max "
                    "wall_ms enqueue_us instructions executor_percent recompute_share "
                    "tflops loss_first loss_last same_bits"
                  : "model plan arithmetic launch predicted arena wrap_takes "
                    "step_takes ms wall_ms enqueue_us TFLOP/s loss same_bits");
    const bench_workload *works = s->tiny ? tiny_workloads : bench_workloads;
    const int count = s->tiny ? 2 : (int)BENCH_WORKLOADS;
    for (int i = 0; i < count; i++) {
        if ((strcmp(s->only, "all") == 0 || strcmp(s->only, works[i].name) == 0) &&
            has_time(s, works[i].name)) {
            run_workload(&table, &works[i], s);
        }
    }
}

// ---- main ---------------------------------------------------------------------------------------

/* The commit by git, unless one was given. */
static void find_commit(const settings *s, char *commit, size_t length) {
    FILE *git = s->commit ? NULL : popen("git rev-parse --short HEAD 2> /dev/null", "r");
    snprintf(commit, length, "%s", s->commit ? s->commit : "unknown");
    if (git) {
        char line[64];
        if (fgets(line, sizeof line, git)) {
            line[strcspn(line, "\n")] = 0;
            snprintf(commit, length, "%s", line);
        }
        pclose(git);
    }
}

static void print_header(const settings *s) {
    struct cudaDeviceProp gpu;
    cublasHandle_t blas;
    int driver = 0, runtime = 0, version = 0;
    char commit[64], date[32];
    const char *mark = s->markdown ? "- " : "# ";
    const time_t now = time(NULL);
    find_commit(s, commit, sizeof commit);
    strftime(date, sizeof date, "%Y-%m-%d %H:%M UTC", gmtime(&now));
    check_cuda(cudaGetDeviceProperties(&gpu, 0));
    check_cuda(cudaDriverGetVersion(&driver));
    check_cuda(cudaRuntimeGetVersion(&runtime));
    if (cublasCreate(&blas) != CUBLAS_STATUS_SUCCESS ||
        cublasGetVersion(blas, &version) != CUBLAS_STATUS_SUCCESS ||
        cublasDestroy(blas) != CUBLAS_STATUS_SUCCESS) {
        bench_stop("cuBLAS cannot be started");
    }
    printf("%s%s, commit %s, memscale.h %d.%d.%d\n", mark, date, commit, MEMSCALE_VERSION_MAJOR,
           MEMSCALE_VERSION_MINOR, MEMSCALE_VERSION_PATCH);
    printf("%s%s, compute capability %d.%d, %d multiprocessors, %.1f GiB\n", mark, gpu.name,
           gpu.major, gpu.minor, gpu.multiProcessorCount,
           (double)gpu.totalGlobalMem / 1073741824.0);
    printf("%sdriver for CUDA %d.%d, runtime %d.%d, cuBLAS %d\n", mark, driver / 1000,
           driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10, version);
    if (!s->markdown) {
        printf("# %lld timed steps, %lld to warm up, %lld repeats; medians\n", (long long)s->steps,
               (long long)s->warmup, (long long)s->repeats);
    }
}

static void run_nothing(settings *s) {
    (void)s; // the header is all
}

/* In the order in which they are run. */
static const struct {
    const char *name;
    void (*run)(settings *);
} parts[] = {{"machine", run_nothing}, {"copies", run_copies},     {"executor", run_executor},
             {"kernels", run_kernels}, {"products", run_products}, {"workloads", run_workloads},
             {"steps", run_steps},     {"slices", run_slices}};
enum { PARTS = sizeof parts / sizeof parts[0] };

/* Whether a list such as "copies,kernels" has the name. */
static bool is_listed(const char *list, const char *name) {
    const size_t length = strlen(name);
    for (; *list; list += strcspn(list, ","), list += *list == ',') {
        if (strcspn(list, ",") == length && strncmp(list, name, length) == 0) {
            return true;
        }
    }
    return false;
}

static bool is_part(const settings *s, int part) {
    return strcmp(s->part, "all") == 0 || is_listed(s->part, parts[part].name);
}

/* Runs the parts that are asked for; returns how many there are. */
static int run_parts(settings *s) {
    int run = 0;
    for (int i = 0; i < PARTS; i++) {
        if (is_part(s, i)) {
            if (run++ > 0) {
                putchar('\n');
            }
            parts[i].run(s);
            print_notes(s);
            fflush(stdout);
        }
    }
    return run;
}

/* Whether there is a device. If so, this creates its context, which then does not count as memory of
   the models. */
static bool find_device(void) {
    int count = 0;
    cudaError_t error = cudaGetDeviceCount(&count);
    error = error == cudaSuccess && count > 0 ? cudaSetDevice(0) : error;
    error = error == cudaSuccess && count > 0 ? cudaFree(NULL) : error;
    if (error != cudaSuccess || count == 0) {
        fprintf(stderr, "there is no CUDA device here: %s\n", cudaGetErrorString(error));
    }
    return error == cudaSuccess && count > 0;
}

int main(int argc, char **argv) {
    static settings s;
    parse_options(&s, argc, argv);
    if (!find_device()) {
        return 2;
    }
    if (!s.markdown || is_part(&s, 0)) {
        print_header(&s);
    }
    if (run_parts(&s) == 0) {
        fail("--part %s: no such part; --help lists them", s.part);
        return 2;
    }
    return s.good ? 0 : 1;
}

#endif // NN_CUDA
