// The update of AdamW on the CPU, by the format of its state: nanoseconds an element, beside that of
// F32 in the same run. Arrays lie one after the other, as in an arena, where those of a param with
// a power of two of elements are at distances that caches take badly; and, for comparison, some
// cache lines farther apart. --loops: all loops of the CPU backend, on one thread and on data that a
// cache holds, to compare compilers and their options.
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

// ---- loops ---------------------------------------------------------------------------------------

enum { LOOP_ELEMENTS = 1 << 16, LOOP_SIDE = 256 }; // of the matrices: so many rows and columns

static float floats[4][LOOP_ELEMENTS];
static uint16_t halves[3][LOOP_ELEMENTS]; // whose bits are numbers in either format

typedef struct loop_case {
    const char *what;
    ms_dtype to, from; // of casts and adds; of updates: of the value and the gradient
    ms_optimizer_kind kind;
    ms_state_format format;
} loop_case;

static void *loop_data(ms_dtype dtype, int which) {
    return dtype == MS_DTYPE_F32 ? (void *)floats[which] : (void *)halves[which];
}

static void run_update(const ms_backend *cpu, const loop_case *c) {
    static const ms_update_factors factors = {-1e-3f, 0.9999f, 0.9f,  0.999f, 0.1f,
                                              1e-3f,  1.0f,    1e-8f, 0.0f,   0};
    static ms_step_state step;
    ms_update_args args;
    memset(&args, 0, sizeof args);
    args.kind = c->kind;
    args.count = LOOP_ELEMENTS;
    args.value = (float *)loop_data(c->to, 0);
    args.gradient = (float *)loop_data(c->from, 1);
    args.value_dtype = c->to;
    args.gradient_dtype = c->from;
    args.factors = &factors;
    args.state_of_step = &step;
    for (int k = 0; k < (c->kind == MS_OPTIMIZER_ADAMW ? 2 : 1); k++) {
        args.state[k] = floats[2 + k];
        args.state_format[k] = c->format;
    }
    (void)cpu->update(cpu->user, &args);
}

static void run_gemm(const ms_backend *cpu) {
    ms_matrix x[3];
    memset(x, 0, sizeof x);
    for (int k = 0; k < 3; k++) {
        x[k].data = floats[k];
        x[k].rows = x[k].cols = x[k].stride = LOOP_SIDE;
        x[k].batch_count = 1;
    }
    (void)cpu->gemm(cpu->user, 1.0f, &x[0], &x[1], 0.0f, &x[2]);
}

static void run_loop(const ms_backend *cpu, const loop_case *c) {
    void *user = cpu->user;
    double sum = 0.0;
    uint32_t nonfinite = 0;
    if (strcmp(c->what, "cast") == 0) {
        (void)cpu->cast(user, loop_data(c->to, 2), c->to, loop_data(c->from, 1), c->from,
                        LOOP_ELEMENTS);
    } else if (strcmp(c->what, "add") == 0) {
        (void)cpu->add(user, loop_data(c->to, 2), c->to, loop_data(c->from, 1), c->from,
                       LOOP_ELEMENTS);
    } else if (strcmp(c->what, "fill") == 0) {
        (void)cpu->fill_f32(user, floats[2], 1.0f, LOOP_ELEMENTS);
    } else if (strcmp(c->what, "scale") == 0) {
        (void)cpu->scale_f32(user, floats[1], floats[3], LOOP_ELEMENTS);
    } else if (strcmp(c->what, "squares") == 0) {
        (void)cpu->add_squares(user, loop_data(c->from, 1), c->from, LOOP_ELEMENTS, &sum, 1,
                               &nonfinite);
    } else if (strcmp(c->what, "gemm") == 0) {
        run_gemm(cpu);
    } else {
        run_update(cpu, c);
    }
}

#define LOOP_PAIRS(what)                                                                           \
    {what, MS_DTYPE_F32, MS_DTYPE_F32, MS_OPTIMIZER_NONE, MS_STATE_FORMAT_F32},                    \
        {what, MS_DTYPE_F32, MS_DTYPE_BF16, MS_OPTIMIZER_NONE, MS_STATE_FORMAT_F32},               \
        {what, MS_DTYPE_F32, MS_DTYPE_F16, MS_OPTIMIZER_NONE, MS_STATE_FORMAT_F32},                \
        {what, MS_DTYPE_BF16, MS_DTYPE_F32, MS_OPTIMIZER_NONE, MS_STATE_FORMAT_F32}, {             \
        what, MS_DTYPE_F16, MS_DTYPE_F32, MS_OPTIMIZER_NONE, MS_STATE_FORMAT_F32                   \
    }
#define LOOP_UPDATES(what, kind)                                                                   \
    {what, MS_DTYPE_F32, MS_DTYPE_F32, kind, MS_STATE_FORMAT_F32},                                 \
        {what, MS_DTYPE_F32, MS_DTYPE_F32, kind, MS_STATE_FORMAT_BF16},                            \
        {what, MS_DTYPE_F32, MS_DTYPE_F32, kind, MS_STATE_FORMAT_8BIT}, {                          \
        what, MS_DTYPE_BF16, MS_DTYPE_BF16, kind, MS_STATE_FORMAT_BF16                             \
    }

