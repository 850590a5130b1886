// engines.c: trains a small model whose params, gradients and optimizer state are on the host, and prints
// what it comes to: losses, the report, the program and a trace. check_new_engine of source.sh compares
// that for headers with more engines. PLANTED: the report counts what an engine of that name copies.
#include "bench.h"

#define MEMSCALE_IMPLEMENTATION
#include "memscale.h"
#include "nn.h"
#include "models.h"

enum { STEPS = 4, MOST_MOVED = 256 };

typedef struct moved {
    ms_tensor of[MOST_MOVED];
    int count;
} moved;

static void print_text(const char *text, size_t length, void *user) {
    (void)user;
    fwrite(text, 1, length, stdout);
}

static void note_moved(const ms_lifetime *l, void *user) {
    moved *m = (moved *)user;
    const bool moves = l->category == MS_CATEGORY_PARAM || l->category == MS_CATEGORY_GRADIENT ||
                       l->category == MS_CATEGORY_OPTIMIZER;
    if (moves && l->tensor.id != 0 && m->count < MOST_MOVED) {
        m->of[m->count++] = l->tensor;
    }
}

int main(void) {
    ms_config config;
    nn_transformer_config shape;
    ms_memory_report r;
    ms_hardware device = *ms_hardware_find("RTX 3090");
    moved all = {{{0}}, 0};
    memset(&config, 0, sizeof config);
    config.memory_budget_bytes = config.max_host_bytes = (uint64_t)1 << 40;
    if (!bench_shape("gpt2-tiny", &shape)) {
        return 1;
    }
    shape.batch = 2;
    shape.sequence = 8;
    bench_model m = bench_model_create(&config, nn_cpu(), "gpt2-tiny", &shape);
    ms_set_hardware(m.model, &device);
    bench_check(m.model, ms_wrap(m.model));
    bench_check(m.model, ms_visit_lifetimes(m.model, MS_PROGRAM_TRAIN, note_moved, &all));
    for (int k = 0; k < all.count; k++) {
        ms_set_tensor_technique(m.model, all.of[k], MS_TECHNIQUE_OFFLOADING, MS_SWITCH_ON);
    }
    bench_check(m.model, ms_wrap(m.model));
    bench_check(m.model, nn_init(m.net, 1));
    bench_write_batch(&m);
    for (int step = 0; step < STEPS; step++) {
        double loss = 0.0;
        bench_check(m.model, ms_step(m.model, &loss));
        printf("loss %a\n", loss);
    }
    bench_check(m.model, ms_report(m.model, &r));
    printf("step_us %.3f\n", r.step_us);
    printf("from the host %llu bytes\n", (unsigned long long)r.to_device_bytes);
#ifdef PLANTED
    printf("planted %llu bytes, %.3f us\n", (unsigned long long)r.planted_bytes, r.planted_us);
#endif
    bench_check(m.model, ms_print_plan_full(m.model, print_text, NULL));
    bench_check(m.model, ms_print_program(m.model, MS_PROGRAM_TRAIN, print_text, NULL));
    bench_check(m.model, ms_print_trace(m.model, print_text, NULL));
    bench_model_destroy(&m);
    return 0;
}
