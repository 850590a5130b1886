// What computing in tiles of rows takes and gains: the head of GPT-2 with its cross-entropy, the
// feed-forward net of GPT-2 XL, both run on this CPU, and GPT-2 124M on one sequence of 32,768
// tokens, which is only planned.
#include "bench.h"

#define MEMSCALE_IMPLEMENTATION
#include "memscale.h"
#include "nn.h"
#include "models.h"

enum { REPEATS_MAX = 64, MOST_INNER = 2, VOCABULARY = 50257, CLASSES = 16 };

// ------------------------------------------------------------------------------------------------
// the head and the feed-forward net: layers of nn.h between an embedding and a loss

typedef struct net {
    ms_model *model;
    nn_net *nn;
    ms_tensor tokens, targets;
    ms_tensor inner[MOST_INNER]; // values that layers in tiles make for each other
    int inner_count;
    double seconds[REPEATS_MAX], cpu_seconds[REPEATS_MAX];
    double loss;
} net;

/* (rows, channels), an activation. */
static ms_tensor begin_net(net *n, int64_t rows, int64_t channels) {
    ms_config config;
    ms_optimizer_desc none;
    const ms_tensor nothing = {0};
    memset(&config, 0, sizeof config);
    memset(&none, 0, sizeof none);
    memset(n, 0, sizeof *n);
    config.memory_budget_bytes = (uint64_t)1 << 50;
    config.tiling = MS_SWITCH_OFF; // but where it is forced
    none.kind = MS_OPTIMIZER_NONE;
    if (ms_create(&config, &n->model) != MS_RESULT_OK || !(n->nn = nn_create(n->model))) {
        bench_stop("no memory");
    }
    ms_set_optimizer(n->model, &none);
    n->tokens = ms_input(n->model, "tokens", MS_DTYPE_I32, ms_shape2(1, rows));
    n->targets = ms_input(n->model, "targets", MS_DTYPE_I32, ms_shape2(1, rows));
    const ms_tensor table =
        nn_param(n->nn, "table", ms_shape2(CLASSES, channels), NN_INIT_NORMAL, 1.0f);
    return nn_embedding(n->nn, "embedding", n->tokens, table, nothing, nothing, nothing);
}

static void end_net(net *n, ms_tensor losses, int64_t rows, int64_t classes) {
    ms_set_loss(n->model, losses);
    bench_check(n->model, ms_wrap(n->model));
    bench_check(n->model, nn_init(n->nn, 1));
    int32_t *ids = (int32_t *)malloc((size_t)rows * sizeof *ids);
    if (!ids) {
        bench_stop("no memory");
    }
    for (int64_t i = 0; i < rows; i++) {
        ids[i] = (int32_t)(i * 7 % CLASSES);
    }
    bench_check(n->model, ms_write(n->model, n->tokens, ids));
    for (int64_t i = 0; i < rows; i++) {
        ids[i] = (int32_t)(i * 7919 % classes);
    }
    bench_check(n->model, ms_write(n->model, n->targets, ids));
    free(ids);
}

/* The head of GPT-2: logits and losses. */
static void make_head(net *n, int64_t rows, int64_t tile_rows) {
    const ms_tensor none = {0};
    const ms_tensor x = begin_net(n, rows, 768);
    const ms_tensor weight =
        nn_param(n->nn, "wte", ms_shape2(VOCABULARY, 768), NN_INIT_NORMAL, 0.02f);
    nn_force_tiles(n->nn, tile_rows);
    const ms_tensor logits = nn_linear_tied(n->nn, "head", x, weight, none);
    const ms_tensor losses = nn_cross_entropy(n->nn, "loss", logits, n->targets);
    n->inner[n->inner_count++] = logits;
    end_net(n, losses, rows, VOCABULARY);
}

