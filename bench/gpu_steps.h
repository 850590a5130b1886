/*  gpu_steps.h - of bench/gpu: steps of GPT-2 with sequences of 1,024 tokens, in 16 bits and in TF32, by
    plans for parts of the memory that they take plainly; what of a step are products; slices of a step.
    Include gpu_device.h first. */
#ifndef MEMSCALE_BENCH_GPU_STEPS_H
#define MEMSCALE_BENCH_GPU_STEPS_H

enum { STEP_WARMUP = 6, ENQUEUED = 5, PADDED_VOCABULARY = 50304 };

static const uint64_t UNLIMITED = (uint64_t)1 << 50;

/* A way to train. The steps that warm up are enough for a measured profile and the plan by it. */
typedef struct step_plan {
    const char *name;
    bool half, graph, profiled, padded; // padded: a vocabulary of 50,304, whose rows are aligned
    uint64_t divisor;                   // of the plain arena; 0: no budget
    ms_switch offloading;
    ms_mode mode;
} step_plan;

/* Of those with the same arithmetic the first is the plain plan. The most important come first. */
static const step_plan step_plans[] = {
    {"plain", true, false, true, false, 0, MS_SWITCH_OFF, MS_MODE_BALANCED},
    {"1/2, recomputed", true, false, true, false, 2, MS_SWITCH_OFF, MS_MODE_BALANCED},
    {"1/3, offloaded", true, false, true, false, 3, MS_SWITCH_ON, MS_MODE_BALANCED},
    {"plain", true, true, false, false, 0, MS_SWITCH_OFF, MS_MODE_BALANCED},
    {"plain", false, false, false, false, 0, MS_SWITCH_OFF, MS_MODE_BALANCED},
    {"plain, 50,304 words", true, false, false, true, 0, MS_SWITCH_OFF, MS_MODE_BALANCED},
    {"1/2, offloaded", true, false, true, false, 2, MS_SWITCH_ON, MS_MODE_BALANCED},
    {"1/3, recomputed", true, false, true, false, 3, MS_SWITCH_OFF, MS_MODE_BALANCED},
    {"1/2, recomputed", true, true, false, false, 2, MS_SWITCH_OFF, MS_MODE_BALANCED},
    {"1/2, recomputed", false, false, true, false, 2, MS_SWITCH_OFF, MS_MODE_BALANCED},
    {"1/3, offloaded", false, false, true, false, 3, MS_SWITCH_ON, MS_MODE_BALANCED},
    {"1/3, offloaded", true, true, false, false, 3, MS_SWITCH_ON, MS_MODE_BALANCED},
    {"1/4, AGGRESSIVE", true, false, true, false, 4, MS_SWITCH_ON, MS_MODE_AGGRESSIVE},
};
enum { STEP_PLANS = sizeof step_plans / sizeof step_plans[0] };

typedef struct step_model {
    const char *name, *preset;
    int64_t batch, sequence;
} step_model;

static const step_model step_models[] = {{"gpt2-124M", "gpt2-124M", 16, 1024},
                                         {"gpt2-774M", "gpt2-774M", 8, 1024}};
static const step_model tiny_step_models[] = {{"gpt2-tiny", "gpt2-tiny", 2, 12}};

/* What the rows of one model have in common: of F32 in [0], of 16 bits in [1]. */
typedef struct step_base {
    uint64_t plain_bytes[2]; // found by a dry run, since the plain plan need not fit the device
    bool has_losses[2];
    double losses[2][3];
} step_base;

typedef struct step_outcome {
    ms_memory_report first, last; // before the steps, and after them
    double wrap_seconds, ms, least_ms, most_ms, enqueue_ms, losses[3];
    uint64_t taken_bytes;
} step_outcome;

// ---- what of a step is spent where ---------------------------------------------------------------

/* A kind of call of the backend; products are told apart by shape. */
typedef struct call_kind {
    const char *name;
    int64_t rows, inner, cols, count;
    int calls;
    double ms, flops;
} call_kind;

enum { CALLS_MAX = 65536, KINDS_MAX = 512, LAYERS_MAX = 128 };

/* Between the model and the CUDA backend: events around each call of one step. */
static struct {
    ms_backend backend;
    bool records;
    int call_count, kind_count, lost; // lost: for want of room here
    cudaEvent_t events[2 * CALLS_MAX];
    int kinds_of[CALLS_MAX];
    call_kind kinds[KINDS_MAX];
} calls;

