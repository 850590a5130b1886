// Time slices of a step on the CPU, beside a thread that loads one core, and what an engine does
// between them: how many slices end late, and by how much; the time of all slices of a step over that
// of a whole step; a slice that has nothing to do; a budget that was seen before; suspending and
// resuming over copying as many bytes out and back. Set OMP_NUM_THREADS=1 to train on the other core.
#include "bench.h"

#include <pthread.h>

#define MEMSCALE_IMPLEMENTATION
#include "memscale.h"
#include "nn.h"
#include "models.h"

enum { WHOLE_STEPS = 5, CHANGES = 101, SUSPENSIONS = 11, EMPTY_SLICES = 100000, BINS = 8 };

typedef struct load {
    pthread_t thread;
    long ends; // by __atomic
    double work;
} load;

static void *run_load(void *argument) {
    load *l = (load *)argument;
    while (!__atomic_load_n(&l->ends, __ATOMIC_RELAXED)) {
        for (int i = 0; i < 100000; i++) {
            l->work = l->work * 0.999 + 1.0;
        }
    }
    return NULL;
}

/* One step, in slices of so many microseconds: the time of all, the longest, and the longest excess.
   Returns how many there were. */
typedef struct sliced {
    double seconds, longest;
    uint64_t count, late, bins[BINS]; // late by more than `allowed`; by what part of the slice
} sliced;

static void step_in_slices(bench_model *m, uint64_t microseconds, double allowed, sliced *s) {
    ms_result result = MS_RESULT_MORE;
    double loss;
    bench_write_batch(m);
    while (result == MS_RESULT_MORE) {
        const double start = bench_seconds();
        result = ms_step_slice(m->model, microseconds, &loss);
        const double seconds = bench_seconds() - start;
        const double over = seconds - 1e-6 * (double)microseconds;
        int bin = 0;
        for (double edge = 1e-5; bin < BINS - 1 && over > edge; edge *= 4.0) {
            bin++;
        }
        s->bins[over > 0.0 ? bin : 0] += 1;
        s->seconds += seconds;
        s->longest = seconds > s->longest ? seconds : s->longest;
        s->late += over > allowed;
        s->count += 1;
    }
    bench_check(m->model, result);
}

static double whole_step(bench_model *m) {
    double loss;
    bench_write_batch(m);
    const double start = bench_seconds();
    bench_check(m->model, ms_step(m->model, &loss));
    return bench_seconds() - start;
}

static void print_warning(ms_log_level level, const char *tag, const char *text, void *user) {
    (void)user;
    if (level == MS_LOG_WARNING) {
        printf("%s: %s\n", tag, text);
    }
}

/* Median microseconds of a change between two budgets that were seen before. */
static double change_us(bench_model *m, uint64_t small, uint64_t large) {
    double us[CHANGES];
    for (int i = -2; i < CHANGES; i++) {
        ms_set_budget(m->model, i & 1 ? small : large);
        const double start = bench_seconds();
        bench_check(m->model, ms_wrap(m->model));
        if (i >= 0) {
            us[i] = 1e6 * (bench_seconds() - start);
        }
    }
    return bench_median(us, CHANGES);
}

/* Median time of suspending and resuming, over that of the same allocations and copies. */
static double suspension_ratio(bench_model *m, uint64_t *bytes) {
    double of_model[SUSPENSIONS], of_copies[SUSPENSIONS];
    *bytes = ms_suspended_bytes(m->model);
    ms_memory_report report;
    bench_check(m->model, ms_report(m->model, &report));
    uint8_t *arena = (uint8_t *)malloc((size_t)report.arena_bytes);
    memset(arena, 1, (size_t)report.arena_bytes);
    for (int i = 0; i < SUSPENSIONS; i++) {
        double start = bench_seconds();
        bench_check(m->model, ms_suspend(m->model, NULL));
        bench_check(m->model, ms_resume(m->model));
        of_model[i] = bench_seconds() - start;
        start = bench_seconds();
        uint8_t *image = (uint8_t *)malloc((size_t)*bytes);
        memcpy(image, arena, (size_t)*bytes);
        free(arena);
        arena = (uint8_t *)malloc((size_t)report.arena_bytes);
        memcpy(arena, image, (size_t)*bytes);
        free(image);
        of_copies[i] = bench_seconds() - start;
    }
    free(arena);
    return bench_median(of_model, SUSPENSIONS) / bench_median(of_copies, SUSPENSIONS);
}

