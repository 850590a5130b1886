/*  test_groups.c - params in groups with an optimizer each, norms by group, steps that are left out by
    their norm, a factor of the gradients, and params that are paused: against float64, and bit for bit
    with every technique, on the CPU and on the virtual device. In recordings: test_cuda_graphs.c. */
#include "private.h"
#include "toy_layers.h"
#include "files.h"
#include "slices.h"
#include "random_dag.h"
#ifndef T_CUDA
#include "virtual.h"
#endif

enum {
    ROWS = 6,
    COLS = 8,
    WIDE = COLS * COLS,
    BLOCKS = 3,
    PARAMS = 3 * BLOCKS,
    OPS = 2 * BLOCKS + 1
};
enum { GROUPS = 4, STEPS = 12, STATES = 2, LARGE = 3 };

// ------------------------------------------------------------------------------------------------
// what is trained, and what happens in each step

typedef struct script {
    uint64_t seed;
    int64_t rows;
    uint32_t micro_count, group_count;
    ms_optimizer_desc desc[GROUPS + 1]; // the first: of params in no group
    uint32_t group_of[PARAMS];
    float decay[PARAMS]; // below 0: not set
    float loss_factor;   // 0: the mean
} script;

typedef struct event {
    uint32_t micros; // fewer than micro_count: ms_update ends the step early
    float spike;     // the input of the last micro-batch is multiplied by it
    float factor;    // of the gradients; 0: none
    uint32_t when; // it is given: before the step, before its last micro-batch, inside it, after it
    bool asks;     // for the norm, before the update
    bool drops;    // goes on with another batch instead of the first one's update
    int32_t pauses, resumes, rated; // a param, a param, a group; -1: none
    float rate;
} event;

static bool takes_norms(const script *s) {
    bool takes = s->desc[0].skip_above_norm > 0.0f;
    for (uint32_t k = 0; k <= s->group_count; ++k) {
        takes |= s->desc[k].grad_clip_norm > 0.0f;
    }
    return takes;
}

static bool has_kind(const script *s, ms_optimizer_kind kind) {
    bool has = false;
    for (uint32_t i = 0; i < PARAMS; ++i) {
        has |= s->desc[s->group_of[i]].kind == kind;
    }
    return has;
}

static int own_update(const ms_update_args *args);

/* Own norms may be asked for of groups alone: a step is left out as a whole. */
static ms_optimizer_desc random_desc(t_rng *rng, bool of_group, bool own) {
    ms_optimizer_desc o;
    memset(&o, 0, sizeof o);
    o.kind = (ms_optimizer_kind)t_below(rng, own && t_chance(rng, 0.5) ? MS_OPTIMIZER_NONE + 1
                                                                       : MS_OPTIMIZER_CUSTOM);
    o.learning_rate = 0.002f + 0.01f * (float)t_unit(rng);
    o.beta1 = t_chance(rng, 0.5) ? 0.6f + 0.3f * (float)t_unit(rng) : 0.0f;
    o.beta2 = t_chance(rng, 0.5) ? 0.9f + 0.09f * (float)t_unit(rng) : 0.0f;
    o.epsilon = t_chance(rng, 0.5) ? 1e-4f : 0.0f;
    o.momentum = t_chance(rng, 0.6) ? 0.3f + 0.6f * (float)t_unit(rng) : 0.0f;
    o.weight_decay = t_chance(rng, 0.5) ? 0.1f * (float)t_unit(rng) : 0.0f;
    const bool clips = o.kind != MS_OPTIMIZER_NONE && t_chance(rng, 0.4);
    o.grad_clip_norm = !clips                           ? 0.0f
                       : of_group && t_chance(rng, 0.3) ? FLT_MAX
                                                        : 0.05f + 3.0f * (float)t_unit(rng);
    o.skip_above_norm = !of_group && t_chance(rng, 0.6) ? 40.0f : 0.0f;
    o.update = o.kind == MS_OPTIMIZER_CUSTOM ? own_update : NULL;
    o.state_count = o.kind == MS_OPTIMIZER_CUSTOM ? 1 : 0;
    return o;
}

static script new_script(uint64_t seed, bool own) {
    script s;
    t_rng rng = t_seed(seed);
    memset(&s, 0, sizeof s);
    s.seed = seed;
    s.rows = ROWS;
    s.micro_count = t_chance(&rng, 0.4) ? 2 + t_below(&rng, 2) : 1;
    s.group_count = t_below(&rng, GROUPS + 1);
    for (uint32_t k = 0; k <= s.group_count; ++k) {
        s.desc[k] = random_desc(&rng, k > 0, own);
    }
    for (uint32_t i = 0; i < PARAMS; ++i) {
        s.group_of[i] = t_below(&rng, s.group_count + 1);
        s.decay[i] = t_chance(&rng, 0.2) ? 0.2f * (float)t_unit(&rng) : -1.0f;
    }
    if (own && seed % 4 < 2) { // an update of the trainer's own first, without norms, or later
        const uint32_t of_own = (uint32_t)seed % 4;
        s.group_count += s.group_count == 0;
        for (uint32_t k = 0; k <= s.group_count && of_own == 0; ++k) {
            s.desc[k].grad_clip_norm = s.desc[k].skip_above_norm = 0.0f;
        }
        s.desc[1 - of_own] = t_optimizer(MS_OPTIMIZER_ADAMW, 0.01f);
        s.desc[0].skip_above_norm = of_own == 1 ? 40.0f : 0.0f;
        s.desc[of_own] = t_optimizer(MS_OPTIMIZER_CUSTOM, 0.005f);
        s.desc[of_own].update = own_update;
        s.desc[of_own].state_count = 1;
        s.group_of[0] = 0;
        s.group_of[1] = 1;
    }
    s.loss_factor = t_chance(&rng, 0.5) ? 0.02f + 0.02f * (float)t_unit(&rng) : 0.0f;
    return s;
}

static event event_at(const script *s, uint64_t step) {
    event e;
    t_rng rng = t_seed(s->seed * 1000 + step);
    memset(&e, 0, sizeof e);
    e.micros = t_chance(&rng, 0.2) ? 1 + t_below(&rng, s->micro_count) : s->micro_count;
    e.spike = t_chance(&rng, 0.25) ? 16.0f : 1.0f;
    e.factor = t_chance(&rng, 0.4) ? 0.25f + (float)t_unit(&rng) : 0.0f;
    e.when = t_below(&rng, 4);
    e.asks = takes_norms(s) && t_chance(&rng, 0.5);
    e.drops = t_chance(&rng, 0.25);
    e.pauses = t_chance(&rng, 0.3) ? (int32_t)t_below(&rng, PARAMS) : -1;
    e.resumes = t_chance(&rng, 0.4) ? (int32_t)t_below(&rng, PARAMS) : -1;
    e.rated = t_chance(&rng, 0.4) ? (int32_t)t_below(&rng, s->group_count + 1) : -1;
    e.rate = 0.01f * (float)t_unit(&rng);
    return e;
}

// ------------------------------------------------------------------------------------------------
// the model: products and scales with shifts; numbers of any size come through

enum {
    ON_VIRTUAL = 1,
    DEBUGGED = 2,
    SMALLEST = 4,
    MOVED = 8,    // values and state, to the host
    CODED = 16,   // state in 8 bits
    BY_STEP = 32, // ms_step in place of ms_forward, ms_backward and ms_update
    SLICED = 64,
    SLEEPS = 128, // suspended and resumed between steps
    SAVED = 256   // and loaded into another model, twice
};

typedef struct ways {
    const char *name;
    unsigned is;
    ms_dtype dtype; // of mixed precision; F32: none
} ways;

typedef struct net {
    const script *of;
    const ways *how;
    ms_model *m;
    ms_tensor x, p[PARAMS], loss;
    ms_param_group group[GROUPS + 1];
    t_op op[OPS];
    uint32_t op_count;
    bool paused[PARAMS];
    uint32_t left_out; // steps that were dropped when their norm was known to be too large
    float rate[GROUPS + 1];
    t_heap heap;
#ifndef T_CUDA
    v_device device;
    v_layer layer[OPS];
#endif
} net;

static bool has(const ways *h, unsigned what) {
    return (h->is & what) != 0;
}

static void apply_own(const ms_update_args *a) {
    for (uint64_t i = 0; i < a->count; ++i) {
        const float g = a->gradient_scale ? *a->gradient_scale * a->gradient[i] : a->gradient[i];
        a->state[0][i] = 0.5f * a->state[0][i] + g;
        a->value[i] -= a->learning_rate * (a->state[0][i] + a->weight_decay * a->value[i]);
    }
}

#ifndef T_CUDA
static void run_own(void *user, void *arguments) {
    if (v_runs((v_device *)user)) {
        apply_own((const ms_update_args *)arguments);
    }
}
#endif

static int own_update(const ms_update_args *args) {
#ifndef T_CUDA
    if (args->stream != NULL) {
        const v_stream *stream = (const v_stream *)args->stream;
        ms_update_args later = *args;
        return streams_enqueue(&stream->device->engine, stream->queue, run_own, stream->device,
                               &later, sizeof later, 100)
                   ? 0
                   : V_ERROR_MEMORY;
    }
#endif
    apply_own(args);
    return 0;
}

