// Time of a training step and size of the arena of GPT-2 on the CPU: the plain plan, one that leaves
// half of the plain activation bytes, and the smallest one. The plans take turns, so that a busy
// machine disturbs all alike. Their losses must be equal bit for bit.
#include "bench.h"

#define MEMSCALE_IMPLEMENTATION
#include "memscale.h"
#include "nn.h"

enum { PLAN_COUNT = 3, ROUNDS_MAX = 32, STEPS_MAX = 32 };

typedef struct plan {
    const char *name;
    ms_config config;
    ms_memory_report report;
    double seconds[ROUNDS_MAX * STEPS_MAX];
    double losses[STEPS_MAX + 1]; // of the first round, the untimed step included
} plan;

typedef struct trainer {
    ms_model *model;
    nn_net *net;
    nn_transformer gpt2;
} trainer;

static void check(ms_model *model, ms_result result) {
    if (result != MS_RESULT_OK) {
        fprintf(stderr, "%s: %s\n", ms_result_name(result), ms_last_error(model));
        exit(1);
    }
}

/* A model, wrapped but not initialised. */
static trainer make_trainer(const ms_config *config, const nn_transformer_config *shape) {
    trainer t;
    check(NULL, ms_create(config, &t.model));
    t.net = nn_create(t.model);
    if (!t.net) {
        fprintf(stderr, "no memory\n");
        exit(1);
    }
    t.gpt2 = nn_gpt2(t.net, shape);
    check(t.model, ms_wrap(t.model));
    return t;
}

static void destroy_trainer(trainer *t) {
    ms_destroy(t->model);
    nn_destroy(t->net);
}

/* The size of the early-update plan without recomputation, less half of its activations. */
static uint64_t half_budget(const nn_transformer_config *shape) {
    ms_memory_report report;
    ms_config config;
    memset(&config, 0, sizeof config);
    config.dry_run = true;
    config.memory_budget_bytes = (uint64_t)1 << 50;
    config.early_update = MS_SWITCH_ON;
    config.checkpointing = MS_SWITCH_OFF;
    trainer t = make_trainer(&config, shape);
    check(t.model, ms_report(t.model, &report));
    destroy_trainer(&t);
    return report.arena_bytes - report.activation_peak_bytes / 2;
}

static void write_batch(const trainer *t, const nn_transformer_config *shape) {
    const size_t count = (size_t)(shape->batch * shape->sequence);
    int32_t *ids = (int32_t *)malloc((count + 1) * sizeof *ids);
    if (!ids) {
        fprintf(stderr, "no memory\n");
        exit(1);
    }
    uint32_t state = 1;
    for (size_t i = 0; i <= count; i++) {
        state = state * 1664525u + 1013904223u; // Knuth, "Seminumerical Algorithms", section 3.3.4
        ids[i] = (int32_t)((state >> 8) % (uint32_t)shape->vocabulary);
    }
    check(t->model, ms_write(t->model, t->gpt2.tokens, ids));
    check(t->model, ms_write(t->model, t->gpt2.targets, ids + 1));
    free(ids);
}

/* One round of one plan: a new model, a step to warm up, the timed steps. */
static void run_round(plan *p, const nn_transformer_config *shape, int round, int steps) {
    trainer t = make_trainer(&p->config, shape);
    check(t.model, ms_report(t.model, &p->report));
    p->report.peak_layer = ""; // belongs to the model
    check(t.model, nn_init(t.net, 1));
    write_batch(&t, shape);
    for (int i = 0; i <= steps; i++) {
        double loss;
        const double start = bench_seconds();
        check(t.model, ms_step(t.model, &loss));
        if (i > 0) {
            p->seconds[round * steps + i - 1] = bench_seconds() - start;
        }
        if (round == 0) {
            p->losses[i] = loss;
        } else if (memcmp(&p->losses[i], &loss, sizeof loss) != 0) {
            fprintf(stderr, "%s: step %d of round %d has loss %.17g, not %.17g\n", p->name, i,
                    round, loss, p->losses[i]);
            exit(1);
        }
    }
    destroy_trainer(&t);
}