int main(int argc, char **argv) {
    bool idle = false;
    const char *preset = "gpt2-124M";
    int64_t batch = 1, sequence = 64, slice_us = 2000, slices = 10000, most_us = 0;
    const option_spec options[] = {
        {"--preset", "NAME", OPTION_TEXT, &preset, "gpt2-124M, -355M, or gpt2-tiny"},
        {"--batch", "N", OPTION_COUNT, &batch, "sequences in a batch"},
        {"--sequence", "N", OPTION_COUNT, &sequence, "tokens in a sequence"},
        {"--slice", "N", OPTION_COUNT, &slice_us, "microseconds of a slice"},
        {"--slices", "N", OPTION_COUNT, &slices, "how many, at least"},
        {"--longest", "N", OPTION_COUNT, &most_us, "max_instruction_us"},
        {"--no-load", NULL, OPTION_FLAG, &idle, "nothing beside the slices"},
    };
    if (take_options("[options]\nTime slices of a training step of GPT-2 on the CPU.", options,
                     OPTIONS_IN(options), argc, argv, NULL) != 0) {
        return 2;
    }
    const nn_transformer_config shape = bench_gpt2_shape(preset, batch, sequence, 1, 1);
    ms_config config;
    memset(&config, 0, sizeof config);
    config.memory_budget_bytes = (uint64_t)1 << 50;
    config.max_instruction_us = (double)most_us;
    config.empirical_profiling = most_us ? MS_SWITCH_ON : MS_SWITCH_DEFAULT;
    config.log = print_warning;
    bench_model m = bench_model_create(&config, nn_cpu(), "gpt2", &shape);
    bench_check(m.model, ms_wrap(m.model));
    bench_check(m.model, nn_init(m.net, 1));
    for (int i = 0; most_us && i < 2; i++) { // measures, and plans again
        (void)whole_step(&m);
    }

    sliced single, all;
    memset(&single, 0, sizeof single);
    memset(&all, 0, sizeof all);
    for (int i = 0; i < 3; i++) { // the first time of each instruction, and what is slow only then
        memset(&single, 0, sizeof single);
        step_in_slices(&m, 1, 0.0, &single);
    }
    load l;
    memset(&l, 0, sizeof l);
    if (!idle && pthread_create(&l.thread, NULL, run_load, &l) != 0) {
        return 1;
    }
    double whole[WHOLE_STEPS * 1000];
    int steps = 0;
    while ((all.count < (uint64_t)slices || steps < WHOLE_STEPS) && steps < WHOLE_STEPS * 1000) {
        step_in_slices(&m, (uint64_t)slice_us, single.longest, &all);
        whole[steps++] = whole_step(&m);
    }
    const double in_slices = all.seconds / steps;
    printf("%llu slices of %lld us in %d steps; longest instruction alone %.0f us\n",
           (unsigned long long)all.count, (long long)slice_us, steps, 1e6 * single.longest);
    printf("late by more than that: %llu (%.4f %%); longest slice %.0f us\n",
           (unsigned long long)all.late, 100.0 * (double)all.late / (double)all.count,
           1e6 * all.longest);
    double edge = 10.0;
    for (int bin = 0; bin < BINS; bin++, edge *= 4.0) {
        printf("  over by %s %8.0f us: %llu\n", bin < BINS - 1 ? "at most" : "more than",
               bin < BINS - 1 ? edge : edge / 4.0, (unsigned long long)all.bins[bin]);
    }
    printf("slices of a step over a whole step: %.3f\n", in_slices / bench_median(whole, steps));

    double loss;
    bench_write_batch(&m);
    (void)!ms_step_slice(m.model, 1, &loss);
    const double start = bench_seconds();
    for (int i = 0; i < EMPTY_SLICES; i++) {
        (void)!ms_step_slice(m.model, 0, &loss);
    }
    printf("a slice that has nothing to do: %.3f us\n",
           1e6 * (bench_seconds() - start) / (double)EMPTY_SLICES);
    bench_check(m.model, ms_step_slice(m.model, UINT64_MAX, &loss));
    if (!idle) {
        __atomic_store_n(&l.ends, 1, __ATOMIC_RELAXED);
        (void)pthread_join(l.thread, NULL);
    }

    ms_memory_report report;
    uint64_t smallest, bytes;
    bench_check(m.model, ms_report(m.model, &report));
    bench_check(m.model, ms_smallest_budget(m.model, &smallest));
    const double us =
        change_us(&m, smallest + (report.arena_bytes - smallest) / 3, report.arena_bytes);
    printf("a change to a budget that was seen before: %.0f us\n", us);
    const double ratio = suspension_ratio(&m, &bytes);
    printf("suspend and resume, of %.1f MB, over copying them out and back: %.2f\n",
           1e-6 * (double)bytes, ratio);
    bench_model_destroy(&m);
    return 0;
}
