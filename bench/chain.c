// Plans the checkpointing of a chain from a CSV file, for one budget after the other: peak,
// step time relative to that of keeping everything, how long planning takes, and which search found
// the plan. With a link to the host, what is kept can be moved there and back too.
#include "bench.h"

#define MEMSCALE_IMPLEMENTATION
#include "memscale.h"
#include "chains.h"

typedef struct outcome {
    bool fits;
    uint64_t peak_bytes, host_bytes;
    double relative_time, plan_ms;
    const char *found_by;
} outcome;

static void stop(const char *path, uint64_t line, const char *text) {
    fflush(stdout);
    if (line) {
        fprintf(stderr, "%s:%llu: %s\n", path, (unsigned long long)line, text);
    } else {
        fprintf(stderr, "%s: %s\n", path, text);
    }
    exit(1);
}

static void check(const ms_model *model, ms_result result) {
    if (result != MS_RESULT_OK) {
        stop(ms_result_name(result), 0, ms_last_error(model));
    }
}

/* Bytes, or a multiple of the peak of keeping everything, such as 0.5x; false if it is neither. */
static bool take_budget(const char *text, uint64_t all, uint64_t *budget) {
    char *end;
    errno = 0;
    *budget = strtoull(text, &end, 10);
    if (text[0] >= '0' && text[0] <= '9' && *end == '\0') {
        return errno == 0;
    }
    const double share = strtod(text, &end);
    const double bytes = share * (double)all;
    *budget = bytes >= 0.0 && bytes < 1e18 ? (uint64_t)bytes : 0;
    return end != text && strcmp(end, "x") == 0 && share >= 0.0 && bytes < 1e18;
}

/* A device whose link copies so many bytes of the chain in a microsecond, in both directions at once,
   and loses no time with anything else. */
static ms_hardware linked_device(double bytes_per_us) {
    ms_hardware h;
    memset(&h, 0, sizeof h);
    snprintf(h.name, sizeof h.name, "device of the chain");
    h.kind = MS_DEVICE_DISCRETE;
    h.total_bytes = h.free_bytes = (uint64_t)1 << 60;
    h.launch_us = 1e-9;
    h.memory_gb_per_s = 1e9;
    h.to_device_gb_per_s = h.to_host_gb_per_s = 1e-3 * (double)CHAIN_SCALE * bytes_per_us;
    return h;
}

static outcome measure(const chain *c, uint64_t budget, int repeats, double link, bool tiles) {
    outcome o;
    ms_config config;
    ms_memory_report report;
    double *ms = (double *)malloc((size_t)repeats * sizeof *ms);
    if (!ms) {
        stop("chain", 0, "no memory for the times");
    }
    memset(&o, 0, sizeof o);
    memset(&config, 0, sizeof config);
    const ms_hardware device = linked_device(link);
    config.mode = MS_MODE_CONSERVATIVE;
    config.offloading = link > 0.0 ? MS_SWITCH_ON : MS_SWITCH_DEFAULT;
    config.tiling = tiles ? MS_SWITCH_ON : MS_SWITCH_DEFAULT;
    config.max_host_bytes = UINT64_MAX;
    config.early_update = MS_SWITCH_OFF;
    config.dry_run = true;
    config.memory_budget_bytes = chain_budget(budget);
    for (int i = 0; i < repeats; i++) {
        ms_model *m;
        const ms_result created = ms_create(&config, &m);
        check(m, created);
        chain_register(m, c, tiles);
        if (link > 0.0) {
            ms_set_hardware(m, &device);
        }
        const clock_t start = clock(); // processor time, which other programs do not add to
        const ms_result result = ms_wrap(m);
        ms[i] = 1e3 * (double)(clock() - start) / CLOCKS_PER_SEC;
        o.fits = result == MS_RESULT_OK;
        if (o.fits) {
            check(m, ms_report(m, &report));
            o.peak_bytes = chain_bytes(report.arena_bytes);
            o.host_bytes = report.host_bytes / CHAIN_SCALE;
            o.found_by = report.found_by;
            o.relative_time =
                link > 0.0 ? report.step_us / report.plain_step_us : 1.0 + report.recompute_share;
        } else if (result != MS_RESULT_BUDGET) {
            check(m, result);
        }
        ms_destroy(m);
    }
    o.plan_ms = bench_median(ms, repeats);
    free(ms);
    return o;
}