static void check_losses(const plan *plans, int steps) {
    for (int k = 1; k < PLAN_COUNT; k++) {
        for (int i = 0; i <= steps; i++) {
            if (memcmp(&plans[k].losses[i], &plans[0].losses[i], sizeof(double)) != 0) {
                fprintf(stderr, "step %d: loss %.17g %s, but %.17g %s\n", i, plans[k].losses[i],
                        plans[k].name, plans[0].losses[i], plans[0].name);
                exit(1);
            }
        }
    }
}

static void print_plans(plan *plans, int steps, int samples, bool tsv) {
    bench_table table = bench_table_begin(
        tsv, tsv ? "plan seconds seconds_min seconds_max ratio arena_bytes lower_bound_bytes "
                   "activation_bytes recompute_share loss"
                 : "plan seconds min max ratio arena bound activations recompute loss");
    double plain_seconds = 0.0;
    for (int k = 0; k < PLAN_COUNT; k++) {
        plan *p = &plans[k];
        const double seconds = bench_median(p->seconds, samples);
        plain_seconds = k == 0 ? seconds : plain_seconds;
        bench_cell(&table, p->name);
        bench_value(&table, seconds, 4);
        bench_value(&table, p->seconds[0], 4);
        bench_value(&table, p->seconds[samples - 1], 4);
        bench_value(&table, seconds / plain_seconds, 3);
        bench_bytes(&table, p->report.arena_bytes);
        bench_bytes(&table, p->report.lower_bound_bytes);
        bench_bytes(&table, p->report.activation_peak_bytes);
        bench_value(&table, p->report.recompute_share, 4);
        bench_value(&table, p->losses[steps], 6);
    }
    if (!tsv) {
        printf("losses of all %d steps are equal bit for bit\n", steps + 1);
    }
}

/* Shape of a published model, or of one small enough for a test. */
static bool find_shape(const char *preset, nn_transformer_config *shape) {
    memset(shape, 0, sizeof *shape);
    if (strcmp(preset, "tiny") == 0) {
        shape->vocabulary = 256;
        shape->context = 64;
        shape->layers = 4;
        shape->heads = 2;
        shape->channels = 32;
        return true;
    }
    return strncmp(preset, "gpt2", 4) == 0 && nn_preset(preset, shape);
}

int main(int argc, char **argv) {
    static plan plans[PLAN_COUNT];
    bool tsv = false;
    const char *preset = "gpt2-124M";
    int64_t batch = 4, sequence = 64, steps = 3, rounds = 3;
    const bench_option options[] = {
        {"--tsv", "tab-separated output", &tsv, NULL, NULL},
        {"--preset", "gpt2-124M, -355M, -774M, -1558M, or tiny", NULL, NULL, &preset},
        {"--batch", "sequences in a batch", NULL, &batch, NULL},
        {"--sequence", "tokens in a sequence", NULL, &sequence, NULL},
        {"--steps", "timed steps in a round; 32 at most", NULL, &steps, NULL},
        {"--rounds", "turns of each plan; 32 at most", NULL, &rounds, NULL},
    };
    bench_options(argc, argv, "Step time and arena of GPT-2 on the CPU, plain and checkpointed.",
                  options, 6);
    nn_transformer_config shape;
    if (!find_shape(preset, &shape) || steps > STEPS_MAX || rounds > ROUNDS_MAX) {
        fprintf(stderr, "no such preset: %s, or more than 32 steps or rounds\n", preset);
        return 2;
    }
    shape.batch = batch;
    shape.sequence = sequence;

    const uint64_t no_limit = (uint64_t)1 << 50;
    plans[0].name = "plain";
    plans[0].config.memory_budget_bytes = no_limit;
    plans[1].name = "half";
    plans[1].config.memory_budget_bytes = half_budget(&shape);
    plans[2].name = "smallest";
    plans[2].config.memory_budget_bytes = no_limit;
    plans[2].config.force_optimize = true;
    for (int round = 0; round < (int)rounds; round++) {
        for (int k = 0; k < PLAN_COUNT; k++) {
            run_round(&plans[k], &shape, round, (int)steps);
        }
    }
    check_losses(plans, (int)steps);
    print_plans(plans, (int)steps, (int)(rounds * steps), tsv);
    return 0;
}
