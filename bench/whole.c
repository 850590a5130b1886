// GPT-2 for real at a half, a quarter, an eighth and a tenth of the memory that it takes plainly:
// the time of a step, what is allocated, what is on the host, and what training with all techniques
// comes to. The models train side by side, each with the same seeds and batches: in every round
// each of them makes one step, so that other work on the machine slows all of them alike. The text
// is this repository's own, as in examples/gpt2; run it in the repository's folder.
#include "bench.h"

#define MEMSCALE_IMPLEMENTATION
#include "memscale.h"
#include "nn.h"

#include "trainer.h"

enum { PLANS_MAX = 9, WARM_ROUNDS = 1, WARM_PROFILED_ROUNDS = 6 };

/* Device memory that a backend has given out. */
typedef struct meter {
    uint64_t bytes, most_bytes;
} meter;

/* One model, with its plan for a fraction of the plain arena. */
typedef struct plan {
    char name[16];         // "plain", "1/4"
    int64_t divisor;       // 0: plain
    uint64_t budget_bytes; // of the plain plan: its arena
    bool fits;
    uint64_t smallest_bytes; // if it does not
    trainer t;
    progress p;
    ms_memory_report report;
    meter allocated;
    uint64_t resident_bytes; // by how much the process has grown for this model
    double wrap_seconds;
    double *seconds, *ratios; // of each timed round; ratios: over the plain plan's of that round
    double held_out;
    uint32_t layers_of[MS_TECHNIQUE_COUNT]; // layers that it applies a technique to
} plan;

typedef struct bench {
    settings common; // of all models
    bool tsv, prints_plans, skips_held_out;
    int64_t rounds; // that are timed
    plan plans[PLANS_MAX];
    int count;
} bench;

// ---- memory -------------------------------------------------------------------------------------

/* memory_alloc and memory_release know nothing but the backend, so what they count for is here: the
   backend as it is, and the model that is at work. */
static struct {
    ms_backend backend;
    meter *current;
} counted;

static int count_alloc(void *user, const ms_allocator *host, uint64_t bytes, void **device) {
    const int error = counted.backend.memory_alloc(user, host, bytes, device);
    if (error == 0 && *device) {
        meter *m = counted.current;
        m->bytes += bytes;
        m->most_bytes = m->most_bytes > m->bytes ? m->most_bytes : m->bytes;
    }
    return error;
}

static void count_release(void *user, const ms_allocator *host, void *device, uint64_t bytes) {
    counted.backend.memory_release(user, host, device, bytes);
    counted.current->bytes -= bytes;
}

// ---- models -------------------------------------------------------------------------------------

static const trainer_kind gpt2 = {
    "GPT-2 on bytes", "gpt2-", "tiny, small, 124M, 355M, 774M or 1558M",
    BYTE_COUNT,       0.95f,   nn_gpt2,
    draw_next_tokens, NULL,    NULL};

/* Makes the model of a plan and wraps it. A budget that cannot be reached is no error. */
static int make_plan(bench *b, plan *p) {
    trainer *t = &p->t;
    const uint64_t before = bench_status_bytes("VmRSS");
    counted.current = &p->allocated;
    t->kind = &gpt2;
    t->options = b->common;
    t->options.mode = p->divisor == 0 ? "conservative" : b->common.mode;
    t->options.offload = p->divisor == 0 ? "off" : "on"; // also where the host is the device
    t->options.half_gradients = p->divisor != 0;
    if (check_options(t) != 0) {
        return 1;
    }
    counted.backend = t->device.backend;
    t->device.backend.memory_alloc = count_alloc;
    t->device.backend.memory_release = count_release;
    t->random = 0x9e3779b97f4a7c15u ^ (uint64_t)t->options.seed;
    t->held_out = -1;
    if (make_model(t, p->budget_bytes, t->options.dry) != 0) {
        return 1;
    }
    const double started = bench_seconds();
    const ms_result result = ms_wrap(t->model);
    p->wrap_seconds = bench_seconds() - started;
    p->fits = result != MS_RESULT_BUDGET;
    if ((p->fits && result != MS_RESULT_OK) ||
        (p->fits ? ms_report(t->model, &p->report)
                 : ms_smallest_budget(t->model, &p->smallest_bytes)) != MS_RESULT_OK) {
        return fail("%s: %s", p->name, ms_last_error(t->model));
    }
    p->resident_bytes = bench_status_bytes("VmRSS") - before;
    return 0;
}

