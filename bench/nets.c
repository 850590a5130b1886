// Plans of nets that are no chains, without running them: the smallest arena over that of the plain
// plan, and the predicted time of a step over that of a plain one, at some budgets; beside
// checkpointing every square root of the number of layers, and beside the greedy search alone. Or what
// it takes to refuse a budget, beside planning for one.
#include "bench.h"

#include <time.h>

#include "private.h"
#include "nn.h"
#include "models.h"
#include "nets.h"

/* A net, and what the searches inside the library need. */
typedef struct subject {
    ms_model *model;
    msi_store *store;
    msi_plan *plan;
    msi_lowering lowering;
    msi_shortage shortage;
    msi_scorer scorer;
    uint64_t plain_bytes;
    double plain_us;
} subject;

static void subject_create(subject *s, net_kind kind, uint32_t layers) {
    ms_config config;
    memset(&config, 0, sizeof config);
    config.dry_run = true;
    config.memory_budget_bytes = UINT64_MAX;
    bench_check(NULL, ms_create(&config, &s->model));
    net_register(s->model, kind, layers, 1);
    bench_check(s->model, ms_wrap(s->model));
    bench_check(s->model, msi_make_plans(s->model, MSI_GOAL_PLAIN, &s->store, &s->plan));
    if (!msi_scorer_init(&s->scorer, s->model, s->store, s->plan, &s->lowering, &s->shortage)) {
        bench_stop("no memory");
    }
    s->plain_bytes = s->plan->plain_bytes;
    s->plain_us = s->plan->plain_step_us;
}

static void subject_destroy(subject *s) {
    msi_lowering_free(&s->lowering);
    msi_plans_free(s->model, s->plan);
    msi_store_free(s->model, s->store);
    ms_destroy(s->model);
}

/* Segments of as many layers as there are segments: what is used within one alone is dropped. */
static msi_score square_root(subject *s) {
    const msi_graph *g = &s->model->graph;
    uint32_t width = 1;
    uint32_t *last = (uint32_t *)calloc(g->tensors.count, sizeof *last);
    msi_tensor_decision *d = (msi_tensor_decision *)malloc(msi_decisions_bytes(g));
    if (!last || !d) {
        bench_stop("no memory");
    }
    while (width * width < g->layers.count) {
        width++;
    }
    for (uint32_t i = 0; i < g->layers.count; i++) {
        for (MSI_EACH(in, g, &g->layers.items[i], MSI_GROUP_IN)) {
            last[in.tensor] = i;
        }
    }
    msi_search base = MSI_ZERO_INIT;
    base.scorer = &s->scorer;
    base.how.early = true;
    msi_decide_base(&base, d);
    for (uint32_t t = 0; t < g->tensors.count; t++) {
        const uint32_t producer = g->tensors.items[t].producer;
        const uint32_t end = last[t] > producer ? last[t] : producer;
        if (msi_is_choice(g, t) && producer / width == end / width) {
            d[t].pass = 1;
        }
    }
    const msi_score score = msi_score_of(&s->scorer, d);
    free(last);
    free(d);
    return score;
}

/* The greedy plan for a budget or, with 0, the smallest one. */
static msi_score greedy_alone(subject *s, uint64_t budget) {
    msi_search search;
    msi_greedy w;
    memset(&search, 0, sizeof search);
    search.scorer = &s->scorer;
    search.budget = budget;
    search.techniques = MSI_CHECKPOINTING;
    search.host_budget = UINT64_MAX;
    search.least_us = s->plain_us;
    search.best = s->plan->decisions;
    if (!msi_greedy_init(&w, &search)) {
        bench_stop("no memory");
    }
    search.how.early = true;
    msi_decide_base(&search, w.decisions);
    w.score = msi_search_estimate(&search, w.decisions);
    if (!(msi_add_prefix(&w) && msi_fits(&s->scorer, &w.score, budget, 0))) {
        msi_search_greedy(&w, true);
        w.score = search.best_score;
    }
    msi_greedy_free(&w);
    return w.score;
}

/* The library's plan for a budget; its time, or 0 if there is none. */
static double plan_us(subject *s, uint64_t budget) {
    ms_set_budget(s->model, budget);
    return ms_wrap(s->model) == MS_RESULT_OK ? s->model->run.plan->train.predicted.last.us : 0.0;
}

static void print_share(bench_table *table, double part, double whole) {
    if (part > 0.0) {
        bench_value(table, part / whole, 4);
    } else {
        bench_cell(table, "-");
    }
}