static void add(net *n, t_kind kind, ms_tensor in, ms_tensor out, const ms_tensor *params,
                int count) {
    t_op *op = &n->op[n->op_count];
    ms_layer_desc desc = t_layer(op, kind, t_kinds[kind].name, in, out);
    for (int k = 0; k < count; ++k) {
        desc.param[k] = params[k];
    }
    if (kind == T_MATMUL && n->how->dtype != MS_DTYPE_F32) {
        desc.dtypes.accepts = 1u << n->how->dtype;
        desc.dtypes.half_gradients = 1;
    }
#ifndef T_CUDA
    if (has(n->how, ON_VIRTUAL) && kind != T_MATMUL) { // ms_gemm enqueues
        desc = v_wrap(&desc, &n->layer[n->op_count]);
    }
#endif
    const ms_layer layer = ms_register_layer(n->m, &desc);
    if (desc.dtypes.accepts != 0) {
        ms_set_layer_technique(n->m, layer, MS_TECHNIQUE_MIXED_PRECISION, MS_SWITCH_ON);
    }
    n->op_count += 1;
}

static void add_layers(net *n) {
    const ms_shape rows = ms_shape2(n->of->rows, COLS);
    char name[16];
    ms_tensor last = n->x = ms_input(n->m, "x", MS_DTYPE_F32, rows);
    for (int b = 0; b < BLOCKS; ++b) {
        ms_tensor *p = &n->p[3 * b];
        for (int k = 0; k < 3; ++k) {
            snprintf(name, sizeof name, "%c%d", "wpq"[k], b);
            p[k] = ms_param(n->m, name, MS_DTYPE_F32,
                            k == 0 ? ms_shape2(COLS, COLS) : ms_shape1(COLS));
        }
        const ms_tensor product = ms_activation(n->m, "product", MS_DTYPE_F32, rows);
        add(n, T_MATMUL, last, product, p, 1);
        last = ms_activation(n->m, "scaled", MS_DTYPE_F32, rows);
        add(n, T_AFFINE, product, last, p + 1, 2);
    }
    n->loss = t_losses_of(n->m, last);
    add(n, T_LOSS, last, n->loss, NULL, 0);
    ms_set_loss(n->m, n->loss);
}

static void add_optimizers(net *n) {
    const script *s = n->of;
    ms_set_optimizer(n->m, &s->desc[0]);
    for (uint32_t k = 1; k <= s->group_count; ++k) {
        n->group[k] = ms_optimizer_group(n->m, &s->desc[k]);
        assert_true(n->group[k].id != 0);
    }
    for (uint32_t i = 0; i < PARAMS; ++i) {
        if (s->group_of[i] > 0) {
            ms_set_param_group(n->m, n->p[i], n->group[s->group_of[i]]);
        }
        if (s->decay[i] >= 0.0f) {
            ms_set_weight_decay(n->m, n->p[i], s->decay[i]);
        }
    }
    for (uint32_t k = 0; k <= s->group_count; ++k) {
        n->rate[k] = msi_fill_optimizer(s->desc[k]).learning_rate;
    }
    if (s->loss_factor > 0.0f) {
        ms_set_loss_factor(n->m, s->loss_factor);
    }
}

static void force_techniques(net *n) {
    for (uint32_t i = 0; i < PARAMS; ++i) {
        const uint32_t t = msi_index(&n->m->graph, n->p[i]);
        const msi_not_8bit why =
            msi_why_not_8bit(&n->m->optimizers, true, &n->m->graph.tensors.items[t]);
        const ms_tensor state = ms_optimizer_state(n->m, n->p[i], 0);
        if (has(n->how, MOVED)) {
            ms_set_tensor_technique(n->m, n->p[i], MS_TECHNIQUE_OFFLOADING, MS_SWITCH_ON);
        }
        if (has(n->how, MOVED) && state.id != 0) {
            ms_set_tensor_technique(n->m, state, MS_TECHNIQUE_OFFLOADING, MS_SWITCH_ON);
        }
        if (has(n->how, CODED) && msi_can_be_8bit(why)) {
            ms_set_tensor_technique(n->m, n->p[i], MS_TECHNIQUE_OPTIMIZER_8BIT, MS_SWITCH_ON);
        }
    }
}

static void write_params(net *n) {
    t_rng rng = t_seed(n->of->seed + 17);
    float data[WIDE];
    for (uint32_t i = 0; i < PARAMS; ++i) {
        t_fill(&rng, data, WIDE, i % 3 == 0 ? 0.5f : 0.25f);
        for (int k = 0; i % 3 == 1 && k < COLS; ++k) {
            data[k] += 1.5f;
        }
        t_ok(n->m, ms_write(n->m, n->p[i], data));
    }
}

static void start(net *n, const script *s, const ways *h) {
    memset(n, 0, sizeof *n);
    ms_config config = t_config();
    n->of = s;
    n->how = h;
    config.allocator = t_heap_allocator(&n->heap);
    config.backend = ms_backend_cpu();
    config.backend.gemm = h->dtype == MS_DTYPE_F32 ? t_gemm : config.backend.gemm;
#ifdef T_CUDA
    memset(&config.backend, 0, sizeof config.backend);
#else
    if (has(h, ON_VIRTUAL)) {
        v_open(&n->device, s->seed);
        n->device.cpu.gemm = config.backend.gemm;
        config.backend = v_backend(&n->device);
    }
#endif
    config.debug = has(h, DEBUGGED);
    config.force_optimize = has(h, SMALLEST);
    config.optimizer_8bit = has(h, CODED) ? MS_SWITCH_DEFAULT : MS_SWITCH_OFF;
    config.mixed_precision = h->dtype != MS_DTYPE_F32 ? MS_SWITCH_ON : MS_SWITCH_OFF;
    config.mixed_dtype = h->dtype;
    config.loss_scaling.initial = 16.0f; // large norms do not overflow
    config.accumulation_steps = s->micro_count;
    config.seed = 5;
    if (has(h, SLICED)) {
        s_slice(&config, s->seed);
    }
    t_ok(NULL, ms_create(&config, &n->m));
    add_layers(n);
    add_optimizers(n);
    force_techniques(n);
    t_ok(n->m, ms_wrap(n->m));
    write_params(n);
}

static void end(net *n) {
    ms_destroy(n->m);
    assert_int_equal(n->heap.live_count, 0);
    assert_int_equal(n->heap.wrong_releases, 0);
#ifndef T_CUDA
    if (has(n->how, ON_VIRTUAL)) {
        v_close(&n->device);
    }
#endif
}

// ------------------------------------------------------------------------------------------------
// updates in float64

typedef struct exact {
    double at[PARAMS][WIDE][1 + STATES];
    uint64_t count[PARAMS]; // of updates
    uint32_t skipped;
    double norm;
} exact;

static double or_else(float given, double otherwise) {
    return given == 0.0f ? otherwise : (double)given;
}

/* The formulas of the comment of ms_optimizer_desc, for one element: the value and its state. */
static void exact_element(const ms_optimizer_desc *o, double rate, double decay, double t, double g,
                          double *v) {
    const double b1 = or_else(o->beta1, 0.9);
    const double b2 = or_else(o->beta2, o->kind == MS_OPTIMIZER_LION ? 0.99 : 0.999);
    const double mu = or_else(o->momentum, o->kind == MS_OPTIMIZER_NESTEROV ? 0.9 : 0.0);
    const double lion = b1 * v[1] + (1.0 - b1) * g;
    switch (o->kind) {
    case MS_OPTIMIZER_ADAMW:
        v[1] = b1 * v[1] + (1.0 - b1) * g;
        v[2] = b2 * v[2] + (1.0 - b2) * g * g;
        v[0] -= rate * (v[1] / (1.0 - pow(b1, t)) /
                            (sqrt(v[2] / (1.0 - pow(b2, t))) + or_else(o->epsilon, 1e-8)) +
                        decay * v[0]);
        break;
    case MS_OPTIMIZER_SGD:
        v[1] = mu * v[1] + g;
        v[0] -= rate * (v[1] + decay * v[0]);
        break;
    case MS_OPTIMIZER_NESTEROV:
        v[1] = mu * v[1] + g;
        v[0] -= rate * (g + mu * v[1] + decay * v[0]);
        break;
    case MS_OPTIMIZER_LION:
        v[0] -= rate * ((lion > 0.0) - (lion < 0.0) + decay * v[0]);
        v[1] = b2 * v[1] + (1.0 - b2) * g;
        break;
    case MS_OPTIMIZER_CUSTOM:
        v[1] = 0.5 * v[1] + g;
        v[0] -= rate * (v[1] + decay * v[0]);
        break;
    case MS_OPTIMIZER_NONE:
    case MS_OPTIMIZER_COUNT:
    default:
        break;
    }
}

static uint64_t count_of(uint32_t param) {
    return param % 3 == 0 ? WIDE : COLS;
}

/* Of the group's own norm, or of all that have none. */
static uint32_t norm_of(const script *s, uint32_t group) {
    return s->desc[group].grad_clip_norm > 0.0f ? group : 0;
}

static void exact_update(const net *n, exact *x, float (*gradients)[WIDE], double factor) {
    const script *s = n->of;
    double squares[GROUPS + 1] = {0}, sum = 0.0;
    for (uint32_t i = 0; i < PARAMS; ++i) {
        for (uint64_t k = 0; k < count_of(i) && !n->paused[i]; ++k) {
            const double g = factor * (double)gradients[i][k];
            squares[norm_of(s, s->group_of[i])] += g * g;
            sum += g * g;
        }
    }
    x->norm = sqrt(sum);
    const double above = (double)s->desc[0].skip_above_norm;
    assert_true(above == 0.0 || fabs(x->norm - above) > 1e-5 * above); // else it is anyone's guess
    if (above > 0.0 && x->norm > above) {
        x->skipped += 1;
        return;
    }
    for (uint32_t i = 0; i < PARAMS; ++i) {
        const uint32_t group = s->group_of[i];
        const ms_optimizer_desc *o = &s->desc[group];
        const double limit = (double)s->desc[norm_of(s, group)].grad_clip_norm;
        const double norm = sqrt(squares[norm_of(s, group)]);
        const double scale = limit > 0.0 && norm > limit ? limit / norm : 1.0;
        const float decay = s->decay[i] >= 0.0f ? s->decay[i] : o->weight_decay;
        x->count[i] += !n->paused[i];
        for (uint64_t k = 0; k < count_of(i) && !n->paused[i]; ++k) {
            exact_element(o, (double)n->rate[group], (double)decay, (double)x->count[i],
                          scale * factor * (double)gradients[i][k], x->at[i][k]);
        }
    }
}