static void count_layers(const ms_decision *decision, void *user) {
    plan *p = (plan *)user;
    p->layers_of[decision->technique] += decision->is_applied;
}

/* Counts what it does, and lists it if asked to. */
static int look_at_plan(plan *p, bool lists) {
    memset(p->layers_of, 0, sizeof p->layers_of);
    ms_result result = ms_visit_decisions(p->t.model, count_layers, p);
    if (result == MS_RESULT_OK && lists) {
        printf("\n---- %s%s\n\n", p->name, p->divisor ? " of the plain arena" : "");
        result = ms_print_plan(p->t.model, print_text, stdout);
    }
    return result == MS_RESULT_OK ? 0 : fail("the plan cannot be read");
}

/* The text is read once, and belongs to the plain model. */
static int start_plan(bench *b, plan *p) {
    trainer *t = &p->t, *first = &b->plans[0].t;
    const uint64_t before = bench_status_bytes("VmRSS");
    counted.current = &p->allocated;
    if (t == first && prepare_text(t) < 0) {
        return 1;
    }
    t->text = first->text;
    t->text_bytes = first->text_bytes;
    t->data = first->data;
    t->data_count = first->data_count;
    t->held_out_block = first->held_out_block;
    p->seconds = (double *)malloc((size_t)b->rounds * sizeof *p->seconds);
    p->ratios = (double *)malloc((size_t)b->rounds * sizeof *p->ratios);
    if (!p->seconds || !p->ratios) {
        return fail("no memory for %lld rounds", (long long)b->rounds);
    }
    const int result = allocate_batch(t) != 0 || start(t) != 0;
    p->resident_bytes += bench_status_bytes("VmRSS") - before;
    return result;
}

static void free_plan(plan *p, bool owns_text) {
    counted.current = &p->allocated;
    p->t.text = owns_text ? p->t.text : NULL;
    p->t.data = owns_text ? p->t.data : NULL;
    free_trainer(&p->t);
    free(p->seconds);
    free(p->ratios);
}

// ---- training -----------------------------------------------------------------------------------

/* One step of one model; a GPU is waited for. */
static int run_step(plan *p, double *seconds) {
    const uint64_t before = p->p.step == 0 ? bench_status_bytes("VmRSS") : 0;
    counted.current = &p->allocated;
    const double started = bench_seconds();
    if (train_step(&p->t, &p->p, true) != 0) {
        return 1;
    }
    if (ms_synchronize(p->t.model) != MS_RESULT_OK) {
        return fail("%s: %s", p->name, ms_last_error(p->t.model));
    }
    *seconds = bench_seconds() - started;
    if (advance(&p->t, &p->p) != 0) {
        return 1;
    }
    if (before) {
        p->resident_bytes +=
            bench_status_bytes("VmRSS") - before; // pages of the arena, on their first use
    }
    return 0;
}

static void print_step(const bench *b, int64_t step) {
    if (b->tsv || step * 10 / b->common.steps == (step - 1) * 10 / b->common.steps) {
        return;
    }
    printf("step %5lld", (long long)step);
    for (int k = 0; k < b->count; k++) {
        if (b->plans[k].fits) {
            printf("  %s %.3f", b->plans[k].name, b->plans[k].t.loss);
        }
    }
    putchar('\n');
    fflush(stdout);
}