/* The kind of a call, from its name and its sizes; -1 if the tables are full. */
static int find_kind(const call_kind *wanted) {
    int i = 0;
    while (i < calls.kind_count &&
           (strcmp(calls.kinds[i].name, wanted->name) != 0 || calls.kinds[i].rows != wanted->rows ||
            calls.kinds[i].inner != wanted->inner || calls.kinds[i].cols != wanted->cols ||
            calls.kinds[i].count != wanted->count)) {
        i++;
    }
    if (i == calls.kind_count && i < KINDS_MAX) {
        calls.kinds[calls.kind_count++] = *wanted;
    }
    return i < KINDS_MAX && calls.call_count < CALLS_MAX ? i : -1;
}

/* The number of the call, to end it by; or -1. */
static int begin_call(void *state, const call_kind *wanted) {
    const int kind = calls.records ? find_kind(wanted) : -1;
    if (kind < 0) {
        calls.lost += calls.records;
        return -1;
    }
    cudaEvent_t *events = &calls.events[2 * calls.call_count];
    check_cuda(cudaEventCreate(&events[0]));
    check_cuda(cudaEventCreate(&events[1]));
    check_cuda(cudaEventRecord(events[0], (cudaStream_t)calls.backend.stream(state)));
    calls.kinds_of[calls.call_count] = kind;
    return calls.call_count++;
}

static int end_call(void *state, int call, int result) {
    if (call >= 0) {
        check_cuda(
            cudaEventRecord(calls.events[2 * call + 1], (cudaStream_t)calls.backend.stream(state)));
    }
    return result;
}

static int record_gemm(void *state, float alpha, const ms_matrix *a, const ms_matrix *b, float beta,
                       const ms_matrix *c) {
    const int64_t inner = a->transposed ? a->rows : a->cols;
    const call_kind kind = {"product", c->rows, inner, c->cols, c->batch_count, 0, 0.0, 0.0};
    const int call = begin_call(state, &kind);
    return end_call(state, call, calls.backend.gemm(state, alpha, a, b, beta, c));
}

static int record_update(void *state, const ms_update_args *args) {
    const call_kind kind = {"updates", 0, 0, 0, 0, 0, 0.0, 0.0};
    const int call = begin_call(state, &kind);
    return end_call(state, call, calls.backend.update(state, args));
}

static int record_cast(void *state, void *target, ms_dtype to, const void *source, ms_dtype from,
                       uint64_t count) {
    const call_kind kind = {"casts", 0, 0, 0, 0, 0, 0.0, 0.0};
    const int call = begin_call(state, &kind);
    return end_call(state, call, calls.backend.cast(state, target, to, source, from, count));
}

static ms_backend recorded_backend(void) {
    ms_backend b = calls.backend = ms_backend_cuda(0);
    b.gemm = record_gemm;
    b.update = record_update;
    b.cast = record_cast;
    return b;
}

static int compare_kinds(const void *a, const void *b) {
    const double x = ((const call_kind *)a)->ms, y = ((const call_kind *)b)->ms;
    return (x < y) - (x > y);
}

/* One more step, with events. Returns its milliseconds. */
static double record_step(const bench_model *m) {
    cudaEvent_t ends[2];
    cudaStream_t stream = (cudaStream_t)ms_stream(m->model);
    calls.call_count = calls.kind_count = calls.lost = 0;
    check_cuda(cudaEventCreate(&ends[0]));
    check_cuda(cudaEventCreate(&ends[1]));
    calls.records = true;
    check_cuda(cudaEventRecord(ends[0], stream));
    bench_check(m->model, ms_step(m->model, NULL));
    check_cuda(cudaEventRecord(ends[1], stream));
    calls.records = false;
    bench_check(m->model, ms_synchronize(m->model));
    for (int i = 0; i < calls.call_count; i++) {
        call_kind *kind = &calls.kinds[calls.kinds_of[i]];
        kind->calls++;
        kind->ms += elapsed_ms(calls.events[2 * i], calls.events[2 * i + 1]);
        kind->flops += 2.0 * (double)kind->rows * (double)kind->inner * (double)kind->cols *
                       (double)kind->count;
        check_cuda(cudaEventDestroy(calls.events[2 * i]));
        check_cuda(cudaEventDestroy(calls.events[2 * i + 1]));
    }
    const double ms = elapsed_ms(ends[0], ends[1]);
    check_cuda(cudaEventDestroy(ends[0]));
    check_cuda(cudaEventDestroy(ends[1]));
    return ms;
}