/* The feed-forward net of GPT-2 XL, with a loss that is not in tiles. */
static void make_mlp(net *n, int64_t rows, int64_t tile_rows) {
    const int64_t channels = 1600;
    const ms_tensor x = begin_net(n, rows, channels);
    nn_force_tiles(n->nn, tile_rows);
    const ms_tensor hidden = nn_linear(n->nn, "fc", x, 4 * channels, 0.02f);
    const ms_tensor gelu = nn_gelu(n->nn, "gelu", hidden);
    const ms_tensor y = nn_linear(n->nn, "fcproj", gelu, channels, 0.02f);
    nn_force_tiles(n->nn, 0);
    const ms_tensor logits = nn_linear(n->nn, "classes", y, CLASSES, 0.02f);
    n->inner[n->inner_count++] = hidden;
    n->inner[n->inner_count++] = gelu;
    end_net(n, nn_cross_entropy(n->nn, "loss", logits, n->targets), rows, CLASSES);
}

static void destroy_net(net *n) {
    ms_destroy(n->model);
    nn_destroy(n->nn);
}

/* Forward and backward; in tiles, the forward of the head has its backward in it. */
static void run(net *n, int repeat) {
    const double start = bench_seconds();
    const clock_t cpu_start = clock();
    bench_check(n->model, ms_forward(n->model, &n->loss));
    bench_check(n->model, ms_backward(n->model));
    n->seconds[repeat] = bench_seconds() - start;
    n->cpu_seconds[repeat] = (double)(clock() - cpu_start) / CLOCKS_PER_SEC;
}

/* What the events of a step say. */
typedef struct account {
    const net *of;
    uint64_t inner_bytes[MOST_INNER]; // of the memory that a value has
    double forwards;                  // of the layer after the embedding, recomputations included
} account;

static void see_event(const ms_event *e, void *user) {
    account *a = (account *)user;
    if ((e->kind == MS_EVENT_FORWARD || e->kind == MS_EVENT_RECOMPUTE) && e->layer_index == 1) {
        a->forwards += e->row_total > 0 ? (double)e->row_count / (double)e->row_total : 1.0;
    }
    for (uint32_t k = 0; k < e->operand_count; k++) {
        for (int i = 0; i < a->of->inner_count; i++) {
            const ms_event_operand *o = &e->operands[k];
            if (o->tensor.id == a->of->inner[i].id && o->is_new && o->bytes > a->inner_bytes[i]) {
                a->inner_bytes[i] = o->bytes;
            }
        }
    }
}

static uint64_t inner_bytes(const net *n, double *forwards) {
    account a;
    memset(&a, 0, sizeof a);
    a.of = n;
    bench_check(n->model, ms_visit_events(n->model, MS_PROGRAM_TRAIN, see_event, &a));
    *forwards = a.forwards;
    return a.inner_bytes[0] + a.inner_bytes[1];
}

// ------------------------------------------------------------------------------------------------
// tables

/* A row of two numbers, untiled and tiled, and their ratio. */
static void print_bytes(bench_table *table, const char *what, int64_t tile_rows, uint64_t whole,
                        uint64_t tiled) {
    bench_cell(table, what);
    bench_count(table, (uint64_t)tile_rows);
    bench_bytes(table, whole);
    bench_bytes(table, tiled);
    bench_value(table, (double)tiled / (double)whole, 4);
}

static void print_values(bench_table *table, const char *what, int64_t tile_rows, double whole,
                         double tiled) {
    bench_cell(table, what);
    bench_count(table, (uint64_t)tile_rows);
    bench_value(table, whole, 4);
    bench_value(table, tiled, 4);
    bench_value(table, tiled / whole, 4);
}

/* Both nets by turns: the medians of their times, and of the time of all threads. The last row has
   the ratios of the turns: the smallest, the largest, and their median. */