/* Nothing but the value and the state that the kind has. */
static int states_of(const net *n, uint32_t param) {
    int count = 0;
    while (ms_optimizer_state(n->m, n->p[param], count).id != 0) {
        count += 1;
    }
    assert_true(count <= STATES);
    return count;
}

static void read_param(const net *n, uint32_t param, int what, float *data) {
    const ms_tensor t = what == 0 ? n->p[param] : ms_optimizer_state(n->m, n->p[param], what - 1);
    t_ok(n->m, ms_read(n->m, t, data));
}

static void expect_exact(const net *n, const exact *x, uint64_t step) {
    float data[WIDE];
    ms_memory_report report;
    for (uint32_t i = 0; i < PARAMS; ++i) {
        for (int what = 0; what <= states_of(n, i); ++what) {
            read_param(n, i, what, data);
            for (uint64_t k = 0; k < count_of(i); ++k) {
                const double wanted = x->at[i][k][what];
                const double least = what == 2 ? 1e-7 : 1e-3;
                if (!(fabs((double)data[k] - wanted) <= 5e-5 * (fabs(wanted) + least))) {
                    print_error("script %llu, step %llu: param %u, kind %d, %d, element %u: %.9g, "
                                "expected %.9g\n",
                                (unsigned long long)n->of->seed, (unsigned long long)step,
                                (unsigned)i, (int)n->of->desc[n->of->group_of[i]].kind, what,
                                (unsigned)k, (double)data[k], wanted);
                    fail();
                }
            }
        }
        if (ms_update_count(n->m, n->p[i]) != x->count[i]) {
            print_error("script %llu, step %llu: param %u, kind %d: %llu updates, expected %llu\n",
                        (unsigned long long)n->of->seed, (unsigned long long)step, (unsigned)i,
                        (int)n->of->desc[n->of->group_of[i]].kind,
                        (unsigned long long)ms_update_count(n->m, n->p[i]),
                        (unsigned long long)x->count[i]);
            fail();
        }
    }
    t_report(n->m, &report);
    assert_int_equal(report.skipped_by_norm, x->skipped + n->left_out);
}

// ------------------------------------------------------------------------------------------------
// steps

/* Of more rows than a batch usually has: of several batches that follow one another. */
static void write_batch(net *n, uint64_t number, float spike) {
    float x[LARGE * ROWS * COLS];
    assert_true(n->of->rows % ROWS == 0 && n->of->rows <= LARGE * ROWS);
    for (int64_t b = 0; b < n->of->rows / ROWS; ++b) {
        t_rng rng = t_seed(n->of->seed * 7919 + number + (uint64_t)b);
        t_fill(&rng, x + b * ROWS * COLS, ROWS * COLS, 1.0f);
    }
    for (int64_t k = 0; k < n->of->rows * COLS; ++k) {
        x[k] *= spike;
    }
    t_ok(n->m, ms_write(n->m, n->x, x));
}

static void apply_between(net *n, const event *e) {
    if (e->rated == 0) {
        ms_set_learning_rate(n->m, e->rate);
    } else if (e->rated > 0) {
        ms_set_group_learning_rate(n->m, n->group[e->rated], e->rate);
    }
    if (e->rated >= 0) {
        n->rate[e->rated] = e->rate;
    }
    if (e->pauses >= 0) {
        t_ok(n->m, ms_set_paused(n->m, n->p[e->pauses], true));
        n->paused[e->pauses] = true;
    }
    if (e->resumes >= 0) {
        t_ok(n->m, ms_set_paused(n->m, n->p[e->resumes], false));
        n->paused[e->resumes] = false;
    }
    if (has(n->how, SLEEPS)) {
        t_ok(n->m, ms_suspend(n->m, NULL));
        t_ok(n->m, ms_resume(n->m));
    }
}

static void read_gradients(const net *n, float gradients[PARAMS][WIDE]) {
    for (uint32_t i = 0; i < PARAMS; ++i) {
        t_ok(n->m, ms_read(n->m, ms_gradient(n->m, n->p[i]), gradients[i]));
    }
}

/* What became of the gradients that the micro-batches have left; x may be NULL. */
static void end_step(net *n, const event *e, exact *x) {
    double before = 0.0, after = 0.0;
    if (e->asks) {
        t_ok(n->m, ms_gradient_norm(n->m, &before));
        t_ok(n->m, ms_gradient_norm(n->m, &after)); // and again
        assert_true(before == after);
    }
    t_ok(n->m, ms_update(n->m));
    if (takes_norms(n->of)) {
        t_ok(n->m, ms_gradient_norm(n->m, &after));
        assert_true(!e->asks || before == after);
    } else if (n->how->dtype != MS_DTYPE_F16) { // which needs the norm itself
        assert_int_equal(ms_gradient_norm(n->m, &after), MS_RESULT_ORDER);
    }
    if (x != NULL && takes_norms(n->of)) {
        if (!(fabs(after - x->norm) <= 1e-6 * x->norm)) {
            print_error("script %llu: norm %.9g, expected %.9g; micros %u of %u, factor %g at %u, "
                        "asks %d, drops %d, pauses %d\n",
                        (unsigned long long)n->of->seed, after, x->norm, (unsigned)e->micros,
                        (unsigned)n->of->micro_count, (double)e->factor, (unsigned)e->when, e->asks,
                        e->drops, (int)e->pauses);
            fail();
        }
    }
}

/* By ms_forward, ms_backward and ms_update, which can be asked between these. */
static void step_in_three(net *n, uint64_t step, const event *e, exact *x) {
    float gradients[PARAMS][WIDE];
    const bool whole = e->micros == n->of->micro_count;
    const double above = (double)n->of->desc[0].skip_above_norm;
    for (int again = 0; again < 1 + (e->drops && whole); ++again) {
        const bool drops = e->drops && whole && again == 0;
        const bool gives = e->factor > 0.0f && !drops;
        const bool late =
            again > 0 && e->when < 2; // a factor for the step that is dropped goes with it
        for (uint32_t k = 0; k < e->micros; ++k) {
            const bool last = k + 1 == e->micros;
            if (gives && !late && (e->when == 0 ? k == 0 : e->when == 1 && last)) {
                t_ok(n->m, ms_set_gradient_factor(n->m, e->factor));
            }
            write_batch(n, 16 * step + 8 * (uint64_t)drops + k, last ? e->spike : 1.0f);
            t_ok(n->m, ms_forward(n->m, NULL));
            if (gives && last && (late || e->when == 2)) {
                t_ok(n->m, ms_set_gradient_factor(n->m, e->factor));
            }
            t_ok(n->m, ms_backward(n->m));
        }
        if (drops && e->asks) {
            double norm;
            t_ok(n->m, ms_gradient_norm(n->m, &norm));
            n->left_out += above > 0.0 && norm > above;
        }
    }
    if (e->factor > 0.0f && e->when == 3) {
        t_ok(n->m, ms_set_gradient_factor(n->m, e->factor));
    }
    if (x != NULL) {
        const double early =
            n->of->loss_factor > 0.0f ? 1.0 : (double)n->of->micro_count / (double)e->micros;
        read_gradients(n, gradients);
        exact_update(n, x, gradients, early * (e->factor > 0.0f ? (double)e->factor : 1.0));
    }
    event now = *e;
    now.asks &= whole; // an early end has no backward that is the last
    end_step(n, &now, x);
}

static void step_at_once(net *n, uint64_t step, const event *e) {
    if (e->factor > 0.0f) {
        t_ok(n->m, ms_set_gradient_factor(n->m, e->factor));
    }
    for (uint32_t k = 0; k < e->micros; ++k) {
        write_batch(n, 16 * step + k, k + 1 == e->micros ? e->spike : 1.0f);
        t_ok(n->m, has(n->how, SLICED) ? s_step(n->m, NULL) : ms_step(n->m, NULL));
    }
    if (e->micros < n->of->micro_count) {
        t_ok(n->m, ms_update(n->m));
    }
}

static void step(net *n, uint64_t number, const event *e, exact *x) {
    apply_between(n, e);
    if (has(n->how, BY_STEP) || has(n->how, SLICED)) {
        step_at_once(n, number, e);
    } else {
        step_in_three(n, number, e, x);
    }
}

// ------------------------------------------------------------------------------------------------
// against float64

typedef struct tally {
    uint64_t skipped, dropped, clipped, paused, early, factors, mixed;
} tally;