static void print_kind(bench_table *table, const char *model, const call_kind *k, double step_ms) {
    bench_cell(table, model);
    bench_cell(table, k->name);
    const int64_t sizes[] = {k->rows, k->inner, k->cols, k->count};
    for (int i = 0; i < 4; i++) {
        optional_value(table, sizes[i] > 0, (double)sizes[i], 0);
    }
    optional_value(table, k->calls > 0, (double)k->calls, 0);
    bench_value(table, k->ms, 3);
    optional_value(table, step_ms > 0.0, k->ms / (step_ms > 0.0 ? step_ms : 1.0), 3);
    optional_value(table, k->flops > 0.0 && k->ms > 0.0,
                   1e-9 * k->flops / (k->ms > 0.0 ? k->ms : 1.0), 1);
}

/* Where the time of a plain step in 16 bits goes: its products by shape, and in all; updates; casts; and
   what is left, the kernels of layers. */
static void print_shares(bench_table *table, const char *model, double step_ms) {
    enum { MOST_ROWS = 12 };
    call_kind all = {"all products", 0, 0, 0, 0, 0, 0.0, 0.0}, rest = all;
    rest.name = "kernels of layers";
    rest.ms = step_ms;
    qsort(calls.kinds, (size_t)calls.kind_count, sizeof calls.kinds[0], compare_kinds);
    for (int i = 0; i < calls.kind_count; i++) {
        const call_kind *k = &calls.kinds[i];
        const bool is_product = k->rows > 0;
        rest.ms -= k->ms;
        all.calls += is_product ? k->calls : 0;
        all.ms += is_product ? k->ms : 0.0;
        all.flops += k->flops;
        if (i < MOST_ROWS || !is_product) {
            print_kind(table, model, k, step_ms);
        }
    }
    print_kind(table, model, &all, step_ms);
    print_kind(table, model, &rest, step_ms);
}

/* The instructions of a plan that callbacks of layers with one name run, and the library's own. */
typedef struct layer_kind {
    char name[48]; // "attention, backward"
    int count;
    double predicted_ms, measured_ms;
} layer_kind;

typedef struct layer_kinds {
    layer_kind items[LAYERS_MAX];
    int count;
    bool measured; // what is being added
} layer_kinds;

/* Layers of blocks are called "h0.attention", "h1.attention", and so on. */
static void name_kind(char name[48], const ms_event *event) {
    const char *dot = event->name ? strrchr(event->name, '.') : NULL;
    const char *what = event->kind == MS_EVENT_FORWARD    ? "forward"
                       : event->kind == MS_EVENT_BACKWARD ? "backward"
                                                          : NULL;
    if (what && event->name) {
        snprintf(name, 48, "%.30s, %s", dot ? dot + 1 : event->name, what);
    } else {
        snprintf(name, 48, "%s", event->kind == MS_EVENT_UPDATE ? "updates" : "all else");
    }
}

static void add_event(const ms_event *event, void *user) {
    layer_kinds *all = (layer_kinds *)user;
    char name[48];
    int i = 0;
    if (event->stream != MS_STREAM_COMPUTE || event->kind == MS_EVENT_DROP) {
        return;
    }
    name_kind(name, event);
    while (i < all->count && strcmp(all->items[i].name, name) != 0) {
        i++;
    }
    if (i == LAYERS_MAX) {
        return;
    }
    if (i == all->count) {
        memset(&all->items[all->count++], 0, sizeof all->items[0]);
        memcpy(all->items[i].name, name, sizeof name);
    }
    if (all->measured) {
        all->items[i].measured_ms += 1e-3 * event->measured_us;
    } else {
        all->items[i].predicted_ms += 1e-3 * event->duration_us;
        all->items[i].count++;
    }
}

static void add_events(layer_kinds *all, ms_model *model, bool measured) {
    all->measured = measured;
    bench_check(model, ms_visit_events(model, MS_PROGRAM_TRAIN, add_event, all));
}

static int compare_layers(const void *a, const void *b) {
    const double x = ((const layer_kind *)a)->measured_ms, y = ((const layer_kind *)b)->measured_ms;
    return (x < y) - (x > y);
}