/* All steps of all models. Rounds before the first that is timed warm up. */
static int train_all(bench *b, int64_t first_round) {
    for (int64_t step = 0; step < b->common.steps; step++) {
        const int64_t round = step - first_round;
        for (int k = 0; k < b->count; k++) {
            double seconds = 0.0;
            if (b->plans[k].fits && run_step(&b->plans[k], &seconds) != 0) {
                return 1;
            }
            if (b->plans[k].fits && round >= 0 && round < b->rounds) {
                b->plans[k].seconds[round] = seconds;
                b->plans[k].ratios[round] = seconds / b->plans[0].seconds[round];
            }
        }
        print_step(b, step + 1);
    }
    for (int k = 0; k < b->count; k++) {
        plan *p = &b->plans[k];
        counted.current = &p->allocated;
        if (p->fits && b->common.profile && // which has planned again
            (ms_report(p->t.model, &p->report) != MS_RESULT_OK || look_at_plan(p, false) != 0)) {
            return fail("%s: the model has no plan", p->name);
        }
        if (p->fits && !b->skips_held_out && held_out_blocks(&p->t) > 0 &&
            held_out_loss(&p->t, &p->held_out) != 0) {
            return 1;
        }
    }
    return 0;
}

// ---- tables -------------------------------------------------------------------------------------

static void print_unreachable(const bench *b) {
    for (int k = 0; k < b->count; k++) {
        const plan *p = &b->plans[k];
        if (!p->fits) {
            printf("%s of the plain arena is not reachable: %.1f MB, and the smallest plan takes "
                   "%.1f MB\n",
                   p->name, (double)p->budget_bytes / 1e6, (double)p->smallest_bytes / 1e6);
        }
    }
}

static void print_sizes(const bench *b) {
    bench_table table = bench_table_begin(
        false, "plan budget arena allocated resident host in out hidden predicted wrap");
    for (int k = 0; k < b->count; k++) {
        const plan *p = &b->plans[k];
        const ms_memory_report *r = &p->report;
        if (!p->fits) {
            continue;
        }
        bench_cell(&table, p->name);
        bench_bytes(&table, p->budget_bytes);
        bench_bytes(&table, r->arena_bytes);
        bench_bytes(&table, p->allocated.most_bytes);
        bench_bytes(&table, p->resident_bytes);
        bench_bytes(&table, r->host_bytes);
        bench_bytes(&table, r->to_device_bytes);
        bench_bytes(&table, r->to_host_bytes);
        bench_value(&table, r->hidden_share, 2);
        bench_value(&table, r->step_us / r->plain_step_us, 3);
        bench_value(&table, p->wrap_seconds, 2);
    }
    printf("arena: as planned; allocated: the most that the backend has given out\n"
           "resident: growth of the process by this model, its memory on the host included\n"
           "host: what the plan has on the host; in, out: what a step copies to and from the "
           "device\n"
           "hidden: share of the time of these copies for which computing does not wait, as "
           "predicted\n"
           "predicted: time of a step over that of the plain plan; wrap: seconds to plan and "
           "allocate\n");
}

static void print_techniques(const bench *b) {
    putchar('\n');
    bench_table table = bench_table_begin(false, "plan layers checkpointing early_update "
                                                 "offloading tiling 16_bits 8_bit_state");
    for (int k = 0; k < b->count; k++) {
        const plan *p = &b->plans[k];
        if (p->fits) {
            bench_cell(&table, p->name);
            bench_count(&table, p->report.layer_count);
            for (int i = 0; i < MS_TECHNIQUE_COUNT; i++) {
                bench_count(&table, p->layers_of[i]);
            }
        }
    }
    printf("layers, and how many of them a technique is applied to\n");
}

/* Sorted: a value that so many of a hundred are below. */
static double percentile(const double *sorted, int64_t count, int64_t percent) {
    return sorted[(count - 1) * percent / 100];
}

static void print_times(bench *b) {
    putchar('\n');
    bench_table table = bench_table_begin(
        false, "plan seconds ratio 10_% 90_% predicted loss over_plain held_out over_plain");
    const plan *plain = &b->plans[0];
    for (int k = 0; k < b->count; k++) {
        plan *p = &b->plans[k];
        if (!p->fits) {
            continue;
        }
        bench_cell(&table, p->name);
        bench_value(&table, bench_median(p->seconds, (int)b->rounds), 4);
        bench_value(&table, bench_median(p->ratios, (int)b->rounds), 3);
        bench_value(&table, percentile(p->ratios, b->rounds, 10), 3);
        bench_value(&table, percentile(p->ratios, b->rounds, 90), 3);
        bench_value(&table, p->report.step_us / p->report.plain_step_us, 3);
        bench_value(&table, p->t.loss, 4);
        bench_value(&table, p->t.loss / plain->t.loss, 4);
        bench_value(&table, p->held_out, 4);
        bench_value(&table, plain->held_out > 0.0 ? p->held_out / plain->held_out : 0.0, 4);
    }
    printf("seconds: median of %lld steps; ratio: median of the ratios to the plain step of the "
           "same round, and\n"
           "which 10 and 90 %% of them are below\n"
           "loss: after %lld steps, the running mean of examples/gpt2; held_out: on %d batches of "
           "text that training\n"
           "has not seen (0: not evaluated)\n",
           (long long)b->rounds, (long long)b->common.steps, HELD_OUT_BATCHES);
}

