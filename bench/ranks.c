// What several ranks gain, as predicted by dry runs:
//   smallest  bytes of the smallest plan of each rank over those of one rank: GPT-2 XL, AdamW, F32,
//             nothing on the host
//   speed     tokens a second of four RTX 4090 over four times those of one: Qwen2.5 in BF16, 524,288 tokens
//             a step, sequences of 1024
//   large     Llama 3 70B on eight H100 with NVLink, in BF16, sequences of 4096: whether it fits, and the
//             step over that of computing alone, as one rank with as many batches would have it that has
//             memory for all
// The plans are those of examples/estimate, in mode AGGRESSIVE, except the first ones (BALANCED).
#include "bench.h"

int estimate_main(int argc, char **argv);
#define main estimate_main
#include "estimate/main.c"
#undef main

/* What is estimated, and with how much of the memory. */
typedef struct ranks_case {
    const char *model, *gpu, *network;
    int64_t ranks, batch, sequence, tokens;
    float utilization;
} ranks_case;

static void ranks_stop(const char *what) {
    fflush(stdout);
    fprintf(stderr, "%s\n", what);
    exit(1);
}

/* In BF16 everything except the sums of gradients of norms and the like, as --precision bf16-alone has it. */
static estimate ranks_begin(const ranks_case *c, bool half) {
    estimate e;
    memset(&e, 0, sizeof e);
    e.options.model = c->model;
    e.options.gpu = c->gpu;
    e.options.ranks = c->ranks;
    e.options.network = c->ranks > 1 ? c->network : NULL;
    e.options.batch = c->batch;
    e.options.sequence = c->sequence;
    e.options.tokens = c->tokens;
    e.options.utilization = c->utilization;
    e.options.precision = half ? "bf16-alone" : "f32";
    e.options.gradients = e.options.state = half ? "bf16" : "f32";
    if (choose_training(&e.options) != 0 || choose_shape(&e.options, &e.model) != 0 ||
        choose_target(&e.options, &e.device) != 0) {
        ranks_stop("the case is none");
    }
    return e;
}

static plan ranks_plan(const estimate *e, ms_mode mode, uint64_t budget) {
    plan p;
    if (plan_budget(e, e->options.batch, mode, budget, &p) != 0) {
        ranks_stop("there is no plan");
    }
    return p;
}

static double ranks_tokens_per_s(const estimate *e, const plan *p) {
    const int64_t batches = batches_of_step(&e->options, e->options.batch);
    const int64_t tokens = batches * e->options.batch * e->options.sequence * e->options.ranks;
    return 1e6 * (double)tokens / p->report.step_us;
}

static void ranks_smallest(bool tsv) {
    bench_table table = bench_table_begin(tsv, "ranks smallest_bytes over_one step_over_plain");
    uint64_t of_one = 0;
    for (int64_t ranks = 1; ranks <= 8; ranks *= 2) {
        const ranks_case c = {"gpt2-1558M", "RTX 4090", "pcie", ranks, 1, 512, 0, 0.95f};
        estimate e = ranks_begin(&c, false);
        plan p;
        e.options.offloading = MS_SWITCH_OFF;
        if (plan_smallest(&e, 1, MS_MODE_BALANCED, &p) != 0) {
            ranks_stop("there is no plan");
        }
        of_one = ranks == 1 ? p.report.arena_bytes : of_one;
        bench_count(&table, (uint64_t)ranks);
        bench_count(&table, p.report.arena_bytes);
        bench_value(&table, (double)p.report.arena_bytes / (double)of_one, 3);
        bench_value(&table, p.report.step_us / p.report.plain_step_us, 3);
    }
}

/* The fastest plan over sizes of the batch. */
static plan ranks_fastest(ranks_case *c, double *tokens_per_s) {
    plan best;
    int64_t batch = 0;
    memset(&best, 0, sizeof best);
    *tokens_per_s = 0.0;
    for (int64_t b = 1; b <= 32; b *= 2) {
        c->batch = b;
        const estimate e = ranks_begin(c, true);
        const plan p = ranks_plan(&e, MS_MODE_AGGRESSIVE, e.device.budget_bytes);
        const double speed = p.fits ? ranks_tokens_per_s(&e, &p) : 0.0;
        if (speed > *tokens_per_s) {
            *tokens_per_s = speed;
            best = p;
            batch = b;
        } else if (*tokens_per_s > 0.0) {
            break;
        }
    }
    c->batch = batch;
    return best;
}

