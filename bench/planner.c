// How well and how fast graphs of many layers are planned, without running them: the predicted time of a
// step over that of the plain plan, and processor time of ms_wrap, by kind of graph, number of layers,
// link and budget. What is found at 100 layers should be found at 10,000, in a hundred times the time.
// With --refused: what it takes to refuse a budget, and one of the host, over what it takes to plan.
#include "bench.h"

#include "memscale.h"
#include "nn.h"
#include "models.h"
#include "nets.h"

static const uint64_t PLANNER_ANY_HOST = (uint64_t)1 << 60;

typedef enum planner_kind {
    PLANNER_TRANSFORMER = NET_KIND_COUNT, // GPT-2 by operators: 10 layers a block
    PLANNER_KIND_COUNT
} planner_kind;

static const int planner_kinds[] = {NET_EQUAL,  PLANNER_TRANSFORMER, NET_UNET,
                                    NET_RESNET, NET_DENSENET,        NET_RANDOM};

static const char *planner_name(int kind) {
    return kind == (int)PLANNER_TRANSFORMER ? "transformer" : net_names[kind];
}

/* A model of a kind on an RTX 3090; nets have times of their own, and so a link of their own. */
typedef struct planner_model {
    ms_model *model;
    nn_net *net;
} planner_model;

static nn_transformer_config planner_shape(int64_t layers) {
    nn_transformer_config shape;
    memset(&shape, 0, sizeof shape);
    (void)nn_preset("gpt2-124M", &shape);
    shape.layers = layers / 10 > 0 ? layers / 10 : 1;
    shape.batch = 4;
    shape.sequence = shape.context = 512;
    shape.vocabulary = 1024;
    return shape;
}

static planner_model planner_create(int kind, int64_t layers, bool has_link, ms_mode mode,
                                    uint64_t host_bytes) {
    planner_model m = {NULL, NULL};
    ms_hardware device = *ms_hardware_find("RTX 3090");
    ms_config config;
    memset(&config, 0, sizeof config);
    config.dry_run = true;
    config.mode = mode;
    config.memory_budget_bytes = UINT64_MAX;
    config.max_host_bytes = host_bytes;
    config.offloading = has_link ? MS_SWITCH_DEFAULT : MS_SWITCH_OFF;
    bench_check(NULL, ms_create(&config, &m.model));
    if (kind == (int)PLANNER_TRANSFORMER) {
        const nn_transformer_config shape = planner_shape(layers);
        m.net = nn_create_on(m.model, nn_cpu());
        if (!m.net) {
            bench_stop("no memory for a net");
        }
        (void)nn_gpt2(m.net, &shape);
    } else { // its times are not those of the device: so is its link
        device.to_device_gb_per_s = device.to_host_gb_per_s = 0.1;
        device.launch_us = 1.0;
        net_register(m.model, (net_kind)kind, (uint32_t)layers, 1);
    }
    ms_set_hardware(m.model, &device);
    return m;
}

static void planner_destroy(planner_model *m) {
    ms_destroy(m->model);
    if (m->net) {
        nn_destroy(m->net);
    }
}

/* Processor time of ms_wrap, which may find that nothing fits. */
static ms_result time_wrap(const planner_model *m, double *seconds) {
    const clock_t start = clock();
    const ms_result result = ms_wrap(m->model);
    *seconds = (double)(clock() - start) / CLOCKS_PER_SEC;
    if (result != MS_RESULT_BUDGET) {
        bench_check(m->model, result);
    }
    return result;
}

static void print_plan(bench_table *table, int kind, int64_t layers, bool has_link, ms_mode mode,
                       double share) {
    planner_model m = planner_create(kind, layers, has_link, mode, PLANNER_ANY_HOST);
    ms_memory_report r;
    bench_check(m.model, ms_wrap(m.model));
    bench_check(m.model, ms_report(m.model, &r));
    ms_set_budget(m.model, (uint64_t)(share * (double)r.plain_bytes));
    double seconds;
    const ms_result result = time_wrap(&m, &seconds);
    if (result == MS_RESULT_OK) {
        bench_check(m.model, ms_report(m.model, &r));
    }
    bench_cell(table, planner_name(kind));
    bench_count(table, r.layer_count);
    bench_cell(table, has_link ? "yes" : "no");
    bench_cell(table, ms_mode_name(mode));
    bench_value(table, share, 2);
    if (result == MS_RESULT_OK) {
        bench_value(table, r.step_us / r.plain_step_us, 4);
    } else {
        bench_cell(table, "-");
    }
    bench_value(table, seconds, 3);
    bench_cell(table, result == MS_RESULT_OK ? r.found_by : "-");
    planner_destroy(&m);
}

/* The smallest budget, and the bytes of the plain plan. */
static uint64_t find_budgets(int kind, int64_t layers, bool has_link, ms_mode mode,
                             uint64_t *plain_bytes) {
    planner_model m = planner_create(kind, layers, has_link, mode, PLANNER_ANY_HOST);
    ms_memory_report r;
    uint64_t least;
    bench_check(m.model, ms_wrap(m.model));
    bench_check(m.model, ms_report(m.model, &r));
    bench_check(m.model, ms_smallest_budget(m.model, &least));
    planner_destroy(&m);
    *plain_bytes = r.plain_bytes;
    return least;
}