/* Where the time of a plain step in 16 bits goes, as it was measured instruction by instruction, and how
   far that was predicted. */
static void print_layers(const settings *s, const char *model, layer_kinds *all) {
    double sum = 0.0;
    bench_table table = begin_table(s, "plain_step_in_16_bits layers count measured_ms share "
                                       "predicted_ms predicted/measured");
    qsort(all->items, (size_t)all->count, sizeof all->items[0], compare_layers);
    for (int i = 0; i < all->count; i++) {
        sum += all->items[i].measured_ms;
    }
    for (int i = 0; i < all->count; i++) {
        const layer_kind *k = &all->items[i];
        const bool known = k->measured_ms > 0.0;
        bench_cell(&table, model);
        bench_cell(&table, k->name);
        bench_count(&table, (uint64_t)k->count);
        bench_value(&table, k->measured_ms, 3);
        bench_value(&table, k->measured_ms / (sum > 0.0 ? sum : 1.0), 3);
        bench_value(&table, k->predicted_ms, 3);
        optional_value(&table, known, k->predicted_ms / (known ? k->measured_ms : 1.0), 3);
    }
}

// ---- rows ----------------------------------------------------------------------------------------

/* As nn_init, with numbers of one generator that are equally distributed: it has to be done for each
   row, and must not take longer than the steps. */
static void init_params(const bench_model *m) {
    uint32_t random = 1;
    for (int64_t i = 0; i < nn_param_count(m->net); i++) {
        const nn_param_info *info = nn_param_at(m->net, i);
        const size_t count = (size_t)ms_shape_count(&info->shape);
        const float constant = info->init == NN_INIT_ONES ? 1.0f : 0.0f;
        const float scale = info->deviation * 3.4641016f / 16777216.0f; // the width: sqrt(12)
        float *values = (float *)malloc(count * sizeof *values);
        if (!values) {
            bench_stop("no memory for initial values");
        }
        for (size_t k = 0; k < count; k++) {
            random = random * 1664525u + 1013904223u; // as in models.h
            values[k] = info->init == NN_INIT_NORMAL ? scale * ((float)(random >> 8) - 8388608.0f)
                                                     : constant;
        }
        bench_check(m->model, ms_write(m->model, info->tensor, values));
        free(values);
    }
}

static bench_model create_step_model(const step_model *model, const step_plan *p,
                                     uint64_t budget_bytes, double max_instruction_us, bool dry) {
    nn_transformer_config shape;
    ms_config config;
    bench_model m;
    memset(&config, 0, sizeof config);
    if (!bench_shape(model->preset, &shape)) {
        bench_stop("no such preset");
    }
    shape.batch = model->batch;
    shape.sequence = model->sequence;
    shape.vocabulary = p->padded && shape.vocabulary > 256 ? PADDED_VOCABULARY : shape.vocabulary;
    config.backend = recorded_backend();
    if (shape.channels < 64) { // tiny: the usual workspace is larger than all else
        config.backend.workspace_bytes = 16384;
    }
    config.tf32 = true;
    config.cuda_graph = p->graph;
    config.mode = p->mode;
    config.offloading = p->offloading;
    config.mixed_precision = p->half ? MS_SWITCH_DEFAULT : MS_SWITCH_OFF;
    config.mixed_dtype = half_dtype();
    config.empirical_profiling = p->profiled ? MS_SWITCH_ON : MS_SWITCH_DEFAULT;
    config.max_instruction_us = max_instruction_us;
    config.tiling = max_instruction_us > 0.0 ? MS_SWITCH_ON : MS_SWITCH_DEFAULT;
    config.memory_budget_bytes = budget_bytes;
    config.dry_run = dry;
    bench_model_begin(&m, &config, nn_cuda());
    nn_force_half(m.net, p->half);
    bench_model_build(&m, model->preset, &shape);
    return m;
}

/* The budget of a plan: a part of what the plain plan with the same arithmetic takes. */
static uint64_t find_budget(step_base *base, const step_model *model, const step_plan *p) {
    uint64_t *bytes = &base->plain_bytes[p->half];
    if (p->divisor == 0) {
        return UNLIMITED;
    }
    if (*bytes == 0) {
        const step_plan *plain = step_plans;
        ms_memory_report report;
        while (plain->half != p->half) {
            plain++;
        }
        bench_model m = create_step_model(model, plain, UNLIMITED, 0.0, true);
        bench_check(m.model, ms_wrap(m.model));
        bench_check(m.model, ms_report(m.model, &report));
        *bytes = report.arena_bytes;
        bench_model_destroy(&m);
    }
    return *bytes / p->divisor;
}