static void check_exact(uint64_t seed, const ways *h, tally *t) {
    static exact x;
    net n;
    const script s = new_script(seed, true);
    float data[WIDE], before[PARAMS][1 + STATES][WIDE];
    start(&n, &s, h);
    memset(&x, 0, sizeof x);
    for (uint32_t i = 0; i < PARAMS; ++i) {
        read_param(&n, i, 0, data);
        for (uint64_t k = 0; k < count_of(i); ++k) {
            x.at[i][k][0] = (double)data[k];
        }
    }
    for (uint64_t number = 0; number < STEPS; ++number) {
        const event e = event_at(&s, number);
        const uint32_t skipped = x.skipped;
        for (uint32_t i = 0; i < PARAMS; ++i) {
            for (int what = 0; what <= states_of(&n, i); ++what) {
                read_param(&n, i, what, before[i][what]);
            }
        }
        step(&n, number, &e, &x);
        expect_exact(&n, &x, number);
        for (uint32_t i = 0; i < PARAMS; ++i) {
            const bool stays = x.skipped > skipped || n.paused[i] ||
                               s.desc[s.group_of[i]].kind == MS_OPTIMIZER_NONE;
            for (int what = 0; what <= states_of(&n, i) && stays; ++what) {
                read_param(&n, i, what, data);
                assert_memory_equal(data, before[i][what], count_of(i) * sizeof(float));
            }
            t->paused += n.paused[i];
        }
        t->dropped += e.drops && e.asks && e.micros == s.micro_count;
        t->early += e.micros < s.micro_count;
        t->factors += e.factor > 0.0f;
    }
    t->skipped += x.skipped;
    t->mixed += has_kind(&s, MS_OPTIMIZER_CUSTOM) && has_kind(&s, MS_OPTIMIZER_ADAMW);
    end(&n);
}

static const ways plain = {"plain", 0, MS_DTYPE_F32};

static void groups_follow_their_formulas(void **state) {
    (void)state;
    tally t;
    memset(&t, 0, sizeof t);
    const uint64_t count = t_sweep(40, 2000);
    for (uint64_t seed = 0; seed < count; ++seed) {
        check_exact(seed, &plain, &t);
    }
    assert_true(t.skipped > count / 8 && t.dropped > count / 8 && t.early > count / 8);
    assert_true(t.paused > 4 * count && t.factors > 2 * count && t.mixed > count / 3);
}

// ------------------------------------------------------------------------------------------------
// with every technique the same bits

static void same_bits(const net *a, const net *b, uint64_t step) {
    float of_a[WIDE], of_b[WIDE];
    ms_memory_report reports[2];
    for (uint32_t i = 0; i < PARAMS; ++i) {
        for (int what = 0; what <= states_of(a, i); ++what) {
            read_param(a, i, what, of_a);
            read_param(b, i, what, of_b);
            if (memcmp(of_a, of_b, count_of(i) * sizeof(float)) != 0) {
                print_error("%s, script %llu, step %llu: param %u, kind %d, %d: %.9g and %.9g\n",
                            b->how->name, (unsigned long long)a->of->seed, (unsigned long long)step,
                            (unsigned)i, (int)a->of->desc[a->of->group_of[i]].kind, what,
                            (double)of_a[0], (double)of_b[0]);
                fail();
            }
        }
        if (ms_update_count(a->m, a->p[i]) != ms_update_count(b->m, b->p[i])) {
            print_error("%s, script %llu, step %llu: param %u, kind %d: %llu and %llu updates\n",
                        b->how->name, (unsigned long long)a->of->seed, (unsigned long long)step,
                        (unsigned)i, (int)a->of->desc[a->of->group_of[i]].kind,
                        (unsigned long long)ms_update_count(a->m, a->p[i]),
                        (unsigned long long)ms_update_count(b->m, b->p[i]));
            fail();
        }
    }
    t_report(a->m, &reports[0]);
    t_report(b->m, &reports[1]);
    if (reports[0].skipped_by_norm - a->left_out != reports[1].skipped_by_norm - b->left_out) {
        print_error("%s, script %llu, step %llu: %u and %u steps skipped by their norms\n",
                    b->how->name, (unsigned long long)a->of->seed, (unsigned long long)step,
                    (unsigned)reports[0].skipped_by_norm, (unsigned)reports[1].skipped_by_norm);
        fail();
    }
    assert_int_equal(reports[0].skipped_steps, reports[1].skipped_steps);
    if (!(reports[0].loss_scale == reports[1].loss_scale)) {
        print_error("%s, script %llu, step %llu: loss scales %g, %g\n", b->how->name,
                    (unsigned long long)a->of->seed, (unsigned long long)step,
                    reports[0].loss_scale, reports[1].loss_scale);
    }
    assert_true(reports[0].loss_scale == reports[1].loss_scale);
}

/* Goes on in a new model with what the file has; rates and pauses are the trainer's to set again. */
static void move_by_file(net *n) {
    static t_file file;
    net next;
    t_file_clear(&file);
    t_ok(n->m, t_save(n->m, &file));
    start(&next, n->of, n->how);
    const bool first = n->of->seed % 2 == 0;
    for (int load = 0; load < 2; ++load) {
        if ((load == 0) == first) {
            t_ok(next.m, t_load(next.m, &file, NULL));
            continue;
        }
        for (uint32_t i = 0; i < PARAMS; ++i) {
            t_ok(next.m, ms_set_paused(next.m, next.p[i], n->paused[i]));
            next.paused[i] = n->paused[i];
        }
        for (uint32_t k = 0; k <= n->of->group_count; ++k) {
            ms_set_group_learning_rate(next.m, next.group[k], n->rate[k]);
            next.rate[k] = n->rate[k];
        }
    }
    same_bits(n, &next, 0);
    end(n);
    start(n, next.of, next.how); // callbacks point into the net: once more, in its place
    memcpy(n->rate, next.rate, sizeof n->rate);
    memcpy(n->paused, next.paused, sizeof n->paused);
    for (uint32_t i = 0; i < PARAMS; ++i) {
        t_ok(n->m, ms_set_paused(n->m, n->p[i], n->paused[i]));
    }
    for (uint32_t k = 0; k <= n->of->group_count; ++k) {
        ms_set_group_learning_rate(n->m, n->group[k], n->rate[k]);
    }
    t_ok(n->m, t_load(n->m, &file, NULL));
    end(&next);
}

/* What is forced is there. */
static void expect_ways(const net *n) {
    ms_memory_report report;
    bool coded = false, narrow = false;
    const msi_store *store = n->m->run.store;
    t_report(n->m, &report);
    for (MSI_ITEMS(const msi_resident, r, store->residents)) {
        coded |= r->role >= MSI_ROLE_STATE0 && msi_is_coded(r->format);
        narrow |= r->role == MSI_ROLE_VALUE && r->bytes == 2 * WIDE;
    }
    assert_true(coded || !has(n->how, CODED) || n->of->group_count == 0 ||
                has_kind(n->of, MS_OPTIMIZER_CUSTOM) || has_kind(n->of, MS_OPTIMIZER_NONE) ||
                has_kind(n->of, MS_OPTIMIZER_SGD));
    assert_true(narrow == (n->how->dtype != MS_DTYPE_F32));
    assert_true(n->m->run.plan->train.code.scales_loss == (n->how->dtype == MS_DTYPE_F16));
    assert_true((report.host_bytes > 0) == has(n->how, MOVED));
}

static void check_bits(uint64_t seed, const ways *h) {
    static net a, b;
    const script s = new_script(seed, !has(h, DEBUGGED) && h->dtype == MS_DTYPE_F32);
    ways with = plain; // of the same formats
    with.is = h->is & CODED;
    with.dtype = h->dtype;
    start(&a, &s, &with);
    start(&b, &s, h);
    expect_ways(&b);
    for (uint64_t number = 0; number < STEPS; ++number) {
        event e = event_at(&s, number);
        /* What rounds at random draws by the number of the step, which is the same after a step that
           was dropped unless its norm was above the limit; a clean step may count for the loss scale. */
        e.drops &= !has(h, CODED) && h->dtype == MS_DTYPE_F32;
        e.asks &= !has(h, SMALLEST) || s.micro_count > 1 || takes_norms(&s);
        if (has(h, SMALLEST) && s.micro_count == 1 && !takes_norms(&s)) { // updates inside backward
            e.when %= 3;
            e.drops = false;
        }
        step(&a, number, &e, NULL);
        step(&b, number, &e, NULL);
        if (has(h, SAVED) && number % 5 == 3) {
            move_by_file(&b);
        }
        if (has(h, ON_VIRTUAL)) {
            t_ok(b.m, ms_synchronize(b.m));
        }
        same_bits(&a, &b, number);
    }
    end(&a);
    end(&b);
}

static void techniques_leave_the_bits_alone(void **state) {
    (void)state;
    static const ways hows[] = {
        {"again", 0, MS_DTYPE_F32},
        {"by step", BY_STEP, MS_DTYPE_F32},
        {"debug", DEBUGGED, MS_DTYPE_F32},
        {"debug, by step", DEBUGGED | BY_STEP | SMALLEST, MS_DTYPE_F32},
        {"smallest", SMALLEST, MS_DTYPE_F32},
        {"slices", SMALLEST | SLICED, MS_DTYPE_F32},
        {"sleeps", SLEEPS, MS_DTYPE_F32},
        {"files", BY_STEP | SAVED, MS_DTYPE_F32},
        {"codes", CODED | BY_STEP | SLEEPS | SAVED, MS_DTYPE_F32},
        {"bf16", BY_STEP | SLEEPS | SAVED, MS_DTYPE_BF16},
        {"f16", BY_STEP | SLEEPS | SAVED, MS_DTYPE_F16},
#ifndef T_CUDA
        {"moves", MOVED, MS_DTYPE_F32},
        {"virtual", ON_VIRTUAL, MS_DTYPE_F32},
        {"virtual, by step", ON_VIRTUAL | BY_STEP, MS_DTYPE_F32},
        {"virtual, smallest", ON_VIRTUAL | SMALLEST | BY_STEP | SLEEPS, MS_DTYPE_F32},
        {"virtual, moves", ON_VIRTUAL | MOVED | BY_STEP | SAVED, MS_DTYPE_F32},
        {"virtual, codes", ON_VIRTUAL | MOVED | CODED, MS_DTYPE_F32},
        {"virtual, slices", ON_VIRTUAL | SMALLEST | SLICED, MS_DTYPE_F32},
        {"virtual, f16", ON_VIRTUAL | BY_STEP | SAVED, MS_DTYPE_F16},
#endif
    };
    for (size_t i = 0; i < sizeof hows / sizeof hows[0]; ++i) {
        for (uint64_t seed = 0; seed < t_sweep(4, 300); ++seed) {
            check_bits(1000 * (i + 1) + seed, &hows[i]);
        }
    }
}