/* What a new model takes to plan for two budgets, or to refuse them. */
static ms_result time_new(int kind, int64_t layers, ms_mode mode, uint64_t budget,
                          uint64_t host_bytes, double *seconds, ms_memory_report *r) {
    planner_model m = planner_create(kind, layers, true, mode, host_bytes);
    ms_set_budget(m.model, budget);
    const ms_result result = time_wrap(&m, seconds);
    if (result == MS_RESULT_OK) {
        bench_check(m.model, ms_report(m.model, r));
    }
    planner_destroy(&m);
    return result;
}

/* A budget of a tenth less than the smallest is refused, and one that needs a host which is too small:
   half of what the plan has there, or a half of that and so on. Each is compared with a plan: for a
   budget half way between the smallest and the plain one, and for that which the host is too small for.
   Returns the number of layers. */
static int64_t print_refusals(bench_table *table, int kind, int64_t layers, ms_mode mode) {
    uint64_t plain, alone, host_bytes;
    double planned, refused, planned_host, refused_host;
    ms_memory_report r, ignored;
    const uint64_t least = find_budgets(kind, layers, true, mode, &plain);
    (void)time_new(kind, layers, mode, least + (plain - least) / 2, PLANNER_ANY_HOST, &planned, &r);
    (void)time_new(kind, layers, mode, least - least / 10, PLANNER_ANY_HOST, &refused, &ignored);
    alone = find_budgets(kind, layers, false, mode, &plain);
    const uint64_t between = least + (alone - least) / 2;
    (void)time_new(kind, layers, mode, between, PLANNER_ANY_HOST, &planned_host, &r);
    for (host_bytes = r.host_bytes / 2;
         time_new(kind, layers, mode, between, host_bytes > 0 ? host_bytes : 1, &refused_host,
                  &ignored) == MS_RESULT_OK &&
         host_bytes > 0;
         host_bytes /= 2) {
    }
    bench_cell(table, planner_name(kind));
    bench_count(table, r.layer_count);
    bench_cell(table, ms_mode_name(mode));
    bench_value(table, planned, 3);
    bench_value(table, refused, 3);
    bench_value(table, refused / planned, 2);
    bench_value(table, planned_host, 3);
    bench_value(table, refused_host, 3);
    bench_value(table, refused_host / planned_host, 2);
    return r.layer_count;
}

static ms_mode take_mode(const char *name) {
    for (int mode = 0; mode < MS_MODE_COUNT; mode++) {
        const char *of = ms_mode_name((ms_mode)mode);
        size_t k = 0;
        while (name[k] && tolower((unsigned char)name[k]) == tolower((unsigned char)of[k])) {
            k++;
        }
        if (!name[k] && !of[k]) {
            return (ms_mode)mode;
        }
    }
    fail_name("--mode", name);
    exit(2);
}

int main(int argc, char **argv) {
    static const double shares[] = {0.7, 0.5, 0.3};
    int64_t layers_min = 100, layers_max = 1000;
    const char *mode_name = "balanced", *only = "all";
    bool tsv = false, refused = false;
    const option_spec options[] = {
        {"--tsv", NULL, OPTION_FLAG, &tsv, "tab-separated output"},
        {"--mode", "NAME", OPTION_TEXT, &mode_name, "conservative, balanced or aggressive"},
        {"--kind", "NAME", OPTION_TEXT, &only,
         "all, or equal, transformer, unet, resnet, densenet or random"},
        {"--from", "N", OPTION_COUNT, &layers_min, "the fewest layers"},
        {"--layers", "N", OPTION_COUNT, &layers_max, "the most layers"},
        {"--refused", NULL, OPTION_FLAG, &refused, "what it takes to refuse a budget"},
    };
    if (take_options(
            "[options]\nPlans of graphs of many layers, with a link to the host and without. "
            "step: predicted, over\nthat of the plain plan; seconds: processor time of "
            "ms_wrap; by: the search that found it.",
            options, OPTIONS_IN(options), argc, argv, NULL) != 0) {
        return 2;
    }
    const ms_mode mode = take_mode(mode_name);
    bench_table table = bench_table_begin(
        tsv, refused ? "graph layers mode planned refused over host_planned host_refused over"
                     : "graph layers link mode budget step seconds by");
    for (size_t k = 0; k < sizeof planner_kinds / sizeof planner_kinds[0]; k++) {
        const int kind = planner_kinds[k];
        if (strcmp(only, "all") != 0 && strcmp(only, planner_name(kind)) != 0) {
            continue;
        }
        for (int64_t n = layers_min; n <= layers_max && n < NET_OPEN;
             n = n * (refused ? 166 : 316) / 100) {
            if (refused) {
                const int64_t count = print_refusals(&table, kind, n, mode);
                n = n > count ? n : count; // some kinds have a least number
                continue;
            }
            for (int way = 0; way < 2 * (int)(sizeof shares / sizeof shares[0]); way++) {
                print_plan(&table, kind, n, way % 2 == 0, mode, shares[way / 2]);
            }
        }
    }
    return 0;
}