/* A budget that cannot be reached has a smallest_bytes, and otherwise zeros. Without training, so
   have the times and losses. */
static void print_tsv(bench *b) {
    bench_table table = bench_table_begin(
        true, "plan budget_bytes smallest_bytes arena_bytes allocated_bytes resident_bytes "
              "host_bytes in_bytes out_bytes hidden predicted_ratio wrap_seconds layers "
              "checkpointing early_update offloading tiling mixed_precision optimizer_8bit seconds "
              "ratio ratio_10 ratio_90 loss loss_ratio held_out held_out_ratio");
    const plan *plain = &b->plans[0];
    for (int k = 0; k < b->count; k++) {
        plan *p = &b->plans[k];
        const ms_memory_report *r = &p->report;
        const bool trained = p->fits && p->p.step > 0;
        bench_cell(&table, p->name);
        bench_count(&table, p->budget_bytes);
        bench_count(&table, p->smallest_bytes);
        bench_count(&table, r->arena_bytes);
        bench_count(&table, p->allocated.most_bytes);
        bench_count(&table, p->fits ? p->resident_bytes : 0);
        bench_count(&table, r->host_bytes);
        bench_count(&table, r->to_device_bytes);
        bench_count(&table, r->to_host_bytes);
        bench_value(&table, r->hidden_share, 3);
        bench_value(&table, p->fits ? r->step_us / r->plain_step_us : 0.0, 4);
        bench_value(&table, p->wrap_seconds, 3);
        bench_count(&table, r->layer_count);
        for (int i = 0; i < MS_TECHNIQUE_COUNT; i++) {
            bench_count(&table, p->layers_of[i]);
        }
        bench_value(&table, trained ? bench_median(p->seconds, (int)b->rounds) : 0.0, 5);
        bench_value(&table, trained ? bench_median(p->ratios, (int)b->rounds) : 0.0, 4);
        bench_value(&table, trained ? percentile(p->ratios, b->rounds, 10) : 0.0, 4);
        bench_value(&table, trained ? percentile(p->ratios, b->rounds, 90) : 0.0, 4);
        bench_value(&table, p->t.loss, 5);
        bench_value(&table, trained ? p->t.loss / plain->t.loss : 0.0, 5);
        bench_value(&table, p->held_out, 5);
        bench_value(&table, p->held_out > 0.0 ? p->held_out / plain->held_out : 0.0, 5);
    }
}

// ---- main ---------------------------------------------------------------------------------------

/* "2,4,8,10": the plain plan, and one for each of these. */
static int read_budgets(bench *b, const char *text) {
    snprintf(b->plans[0].name, sizeof b->plans[0].name, "plain");
    for (b->count = 1; *text; b->count++) {
        char *end;
        const long long divisor = strtoll(text, &end, 10);
        if (divisor < 2 || divisor > 1000000 || (*end && (*end != ',' || !end[1])) ||
            b->count == PLANS_MAX) {
            return fail("--budgets: give up to %d numbers from 2 on, such as 2,4,8,10",
                        PLANS_MAX - 1);
        }
        plan *p = &b->plans[b->count];
        p->divisor = divisor;
        snprintf(p->name, sizeof p->name, "1/%lld", divisor);
        text = *end ? end + 1 : end;
    }
    return 0;
}