// ------------------------------------------------------------------------------------------------
// what must be as if it had not been

/* Three groups beside the params in none: AdamW twice, SGD with momentum, Lion, with norms of all. */
static script usual_script(uint32_t micro_count, float skip_above) {
    script s = new_script(1, false);
    s.micro_count = micro_count;
    s.group_count = 3;
    memset(s.desc, 0, sizeof s.desc);
    s.desc[0].learning_rate = 0.01f;
    s.desc[0].grad_clip_norm = 2.0f;
    s.desc[0].skip_above_norm = skip_above;
    s.desc[1] = t_optimizer(MS_OPTIMIZER_ADAMW, 0.003f);
    s.desc[1].weight_decay = 0.1f;
    s.desc[1].grad_clip_norm = 0.5f;
    s.desc[2] = t_optimizer(MS_OPTIMIZER_SGD, 0.01f);
    s.desc[2].momentum = 0.9f;
    s.desc[2].grad_clip_norm = FLT_MAX;
    s.desc[3] = t_optimizer(MS_OPTIMIZER_LION, 0.001f);
    for (uint32_t i = 0; i < PARAMS; ++i) {
        s.group_of[i] = i % 4;
        s.decay[i] = -1.0f;
    }
    s.loss_factor = 0.0f;
    return s;
}

static event usual_event(const script *s) {
    event e;
    memset(&e, 0, sizeof e);
    e.micros = s->micro_count;
    e.spike = 1.0f;
    e.pauses = e.resumes = e.rated = -1;
    return e;
}

/* A step above the norm leaves everything as in a twin that never had its batch, also later. */
static void steps_above_the_norm_leave_nothing(void **state) {
    (void)state;
    static const ways hows[] = {
        {"plain", 0, MS_DTYPE_F32},
        {"by step", BY_STEP | SMALLEST, MS_DTYPE_F32},
        {"debug", DEBUGGED, MS_DTYPE_F32},
        {"slices", SLICED, MS_DTYPE_F32},
        {"sleeps", SLEEPS | SAVED, MS_DTYPE_F32},
        {"codes", CODED, MS_DTYPE_F32},
        {"bf16", BY_STEP, MS_DTYPE_BF16},
        {"f16", BY_STEP, MS_DTYPE_F16},
#ifndef T_CUDA
        {"virtual", ON_VIRTUAL, MS_DTYPE_F32},
        {"virtual, by step", ON_VIRTUAL | BY_STEP | MOVED, MS_DTYPE_F32},
        {"virtual, slices", ON_VIRTUAL | SLICED | SMALLEST, MS_DTYPE_F32},
        {"virtual, f16", ON_VIRTUAL | BY_STEP, MS_DTYPE_F16},
#endif
    };
    for (size_t i = 0; i < sizeof hows / sizeof hows[0]; ++i) {
        for (uint32_t micros = 1; micros <= 3; micros += 2) {
            static net n, twin;
            const script s = usual_script(micros, 30.0f);
            event e = usual_event(&s);
            ms_memory_report report;
            start(&n, &s, &hows[i]);
            start(&twin, &s, &hows[i]);
            uint32_t skipped = 0;
            for (uint64_t number = 0; number < 8; ++number) {
                if (number % 3 != 1) { // the first step is one of them
                    e.spike = 40.0f;
                    step(&n, 100 + number, &e, NULL);
                    e.spike = 1.0f;
                    skipped += 1;
                    if (hows[i].is & SAVED) {
                        move_by_file(&n);
                    }
                    if (number > 0) {
                        t_report(n.m, &report);
                        assert_true(report.skipped_by_norm <= skipped);
                    }
                }
                if (hows[i].is & CODED && number > 0) { // from here on they round differently
                    n.left_out = skipped;
                    same_bits(&n, &twin, number);
                    break;
                }
                step(&n, number, &e, NULL);
                step(&twin, number, &e, NULL);
                t_ok(n.m, ms_synchronize(n.m));
                t_ok(twin.m, ms_synchronize(twin.m));
                t_report(n.m, &report);
                assert_int_equal(report.skipped_by_norm, skipped);
                n.left_out = skipped;
                same_bits(&n, &twin, number);
                n.left_out = 0;
            }
            end(&n);
            end(&twin);
        }
    }
}

/* What ms_gradient_norm has found to be above the limit is counted at once, whatever comes then. */
static void steps_are_left_out_by_going_on(void **state) {
    (void)state;
    static const ways hows[] = {{"plain", 0, MS_DTYPE_F32},
#ifndef T_CUDA
                                {"virtual", ON_VIRTUAL, MS_DTYPE_F32},
#endif
                                {"debug", DEBUGGED, MS_DTYPE_F32}};
    for (size_t i = 0; i < sizeof hows / sizeof hows[0]; ++i) {
        for (int then = 0; then < 6; ++then) {
            static net n, twin;
            const script s = usual_script(1, 30.0f);
            const event e = usual_event(&s);
            double norm = 0.0;
            start(&n, &s, &hows[i]);
            start(&twin, &s, &hows[i]);
            for (uint64_t number = 0; number < 4; ++number) {
                write_batch(&n, 1000, 40.0f);
                t_ok(n.m, ms_forward(n.m, NULL));
                t_ok(n.m, ms_backward(n.m));
                t_ok(n.m, ms_gradient_norm(n.m, &norm));
                assert_true(norm > 30.0);
                assert_int_equal(ms_update_count(n.m, n.p[0]), number);
                double loss;
                switch (then) {
                case 0: // the next forward
                    break;
                case 1:
                    t_ok(n.m, ms_update(n.m));
                    break;
                case 2:
                    t_ok(n.m, ms_eval(n.m, &loss));
                    break;
                case 3:
                    t_ok(n.m, ms_wrap(n.m));
                    break;
                case 4:
                    t_error(n.m, ms_set_paused(n.m, n.p[0], true), MS_RESULT_ORDER);
                    t_text_has(ms_last_error(n.m), "ms_gradient_norm has taken the norm");
                    break;
                default:
                    t_ok(n.m, ms_suspend(n.m, NULL));
                    t_ok(n.m, ms_resume(n.m));
                    break;
                }
                assert_int_equal(ms_update_count(n.m, n.p[0]), number);
                step(&n, number, &e, NULL);
                step(&twin, number, &e, NULL);
                n.left_out = (uint32_t)number + 1;
                same_bits(&n, &twin, number);
                n.left_out = 0;
            }
            end(&n);
            end(&twin);
        }
    }
}

/* The number of a step that was skipped may come again: by a file from before it. */
static void numbers_of_skipped_steps_come_again(void **state) {
    (void)state;
    static t_file file;
    static net n, twin;
    const script s = usual_script(1, 30.0f);
    event e = usual_event(&s);
    start(&n, &s, &plain);
    start(&twin, &s, &plain);
    step(&n, 0, &e, NULL);
    step(&twin, 0, &e, NULL);
    t_file_clear(&file);
    t_ok(n.m, t_save(n.m, &file));
    e.spike = 40.0f;
    step(&n, 1, &e, NULL);
    e.spike = 1.0f;
    t_ok(n.m, t_load(n.m, &file, NULL));
    step(&n, 2, &e, NULL);
    step(&twin, 2, &e, NULL);
    same_bits(&n, &twin, 2);
    end(&n);
    end(&twin);
}

/* A norm that is no number is told of at once, and ends the step, also where the device is late. */
static void norms_that_are_not_finite_end_the_step(void **state) {
    (void)state;
    static const ways hows[] = {
#ifndef T_CUDA
        {"virtual", ON_VIRTUAL, MS_DTYPE_F32},
        {"virtual, moves", ON_VIRTUAL | MOVED, MS_DTYPE_F32},
#endif
        {"plain", 0, MS_DTYPE_F32}};
    for (size_t i = 0; i < sizeof hows / sizeof hows[0]; ++i) {
        static net n, twin;
        const script s = usual_script(1, 30.0f);
        const event e = usual_event(&s);
        float huge[COLS];
        double norm = 0.0;
        start(&n, &s, &hows[i]);
        start(&twin, &s, &hows[i]);
        step(&n, 0, &e, NULL);
        step(&twin, 0, &e, NULL);
        write_batch(&n, 1000, 1e15f); // gradients are, squares in float would not be
        t_ok(n.m, ms_forward(n.m, NULL));
        t_ok(n.m, ms_backward(n.m));
        const ms_result result = ms_gradient_norm(n.m, &norm);
        if (result == MS_RESULT_OK) {
            assert_true(norm > 1e15);
            t_ok(n.m, ms_update(n.m)); // above the limit
            n.left_out = 1;
        } else {
            assert_int_equal(result, MS_RESULT_NONFINITE);
            assert_true(!(norm <= 1e300));
            t_error(n.m, ms_update(n.m), MS_RESULT_ORDER);
        }
        read_param(&n, 1, 0, huge);
        same_bits(&n, &twin, 1);
        for (uint64_t number = 2; number < 5; ++number) {
            step(&n, number, &e, NULL);
            step(&twin, number, &e, NULL);
            same_bits(&n, &twin, number);
        }
        end(&n);
        end(&twin);
    }
}

// ------------------------------------------------------------------------------------------------
// pauses