static const loop_case loop_cases[] = {
    LOOP_PAIRS("cast"),
    LOOP_PAIRS("add"),
    {"fill", MS_DTYPE_F32, MS_DTYPE_F32, MS_OPTIMIZER_NONE, MS_STATE_FORMAT_F32},
    {"scale", MS_DTYPE_F32, MS_DTYPE_F32, MS_OPTIMIZER_NONE, MS_STATE_FORMAT_F32},
    {"squares", MS_DTYPE_F32, MS_DTYPE_F32, MS_OPTIMIZER_NONE, MS_STATE_FORMAT_F32},
    {"squares", MS_DTYPE_F32, MS_DTYPE_BF16, MS_OPTIMIZER_NONE, MS_STATE_FORMAT_F32},
    LOOP_UPDATES("adamw", MS_OPTIMIZER_ADAMW),
    LOOP_UPDATES("sgd", MS_OPTIMIZER_SGD),
    LOOP_UPDATES("lion", MS_OPTIMIZER_LION),
    {"gemm", MS_DTYPE_F32, MS_DTYPE_F32, MS_OPTIMIZER_NONE, MS_STATE_FORMAT_F32},
};

static void fill_loops(void) {
    uint64_t random = 1;
    memset(floats, 0, sizeof floats);
    floats[3][0] = 1.0f; // the factor
    for (int i = 0; i < LOOP_ELEMENTS; i++) {
        random = random * 6364136223846793005u + 1442695040888963407u;
        floats[0][i] = (float)(int32_t)(random >> 32) * 1e-10f;
        floats[1][i] = (float)(int32_t)(random >> 36) * 1e-10f;
        for (int k = 0; k < 3; k++) {
            halves[k][i] = (uint16_t)(random >> (40 + k)) & 0xbfff;
        }
    }
}

/* Nanoseconds an element of each loop (gemm: a thousand multiplications), the median. */
static void time_loops(bool tsv, int repeats) {
    static const char *const dtypes[] = {"f32", "bf16", "f16"};
    static const char *const formats[] = {"f32", "bf16", "8bit"};
    static const ms_state_format all[] = {MS_STATE_FORMAT_F32, MS_STATE_FORMAT_BF16,
                                          MS_STATE_FORMAT_8BIT};
    const ms_backend cpu = ms_backend_cpu();
    bench_table table = bench_table_begin(tsv, "loop to from state ns_element");
#ifdef _OPENMP
    omp_set_num_threads(1);
#endif
    for (size_t k = 0; k < sizeof loop_cases / sizeof loop_cases[0]; k++) {
        const loop_case *c = &loop_cases[k];
        const double count = strcmp(c->what, "gemm") == 0
                                 ? 1e-3 * (double)(LOOP_SIDE * LOOP_SIDE * LOOP_SIDE)
                                 : (double)LOOP_ELEMENTS;
        double ns[MOST_REPEATS];
        int format = 0;
        fill_loops();
        while (all[format] != c->format) {
            format++;
        }
        for (int round = -1; round < repeats; round++) { // the first one warms up
            const double start = bench_seconds();
            run_loop(&cpu, c);
            ns[round < 0 ? 0 : round] = 1e9 * (bench_seconds() - start) / count;
        }
        bench_cell(&table, c->what);
        bench_cell(&table, dtypes[c->to == MS_DTYPE_F32 ? 0 : c->to == MS_DTYPE_BF16 ? 1 : 2]);
        bench_cell(&table, dtypes[c->from == MS_DTYPE_F32 ? 0 : c->from == MS_DTYPE_BF16 ? 1 : 2]);
        bench_cell(&table, c->kind == MS_OPTIMIZER_NONE ? "-" : formats[format]);
        bench_value(&table, bench_median(ns, repeats), 3);
    }
}

int main(int argc, char **argv) {
    int64_t elements = 32 << 20, repeats = 7;
    bool tsv = false, loops = false;
    const option_spec options[] = {
        {"--elements", "N", OPTION_COUNT, &elements, "of the param"},
        {"--repeats", "N", OPTION_COUNT, &repeats, "of which the median counts, at most 100"},
        {"--tsv", NULL, OPTION_FLAG, &tsv, "for programs"},
        {"--loops", NULL, OPTION_FLAG, &loops,
         "all loops of the CPU backend, by one thread, in a cache"},
    };
    if (take_options("[options]\nTimes AdamW on the CPU by the format of its state.", options,
                     OPTIONS_IN(options), argc, argv, NULL) != 0 ||
        check_most("--repeats", repeats, MOST_REPEATS) != 0) {
        return 2;
    }
    if (loops) {
        time_loops(tsv, (int)repeats);
        return 0;
    }
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
