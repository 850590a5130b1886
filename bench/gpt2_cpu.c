// Time of a training step and size of the arena of GPT-2 on the CPU: the plain plan, one that
// leaves half of the plain activation bytes, and the smallest one. The plans take turns, so that
// other work on the machine slows all of them alike. Their losses must be equal bit for bit.
#include "bench.h"

#define MEMSCALE_IMPLEMENTATION
#include "memscale.h"
#include "nn.h"
#include "models.h"

enum { PLAN_COUNT = 3, ROUNDS_MAX = BENCH_STEPS, STEPS_MAX = BENCH_STEPS };

typedef struct plan {
    const char *name;
    ms_config config;
    ms_memory_report report;
    double seconds[ROUNDS_MAX * STEPS_MAX];
    double losses[STEPS_MAX + 1]; // of the first round, the untimed step included
} plan;

/* One round of one plan: a new model, a step to warm up, the timed steps. */
static void run_round(plan *p, const nn_transformer_config *shape, int round, int steps) {
    bench_model m = bench_model_create(&p->config, nn_cpu(), "gpt2", shape);
    bench_check(m.model, ms_wrap(m.model));
    bench_check(m.model, ms_report(m.model, &p->report));
    p->report.peak_layer = ""; // belongs to the model
    bench_check(m.model, nn_init(m.net, 1));
    bench_write_batch(&m);
    for (int i = 0; i <= steps; i++) {
        double loss;
        const double start = bench_seconds();
        bench_check(m.model, ms_step(m.model, &loss));
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
    bench_model_destroy(&m);
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

int main(int argc, char **argv) {
    static plan plans[PLAN_COUNT];
    bool tsv = false;
    const char *preset = "gpt2-124M";
    int64_t batch = 4, sequence = 64, steps = 3, rounds = 3;
    const option_spec options[] = {
        {"--tsv", NULL, OPTION_FLAG, &tsv, "tab-separated output"},
        {"--preset", "NAME", OPTION_TEXT, &preset, "gpt2-124M, -355M, -774M, -1558M, or gpt2-tiny"},
        {"--batch", "N", OPTION_COUNT, &batch, "sequences in a batch"},
        {"--sequence", "N", OPTION_COUNT, &sequence, "tokens in a sequence"},
        {"--steps", "N", OPTION_COUNT, &steps, "timed steps in a round, 32 at most"},
        {"--rounds", "N", OPTION_COUNT, &rounds, "rounds of each plan, 32 at most"},
    };
    if (take_options("[options]\nStep time and arena of GPT-2 on the CPU, plain and checkpointed.",
                     options, OPTIONS_IN(options), argc, argv, NULL) != 0) {
        return 2;
    }
    const nn_transformer_config shape = bench_gpt2_shape(preset, batch, sequence, steps, rounds);

    const ms_backend cpu = ms_backend_cpu();
    const uint64_t no_limit = (uint64_t)1 << 50;
    plans[0].name = "plain";
    plans[0].config.memory_budget_bytes = no_limit;
    plans[1].name = "half";
    plans[1].config.memory_budget_bytes = bench_half_budget(&cpu, nn_cpu(), "gpt2", &shape);
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