/* A param that is frozen while it is paused loses its state, and stays paused. */
static void what_is_frozen_in_a_pause_begins_anew(void **state) {
    (void)state;
    static net n;
    const script s = usual_script(1, 0.0f);
    event e = usual_event(&s);
    float before[WIDE], after[WIDE], moment[WIDE];
    start(&n, &s, &plain);
    for (uint64_t number = 0; number < 3; ++number) {
        step(&n, number, &e, NULL);
    }
    e.pauses = 0;
    step(&n, 3, &e, NULL);
    assert_int_equal(ms_update_count(n.m, n.p[0]), 3);
    e.pauses = -1;
    ms_set_frozen(n.m, n.p[0], true);
    t_ok(n.m, ms_wrap(n.m));
    step(&n, 4, &e, NULL);
    assert_int_equal(ms_update_count(n.m, n.p[0]), 0);
    ms_set_frozen(n.m, n.p[0], false);
    t_ok(n.m, ms_wrap(n.m));
    read_param(&n, 0, 0, before);
    step(&n, 5, &e, NULL);
    read_param(&n, 0, 0, after);
    assert_memory_equal(before, after, sizeof before);
    assert_int_equal(ms_update_count(n.m, n.p[0]), 0);
    read_param(&n, 0, 1, moment);
    e.resumes = 0;
    step(&n, 6, &e, NULL);
    read_param(&n, 0, 0, after);
    for (int k = 0; k < WIDE; ++k) { // the first update of AdamW is one of the learning rate
        assert_true(moment[k] == 0.0f);
        assert_true(fabs(fabs((double)(after[k] - before[k])) - 0.01) < 1e-5);
    }
    assert_int_equal(ms_update_count(n.m, n.p[0]), 1);
    end(&n);
}

/* Counts that are set while a param is paused are where it goes on. */
static void counts_are_set_in_a_pause(void **state) {
    (void)state;
    static net n;
    const script s = usual_script(1, 30.0f);
    event e = usual_event(&s);
    start(&n, &s, &plain);
    step(&n, 0, &e, NULL);
    e.pauses = 0;
    step(&n, 1, &e, NULL);
    t_ok(n.m, ms_set_update_count(n.m, n.p[0], 1000));
    e.spike = 40.0f;
    step(&n, 2, &e, NULL);
    assert_int_equal(ms_update_count(n.m, n.p[0]), 1000);
    e = usual_event(&s);
    e.resumes = 0;
    step(&n, 3, &e, NULL);
    assert_int_equal(ms_update_count(n.m, n.p[0]), 1001);
    assert_int_equal(ms_update_count(n.m, n.p[4]), 3);
    t_ok(n.m, ms_set_step_count(n.m, 50));
    step(&n, 4, &e, NULL);
    assert_int_equal(ms_update_count(n.m, n.p[0]), 1002);
    end(&n);
}

// ------------------------------------------------------------------------------------------------
// the factor of gradients

/* Micro-batches whose rows are counted last: as one batch of all of them. */
static void a_factor_makes_one_large_batch(void **state) {
    (void)state;
    for (int early = 0; early < 2; ++early) {
        static net n, large;
        const uint32_t micros = LARGE - (uint32_t)early;
        script s = usual_script(LARGE, 0.0f), whole = usual_script(1, 0.0f);
        whole.rows = micros * ROWS;
        s.loss_factor = 1.0f;
        start(&n, &s, &plain);
        start(&large, &whole, &plain);
        for (uint64_t number = 0; number < 6; ++number) {
            float a[WIDE], b[WIDE];
            double norms[2];
            event e = usual_event(&s), of_large = usual_event(&whole);
            e.micros = micros;
            e.factor = 1.0f / (float)(micros * ROWS);
            e.when = early != 0 ? 1 : 3;
            step(&n, number, &e, NULL);
            step(&large, number, &of_large, NULL);
            t_ok(n.m, ms_gradient_norm(n.m, &norms[0]));
            t_ok(large.m, ms_gradient_norm(large.m, &norms[1]));
            assert_true(fabs(norms[0] - norms[1]) < 1e-4 * norms[1]);
            for (uint32_t i = 0; i < PARAMS; ++i) {
                read_param(&n, i, 0, a);
                read_param(&large, i, 0, b);
                for (uint64_t k = 0; k < count_of(i) && i % 4 != 3; ++k) { // no signs of Lion
                    assert_true(fabs((double)(a[k] - b[k])) < 1e-4);
                }
            }
        }
        end(&n);
        end(&large);
    }
}

// ------------------------------------------------------------------------------------------------
// verification

static void verification_changes_nothing(void **state) {
    (void)state;
    for (uint64_t seed = 0; seed < t_sweep(10, 100); ++seed) {
        static net a, b;
        const script s = new_script(5000 + seed, true);
        ms_verify_report report;
        start(&a, &s, &plain);
        start(&b, &s, &plain);
        for (uint64_t number = 0; number < 5; ++number) {
            const event e = event_at(&s, number);
            step(&a, number, &e, NULL);
            step(&b, number, &e, NULL);
            write_batch(&b, number, 1.0f);
            t_ok(b.m, ms_verify(b.m, NULL, NULL, &report));
            assert_true(report.tensor_count > 0 && report.differ_count == 0);
            same_bits(&a, &b, number);
        }
        end(&a);
        end(&b);
    }
}

// ------------------------------------------------------------------------------------------------
// plans

/* The plan of a random model, with its params in `groups` groups of the same optimizer. */
static ms_memory_report plan_of(uint64_t seed, uint32_t groups, bool smallest) {
    ms_config config = t_config();
    ms_memory_report report;
    char failure[RD_TEXT] = "";
    rd_graph *g = rd_generate(seed);
    config.force_optimize = smallest;
    g->group_count = groups;
    g->optimizer.grad_clip_norm = 0.0f;
    for (uint32_t k = 0; k < groups; ++k) {
        g->group[k] = g->optimizer;
        g->group[k].update = g->optimizer.kind == MS_OPTIMIZER_CUSTOM ? rd_update : NULL;
        g->group[k].workspace = g->has_update_space ? rd_update_bytes : NULL;
        g->group[k].user = g;
        g->group[k].skip_above_norm = 0.0f; // steps are skipped as a whole
    }
    for (uint32_t i = 0; i < g->value_count; ++i) {
        g->value[i].group = (uint8_t)(groups > 0 ? 1 + i % groups : 0);
    }
    rd_net *n = rd_net_create(g, &config, "groups", failure, false);
    t_ok(n->model, ms_wrap(n->model));
    t_report(n->model, &report);
    rd_net_destroy(n);
    free(g);
    return report;
}

static void groups_cost_nothing(void **state) {
    (void)state;
    uint64_t compared = 0;
    for (uint64_t seed = 0; seed < t_sweep(20, 1000); ++seed) {
        for (int smallest = 0; smallest < 2; ++smallest) {
            const ms_memory_report none = plan_of(seed, 0, smallest != 0);
            for (uint32_t groups = 1; groups <= RD_GROUPS; groups += 2) {
                const ms_memory_report with = plan_of(seed, groups, smallest != 0);
                assert_true(with.arena_bytes == none.arena_bytes);
                assert_true(with.step_us == none.step_us && with.plan_hash == none.plan_hash);
                assert_true(with.host_bytes == none.host_bytes);
                compared += 1;
            }
        }
    }
    assert_true(compared >= 80);
}

// ------------------------------------------------------------------------------------------------
// files of other models

/* Files are of the kinds that params have, whichever group says so. */
static void files_fit_where_the_kinds_do(void **state) {
    (void)state;
    static t_file file;
    static net n, other;
    script grouped = usual_script(1, 0.0f), alone = usual_script(1, 0.0f);
    alone.group_count = 0;
    for (uint32_t i = 0; i < PARAMS; ++i) {
        alone.group_of[i] = 0;
        grouped.group_of[i] = i % 2; // AdamW both
    }
    for (int back = 0; back < 2; ++back) {
        const event e = usual_event(&grouped);
        start(&n, back ? &grouped : &alone, &plain);
        start(&other, back ? &alone : &grouped, &plain);
        step(&n, 0, &e, NULL);
        t_file_clear(&file);
        t_ok(n.m, t_save(n.m, &file));
        t_ok(other.m, t_load(other.m, &file, NULL));
        same_bits(&n, &other, 0);
        end(&n);
        end(&other);
    }
    script mixed = usual_script(1, 0.0f), turned = usual_script(1, 0.0f);
    for (uint32_t i = 0; i < PARAMS; ++i) {
        turned.group_of[i] = (i + 1) % 4;
    }
    const script *const pairs[][2] = {{&alone, &mixed}, {&mixed, &alone}, {&mixed, &turned}};
    for (int i = 0; i < 3; ++i) {
        ms_load_options options;
        const event e = usual_event(pairs[i][0]);
        memset(&options, 0, sizeof options);
        start(&n, pairs[i][0], &plain);
        start(&other, pairs[i][1], &plain);
        step(&n, 0, &e, NULL);
        t_file_clear(&file);
        t_ok(n.m, t_save(n.m, &file));
        assert_true(t_load(other.m, &file, NULL) != MS_RESULT_OK);
        t_text_has(ms_last_error(other.m), "the kind of an optimizer");
        options.values_only = true;
        t_ok(other.m, t_load(other.m, &file, &options));
        end(&n);
        end(&other);
    }
}

// ------------------------------------------------------------------------------------------------
// errors