static void ranks_speed(bool tsv, const char *only) {
    static const char *const models[] = {"qwen2.5-0.5B", "qwen2.5-1.5B", "qwen2.5-7B",
                                         "qwen2.5-14B", "qwen2.5-32B"};
    bench_table table = bench_table_begin(
        tsv, "model batch_of_one tokens_of_one batch_of_4 tokens_of_4 over_4_times "
             "step_ms network_share hidden_share host_bytes params_divided");
    for (size_t i = 0; i < sizeof models / sizeof models[0]; i++) {
        ranks_case one = {models[i], "RTX 4090", "pcie", 1, 1, 1024, 524288, 0.95f}, four = one;
        double alone, together;
        if (strcmp(only, "all") != 0 && strcmp(only, models[i]) != 0) {
            continue;
        }
        four.ranks = 4;
        (void)ranks_fastest(&one, &alone);
        const plan p = ranks_fastest(&four, &together);
        bench_cell(&table, models[i]);
        bench_count(&table, (uint64_t)one.batch);
        bench_value(&table, alone, 0);
        bench_count(&table, (uint64_t)four.batch);
        bench_value(&table, together, 0);
        bench_value(&table, alone > 0.0 ? together / (4.0 * alone) : 0.0, 3);
        bench_value(&table, p.report.step_us / 1e3, 0);
        bench_value(&table, network_share(&p.report), 3);
        bench_value(&table, p.report.hidden_share, 3);
        bench_count(&table, p.report.host_bytes);
        bench_value(&table, share_divided(&p.shards[SHARD_VALUE]), 3);
    }
}

static void ranks_large(bool tsv) {
    bench_table table = bench_table_begin(
        tsv,
        "batches arena_bytes budget_bytes fits host_bytes step_ms computing_ms over_computing");
    for (int64_t batches = 1; batches <= 16; batches *= 4) {
        ranks_case c = {"llama3-70B", "H100 80GB SXM", "nvlink", 8, 1, 4096, 0, 0.95f};
        c.tokens = batches * c.ranks * c.batch * c.sequence;
        const estimate e = ranks_begin(&c, true);
        plan p = ranks_plan(&e, MS_MODE_AGGRESSIVE, e.device.budget_bytes), alone;
        if (!p.fits && plan_smallest(&e, 1, MS_MODE_AGGRESSIVE, &p) != 0) {
            ranks_stop("there is no plan");
        }
        c.ranks = 1;
        c.tokens /= 8;
        const estimate one = ranks_begin(&c, true);
        if (plan_plain(&one, 1, &alone) != 0) {
            ranks_stop("there is no plain plan");
        }
        bench_count(&table, (uint64_t)batches);
        bench_count(&table, p.report.arena_bytes);
        bench_count(&table, e.device.budget_bytes);
        bench_cell(&table, p.report.arena_bytes <= e.device.budget_bytes ? "yes" : "no");
        bench_count(&table, p.report.host_bytes);
        bench_value(&table, p.report.step_us / 1e3, 0);
        bench_value(&table, alone.report.step_us / 1e3, 0);
        bench_value(&table, p.report.step_us / alone.report.step_us, 3);
    }
}

int main(int argc, char **argv) {
    const char *part = "all", *model = "all";
    bool tsv = false;
    const option_spec options[] = {
        {"--part", "NAME", OPTION_TEXT, &part, "smallest, speed, large, or all"},
        {"--model", "NAME", OPTION_TEXT, &model, "of speed: all, or one, such as qwen2.5-7B"},
        {"--tsv", NULL, OPTION_FLAG, &tsv, "tab-separated output"},
    };
    if (take_options("[options]", options, OPTIONS_IN(options), argc, argv, NULL) != 0) {
        return 2;
    }
    const bool all = strcmp(part, "all") == 0, smallest = strcmp(part, "smallest") == 0;
    const bool speed = strcmp(part, "speed") == 0, large = strcmp(part, "large") == 0;
    if (!all && !smallest && !speed && !large) {
        return fail_name("--part", part) + 1;
    }
    if (all || smallest) {
        ranks_smallest(tsv);
    }
    if (all || speed) {
        ranks_speed(tsv, model);
    }
    if (all || large) {
        ranks_large(tsv);
    }
    return 0;
}