static void print_model(bench *b) {
    trainer *t = &b->plans[0].t;
    const ms_memory_report *r = &b->plans[0].report;
    meter measuring = {0, 0}; // takes memory for a while
    counted.current = &measuring;
    if (!b->tsv && print_machine(t) == 0) {
        printf("model     GPT-2 %s, %.2f M params, batch %lld x %lld, mode %s\n\n",
               t->options.preset, (double)r->param_count / 1e6, (long long)t->shape.batch,
               (long long)t->shape.sequence, b->common.mode);
    }
}

static int run_bench(bench *b) {
    const int64_t warm = b->common.profile ? WARM_PROFILED_ROUNDS : WARM_ROUNDS;
    const int64_t first_round = b->common.steps > warm ? warm : b->common.steps - 1;
    const int64_t rest = b->common.steps - first_round;
    b->rounds = b->rounds < rest ? b->rounds : rest;
    for (int k = 0; k < b->count; k++) {
        plan *p = &b->plans[k];
        p->budget_bytes =
            k == 0 ? UINT64_MAX : b->plans[0].report.plain_bytes / (uint64_t)p->divisor;
        if (make_plan(b, p) != 0) {
            return 1;
        }
        if (k == 0) {
            p->budget_bytes = p->report.plain_bytes;
            print_model(b);
        }
        if (p->fits && (look_at_plan(p, b->prints_plans && !b->tsv) != 0 ||
                        (!b->common.dry && start_plan(b, p) != 0))) {
            return 1;
        }
    }
    if (!b->common.dry && train_all(b, first_round) != 0) {
        return 1;
    }
    if (b->tsv) {
        print_tsv(b);
        return 0;
    }
    putchar('\n');
    print_unreachable(b);
    print_sizes(b);
    print_techniques(b);
    if (!b->common.dry) {
        print_times(b);
    }
    return 0;
}

int main(int argc, char **argv) {
    static bench b;
    settings *o = &b.common;
    const char *budgets = "2,4,8,10";
    o->preset = "124M";
    o->device = "cpu";
    o->mode = "aggressive";
    o->batch = 4;
    o->sequence = 64;
    o->steps = 300;
    o->accumulate = 1;
    o->warmup = WARMUP_STEPS;
    o->seed = 1;
    b.rounds = 300;
    const option_spec options[] = {
        {"--tsv", NULL, OPTION_FLAG, &b.tsv, "tab-separated output"},
        {"--preset", "NAME", OPTION_TEXT, &o->preset, "tiny, small, 124M, 355M, 774M or 1558M"},
        {"--device", "NAME", OPTION_TEXT, &o->device, "cpu or cuda"},
        {"--batch", "N", OPTION_COUNT, &o->batch, "sequences in a batch"},
        {"--sequence", "N", OPTION_COUNT, &o->sequence, "tokens in a sequence"},
        {"--budgets", "N,N", OPTION_TEXT, &budgets, "parts of the plain arena to train in"},
        {"--mode", "NAME", OPTION_TEXT, &o->mode,
         "conservative, balanced or aggressive; each may offload"},
        {"--steps", "N", OPTION_COUNT, &o->steps, "training steps of each model"},
        {"--rounds", "N", OPTION_COUNT, &b.rounds,
         "the first so many of them are timed, after warming up"},
        {"--seed", "N", OPTION_COUNT, &o->seed, "of params and batches"},
        {"--profile", NULL, OPTION_FLAG, &o->profile,
         "plan again with times measured in the first steps"},
        {"--plan", NULL, OPTION_FLAG, &b.prints_plans, "list each plan"},
        {"--no-eval", NULL, OPTION_FLAG, &b.skips_held_out, "do not evaluate what was held out"},
        {"--dry", NULL, OPTION_FLAG, &o->dry, "plan only"},
    };
    if (take_options("[options]\nGPT-2 in parts of the memory that it takes plainly.", options,
                     OPTIONS_IN(options), argc, argv, NULL) != 0) {
        return 2;
    }
    b.plans[0].t.kind = &gpt2;
    b.plans[0].t.options = *o;
    if (read_budgets(&b, budgets) != 0 || check_options(&b.plans[0].t) != 0) {
        return 2;
    }
    const int result = run_bench(&b);
    for (int k = b.count - 1; k >= 0; k--) {
        free_plan(&b.plans[k], k == 0);
    }
    return result;
}