static void time_nets(bench_table *table, const char *name, net *whole, net *tiled,
                      int64_t tile_rows, int repeats) {
    double ratio[REPEATS_MAX];
    char what[64];
    run(whole, 0); // to warm up
    run(tiled, 0);
    for (int i = 0; i < repeats; i++) {
        run(i % 2 == 0 ? whole : tiled, i);
        run(i % 2 == 0 ? tiled : whole, i);
        ratio[i] = tiled->seconds[i] / whole->seconds[i];
    }
    const double difference = whole->loss - tiled->loss;
    if (difference > 1e-5 || difference < -1e-5) {
        fprintf(stderr, "%s: loss %.9g, in tiles %.9g\n", name, whole->loss, tiled->loss);
        exit(1);
    }
    snprintf(what, sizeof what, "%s_seconds", name);
    print_values(table, what, tile_rows, bench_median(whole->seconds, repeats),
                 bench_median(tiled->seconds, repeats));
    snprintf(what, sizeof what, "%s_cpu_seconds", name);
    print_values(table, what, tile_rows, bench_median(whole->cpu_seconds, repeats),
                 bench_median(tiled->cpu_seconds, repeats));
    snprintf(what, sizeof what, "%s_ratio", name);
    bench_cell(table, what);
    bench_count(table, (uint64_t)tile_rows);
    const double median = bench_median(ratio, repeats);
    bench_value(table, ratio[0], 4);
    bench_value(table, ratio[repeats - 1], 4);
    bench_value(table, median, 4);
}

/* A net whole and in tiles: bytes and times. */
static void compare(bench_table *table, const char *name,
                    void (*make)(net *n, int64_t rows, int64_t tile_rows), int64_t rows,
                    int64_t tile_rows, int repeats) {
    static net whole, tiled;
    ms_memory_report of_whole, of_tiled;
    double forwards, again;
    char what[64];
    make(&whole, rows, 0);
    make(&tiled, rows, tile_rows);
    bench_check(whole.model, ms_report(whole.model, &of_whole));
    bench_check(tiled.model, ms_report(tiled.model, &of_tiled));
    const uint64_t bytes = inner_bytes(&whole, &forwards);
    snprintf(what, sizeof what, "%s_inner", name);
    print_bytes(table, what, tile_rows, bytes, inner_bytes(&tiled, &again));
    snprintf(what, sizeof what, "%s_activations", name);
    print_bytes(table, what, tile_rows, of_whole.activation_peak_bytes,
                of_tiled.activation_peak_bytes);
    snprintf(what, sizeof what, "%s_forwards", name);
    print_values(table, what, tile_rows, forwards, again);
    time_nets(table, name, &whole, &tiled, tile_rows, repeats);
    destroy_net(&whole);
    destroy_net(&tiled);
}

// ------------------------------------------------------------------------------------------------
// one long sequence, planned for this CPU, and for an RTX 3090, where plans may offload

/* The attention of the long sequence. */
typedef struct long_attention {
    bool keeps_scores;
    int64_t head_groups; // 0: one
} long_attention;

/* Bytes of a smallest plan: of activations, their gradients, saved tensors and workspace, where the
   arena is fullest and at the most in a step. */
typedef struct long_plan {
    uint64_t at_peak, most, arena;
} long_plan;

static uint64_t passing_bytes(const uint64_t bytes_of[MS_CATEGORY_COUNT]) {
    return bytes_of[MS_CATEGORY_ACTIVATION] + bytes_of[MS_CATEGORY_ACTIVATION_GRADIENT] +
           bytes_of[MS_CATEGORY_SAVED] + bytes_of[MS_CATEGORY_WORKSPACE];
}

static void see_most(const ms_event *e, void *user) {
    uint64_t *most = (uint64_t *)user;
    const uint64_t bytes = passing_bytes(e->live_bytes_of);
    *most = bytes > *most ? bytes : *most;
}