/* Steps one after the other, each with a batch of its own, as a trainer takes them. */
static void time_steps(step_outcome *o, const bench_model *m, int count) {
    static cudaEvent_t events[STEPS_MAX + 1];
    double ms[STEPS_MAX], enqueue[ENQUEUED];
    cudaStream_t stream = (cudaStream_t)ms_stream(m->model);
    for (int i = 0; i <= count; i++) {
        check_cuda(cudaEventCreate(&events[i]));
    }
    check_cuda(cudaEventRecord(events[0], stream));
    for (int i = 0; i < count; i++) {
        bench_write_batch(m);
        bench_check(m->model, ms_step(m->model, NULL));
        check_cuda(cudaEventRecord(events[i + 1], stream));
    }
    bench_check(m->model, ms_synchronize(m->model));
    for (int i = 0; i < count; i++) {
        ms[i] = elapsed_ms(events[i], events[i + 1]);
    }
    for (int i = 0; i <= count; i++) {
        check_cuda(cudaEventDestroy(events[i]));
    }
    o->ms = bench_median(ms, count);
    o->least_ms = ms[0];
    o->most_ms = ms[count - 1];
    for (int i = 0; i < ENQUEUED; i++) {
        bench_check(m->model, ms_synchronize(m->model));
        const double start = bench_seconds();
        bench_check(m->model, ms_step(m->model, NULL));
        enqueue[i] = 1e3 * (bench_seconds() - start);
    }
    o->enqueue_ms = bench_median(enqueue, ENQUEUED);
}

static void run_steps_of(step_outcome *o, const bench_model *m, int count, uint64_t before,
                         layer_kinds *layers) {
    memset(layers, 0, sizeof *layers);
    bench_check(m->model, ms_report(m->model, &o->first));
    add_events(layers, m->model, false);
    init_params(m);
    bench_write_batch(m);
    for (int i = 0; i <= STEP_WARMUP; i++) {
        bench_check(m->model, ms_step(m->model, &o->losses[i == 0 ? 0 : 1]));
    }
    bench_check(m->model, ms_synchronize(m->model));
    o->taken_bytes = taken_since(before);
    bench_check(m->model, ms_report(m->model, &o->last)); // a profile has led to another plan
    add_events(layers, m->model, true);
    time_steps(o, m, count);
    bench_check(m->model, ms_step(m->model, &o->losses[2]));
}

static void print_step(bench_table *table, const char *name, const bench_model *m,
                       const step_plan *p, const step_outcome *o, const char *bits) {
    const ms_memory_report *r = &o->last;
    const nn_transformer_config *shape = &m->shape;
    const double tokens = (double)(shape->batch * shape->sequence), ms = o->ms;
    const double attention = 12.0 * (double)(shape->layers * shape->channels * shape->sequence);
    const double flops = tokens * (6.0 * (double)r->param_count + attention);
    const double per_ms = ms > 0.0 ? 1.0 / ms : 0.0;
    char text[64];
    snprintf(text, sizeof text, "%s, %lld x %lld", name, (long long)shape->batch,
             (long long)shape->sequence);
    bench_cell(table, text);
    bench_cell(table, arithmetic_name(p->half));
    bench_cell(table, p->name);
    bench_cell(table, p->graph ? "graph" : "stream");
    bench_bytes(table, r->arena_bytes);
    bench_bytes(table, o->taken_bytes);
    bench_bytes(table, r->host_bytes);
    bench_bytes(table, r->to_device_bytes + r->to_host_bytes);
    bench_value(table, r->recompute_share, 3);
    bench_value(table, o->wrap_seconds, 2);
    bench_value(table, ms, 3);
    bench_value(table, o->least_ms, 3);
    bench_value(table, o->most_ms, 3);
    bench_value(table, o->enqueue_ms, 3);
    bench_value(table, 1e3 * tokens * per_ms, 0);
    bench_value(table, 1e-9 * flops * per_ms, 2);
    bench_value(table, 1e-3 * o->first.step_us * per_ms, 3);
    optional_value(table, p->profiled, 1e-3 * r->step_us * per_ms, 3);
    bench_value(table, o->losses[2], 6);
    bench_cell(table, bits);
}

