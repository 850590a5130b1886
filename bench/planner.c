// How well and how fast graphs of many layers are planned, without running them: the predicted time of a
// step over that of the plain plan, and processor time of ms_wrap, by kind of graph, number of layers,
// link and budget. What is found at 100 layers should be found at 10,000, in a hundred times the time.
#include "bench.h"

#include "memscale.h"
#include "nn.h"
#include "models.h"
#include "nets.h"

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

static planner_model planner_create(int kind, int64_t layers, bool has_link, ms_mode mode) {
    planner_model m = {NULL, NULL};
    ms_hardware device = *ms_hardware_find("RTX 3090");
    ms_config config;
    memset(&config, 0, sizeof config);
    config.dry_run = true;
    config.mode = mode;
    config.memory_budget_bytes = UINT64_MAX;
    config.max_host_bytes = (uint64_t)1 << 60;
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

static void print_plan(bench_table *table, int kind, int64_t layers, bool has_link, ms_mode mode,
                       double share) {
    planner_model m = planner_create(kind, layers, has_link, mode);
    ms_memory_report r;
    bench_check(m.model, ms_wrap(m.model));
    bench_check(m.model, ms_report(m.model, &r));
    ms_set_budget(m.model, (uint64_t)(share * (double)r.plain_bytes));
    const clock_t start = clock();
    const ms_result result = ms_wrap(m.model);
    const double seconds = (double)(clock() - start) / CLOCKS_PER_SEC;
    if (result == MS_RESULT_OK) {
        bench_check(m.model, ms_report(m.model, &r));
    } else if (result != MS_RESULT_BUDGET) {
        bench_check(m.model, result);
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
    bool tsv = false;
    const option_spec options[] = {
        {"--tsv", NULL, OPTION_FLAG, &tsv, "tab-separated output"},
        {"--mode", "NAME", OPTION_TEXT, &mode_name, "conservative, balanced or aggressive"},
        {"--kind", "NAME", OPTION_TEXT, &only,
         "all, or equal, transformer, unet, resnet, densenet or random"},
        {"--from", "N", OPTION_COUNT, &layers_min, "the fewest layers"},
        {"--layers", "N", OPTION_COUNT, &layers_max, "the most layers"},
    };
    if (take_options(
            "[options]\nPlans of graphs of many layers, with a link to the host and without. "
            "step: predicted, over\nthat of the plain plan; seconds: processor time of "
            "ms_wrap; by: the search that found it.",
            options, OPTIONS_IN(options), argc, argv, NULL) != 0) {
        return 2;
    }
    const ms_mode mode = take_mode(mode_name);
    bench_table table = bench_table_begin(tsv, "graph layers link mode budget step seconds by");
    for (size_t k = 0; k < sizeof planner_kinds / sizeof planner_kinds[0]; k++) {
        const int kind = planner_kinds[k];
        if (strcmp(only, "all") != 0 && strcmp(only, planner_name(kind)) != 0) {
            continue;
        }
        for (int64_t n = layers_min; n <= layers_max && n < NET_OPEN; n = n * 316 / 100) {
            for (int way = 0; way < 2 * (int)(sizeof shares / sizeof shares[0]); way++) {
                print_plan(&table, kind, n, way % 2 == 0, mode, shares[way / 2]);
            }
        }
    }
    return 0;
}