static void with_desc(ms_model *m, void (*change)(ms_optimizer_desc *), bool of_group) {
    ms_optimizer_desc o = t_optimizer(MS_OPTIMIZER_ADAMW, 0.01f);
    change(&o);
    if (of_group) {
        assert_int_equal(ms_optimizer_group(m, &o).id, 0);
    } else {
        ms_set_optimizer(m, &o);
    }
}

static void wrong_kind(ms_optimizer_desc *o) {
    o->kind = MS_OPTIMIZER_COUNT;
}

static void no_update(ms_optimizer_desc *o) {
    o->kind = MS_OPTIMIZER_CUSTOM;
}

static void spare_update(ms_optimizer_desc *o) {
    o->update = own_update;
}

static void many_states(ms_optimizer_desc *o) {
    o->kind = MS_OPTIMIZER_CUSTOM;
    o->update = own_update;
    o->state_count = 5;
}

static void skips(ms_optimizer_desc *o) {
    o->skip_above_norm = 1.0f;
}

static void negative_norm(ms_optimizer_desc *o) {
    o->grad_clip_norm = -1.0f;
}

static void negative_limit(ms_optimizer_desc *o) {
    o->skip_above_norm = -1.0f;
}

static void infinite_limit(ms_optimizer_desc *o) {
    o->skip_above_norm = INFINITY;
}

static void clips_nothing(ms_optimizer_desc *o) {
    o->kind = MS_OPTIMIZER_NONE;
    o->grad_clip_norm = 1.0f;
}

static void large_beta(ms_optimizer_desc *o) {
    o->beta1 = 1.0f;
}

/* Each error sticks, and ms_wrap tells of it. */
static void descs_are_checked(void **state) {
    (void)state;
    static const struct {
        void (*change)(ms_optimizer_desc *);
        const char *of_group, *of_all; // NULL: allowed
    } cases[] = {
        {wrong_kind, "ms_optimizer_group: there is no such kind", "ms_set_optimizer: there is"},
        {no_update, "ms_optimizer_group: MS_OPTIMIZER_CUSTOM needs", "ms_set_optimizer: MS_"},
        {spare_update, "ms_optimizer_group: only MS_OPTIMIZER_CUSTOM takes an update", "only"},
        {many_states, "ms_optimizer_group: state_count is 5; a param has 4", "state_count is 5"},
        {skips, "a step is skipped as a whole: give skip_above_norm to ms_set_optimizer", NULL},
        {negative_norm, "ms_optimizer_group: rate 0.01", "clip norm -1"},
        {negative_limit, "a step is skipped as a whole", "skip_above_norm -1: all must be finite"},
        {infinite_limit, "a step is skipped as a whole", "skip_above_norm inf"},
        {clips_nothing, "there is nothing to clip", "there is nothing to clip"},
        {large_beta, "ms_optimizer_group: rate", "betas 1 0"}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; ++i) {
        for (int of_group = 0; of_group < 2; ++of_group) {
            const char *text = of_group ? cases[i].of_group : cases[i].of_all;
            t_net n;
            if (text == NULL) {
                continue;
            }
            t_net_begin(&n);
            t_net_create(&n);
            t_net_loss(&n, t_net_scale(&n, "scale", n.x, 0.0f, t_net_param(&n, "p")), 1.0f);
            with_desc(n.m, cases[i].change, of_group != 0);
            t_error(n.m, ms_wrap(n.m), MS_RESULT_INVALID);
            t_text_has(ms_last_error(n.m), text);
            t_net_end(&n);
        }
    }
}

/* Handles of nothing, of another model, of what is no param; groups after ms_wrap. */
static void handles_are_checked(void **state) {
    (void)state;
    const ms_optimizer_desc o = t_optimizer(MS_OPTIMIZER_SGD, 0.01f);
    const ms_param_group none = {0};
    for (int i = 0; i < 7; ++i) {
        t_net n, other;
        ms_tensor p[2];
        ms_param_group group[2];
        t_net *const nets[] = {&n, &other};
        for (int k = 0; k < 2; ++k) {
            t_net_begin(nets[k]);
            t_net_create(nets[k]);
            p[k] = t_net_param(nets[k], "p");
            group[k] = ms_optimizer_group(nets[k]->m, &o);
            t_net_loss(nets[k], t_net_scale(nets[k], "scale", nets[k]->x, 0.0f, p[k]), 1.0f);
            assert_true(group[k].id != 0);
        }
        const ms_param_group wrong = {n.x.id}; // whose number is that of no group
        const ms_tensor no_tensor = {0};
        ms_result expected = MS_RESULT_INVALID;
        const char *text = "the group is none of this model: see ms_optimizer_group";
        switch (i) {
        case 0:
            ms_set_param_group(n.m, p[0], group[1]);
            break;
        case 1:
            ms_set_group_learning_rate(n.m, group[1], 0.1f);
            break;
        case 2:
            ms_set_param_group(n.m, p[0], wrong);
            break;
        case 3:
            ms_set_param_group(n.m, n.x, group[0]);
            text = "ms_set_param_group";
            break;
        case 4:
            ms_set_param_group(n.m, p[1], group[0]);
            text = "ms_set_param_group";
            break;
        case 5:
            ms_set_param_group(n.m, no_tensor, none);
            text = "ms_set_param_group";
            break;
        default:
            ms_set_group_learning_rate(n.m, group[0], INFINITY);
            text = "ms_set_group_learning_rate";
            break;
        }
        t_error(n.m, ms_wrap(n.m), expected);
        t_text_has(ms_last_error(n.m), text);
        ms_set_group_learning_rate(NULL, none, 1.0f);
        ms_set_param_group(NULL, p[0], none);
        assert_int_equal(ms_optimizer_group(NULL, &o).id, 0);
        assert_int_equal(ms_set_paused(NULL, p[0], true), MS_RESULT_INVALID);
        assert_int_equal(ms_set_gradient_factor(NULL, 1.0f), MS_RESULT_INVALID);
        t_net_end(&n);
        t_net_end(&other);
    }
    for (int i = 0; i < 3; ++i) {
        t_net n;
        t_net_begin(&n);
        t_net_create(&n);
        const ms_tensor p = t_net_param(&n, "p");
        const ms_param_group group = ms_optimizer_group(n.m, &o);
        ms_set_param_group(n.m, p, group);
        ms_set_param_group(n.m, p, none); // and back
        t_net_loss(&n, t_net_scale(&n, "scale", n.x, 0.0f, p), 1.0f);
        t_net_start(&n);
        if (i == 0) {
            assert_int_equal(ms_optimizer_group(n.m, &o).id, 0);
        } else if (i == 1) {
            ms_set_param_group(n.m, p, group);
        } else {
            assert_int_equal(ms_set_paused(n.m, n.x, true), MS_RESULT_INVALID);
        }
        const ms_result expected = i == 2 ? MS_RESULT_INVALID : MS_RESULT_ORDER;
        t_error(n.m, ms_wrap(n.m), expected);
        t_net_end(&n);
    }
}

static void norms_and_groups_are_limited(void **state) {
    (void)state;
    t_net n;
    ms_optimizer_desc o = t_optimizer(MS_OPTIMIZER_SGD, 0.01f);
    t_net_begin(&n);
    t_net_create(&n);
    o.grad_clip_norm = 1.0f;
    for (int k = 1; k < MS_LIMIT_NORMS; ++k) {
        assert_true(ms_optimizer_group(n.m, &o).id != 0);
    }
    assert_int_equal(ms_optimizer_group(n.m, &o).id, 0);
    t_error(n.m, ms_wrap(n.m), MS_RESULT_INVALID);
    t_text_has(ms_last_error(n.m), "15 groups already, at most 4095, and 16 norms, at most 16");
    t_net_end(&n);
    t_net_begin(&n);
    t_net_create(&n);
    o.grad_clip_norm = 0.0f;
    for (int k = 1; k < MS_LIMIT_GROUPS; ++k) {
        assert_true(ms_optimizer_group(n.m, &o).id != 0);
    }
    assert_int_equal(ms_optimizer_group(n.m, &o).id, 0);
    t_error(n.m, ms_wrap(n.m), MS_RESULT_INVALID);
    t_text_has(ms_last_error(n.m), "4095 groups already");
    t_net_end(&n);
}

/* As many norms as there may be, each with a limit of its own. */
static void every_norm_has_its_limit(void **state) {
    (void)state;
    t_net n;
    ms_tensor p[MS_LIMIT_NORMS], last;
    float before[T_NET_COLS], after[T_NET_COLS], gradient[T_NET_COLS];
    t_net_begin(&n);
    t_net_create(&n);
    ms_optimizer_desc o = t_optimizer(MS_OPTIMIZER_SGD, 1.0f);
    o.grad_clip_norm = 0.001f;
    ms_set_optimizer(n.m, &o);
    last = n.x;
    for (int k = 0; k < 13; ++k) {
        p[k] = t_net_param(&n, "p");
        last = t_net_scale(&n, "scale", last, 0.0f, p[k]);
        o.grad_clip_norm = 0.001f * (float)(k + 1);
        if (k > 0) {
            ms_set_param_group(n.m, p[k], ms_optimizer_group(n.m, &o));
        }
    }
    t_net_loss(&n, last, 1.0f);
    t_net_start(&n);
    for (int k = 0; k < 13; ++k) {
        t_net_write_param(&n, p[k], 1.0f);
    }
    t_ok(n.m, ms_forward(n.m, NULL));
    t_ok(n.m, ms_backward(n.m));
    for (int k = 0; k < 13; ++k) {
        double squares = 0.0;
        t_ok(n.m, ms_read(n.m, ms_gradient(n.m, p[k]), gradient));
        t_ok(n.m, ms_read(n.m, p[k], before));
        for (int c = 0; c < T_NET_COLS; ++c) {
            squares += (double)gradient[c] * (double)gradient[c];
        }
        assert_true(sqrt(squares) > 0.02);
        if (k == 12) {
            const double scale = 0.013 / sqrt(squares);
            t_ok(n.m, ms_update(n.m));
            t_ok(n.m, ms_read(n.m, p[k], after));
            for (int c = 0; c < T_NET_COLS; ++c) {
                assert_true(fabs((double)before[c] - scale * (double)gradient[c] -
                                 (double)after[c]) < 1e-6 * (1.0 + fabs((double)before[c])));
            }
        }
    }
    t_net_end(&n);
}