static void print_at(bench_table *table, subject *s, uint64_t budget) {
    const msi_score greedy = greedy_alone(s, budget);
    const double us = plan_us(s, budget);
    print_share(table, us, s->plain_us);
    bench_cell(table, us > 0.0 ? msi_finder_names[s->model->run.plan->found.by] : "-");
    print_share(table, greedy.bytes <= budget ? greedy.us : 0.0, s->plain_us);
}

static void print_net(bench_table *table, net_kind kind, uint32_t layers) {
    subject s;
    uint64_t least;
    subject_create(&s, kind, layers);
    bench_check(s.model, ms_smallest_budget(s.model, &least));
    const msi_score root = square_root(&s);
    const double plain = (double)s.plain_bytes;
    bench_cell(table, net_names[kind]);
    bench_count(table, s.model->graph.layers.count);
    print_share(table, (double)least, plain);
    print_share(table, (double)greedy_alone(&s, 0).bytes, plain);
    print_share(table, (double)root.bytes, plain);
    print_share(table, root.us, s.plain_us);
    print_at(table, &s, root.bytes);
    for (int quarters = 3; quarters > 0; quarters--) {
        print_at(table, &s, least + (s.plain_bytes - least) / 4 * (uint64_t)quarters);
    }
    subject_destroy(&s);
}

/* Milliseconds of processor time that ms_wrap takes for a budget, the median of three: of a model of
   its own each time, since a model keeps its plans. */
static double wrap_ms(net_kind kind, uint32_t layers, uint64_t budget, ms_result expected) {
    double ms[3];
    for (int i = 0; i < 3; i++) {
        subject s;
        subject_create(&s, kind, layers);
        ms_set_budget(s.model, budget);
        const clock_t start = clock();
        if (ms_wrap(s.model) != expected) {
            bench_stop(ms_last_error(s.model));
        }
        ms[i] = 1e3 * (double)(clock() - start) / CLOCKS_PER_SEC;
        subject_destroy(&s);
    }
    return bench_median(ms, 3);
}

static void print_refusal(bench_table *table, net_kind kind, uint32_t layers) {
    subject s;
    uint64_t least;
    subject_create(&s, kind, layers);
    bench_check(s.model, ms_smallest_budget(s.model, &least));
    const uint64_t middle = least + (s.plain_bytes - least) / 2;
    const double half = wrap_ms(kind, layers, middle, MS_RESULT_OK);
    const double smallest = wrap_ms(kind, layers, least, MS_RESULT_OK);
    const double refused = wrap_ms(kind, layers, least - 1, MS_RESULT_BUDGET);
    bench_cell(table, net_names[kind]);
    bench_count(table, s.model->graph.layers.count);
    bench_value(table, half, 1);
    bench_value(table, smallest, 1);
    bench_value(table, refused, 1);
    bench_value(table, refused / half, 2);
    bench_value(table, refused / smallest, 2);
    subject_destroy(&s);
}

int main(int argc, char **argv) {
    int64_t layers_min = 100, layers_max = 1000;
    bool tsv = false, refusals = false;
    const option_spec options[] = {
        {"--tsv", NULL, OPTION_FLAG, &tsv, "tab-separated output"},
        {"--refusals", NULL, OPTION_FLAG, &refusals,
         "time of ms_wrap: half way to the plain arena, the smallest, a byte less"},
        {"--from", "N", OPTION_COUNT, &layers_min, "the fewest layers of a net"},
        {"--layers", "N", OPTION_COUNT, &layers_max, "the most layers of a net"},
    };
    if (take_options(
            "[options]\nPlans of DenseNet, U-Net, Inception, ResNet and random graphs. Arenas are "
            "over "
            "the plain one,\n"
            "times over a plain step: the library's, and greedy's alone (g.), at the bytes "
            "of square-root\n"
            "checkpointing, and at 3/4, 1/2 and 1/4 of the way from the smallest arena to "
            "the plain one;\n"
            "by: the search that found the library's.",
            options, OPTIONS_IN(options), argc, argv, NULL) != 0) {
        return 2;
    }
    bench_table table = bench_table_begin(
        tsv, refusals ? "net layers half_ms smallest_ms refused_ms over_half over_smallest"
                      : "net layers smallest g.smallest root root_step at_root by g.at_root at_3/4 "
                        "by g.at_3/4 at_1/2 by g.at_1/2 at_1/4 by g.at_1/4");
    for (int kind = 0; kind < NET_CHAIN; kind++) {
        for (int64_t n = layers_min; n <= layers_max && n < NET_OPEN; n = n * 316 / 100) {
            (refusals ? print_refusal : print_net)(&table, (net_kind)kind, (uint32_t)n);
        }
    }
    return 0;
}