/* gpu: NULL for this CPU. */
static long_plan plan_long(const ms_hardware *gpu, int64_t tokens, ms_switch tiling,
                           long_attention attention) {
    nn_transformer_config shape;
    ms_config config;
    ms_memory_report report;
    ms_model *model;
    long_plan plan;
    memset(&plan, 0, sizeof plan);
    bench_shape("gpt2-124M", &shape);
    shape.context = tokens;
    shape.batch = 1;
    shape.sequence = tokens;
    shape.save_scores = attention.keeps_scores;
    shape.head_groups = attention.head_groups;
    memset(&config, 0, sizeof config);
    config.dry_run = true;
    config.mode = MS_MODE_AGGRESSIVE;
    config.force_optimize = true;
    config.tiling = tiling;
    config.memory_budget_bytes = (uint64_t)1 << 50;
    if (ms_create(&config, &model) != MS_RESULT_OK) {
        bench_stop("no memory");
    }
    if (gpu) {
        ms_set_hardware(model, gpu);
    }
    nn_net *owner = nn_create_on(model, gpu ? nn_cuda_dry() : nn_cpu());
    nn_half_gradients(owner, gpu != NULL);
    nn_gpt2(owner, &shape);
    bench_check(model, ms_wrap(model));
    bench_check(model, ms_report(model, &report));
    bench_check(model, ms_visit_events(model, MS_PROGRAM_TRAIN, see_most, &plan.most));
    plan.at_peak = passing_bytes(report.peak_bytes);
    plan.arena = report.arena_bytes;
    ms_destroy(model);
    nn_destroy(owner);
    return plan;
}

/* A plan in tiles beside one of whole layers. */
static void print_long(bench_table *table, const char *device, const char *what, long_plan whole,
                       long_plan tiled) {
    char name[64];
    snprintf(name, sizeof name, "long_%s_%s_at_peak", device, what);
    print_bytes(table, name, 0, whole.at_peak, tiled.at_peak);
    snprintf(name, sizeof name, "long_%s_%s_most", device, what);
    print_bytes(table, name, 0, whole.most, tiled.most);
    snprintf(name, sizeof name, "long_%s_%s_arena", device, what);
    print_bytes(table, name, 0, whole.arena, tiled.arena);
}

/* The smallest plan in tiles, and in tiles with the heads in groups, beside the smallest of whole
   layers; and in tiles beside whole layers whose attention keeps its probabilities. */
static void compare_long(bench_table *table, const char *device, const ms_hardware *gpu,
                         int64_t tokens, int64_t head_groups) {
    const long_attention online = {false, 0}, keeping = {true, 0}, grouped = {false, head_groups};
    const long_plan whole = plan_long(gpu, tokens, MS_SWITCH_OFF, online);
    const long_plan tiled = plan_long(gpu, tokens, MS_SWITCH_ON, online);
    const long_plan groups = plan_long(gpu, tokens, MS_SWITCH_ON, grouped);
    const long_plan scores = plan_long(gpu, tokens, MS_SWITCH_OFF, keeping);
    print_long(table, device, "tiles", whole, tiled);
    print_long(table, device, "groups", whole, groups);
    print_long(table, device, "scores", scores, tiled);
}

int main(int argc, char **argv) {
    bool tsv = false;
    int64_t rows = 2048, tile_rows = 256, repeats = 7, tokens = 32768, head_groups = 6;
    const option_spec options[] = {
        {"--tsv", NULL, OPTION_FLAG, &tsv, "tab-separated output"},
        {"--rows", "N", OPTION_COUNT, &rows, "tokens of the head"},
        {"--tile", "N", OPTION_COUNT, &tile_rows, "rows of its tiles"},
        {"--repeats", "N", OPTION_COUNT, &repeats, "timed steps of each, 64 at most"},
        {"--tokens", "N", OPTION_COUNT, &tokens, "of the long sequence"},
        {"--head-groups", "N", OPTION_COUNT, &head_groups, "of its attention, in the rows groups"},
    };
    if (take_options(
            "[options]\nLayers in tiles of rows: bytes and time, beside those of whole layers.",
            options, OPTIONS_IN(options), argc, argv, NULL) != 0 ||
        check_most("--repeats", repeats, REPEATS_MAX) != 0) {
        return 2;
    }
    bench_table table = bench_table_begin(tsv, "what tile_rows untiled tiled ratio");
    compare(&table, "head", make_head, rows, tile_rows, (int)repeats);
    compare(&table, "mlp", make_mlp, 512, 64, (int)repeats);
    compare_long(&table, "cpu", NULL, tokens, head_groups);
    compare_long(&table, "3090", ms_hardware_find("RTX 3090"), tokens, head_groups);
    return 0;
}