static void print_row(bench_table *table, const char *path, uint64_t budget, const outcome *o,
                      bool linked) {
    const char *slash = strrchr(path, '/');
    bench_cell(table, slash && !table->tsv ? slash + 1 : path);
    bench_bytes(table, budget);
    if (o->fits) {
        bench_bytes(table, o->peak_bytes);
        bench_value(table, o->relative_time, 4);
    } else {
        bench_cell(table, "inf");
        bench_cell(table, "inf");
    }
    bench_value(table, o->plan_ms, 3);
    if (linked) {
        bench_bytes(table, o->host_bytes);
    }
    bench_cell(table, o->fits ? o->found_by : "-");
}

/* What the command line has beside options: FILE, then budgets. */
typedef struct arguments {
    option_words words;
    bool tsv, tiles;
    int64_t repeats;
    float link; // bytes per microsecond; 0: there is none
} arguments;

static int take_arguments(arguments *a, int argc, char **argv) {
    const option_spec options[] = {
        {"--tsv", NULL, OPTION_FLAG, &a->tsv, "tab-separated output, sizes in bytes"},
        {"--repeats", "N", OPTION_COUNT, &a->repeats,
         "plans for each budget; plan_ms is their median"},
        {"--link", "X", OPTION_REAL, &a->link,
         "bytes that can be copied to the host, and from it, in a microsecond"},
        {"--tiles", NULL, OPTION_FLAG, &a->tiles, "stages may be computed in tiles of 32 rows"},
    };
    const char *const usage =
        "[options] FILE [budget ...]\n"
        "Plans a chain: a CSV with the columns stage,ain,aout,abar,tf,tb,tmpf,tmpb. Budgets are "
        "bytes,\n"
        "or multiples of the peak of keeping everything, such as 0.5x. Without any: 1x to 0.15x.";
    if (take_options(usage, options, OPTIONS_IN(options), argc, argv, &a->words) != 0) {
        return 1;
    }
    return a->words.count > 0 ? 0 : fail("no FILE given; --help tells more");
}

int main(int argc, char **argv) {
    static const char *const usual[] = {"1x",   "0.95x", "0.9x", "0.85x", "0.8x", "0.75x",
                                        "0.7x", "0.65x", "0.6x", "0.55x", "0.5x", "0.45x",
                                        "0.4x", "0.35x", "0.3x", "0.25x", "0.2x", "0.15x"};
    arguments a = {{{NULL}, 0}, false, false, 5, 0.0f};
    if (take_arguments(&a, argc, argv) != 0) {
        return 2;
    }
    const char *path = a.words.items[0];
    const bool own = a.words.count > 1;
    const char *const *budgets = own ? a.words.items + 1 : usual;
    const int rows = own ? a.words.count - 1 : (int)(sizeof usual / sizeof usual[0]);

    chain c;
    uint64_t line, budget;
    const char *wrong = chain_read(&c, path, &line);
    if (wrong) {
        stop(path, line, wrong);
    }
    for (int i = 0; i < rows; i++) {
        if (!take_budget(budgets[i], chain_peak(&c), &budget)) {
            fail("%s: not a budget: give bytes, or a multiple such as 0.5x", budgets[i]);
            return 2;
        }
    }
    const bool linked = a.link > 0.0f;
    bench_table table = bench_table_begin(
        a.tsv, linked ? "file budget_bytes peak_bytes relative_time plan_ms host_bytes found_by"
                      : "file budget_bytes peak_bytes relative_time plan_ms found_by");
    for (int i = 0; i < rows; i++) {
        take_budget(budgets[i], chain_peak(&c), &budget);
        const outcome o = measure(&c, budget, (int)a.repeats, (double)a.link, a.tiles);
        print_row(&table, path, budget, &o, linked);
    }
    chain_free(&c);
    return 0;
}