/* "yes" or "NO" beside the first plan, the plain one if it fits, whose losses are kept; "-" where there is none to compare. */
static const char *compare_losses(settings *s, step_base *base, const step_plan *p,
                                  const step_outcome *o) {
    double *known = base->losses[p->half];
    if (p->padded || p->mode == MS_MODE_AGGRESSIVE) {
        return "-";
    }
    if (!base->has_losses[p->half]) {
        base->has_losses[p->half] = true;
        memcpy(known, o->losses, sizeof o->losses);
    }
    const bool same = memcmp(known, o->losses, sizeof o->losses) == 0;
    s->good = s->good && same;
    return same ? "yes" : "NO";
}

/* Where no plan is as small as the budget, the smallest one is taken, and a note says so. */
static ms_result wrap_or_smallest(settings *s, const char *row, ms_model *model) {
    uint64_t smallest = 0;
    ms_result result = ms_wrap(model);
    if (result == MS_RESULT_BUDGET && ms_smallest_budget(model, &smallest) == MS_RESULT_OK) {
        char text[96];
        snprintf(text, sizeof text, "no plan is that small; the smallest takes %.1f MB",
                 1e-6 * (double)smallest);
        note(s, row, text);
        ms_set_budget(model, smallest);
        result = ms_wrap(model);
    }
    return result;
}

/* What is known of the first plan alone: where the time of a step goes. The kinds of calls are in
   `calls`. */
typedef struct step_details {
    bool known;
    double recorded_ms;
    layer_kinds layers;
} step_details;

/* A row of the table, or a note why there is none. */
static void run_step_plan(settings *s, bench_table *table, step_details *details,
                          const step_model *model, const step_plan *p, step_base *base) {
    static layer_kinds layers;
    char name[96];
    step_outcome o;
    memset(&o, 0, sizeof o);
    snprintf(name, sizeof name, "%s, %s, %s%s", model->name, arithmetic_name(p->half), p->name,
             p->graph ? ", graph" : "");
    if ((p->graph && s->no_graph) || !has_time(s, name)) {
        return;
    }
    bench_model m = create_step_model(model, p, find_budget(base, model, p), 0.0, false);
    const uint64_t before = device_free_bytes();
    const double start = bench_seconds();
    const ms_result result = wrap_or_smallest(s, name, m.model);
    o.wrap_seconds = bench_seconds() - start;
    if (result == MS_RESULT_OK) {
        run_steps_of(&o, &m, (int)s->steps, before, &layers);
        print_step(table, model->name, &m, p, &o, compare_losses(s, base, p, &o));
        if (p == step_plans) {
            details->known = true;
            details->recorded_ms = record_step(&m);
            if (calls.lost > 0) {
                note(s, name, "there is no room for all calls: some count as kernels of layers");
            }
            details->layers = layers;
        }
    } else {
        note(s, name, ms_last_error(m.model));
    }
    bench_model_destroy(&m);
}

static void print_legend(const settings *s) {
    if (!s->tsv) {
        printf(
            "\nms: median of %lld steps by the device's events. arena: as planned; device takes: "
            "what the device has less after\nthe steps; moved: copied from and to the host in a "
            "step. predicted/ms: the step as predicted without measurements,\nprofiled/ms: by a "
            "measured profile, over the measured one. same bits: the losses are those of the "
            "plain plan.\n",
            (long long)s->steps);
    }
}

static void print_details(const settings *s, const char *model, step_details *d) {
    putchar('\n');
    print_layers(s, model, &d->layers);
    putchar('\n');
    bench_table table =
        begin_table(s, "plain_step_in_16_bits what rows inner cols count calls ms share TFLOP/s");
    print_shares(&table, model, d->recorded_ms);
}

static void run_steps(settings *s) {
    static step_details details;
    const int count = s->tiny ? 1 : (int)(sizeof step_models / sizeof step_models[0]);
    load_kernels();
    for (int i = 0; i < count; i++) {
        const step_model *model = s->tiny ? &tiny_step_models[i] : &step_models[i];
        step_base base;
        memset(&base, 0, sizeof base);
        memset(&details, 0, sizeof details);
        if (strcmp(s->only, "all") != 0 && strcmp(s->only, model->name) != 0) {
            continue;
        }
        bench_table table = begin_table(
            s, "model arithmetic plan launch arena device_takes host moved recomputed plan_s ms "
               "ms_min ms_max enqueue_ms tokens/s TFLOP/s predicted/ms profiled/ms loss same_bits");
        for (int k = 0; k < STEP_PLANS; k++) {
            run_step_plan(s, &table, &details, model, &step_plans[k], &base);
        }
        print_notes(s);
        print_legend(s);
        if (details.known) {
            print_details(s, model->name, &details);
        }
    }
}

