// What a plan in a file takes: processor time of a ms_wrap that loads its plan over that of one that
// searches it, bytes of the file, and whether the programs are the same; GPT-2 on an RTX 3090, by mode and
// budget.
#include "bench.h"

#include "memscale.h"
#include "nn.h"
#include "models.h"

enum { PLANS_MOST_BYTES = 4 << 20, PLANS_ROUNDS = 5 };

typedef struct plans_file {
    unsigned char data[PLANS_MOST_BYTES];
    size_t bytes;
} plans_file;

static plans_file the_file;

static int plans_write(void *user, const void *data, size_t bytes) {
    plans_file *f = (plans_file *)user;
    if (bytes > sizeof f->data - f->bytes) {
        return 1;
    }
    memcpy(f->data + f->bytes, data, bytes);
    f->bytes += bytes;
    return 0;
}

static int plans_read(void *user, uint64_t offset, void *data, size_t bytes) {
    memcpy(data, ((const plans_file *)user)->data + offset, bytes);
    return 0;
}

static bench_model plans_create(const char *preset, ms_mode mode) {
    nn_transformer_config shape;
    ms_config config;
    memset(&config, 0, sizeof config);
    config.dry_run = true;
    config.mode = mode;
    config.memory_budget_bytes = UINT64_MAX;
    config.max_host_bytes = (uint64_t)1 << 60;
    (void)bench_shape(preset, &shape);
    shape.batch = 4;
    shape.sequence = 512;
    bench_model m = bench_model_create(&config, nn_cpu(), preset, &shape);
    ms_set_hardware(m.model, ms_hardware_find("RTX 3090"));
    return m;
}

/* Processor time of ms_wrap in ms, and of ms_plan_load where there is a file. */
static double plans_wrap(ms_model *m, plans_file *file) {
    const clock_t start = clock();
    if (file) {
        ms_source source;
        source.read = plans_read;
        source.user = file;
        source.size = file->bytes;
        bench_check(m, ms_plan_load(m, &source));
    }
    bench_check(m, ms_wrap(m));
    return 1e3 * (double)(clock() - start) / CLOCKS_PER_SEC;
}

static void plans_row(bench_table *table, const char *preset, ms_mode mode, double share) {
    ms_memory_report r;
    double planned_ms = 0.0, loaded_ms = 1e300;
    bench_model m = plans_create(preset, mode);
    (void)plans_wrap(m.model, NULL);
    bench_check(m.model, ms_report(m.model, &r));
    bench_model_destroy(&m);
    const uint64_t budget = (uint64_t)(share * (double)r.plain_bytes);
    m = plans_create(preset, mode);
    uint64_t least;
    bench_check(m.model, ms_smallest_budget(m.model, &least));
    bench_model_destroy(&m);
    if (least > budget) {
        return;
    }
    m = plans_create(preset, mode);
    ms_set_budget(m.model, budget);
    planned_ms = plans_wrap(m.model, NULL);
    bench_check(m.model, ms_report(m.model, &r));
    ms_sink sink;
    sink.write = plans_write;
    sink.user = &the_file;
    the_file.bytes = 0;
    bench_check(m.model, ms_plan_save(m.model, &sink));
    bench_model_destroy(&m);
    bool same = true;
    for (int k = 0; k < PLANS_ROUNDS; k++) {
        ms_memory_report loaded;
        m = plans_create(preset, mode);
        ms_set_budget(m.model, budget);
        const double ms = plans_wrap(m.model, &the_file);
        loaded_ms = ms < loaded_ms ? ms : loaded_ms;
        bench_check(m.model, ms_report(m.model, &loaded));
        same = same && loaded.plan_hash == r.plan_hash && !(loaded.step_us < r.step_us) &&
               !(loaded.step_us > r.step_us);
        bench_model_destroy(&m);
    }
    bench_cell(table, preset);
    bench_cell(table, ms_mode_name(mode));
    bench_value(table, share, 2);
    bench_cell(table, r.found_by);
    bench_value(table, planned_ms, 1);
    bench_value(table, loaded_ms, 1);
    bench_value(table, loaded_ms / planned_ms, 4);
    bench_count(table, the_file.bytes);
    bench_cell(table, same ? "same" : "others");
}

int main(int argc, char **argv) {
    static const char *const presets[] = {"gpt2-124M", "gpt2-1558M"};
    static const double shares[] = {0.8, 0.6,
                                    0.4}; // of the arena of the plain plan, where that is possible
    const char *only = "all";
    bool tsv = false;
    const option_spec options[] = {
        {"--tsv", NULL, OPTION_FLAG, &tsv, "tab-separated output"},
        {"--preset", "NAME", OPTION_TEXT, &only, "all, gpt2-124M or gpt2-1558M"},
    };
    if (take_options(
            "[options]\nPlans that are searched, and loaded from a file. ms: processor time of "
            "ms_wrap, with\nms_plan_load the least of five; over: loaded over planned.",
            options, OPTIONS_IN(options), argc, argv, NULL) != 0) {
        return 2;
    }
    bench_table table =
        bench_table_begin(tsv, "model mode budget by planned_ms loaded_ms over bytes programs");
    for (size_t k = 0; k < sizeof presets / sizeof presets[0]; k++) {
        if (strcmp(only, "all") != 0 && strcmp(only, presets[k]) != 0) {
            continue;
        }
        for (int mode = 0; mode < MS_MODE_COUNT; mode++) {
            for (size_t n = 0; n < sizeof shares / sizeof shares[0]; n++) {
                plans_row(&table, presets[k], (ms_mode)mode, shares[n]);
            }
        }
    }
    return 0;
}