// ------------------------------------------------------------------------------------------------
// calls out of turn

static ms_model *calling;
static ms_tensor called_for;
static int refusals;

static int call_back(const ms_update_args *args) {
    double norm = 0.0;
    (void)args;
    refusals += ms_set_paused(calling, called_for, true) == MS_RESULT_ORDER;
    refusals += ms_set_gradient_factor(calling, 0.5f) == MS_RESULT_ORDER;
    refusals += ms_gradient_norm(calling, &norm) == MS_RESULT_ORDER;
    return 0;
}

static void callbacks_are_refused(void **state) {
    (void)state;
    static net n;
    script s = usual_script(1, 0.0f);
    s.desc[3] = t_optimizer(MS_OPTIMIZER_CUSTOM, 0.1f);
    s.desc[3].update = call_back;
    const event e = usual_event(&s);
    start(&n, &s, &plain);
    calling = n.m;
    called_for = n.p[0];
    refusals = 0;
    step(&n, 0, &e, NULL);
    assert_int_equal(refusals, 3 * 2); // two params
    end(&n);
}

static void calls_have_their_time(void **state) {
    (void)state;
    static net n;
    static const ways smallest = {"smallest", SMALLEST, MS_DTYPE_F32};
    static const ways sliced = {"slices", SLICED, MS_DTYPE_F32};
    script s = usual_script(1, 30.0f);
    double norm = 0.0;
    start(&n, &s, &plain);
    t_error(n.m, ms_gradient_norm(n.m, &norm), MS_RESULT_ORDER); // no backward yet
    t_text_has(ms_last_error(n.m), "ms_gradient_norm: there is no norm now");
    assert_int_equal(ms_gradient_norm(n.m, NULL), MS_RESULT_INVALID);
    static const float wrong[] = {0.0f, -1.0f, INFINITY, NAN};
    for (int i = 0; i < 4; ++i) {
        t_error(n.m, ms_set_gradient_factor(n.m, wrong[i]), MS_RESULT_INVALID);
        t_text_has(ms_last_error(n.m), "it must be positive and finite");
    }
    write_batch(&n, 0, 1.0f);
    t_ok(n.m, ms_forward(n.m, NULL));
    t_error(n.m, ms_gradient_norm(n.m, &norm), MS_RESULT_ORDER);
    t_ok(n.m, ms_backward(n.m));
    t_ok(n.m, ms_gradient_norm(n.m, &norm));
    t_error(n.m, ms_set_gradient_factor(n.m, 0.5f), MS_RESULT_ORDER);
    t_text_has(ms_last_error(n.m), "ms_set_gradient_factor: the update has begun");
    t_ok(n.m, ms_update(n.m));
    t_ok(n.m, ms_eval(n.m, &norm));
    t_error(n.m, ms_gradient_norm(n.m, &norm), MS_RESULT_ORDER);
    end(&n);
    for (uint32_t k = 0; k <= s.group_count; ++k) { // updates inside backward
        s.desc[k].grad_clip_norm = s.desc[k].skip_above_norm = 0.0f;
    }
    start(&n, &s, &smallest);
    write_batch(&n, 0, 1.0f);
    t_ok(n.m, ms_forward(n.m, NULL));
    t_ok(n.m, ms_backward(n.m));
    assert_true(n.m->run.updates_done > 0);
    t_error(n.m, ms_set_paused(n.m, n.p[0], true), MS_RESULT_ORDER);
    t_error(n.m, ms_set_gradient_factor(n.m, 0.5f), MS_RESULT_ORDER);
    t_error(n.m, ms_gradient_norm(n.m, &norm), MS_RESULT_ORDER);
    t_ok(n.m, ms_update(n.m));
    t_ok(n.m, ms_set_paused(n.m, n.p[0], true));
    end(&n);
    s = usual_script(1, 30.0f);
    start(&n, &s, &sliced);
    write_batch(&n, 0, 1.0f);
    assert_int_equal(ms_step_slice(n.m, 1, NULL), MS_RESULT_MORE);
    t_error(n.m, ms_set_paused(n.m, n.p[0], true), MS_RESULT_ORDER);
    t_error(n.m, ms_set_gradient_factor(n.m, 0.5f), MS_RESULT_ORDER);
    t_error(n.m, ms_gradient_norm(n.m, &norm), MS_RESULT_ORDER);
    ms_cancel(n.m);
    assert_true(ms_step_slice(n.m, UINT64_MAX, NULL) != MS_RESULT_MORE);
    t_ok(n.m, ms_set_paused(n.m, n.p[0], true));
    end(&n);
}

/* A step that fails takes its factor with it, and so does one that is left without its update, whatever
   ends it. */
static void failures_drop_the_factor(void **state) {
    (void)state;
    static net n, twin;
    const script s = usual_script(1, 0.0f);
    const event e = usual_event(&s);
    start(&n, &s, &plain);
    start(&twin, &s, &plain);
    for (int how_so = 0; how_so < 2; ++how_so) {
        write_batch(&n, 7, 1.0f);
        t_ok(n.m, ms_set_gradient_factor(n.m, 0.001f));
        n.op[1].failing = how_so == 0 ? 1u << MS_PHASE_FORWARD : 1u << MS_PHASE_BACKWARD;
        t_error(n.m, ms_step(n.m, NULL), MS_RESULT_CALLBACK);
        n.op[1].failing = 0;
        step(&n, (uint64_t)how_so, &e, NULL);
        step(&twin, (uint64_t)how_so, &e, NULL);
        same_bits(&n, &twin, 0);
    }
    for (int how_so = 0; how_so < 5; ++how_so) { // the last time, the next step comes at once
        double loss;
        write_batch(&n, 7, 1.0f);
        t_ok(n.m, ms_set_gradient_factor(n.m, 0.001f));
        t_ok(n.m, ms_forward(n.m, &loss));
        t_ok(n.m, ms_backward(n.m));
        t_ok(n.m, how_so == 0   ? ms_wrap(n.m)
                  : how_so == 1 ? ms_detach(n.m)
                  : how_so == 2 ? ms_eval(n.m, &loss)
                  : how_so == 3 ? ms_set_step_count(n.m, 5)
                                : MS_RESULT_OK);
        step(&n, 2 + (uint64_t)how_so, &e, NULL);
        step(&twin, 2 + (uint64_t)how_so, &e, NULL);
        same_bits(&n, &twin, 0);
    }
    end(&n);
    end(&twin);
}

static void every_allocation_fails_once(void **state) {
    (void)state;
    t_heap heap;
    memset(&heap, 0, sizeof heap);
    t_failing f = t_failing_heap(&heap);
    f.errors |= 1u << MS_RESULT_BACKEND; // of a device that cannot be opened
    while (t_next_failure(&f, 1)) {
        t_net n;
        const ms_optimizer_desc o = t_optimizer(MS_OPTIMIZER_LION, 0.01f);
        t_net_begin(&n);
        n.config.allocator = t_heap_allocator(&heap);
        t_arm(&f);
        ms_result result = ms_create(&n.config, &n.m);
        if (result != MS_RESULT_OK) {
            t_failed(&f, n.m, t_not_created(&n.m, result));
            assert_int_equal(heap.live_bytes, 0);
            continue;
        }
        n.x = ms_input(n.m, "x", MS_DTYPE_F32, ms_shape2(T_NET_ROWS, T_NET_COLS));
        const ms_tensor p = t_net_param(&n, "p");
        for (int k = 0; k < 40; ++k) {
            ms_set_param_group(n.m, p, ms_optimizer_group(n.m, &o));
        }
        t_net_loss(&n, t_net_scale(&n, "scale", n.x, 0.0f, p), 1.0f);
        result = ms_wrap(n.m);
        t_failed(&f, n.m, result);
        ms_destroy(n.m);
        assert_int_equal(heap.live_bytes, 0);
        assert_int_equal(heap.wrong_releases, 0);
    }
    assert_true(f.at > 20);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(groups_follow_their_formulas),
        cmocka_unit_test(techniques_leave_the_bits_alone),
        cmocka_unit_test(steps_above_the_norm_leave_nothing),
        cmocka_unit_test(steps_are_left_out_by_going_on),
        cmocka_unit_test(numbers_of_skipped_steps_come_again),
        cmocka_unit_test(norms_that_are_not_finite_end_the_step),
        cmocka_unit_test(what_is_frozen_in_a_pause_begins_anew),
        cmocka_unit_test(counts_are_set_in_a_pause),
        cmocka_unit_test(a_factor_makes_one_large_batch),
        cmocka_unit_test(verification_changes_nothing),
        cmocka_unit_test(groups_cost_nothing),
        cmocka_unit_test(files_fit_where_the_kinds_do),
        cmocka_unit_test(descs_are_checked),
        cmocka_unit_test(handles_are_checked),
        cmocka_unit_test(norms_and_groups_are_limited),
        cmocka_unit_test(every_norm_has_its_limit),
        cmocka_unit_test(callbacks_are_refused),
        cmocka_unit_test(calls_have_their_time),
        cmocka_unit_test(failures_drop_the_factor),
        cmocka_unit_test(every_allocation_fails_once),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