// ---- slices --------------------------------------------------------------------------------------

typedef struct sliced {
    double longest_ms, longest_call_ms, sum_ms;
    int count, late; // late: longer on the device than asked for, by more than a tenth
} sliced;

/* One step in slices; each is waited for, and timed by the device and by the host. */
static void step_in_slices(sliced *all, const bench_model *m, uint64_t slice_us,
                           const cudaEvent_t events[2]) {
    cudaStream_t stream = (cudaStream_t)ms_stream(m->model);
    ms_result result = MS_RESULT_MORE;
    double loss;
    bench_write_batch(m);
    while (result == MS_RESULT_MORE) {
        check_cuda(cudaEventRecord(events[0], stream));
        const double start = bench_seconds();
        result = ms_step_slice(m->model, slice_us, &loss);
        const double call_ms = 1e3 * (bench_seconds() - start);
        check_cuda(cudaEventRecord(events[1], stream));
        check_cuda(cudaStreamSynchronize(stream));
        const double ms = elapsed_ms(events[0], events[1]);
        all->count++;
        all->sum_ms += ms;
        all->late += ms > 1.1e-3 * (double)slice_us;
        all->longest_ms = ms > all->longest_ms ? ms : all->longest_ms;
        all->longest_call_ms = call_ms > all->longest_call_ms ? call_ms : all->longest_call_ms;
    }
    bench_check(m->model, result);
}

static void run_slices_of(settings *s, bench_table *table, const step_model *model,
                          double max_instruction_us) {
    static const uint64_t lengths_us[] = {1000, 2000, 5000, 16000};
    enum { WARM = 2, TIMED = 3 };
    static layer_kinds layers;
    step_outcome whole;
    cudaEvent_t events[2];
    memset(&whole, 0, sizeof whole);
    bench_model m = create_step_model(model, &step_plans[0], UNLIMITED, max_instruction_us, false);
    bench_check(m.model, ms_wrap(m.model));
    run_steps_of(&whole, &m, (int)s->steps, device_free_bytes(), &layers);
    check_cuda(cudaEventCreate(&events[0]));
    check_cuda(cudaEventCreate(&events[1]));
    for (size_t i = 0; i < sizeof lengths_us / sizeof lengths_us[0]; i++) {
        sliced all;
        for (int step = 0; step < WARM + TIMED; step++) {
            if (step <= WARM) {
                memset(&all, 0, sizeof all);
            }
            step_in_slices(&all, &m, lengths_us[i], events);
        }
        bench_cell(table, model->name);
        optional_value(table, max_instruction_us > 0.0, max_instruction_us, 0);
        bench_count(table, lengths_us[i]);
        bench_value(table, (double)all.count / TIMED, 1);
        bench_value(table, all.longest_ms, 3);
        bench_value(table, 100.0 * all.late / all.count, 1);
        bench_value(table, all.longest_call_ms, 3);
        bench_value(table, all.sum_ms / TIMED, 3);
        bench_value(table, whole.ms > 0.0 ? all.sum_ms / TIMED / whole.ms : 0.0, 3);
    }
    check_cuda(cudaEventDestroy(events[0]));
    check_cuda(cudaEventDestroy(events[1]));
    bench_model_destroy(&m);
}

/* With whole layers, and with those that are longer than a millisecond cut into tiles. */
static void run_slices(settings *s) {
    const step_model *model = s->tiny ? tiny_step_models : step_models;
    bench_table table = begin_table(s, "model max_instruction_us slice_us slices_a_step longest_ms "
                                       "late_% longest_call_ms step_ms over_whole");
    for (int cut = 0; cut < 2; cut++) {
        if (has_time(s, cut ? "long layers cut" : "whole layers")) {
            run_slices_of(s, &table, model, cut ? 1000.0 : 0.0);
        }
    }
}

#endif // MEMSCALE_BENCH_GPU_STEPS_H
