// The update of AdamW on the CPU, by the format of its state: nanoseconds an element, beside that of
// F32 in the same run. Arrays lie one after the other, as in an arena, where those of a param with
// a power of two of elements are at distances that caches take badly; and, for comparison, some
// cache lines farther apart.
#include "bench.h"

#define MEMSCALE_IMPLEMENTATION
#include "memscale.h"

#ifdef _OPENMP
#include <omp.h>
#endif

enum { MOST_REPEATS = 100, FORMATS = 4, APART_BYTES = 12480 };

static const struct {
    const char *name;
    ms_state_format format[2];
    double bytes_moved; // an element, read and written
} rows[FORMATS] = {
    {"f32", {MS_STATE_FORMAT_F32, MS_STATE_FORMAT_F32}, 28.0},
    {"bf16", {MS_STATE_FORMAT_BF16, MS_STATE_FORMAT_BF16}, 20.0},
    {"bf16_f32", {MS_STATE_FORMAT_BF16, MS_STATE_FORMAT_F32}, 24.0},
    {"8bit", {MS_STATE_FORMAT_8BIT, MS_STATE_FORMAT_8BIT}, 16.0625},
};

/* One param and its state, with room for F32. */
typedef struct param {
    uint8_t *memory;
    float *value, *gradient, *state[2];
} param;

static param make_param(uint64_t count, uint64_t apart_bytes) {
    const uint64_t each = (count * sizeof(float) + 63) / 64 * 64 + apart_bytes;
    param p;
    p.memory = (uint8_t *)malloc((size_t)(4 * each + 64));
    if (!p.memory) {
        fprintf(stderr, "no memory for %llu elements\n", (unsigned long long)count);
        exit(1);
    }
    uint8_t *at = p.memory + (64 - (uintptr_t)p.memory % 64) % 64;
    p.value = (float *)(void *)at;
    p.gradient = (float *)(void *)(at + each);
    p.state[0] = (float *)(void *)(at + 2 * each);
    p.state[1] = (float *)(void *)(at + 3 * each);
    memset(at, 0, (size_t)(4 * each));
    uint64_t random = 1;
    for (uint64_t i = 0; i < count; i++) {
        random = random * 6364136223846793005u + 1442695040888963407u;
        p.value[i] = (float)(int32_t)(random >> 32) * 1e-10f;
        p.gradient[i] = (float)(int32_t)(random >> 36) * (float)(random >> 60) * 1e-11f;
    }
    return p;
}

/* Nanoseconds an element of each format, by turns: median of so many rounds. */
static void time_formats(uint64_t count, uint64_t apart_bytes, int repeats, double *median_ns) {
    static double ns[FORMATS][MOST_REPEATS];
    const ms_backend cpu = ms_backend_cpu();
    const ms_update_factors factors = {-1e-3f, 0.9999f, 0.9f,  0.999f, 0.1f,
                                       1e-3f,  1.0f,    1e-8f, 0.0f,   0};
    ms_step_state step;
    param params[FORMATS];
    memset(&step, 0, sizeof step);
    for (int k = 0; k < FORMATS; k++) {
        params[k] = make_param(count, apart_bytes);
    }
    for (int round = -1; round < repeats; round++) { // the first one warms up
        for (int k = 0; k < FORMATS; k++) {
            ms_update_args args;
            memset(&args, 0, sizeof args);
            args.kind = MS_OPTIMIZER_ADAMW;
            args.count = count;
            args.value = params[k].value;
            args.gradient = params[k].gradient;
            args.factors = &factors;
            args.state_of_step = &step;
            for (int s = 0; s < 2; s++) {
                args.state[s] = params[k].state[s];
                args.state_format[s] = rows[k].format[s];
            }
            const double start = bench_seconds();
            if (cpu.update(cpu.user, &args) != 0) {
                fprintf(stderr, "the update failed\n");
                exit(1);
            }
            ns[k][round < 0 ? 0 : round] = 1e9 * (bench_seconds() - start) / (double)count;
        }
        step.seed++;
    }
    for (int k = 0; k < FORMATS; k++) {
        median_ns[k] = bench_median(ns[k], repeats);
        free(params[k].memory);
    }
}

int main(int argc, char **argv) {
    int64_t elements = 32 << 20, repeats = 7;
    bool tsv = false;
    const bench_option options[] = {
        {"--elements", "of the param", NULL, &elements, NULL},
        {"--repeats", "of which the median counts, at most 100", NULL, &repeats, NULL},
        {"--tsv", "for programs", &tsv, NULL, NULL},
    };
    bench_options(argc, argv, "Times AdamW on the CPU by the format of its state.", options, 3);
    repeats = repeats > MOST_REPEATS ? (int64_t)MOST_REPEATS : repeats;
    bench_table table =
        bench_table_begin(tsv, "format threads apart_bytes ns_element gb_s over_f32");
#ifdef _OPENMP
    const int most = omp_get_max_threads();
#else
    const int most = 1;
#endif
    for (int apart = 0; apart < 2; apart++) {
        for (int threads = 1; threads <= most; threads *= 2) {
            double ns[FORMATS];
#ifdef _OPENMP
            omp_set_num_threads(threads);
#endif
            time_formats((uint64_t)elements, (uint64_t)apart * APART_BYTES, (int)repeats, ns);
            for (int k = 0; k < FORMATS; k++) {
                bench_cell(&table, rows[k].name);
                bench_count(&table, (uint64_t)threads);
                bench_count(&table, (uint64_t)apart * APART_BYTES);
                bench_value(&table, ns[k], 3);
                bench_value(&table, rows[k].bytes_moved / ns[k], 1);
                bench_value(&table, ns[k] / ns[0], 2);
            }
        }
    }
    return 0;
}
