/*  test_golden.c - bits that must not change: random numbers by formulas of this file and by
    numbers that are written down; updates in every format, whole and in whatever parts, slices and
    threads; and updates by vector instructions beside those of single elements. */
#include "private.h"
#include "toy_layers.h"
#include "slices.h"

// ------------------------------------------------------------------------------------------------
// the formulas, once more

/* splitmix64, and the last step of MurmurHash3 for 64 bits of input. */
static uint64_t mixed(uint64_t x) {
    t_rng rng;
    rng.state = x;
    return t_next(&rng);
}

static uint32_t drawn(uint32_t key, uint64_t number) {
    uint64_t x = ((number ^ key) & 0xffffffffu) + (number >> 32) * 0x9e3779b9u;
    x = (x & 0xffffffffu) ^ (x & 0xffffffffu) >> 16;
    x = x * 0x85ebca6bu & 0xffffffffu;
    x = (x ^ x >> 13) * 0xc2b2ae35u & 0xffffffffu;
    return (uint32_t)(x ^ x >> 16);
}

/* *ms_call.step_seed; ms_call.seed; and the key for tensor k of the state of a param. */
static uint64_t seed_of_step(uint64_t seed, uint64_t step, uint64_t micro) {
    return mixed(seed ^ mixed(step + (micro << 40)));
}

static uint64_t seed_of_layer(uint64_t seed, uint64_t layer, uint64_t step, uint64_t micro) {
    return mixed(layer) ^ seed_of_step(seed, step, micro);
}

static uint32_t key_of(uint64_t seed, uint64_t param, uint64_t k, uint64_t step, uint64_t micro) {
    return (uint32_t)(mixed(seed_of_step(seed, step, micro) ^ mixed(mixed(seed + param) + k)) >>
                      32);
}

/* x rounded to a multiple of 2^unit, up where the upper `bits` bits of `random` carry. */
static double at_random(double x, int unit, int bits, uint32_t random) {
    const double size = ldexp(fabs(x), -unit), whole = floor(size);
    const double carries = floor(ldexp(size - whole, bits)) + (double)(random >> (32 - bits));
    return copysign(ldexp(whole + (carries >= ldexp(1.0, bits)), unit), x);
}

static double bf16_at_random(double x, uint32_t random) {
    int e;
    (void)frexp(x, &e);
    return x == 0.0 ? x : at_random(x, e - 8, 16, random);
}

static double f16_at_random(double x, uint32_t random) {
    int e;
    (void)frexp(x, &e);
    const bool normal = e > -14;
    return x == 0.0 ? x
                    : at_random(x, normal ? e - 11 : -24,
                                normal    ? 13
                                : e < -31 ? 31
                                          : -1 - e,
                                random);
}

/* What a program of another language gives for these formulas. */
static void random_bits_are_those_written_down(void **state) {
    (void)state;
    static const struct {
        uint64_t x, is;
    } mixes[] = {{0, 0xe220a8397b1dcdafu},
                 {1, 0x910a2dec89025cc1u},
                 {UINT64_MAX, 0xe4d971771b652c20u},
                 {0x123456789abcdef0u, 0x161922c645ce50e8u}};
    static const struct {
        uint64_t number;
        uint32_t key, is;
    } draws[] = {{0, 0, 0},
                 {1, 0, 0x514e28b7u},
                 {0, 1, 0x514e28b7u},
                 {4095, 0x9abcdef0u, 0x455664d0u},
                 {4096, 0x9abcdef0u, 0xa6c50064u},
                 {(uint64_t)1 << 32, 0xffffffffu, 0x36deb503u},
                 {((uint64_t)5 << 32) + 3, 7, 0xcdb564b1u}};
    static const struct {
        uint64_t of[5]; // seed, param, k, step, micro
        uint32_t is;
    } keys[] = {{{0, 0, 0, 0, 0}, 0xe220a839u}, {{5, 0, 0, 0, 0}, 0xaa8287adu},
                {{5, 1, 0, 0, 0}, 0x6c479283u}, {{5, 1, 1, 0, 0}, 0x1855abd0u},
                {{5, 1, 4, 0, 0}, 0x3ff0c841u}, {{5, 1, 0, 1, 0}, 0xbac7bcfcu},
                {{5, 1, 0, 1, 1}, 0xddfc6326u}};
    for (size_t i = 0; i < sizeof mixes / sizeof *mixes; ++i) {
        assert_true(msi_mix(mixes[i].x) == mixes[i].is && mixed(mixes[i].x) == mixes[i].is);
    }
    for (size_t i = 0; i < sizeof draws / sizeof *draws; ++i) {
        assert_int_equal(msi_random(draws[i].key, draws[i].number), draws[i].is);
        assert_int_equal(drawn(draws[i].key, draws[i].number), draws[i].is);
    }
    for (size_t i = 0; i < sizeof keys / sizeof *keys; ++i) {
        const uint64_t *of = keys[i].of;
        ms_update_args args;
        ms_step_state step;
        memset(&args, 0, sizeof args);
        memset(&step, 0, sizeof step);
        step.seed = seed_of_step(of[0], of[3], of[4]);
        args.seed = mixed(of[0] + of[1]);
        args.state_of_step = &step;
        assert_int_equal(key_of(of[0], of[1], of[2], of[3], of[4]), keys[i].is);
        assert_int_equal(msi_state_key(&args, (int)of[2]), keys[i].is);
    }
    assert_true(seed_of_step(UINT64_MAX, 1000000, 3) == 0x81668fc4f78438abu);
    assert_true(seed_of_layer(5, 1, 2, 1) == 0x78a3b1e5b79a7fffu);
    t_rng rng = t_seed(1);
    for (int i = 0; i < 20000; ++i) {
        const double size = exp2(34.0 * t_unit(&rng) - 33.0);
        const float x = (float)(size * (2.0 * t_unit(&rng) - 1.0));
        const uint32_t random = (uint32_t)t_next(&rng);
        assert_true((double)msi_f32_of_bf16(msi_bf16_at_random(x, random)) ==
                    bf16_at_random((double)x, random));
        const double of_f16 = (double)msi_f32_of_f16(msi_f16_at_random(x, random));
        assert_true(fabs((double)x) < ldexp(1.0, -32) ||
                    of_f16 == f16_at_random((double)x, random));
    }
}

static int compare_keys(const void *a, const void *b) {
    const uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

/* No two of a few thousand keys are equal, and draws for neighbours, whether elements, params,
   tensors of state, steps or micro-batches, have half of their bits in common. */
static void neighbours_draw_other_bits(void **state) {
    (void)state;
    enum { PARAM_COUNT = 20, STEPS = 20, KEYS = PARAM_COUNT * STEPS * 3 * 2 };
    static uint32_t keys[KEYS];
    static const uint64_t tensors[] = {0, 1, MS_LIMIT_OPTIMIZER_STATE};
    uint32_t count = 0;
    double common[5] = {0.0, 0.0, 0.0, 0.0, 0.0};
    for (uint64_t param = 0; param < PARAM_COUNT; ++param) {
        for (uint64_t step = 0; step < STEPS; ++step) {
            for (int k = 0; k < 3; ++k) {
                for (uint64_t micro = 0; micro < 2; ++micro) {
                    keys[count++] = key_of(9, param, tensors[k], step, micro);
                }
                const uint32_t other[] = {key_of(9, param, tensors[k], step, 0),
                                          key_of(9, param + 1, tensors[k], step, 0),
                                          key_of(9, param, tensors[(k + 1) % 3], step, 0),
                                          key_of(9, param, tensors[k], step + 1, 0),
                                          key_of(9, param, tensors[k], step, 1)};
                for (uint64_t i = 0; i < 50; ++i) {
                    for (int way = 0; way < 5; ++way) {
                        uint32_t x =
                            msi_random(other[0], i) ^ msi_random(other[way], i + (way == 0));
                        for (; x != 0; x &= x - 1) {
                            common[way] += 1.0;
                        }
                    }
                }
            }
        }
    }
    qsort(keys, KEYS, sizeof *keys, compare_keys);
    for (int i = 1; i < KEYS; ++i) {
        assert_true(keys[i - 1] < keys[i]);
    }
    for (int way = 0; way < 5; ++way) { // of 1,920,000 bits; the standard deviation is 0.0004
        assert_true(fabs(common[way] / (PARAM_COUNT * STEPS * 3 * 50 * 32.0) - 0.5) < 0.003);
    }
}

// ------------------------------------------------------------------------------------------------
// a model whose gradients are its inputs

enum { PARAMS = 4, MOST = 16640 };

static const int64_t dims[PARAMS][2] = {{3, 85}, {64, 64}, {17, 241}, {128, 130}};

/* What is updated. */
typedef struct mixture {
    ms_optimizer_kind kind;
    float momentum; // of SGD
    ms_state_format formats[2];
    ms_dtype dtype; // of the values
    bool has_master, half_gradients;
} mixture;

enum { MOST_STATES = 100 };

static int states_of(const mixture *k) {
    ms_optimizer_desc o = t_optimizer(k->kind, 0.0f);
    o.momentum = k->momentum;
    return (int)t_state_count(&o);
}

/* Each optimizer that is built in, with each format of each tensor of its state. */
static uint32_t list_states(mixture *list) {
    uint32_t count = 0;
    memset(list, 0, MOST_STATES * sizeof *list);
    for (int kind = 0; t_is_built_in(kind); ++kind) {
        const msi_optimizer row = msi_optimizer_of((ms_optimizer_kind)kind);
        for (int formats = 0; formats < (row.states > 1 ? 9 : 3); ++formats) {
            list[count].kind = (ms_optimizer_kind)kind;
            list[count].momentum = row.has_momentum ? 0.9f : 0.0f;
            list[count].formats[0] = (ms_state_format)(formats % 3);
            list[count++].formats[1] = (ms_state_format)(formats / 3);
        }
        if (row.has_momentum) {
            list[count++].kind = (ms_optimizer_kind)kind;
        }
        assert_true(count + 10 < MOST_STATES);
    }
    return count;
}

/* How it is updated. */
typedef struct way {
    const char *name;
    uint64_t part_bytes; // of what is moved
    double most_us;      // ms_config.max_instruction_us
    bool is_split;       // some update is in parts, of every format
    bool moves, has_jobs, is_sliced;
    ms_switch early;
    int threads;
} way;

static const way ways[] = {
    {"plain", 16 << 20, 0.0, false, false, false, false, MS_SWITCH_OFF, 1},
    {"threads", 16 << 20, 0.0, false, false, false, false, MS_SWITCH_ON, 3},
    {"small parts", 1040, 0.0, false, true, false, false, MS_SWITCH_OFF, 2},
    {"parts of groups", 20000, 0.0, true, true, false, false, MS_SWITCH_OFF, 2},
    {"short instructions", 16 << 20, 0.2, true, false, false, false, MS_SWITCH_OFF, 2},
    {"shortest instructions", 16 << 20, 0.02, false, false, false, true, MS_SWITCH_OFF, 1},
    {"jobs", 16 << 20, 0.0, false, false, true, false, MS_SWITCH_OFF, 1},
    {"slices of parts", 20000, 0.0, true, true, false, true, MS_SWITCH_OFF, 1},
    {"all at once", 2000, 0.05, false, true, true, true, MS_SWITCH_OFF, 3},
};
enum { WAYS = sizeof ways / sizeof *ways };

typedef struct pulled {
    ms_model *m;
    ms_tensor x[PARAMS], p[PARAMS];
    int states;
    uint32_t micro_count;
    bool in_parts;
} pulled;

static uint64_t count_of(int param) {
    return (uint64_t)(dims[param][0] * dims[param][1]);
}

static int pull_forward(const ms_call *call) {
    t_data(&call->out[0])[0] = 1.0f;
    return 0;
}

static int pull_backward(const ms_call *call) {
    const float upstream = t_data(&call->grad_out[0])[0];
    const ms_view *g = &call->grad_param[0];
    if (call->grad_in[1].data) {
        t_contribute(&call->grad_in[1], 0, upstream);
    }
    for (uint64_t i = 0; g->data && i < ms_shape_count(&g->shape); ++i) {
        const float old = g->beta == 0.0f ? 0.0f : msi_load(g->data, g->dtype, i);
        msi_store_as(g->data, g->dtype, i, old + upstream * t_data(&call->in[0])[i]);
    }
    return 0;
}

/* An optimizer of the trainer's own, element by element: it gets the whole param, however the plan
   splits updates. */
static int own_update(const ms_update_args *args) {
    const float scale = args->gradient_scale ? *args->gradient_scale : 1.0f;
    if (args->begin != 0) {
        return T_CALLBACK_ERROR;
    }
    for (uint64_t i = 0; i < args->count; ++i) {
        args->state[0][i] = 0.5f * args->state[0][i] + scale * args->gradient[i];
        args->value[i] -= args->learning_rate * args->state[0][i];
    }
    return 0;
}

#ifndef T_CUDA
/* A job system that takes the last piece first. */
static void run_backwards(void *user, uint32_t count, ms_piece_fn piece, void *argument) {
    (void)user;
    while (count > 0) {
        piece(argument, --count);
    }
}
#endif

static void pulled_register(pulled *z, const mixture *k, const way *w) {
    ms_tensor last = {0};
    for (int i = 0; i < PARAMS; ++i) {
        ms_layer_desc d;
        memset(&d, 0, sizeof d);
        const ms_shape shape = ms_shape2(dims[i][0], dims[i][1]);
        z->x[i] = d.in[0] = ms_input(z->m, "x", MS_DTYPE_F32, shape);
        z->p[i] = d.param[0] = ms_param(z->m, "p", MS_DTYPE_F32, shape);
        d.in[1] = last;
        d.out[0] = last = ms_activation(z->m, "y", MS_DTYPE_F32, ms_shape1(1));
        d.name = "pull";
        d.forward = pull_forward;
        d.backward = pull_backward;
        d.dtypes.accepts = 1u << MS_DTYPE_BF16 | 1u << MS_DTYPE_F16;
        d.dtypes.f32_in = i == 0 ? 1 : 3;
        d.dtypes.f32_out = 1;
        d.dtypes.half_gradients = k->half_gradients;
        const ms_layer layer = ms_register_layer(z->m, &d);
        ms_set_layer_technique(z->m, layer, MS_TECHNIQUE_MIXED_PRECISION,
                               k->dtype != MS_DTYPE_F32 ? MS_SWITCH_ON : MS_SWITCH_OFF);
        if (k->formats[0] == MS_STATE_FORMAT_8BIT) {
            ms_set_tensor_technique(z->m, z->p[i], MS_TECHNIQUE_OPTIMIZER_8BIT, MS_SWITCH_ON);
        }
        if (w->moves) { // the gradient of every other one
            ms_set_tensor_technique(z->m, z->p[i], MS_TECHNIQUE_OFFLOADING, MS_SWITCH_ON);
            ms_set_tensor_technique(z->m, ms_gradient(z->m, z->p[i]), MS_TECHNIQUE_OFFLOADING,
                                    i % 2 ? MS_SWITCH_ON : MS_SWITCH_OFF);
            if (z->states > 0) {
                ms_set_tensor_technique(z->m, ms_optimizer_state(z->m, z->p[i], 0),
                                        MS_TECHNIQUE_OFFLOADING, MS_SWITCH_ON);
            }
        }
    }
    ms_set_loss(z->m, last);
}

static void pulled_start(pulled *z, const mixture *k, const way *w,
                         const ms_optimizer_desc *optimizer, uint64_t seed, uint32_t micro_count) {
    ms_config config = t_config();
    ms_hardware device = *ms_hardware_find("RTX 3090");
    ms_optimizer_desc o = *optimizer;
    memset(z, 0, sizeof *z);
    t_hook.part_bytes = w->part_bytes;
    t_threads(w->threads);
    device.launch_us = 0.001;
    config.seed = seed;
    config.early_update = w->early;
    config.max_instruction_us = w->most_us;
    config.offloading = w->moves ? MS_SWITCH_DEFAULT : MS_SWITCH_OFF;
    config.mixed_dtype = k->dtype == MS_DTYPE_F16 ? MS_DTYPE_F16 : MS_DTYPE_BF16;
    config.master_weights = k->has_master ? MS_SWITCH_ON : MS_SWITCH_OFF;
    config.loss_scaling.initial = 1024;
    config.accumulation_steps = micro_count;
    if (micro_count > 1 || k->dtype == MS_DTYPE_F16) { // updates wait for all gradients
        config.early_update = MS_SWITCH_OFF;
    }
#ifndef T_CUDA
    config.parallel.run = w->has_jobs ? run_backwards : NULL;
#endif
    if (w->is_sliced) {
        s_slice(&config, seed + 1);
    }
    o.kind = k->kind;
    o.momentum = k->momentum;
    o.state_format[0] =
        k->formats[0] == MS_STATE_FORMAT_BF16 ? MS_STATE_FORMAT_BF16 : MS_STATE_FORMAT_F32;
    o.state_format[1] =
        k->formats[1] == MS_STATE_FORMAT_BF16 ? MS_STATE_FORMAT_BF16 : MS_STATE_FORMAT_F32;
    if (k->kind == MS_OPTIMIZER_CUSTOM) {
        o.update = own_update;
        o.state_count = 1;
    }
    z->states = (int)t_state_count(&o);
    z->micro_count = micro_count;
    assert_int_equal(ms_create(&config, &z->m), MS_RESULT_OK);
    ms_set_optimizer(z->m, &o);
    pulled_register(z, k, w);
    if (w->most_us > 0.0) { // a device of known speeds
        ms_set_hardware(z->m, &device);
    }
    t_ok(z->m, ms_wrap(z->m));
    const msi_program *p = &z->m->run.plan->train;
    for (uint32_t i = 0; i < p->code.instructions.count; ++i) {
        z->in_parts |= p->code.instructions.items[i].part_count > 1;
    }
}

static void pulled_write(pulled *z, bool params, const float *values) {
    for (int i = 0; i < PARAMS; ++i) {
        t_ok(z->m, ms_write(z->m, params ? z->p[i] : z->x[i], values));
    }
}

static void pulled_step(pulled *z, const float *gradient) {
    for (uint32_t micro = 0; micro < z->micro_count; ++micro) {
        pulled_write(z, false, gradient);
        t_ok(z->m, s_step(z->m, NULL));
    }
    t_ok(z->m, ms_synchronize(z->m));
}

static const float *read_of(const pulled *z, ms_tensor tensor) {
    static float values[MOST];
    t_ok(z->m, ms_read(z->m, tensor, values));
    return values;
}

// ------------------------------------------------------------------------------------------------
// every format with every split

/* What steps leave behind: for each param its value and its state. */
typedef struct result {
    float of[PARAMS][3][MOST];
} result;

enum { SPLIT_STEPS = 3 };

static void run_way(const mixture *k, const way *w, result *r, bool *in_parts) {
    static float values[MOST + SPLIT_STEPS];
    ms_optimizer_desc o = t_optimizer(k->kind, 0.01f);
    pulled z;
    t_rng rng = t_seed(7);
    o.weight_decay = 0.01f;
    pulled_start(&z, k, w, &o, 3, 1);
    for (int i = 0; i < MOST + SPLIT_STEPS; ++i) {
        values[i] = (float)((t_unit(&rng) - 0.5) / (double)(1 + (i & 255)));
    }
    pulled_write(&z, true, values);
    for (int step = 0; step < SPLIT_STEPS; ++step) {
        pulled_step(&z, values + step);
    }
    for (int i = 0; i < PARAMS; ++i) {
        memcpy(r->of[i][0], read_of(&z, z.p[i]), count_of(i) * sizeof(float));
        for (int s = 0; s < z.states; ++s) {
            memcpy(r->of[i][1 + s], read_of(&z, ms_optimizer_state(z.m, z.p[i], s)),
                   count_of(i) * sizeof(float));
        }
    }
    *in_parts = z.in_parts;
    ms_destroy(z.m);
}

static void no_split_changes_a_bit_in(const mixture *k) {
    static result whole, split;
    bool in_parts;
    memset(&whole, 0, sizeof whole);
    memset(&split, 0, sizeof split);
    run_way(k, &ways[0], &whole, &in_parts);
    for (int i = 0; i < PARAMS; ++i) {
        for (uint64_t at = 0; at < count_of(i); ++at) {
            for (int s = 0; s < 3; ++s) {
                assert_true(msi_is_finite((double)whole.of[i][s][at]));
            }
        }
    }
    for (int w = 1; w < WAYS; ++w) {
        run_way(k, &ways[w], &split, &in_parts);
        assert_true(in_parts || !ways[w].is_split || k->kind == MS_OPTIMIZER_CUSTOM);
        for (int i = 0; i < PARAMS; ++i) {
            for (int s = 0; s < 3; ++s) {
                if (memcmp(whole.of[i][s], split.of[i][s], sizeof whole.of[i][s]) != 0) {
                    fail_msg("%s: param %d, tensor %d; optimizer %d, momentum %g, state in %d and "
                             "%d, value in %s, master %d, half gradients %d",
                             ways[w].name, i, s, (int)k->kind, (double)k->momentum,
                             (int)k->formats[0], (int)k->formats[1], ms_dtype_name(k->dtype),
                             (int)k->has_master, (int)k->half_gradients);
                }
            }
        }
    }
}

static void no_split_changes_a_bit(void **state) {
    (void)state;
#ifdef __FAST_MATH__
    skip(); // a part that ends inside a block of 256 elements is rounded otherwise there
#endif
    static mixture states[MOST_STATES];
    static const struct {
        ms_dtype dtype;
        bool has_master, half_gradients;
    } values[] = {{MS_DTYPE_F32, false, false},  {MS_DTYPE_BF16, true, true},
                  {MS_DTYPE_BF16, false, false}, {MS_DTYPE_F16, true, false},
                  {MS_DTYPE_F16, false, true},   {MS_DTYPE_BF16, true, false}};
    const uint32_t count = list_states(states);
    states[count].kind = MS_OPTIMIZER_CUSTOM;
    for (uint32_t s = 0; s <= count; ++s) {
        if (msi_optimizer_of(states[s].kind).states > 1 &&
            (states[s].formats[0] == MS_STATE_FORMAT_8BIT) !=
                (states[s].formats[1] == MS_STATE_FORMAT_8BIT)) {
            continue; // a plan codes all or none
        }
        for (size_t v = 0;
             v < (states[s].kind == MS_OPTIMIZER_CUSTOM ? 1 : sizeof values / sizeof *values);
             ++v) {
            mixture k = states[s];
            k.dtype = values[v].dtype;
            k.has_master = values[v].has_master;
            k.half_gradients = values[v].half_gradients;
            no_split_changes_a_bit_in(&k);
        }
    }
    t_threads(0);
}

// ------------------------------------------------------------------------------------------------
// what a step draws

/* What steps of a model must leave in memory, in double: numbers have so few bits that nothing but
   the last rounding of each rounds. */
typedef struct exact {
    double p[PARAMS][MOST], state[PARAMS][2][MOST];
} exact;

static double rounded_as(ms_dtype dtype, double x, uint32_t random) {
    return dtype == MS_DTYPE_F32    ? (double)(float)x
           : dtype == MS_DTYPE_BF16 ? bf16_at_random((double)(float)x, random)
                                    : f16_at_random((double)(float)x, random);
}

/* SGD with a rate of 1/4 and a momentum of 1/2, and AdamW and Lion with 1/2 for both decays. All
   params have one gradient, and one value in the beginning. */
static void exact_step(exact *e, const pulled *z, const mixture *k, const float *gradient,
                       uint64_t seed, uint64_t step) {
    const bool sgd = k->kind == MS_OPTIMIZER_SGD, lion = k->kind == MS_OPTIMIZER_LION;
    for (int i = 0; i < PARAMS; ++i) {
        const uint64_t param = msi_index(&z->m->graph, z->p[i]), last = z->micro_count - 1;
        const uint32_t keys[] = {key_of(seed, param, 0, step, last),
                                 key_of(seed, param, 1, step, last),
                                 key_of(seed, param, MS_LIMIT_OPTIMIZER_STATE, step, last)};
        const ms_dtype value = k->has_master ? MS_DTYPE_F32 : k->dtype;
        for (uint64_t at = 0; at < count_of(i); ++at) {
            const double g = (double)gradient[at];
            const double m = 0.5 * e->state[i][0][at] + (sgd ? g : 0.5 * g);
            const double moves = lion ? (m > 0.0) - (m < 0.0) : m;
            const double v = 0.5 * e->state[i][1][at] + 0.5 * g * g;
            const double news[] = {m, v};
            for (int s = 0; s < z->states; ++s) {
                const bool coarse = k->formats[s] == MS_STATE_FORMAT_BF16;
                e->state[i][s][at] =
                    rounded_as(coarse ? MS_DTYPE_BF16 : MS_DTYPE_F32, news[s], drawn(keys[s], at));
            }
            e->p[i][at] = rounded_as(value, e->p[i][at] - 0.25 * moves, drawn(keys[2], at));
        }
    }
}

static void expect_exact(const exact *e, const pulled *z, const mixture *k, const char *name) {
    for (int i = 0; i < PARAMS; ++i) {
        for (int s = 0; s < 1 + z->states; ++s) {
            const ms_tensor tensor = s == 0 ? z->p[i] : ms_optimizer_state(z->m, z->p[i], s - 1);
            const double *expected = s == 0 ? e->p[i] : e->state[i][s - 1];
            const float *is = read_of(z, tensor);
            for (uint64_t at = 0; at < count_of(i); ++at) {
                if (is[at] != (float)expected[at] && (s > 0 || k->kind != MS_OPTIMIZER_ADAMW)) {
                    fail_msg("%s: element %u of tensor %d of param %d is %.9g, not %.9g", name,
                             (unsigned)at, s, i, (double)is[at], expected[at]);
                }
            }
        }
    }
}

static void expect_draws(const mixture *k, const way *w, uint64_t seed, uint32_t micro_count) {
    static exact e;
    static float values[MOST];
    ms_optimizer_desc o = t_optimizer(k->kind, 0.25f);
    pulled z;
    t_rng rng = t_seed(seed);
    o.beta1 = o.beta2 = 0.5f;
    pulled_start(&z, k, w, &o, seed, micro_count);
    memset(&e, 0, sizeof e);
    for (int at = 0; at < MOST; ++at) {
        values[at] = ((float)t_below(&rng, 256) - 128.0f) / 128.0f;
        for (int i = 0; i < PARAMS; ++i) {
            e.p[i][at] = (double)values[at];
        }
    }
    pulled_write(&z, true, values);
    for (uint64_t step = 0; step < 3; ++step) {
        for (int at = 0; at < MOST; ++at) {
            values[at] = ((float)t_below(&rng, 2048) - 1023.5f) / 1024.0f;
        }
        pulled_step(&z, values);
        exact_step(&e, &z, k, values, seed, step);
        expect_exact(&e, &z, k, w->name);
    }
    ms_destroy(z.m);
}

/* By the seed, the step, the param, its tensor of state and the element, in every way of updating.
   */
static void updates_draw_by_the_formula(void **state) {
    (void)state;
    static const mixture cases[] = {
        {MS_OPTIMIZER_SGD, 0.5f, {MS_STATE_FORMAT_BF16, MS_STATE_FORMAT_F32}, MS_DTYPE_F32, 0, 0},
        {MS_OPTIMIZER_SGD, 0.5f, {MS_STATE_FORMAT_BF16, MS_STATE_FORMAT_F32}, MS_DTYPE_BF16, 0, 0},
        {MS_OPTIMIZER_SGD, 0.5f, {MS_STATE_FORMAT_F32, MS_STATE_FORMAT_F32}, MS_DTYPE_F16, 0, 0},
        {MS_OPTIMIZER_SGD, 0.5f, {MS_STATE_FORMAT_BF16, MS_STATE_FORMAT_F32}, MS_DTYPE_F16, 1, 0},
        {MS_OPTIMIZER_ADAMW, 0, {MS_STATE_FORMAT_BF16, MS_STATE_FORMAT_BF16}, MS_DTYPE_F32, 0, 0},
        {MS_OPTIMIZER_ADAMW, 0, {MS_STATE_FORMAT_F32, MS_STATE_FORMAT_BF16}, MS_DTYPE_BF16, 0, 0},
        {MS_OPTIMIZER_LION, 0, {MS_STATE_FORMAT_BF16, MS_STATE_FORMAT_F32}, MS_DTYPE_BF16, 0, 0},
        {MS_OPTIMIZER_LION, 0, {MS_STATE_FORMAT_F32, MS_STATE_FORMAT_F32}, MS_DTYPE_F16, 1, 0}};
    for (size_t c = 0; c < sizeof cases / sizeof *cases; ++c) {
        for (uint64_t w = c % t_stride(2); w < WAYS; w += t_stride(2)) {
            expect_draws(&cases[c], &ways[w], 11 + c, 1 + (uint32_t)(w / 2 % 2));
        }
    }
    t_threads(0);
}

// ------------------------------------------------------------------------------------------------
// what layers draw

enum { DROPS = 4, DROP_ROWS = 16, DROP_COLS = 5 };

/* Layers that keep numbers or drop them by a draw, and note what seeds they were given. */
typedef struct dropping {
    ms_model *m;
    ms_tensor x;
    uint64_t seed, step;
    uint32_t micro;
    uint32_t calls[MS_PHASE_COUNT], tiles;
    int numbers[DROPS];
} dropping;

static dropping *the_dropping; // of the model that runs

static bool keeps(uint64_t seed, int64_t i) {
    return drawn((uint32_t)seed, (uint64_t)i) % 4 != 0;
}

static void note_seed(const ms_call *call, uint64_t layer) {
    dropping *d = the_dropping;
    const uint64_t seed = seed_of_layer(d->seed, layer, d->step, d->micro);
    if (call->seed != seed || call->layer_seed != mixed(layer) ||
        *call->step_seed != seed_of_step(d->seed, d->step, d->micro)) {
        fail_msg("layer %u in %s, step %u, micro-batch %u: the seed is %016llx, not %016llx",
                 (unsigned)layer, msi_phase_name(call->phase), (unsigned)d->step,
                 (unsigned)d->micro, (unsigned long long)call->seed, (unsigned long long)seed);
    }
    d->calls[call->phase] += 1;
    d->tiles += call->row_begin > 0;
}

static int drop_forward(const ms_call *call) {
    note_seed(call, (uint64_t) * (const int *)call->user);
    for (int64_t i = 0; call->out[0].data && i < call->row_count * DROP_COLS; ++i) {
        const bool stays = keeps(call->seed, call->row_begin * DROP_COLS + i);
        t_data(&call->out[0])[i] =
            stays ? t_data(&call->in[0])[i] * t_data(&call->param[0])[i % DROP_COLS] : 0.0f;
    }
    return 0;
}

static int drop_backward(const ms_call *call) {
    note_seed(call, (uint64_t) * (const int *)call->user);
    for (int64_t i = 0; i < call->row_count * DROP_COLS; ++i) {
        const bool stays = keeps(call->seed, call->row_begin * DROP_COLS + i);
        const float g = stays ? t_data(&call->grad_out[0])[i] : 0.0f;
        if (call->grad_in[0].data) {
            t_contribute(&call->grad_in[0], i, g * t_data(&call->param[0])[i % DROP_COLS]);
        }
        if (call->grad_param[0].data) { // the first row overwrites if beta is 0
            float *to = t_data(&call->grad_param[0]) + i % DROP_COLS;
            const bool begins = i < DROP_COLS && call->grad_param[0].beta == 0.0f;
            *to = (begins ? 0.0f : *to) + g * t_data(&call->in[0])[i];
        }
    }
    return 0;
}

static int sum_forward(const ms_call *call) {
    note_seed(call, DROPS);
    for (int64_t r = 0; r < DROP_ROWS; ++r) {
        float sum = 0.0f;
        for (int64_t c = 0; c < DROP_COLS; ++c) {
            sum += t_data(&call->in[0])[r * DROP_COLS + c];
        }
        t_data(&call->out[0])[r] = sum;
    }
    return 0;
}

static int sum_backward(const ms_call *call) {
    note_seed(call, DROPS);
    for (int64_t i = 0; i < DROP_ROWS * DROP_COLS; ++i) {
        t_contribute(&call->grad_in[0], i, t_data(&call->grad_out[0])[i / DROP_COLS]);
    }
    return 0;
}

static void dropping_start(dropping *d, ms_config *config, ms_technique technique, bool forced) {
    ms_tensor last;
    const float ones[DROP_COLS] = {1.0f, 1.0f, 1.0f, 1.0f, 1.0f};
    const ms_optimizer_desc none = t_optimizer(MS_OPTIMIZER_SGD, 0.0625f);
    memset(d, 0, sizeof *d);
    the_dropping = d;
    d->seed = config->seed;
    assert_int_equal(ms_create(config, &d->m), MS_RESULT_OK);
    ms_set_optimizer(d->m, &none);
    last = d->x = ms_input(d->m, "x", MS_DTYPE_F32, ms_shape2(DROP_ROWS, DROP_COLS));
    for (int i = 0; i <= DROPS; ++i) {
        ms_layer_desc l;
        const bool is_last = i == DROPS;
        memset(&l, 0, sizeof l);
        l.forward = is_last ? sum_forward : drop_forward;
        l.backward = is_last ? sum_backward : drop_backward;
        l.in[0] = last;
        l.out[0] = last =
            ms_activation(d->m, "y", MS_DTYPE_F32,
                          is_last ? ms_shape1(DROP_ROWS) : ms_shape2(DROP_ROWS, DROP_COLS));
        if (!is_last) {
            d->numbers[i] = i;
            l.user = &d->numbers[i];
            l.param[0] = ms_param(d->m, "p", MS_DTYPE_F32, ms_shape1(DROP_COLS));
            l.tile.axes = 1;
            l.tile.preferred = 5;
        }
        const ms_layer layer = ms_register_layer(d->m, &l);
        if (forced && !is_last) {
            ms_set_layer_technique(d->m, layer, technique, MS_SWITCH_ON);
        }
        if (!is_last) {
            t_ok(d->m, ms_write(d->m, l.param[0], ones));
        }
    }
    ms_set_loss(d->m, last);
    t_ok(d->m, ms_wrap(d->m));
}

/* The loss by the formulas; values are small whole numbers, and params 1, in the first step. */
static double loss_of_draws(const float *x, uint64_t seed, uint32_t micro) {
    double sum = 0.0;
    for (int64_t i = 0; i < DROP_ROWS * DROP_COLS; ++i) {
        bool stays = true;
        for (uint64_t layer = 0; layer < DROPS; ++layer) {
            stays &= keeps(seed_of_layer(seed, layer, 0, micro), i);
        }
        sum += stays ? (double)x[i] : 0.0;
    }
    return sum;
}

/* Layers draw by the seed, the layer, the step and the micro-batch, and by rows of the whole: the
   same in forward, its recomputation and backward, in tiles and in slices. */
static void layers_draw_by_the_formula(void **state) {
    (void)state;
    static const struct {
        ms_technique technique;
        bool forced, is_sliced, debug;
    } plans[] = {{MS_TECHNIQUE_CHECKPOINTING, false, false, false},
                 {MS_TECHNIQUE_CHECKPOINTING, true, false, false},
                 {MS_TECHNIQUE_CHECKPOINTING, true, true, true},
                 {MS_TECHNIQUE_TILING, true, false, false},
                 {MS_TECHNIQUE_TILING, true, true, false}};
    float x[DROP_ROWS * DROP_COLS];
    for (int i = 0; i < DROP_ROWS * DROP_COLS; ++i) {
        x[i] = (float)(1 + i);
    }
    for (size_t p = 0; p < sizeof plans / sizeof *plans; ++p) {
        for (uint32_t micro_count = 1; micro_count <= 2; ++micro_count) {
            dropping d;
            ms_config config = t_config();
            config.seed = 4 + p;
            config.accumulation_steps = micro_count;
            config.debug = plans[p].debug;
            if (plans[p].is_sliced) {
                s_slice(&config, 5);
            }
            dropping_start(&d, &config, plans[p].technique, plans[p].forced);
            for (d.step = 0; d.step < 4; ++d.step) {
                for (d.micro = 0; d.micro < micro_count; ++d.micro) {
                    double loss;
                    t_ok(d.m, ms_write(d.m, d.x, x));
                    t_ok(d.m, s_step(d.m, &loss));
                    t_ok(d.m, ms_synchronize(d.m));
                    if (d.step == 0) {
                        assert_true(loss * DROP_ROWS == loss_of_draws(x, config.seed, d.micro));
                    }
                }
            }
            const bool again = plans[p].forced && plans[p].technique == MS_TECHNIQUE_CHECKPOINTING;
            assert_true(!again || d.calls[MS_PHASE_RECOMPUTE] > 0);
            assert_true(plans[p].technique != MS_TECHNIQUE_TILING || d.tiles > 0);
            ms_destroy(d.m);
        }
    }
}

// ------------------------------------------------------------------------------------------------
// vector instructions beside single elements

enum { WIDEST = 4200 };

/* A param with gradient and state, all in memory of their own: of 4 bytes an element, whatever
   their formats are, with room after it, which nothing may change. */
typedef struct updated {
    ms_update_args args;
    ms_update_factors factors;
    ms_step_state step;
    float value[WIDEST + 16], master[WIDEST + 16], gradient[WIDEST + 16], state[2][WIDEST + 80];
} updated;

static const ms_update_args *args_of(updated *u, const mixture *k) {
    u->args.value = u->value;
    u->args.gradient = u->gradient;
    u->args.master = k->has_master ? u->master : NULL;
    u->args.factors = &u->factors;
    u->args.state_of_step = &u->step;
    for (int s = 0; s < 2; ++s) {
        u->args.state[s] = s < states_of(k) ? u->state[s] : NULL;
    }
    return &u->args;
}

static void updated_init(updated *u, const mixture *k, uint64_t count, t_rng *rng) {
    memset(u, 0, sizeof *u);
    ms_optimizer_desc o = t_optimizer(k->kind, 0.01f);
    o.beta1 = 0.9f;
    o.beta2 = 0.999f;
    o.epsilon = 1e-8f;
    o.momentum = k->momentum;
    u->factors = msi_factors_at(&o, 3);
    u->factors.decay = msi_decay_factor(&o, 0.01f);
    u->args.kind = k->kind;
    u->args.count = count;
    u->args.seed = 77;
    u->step.seed = 99;
    u->args.state_format[0] = k->formats[0];
    u->args.state_format[1] = k->formats[1];
    u->args.value_dtype = k->dtype;
    u->args.gradient_dtype = k->half_gradients ? k->dtype : MS_DTYPE_F32;
    for (uint64_t i = 0; i < count; ++i) {
        u->master[i] = (float)(t_unit(rng) - 0.5);
        msi_store_as(u->value, k->dtype, i, u->master[i]);
    }
}

/* The update of elements one after another. */
static void update_elements(updated *u, const mixture *k) {
    const ms_update_args *a = args_of(u, k);
    const bool guarded = msi_has_formats(a);
    const int states = a->state[1] != NULL ? 2 : a->state[0] != NULL ? 1 : 0;
    const uint32_t keys[3] = {msi_state_key(a, 0), msi_state_key(a, 1),
                              msi_state_key(a, MS_LIMIT_OPTIMIZER_STATE)};
    for (uint64_t at = 0; at < a->count; at += MSI_CODED_BLOCK) {
        const int count = (int)msi_smaller(a->count - at, MSI_CODED_BLOCK);
        float s[2][MSI_CODED_BLOCK];
        memset(s, 0, sizeof s);
        for (int j = 0; j < states; ++j) {
            msi_load_state(a->state[j], msi_format_of_state(a->state_format[j]),
                           msi_state_is_signed(a->kind, j), at, count, a->count, s[j]);
        }
        for (int i = 0; i < count; ++i) {
            const uint64_t n = at + (uint64_t)i;
            const float p = a->master ? a->master[n] : msi_load(a->value, a->value_dtype, n);
            const volatile float g = (a->gradient_scale ? *a->gradient_scale : 1.0f) *
                                     msi_load(a->gradient, a->gradient_dtype, n);
            const float now =
                guarded ? msi_guarded_element(a->kind, a->factors, p, g, &s[0][i], &s[1][i])
                        : msi_element(a->kind, a->factors, p, g, states > 0 ? &s[0][i] : NULL,
                                      states > 1 ? &s[1][i] : NULL);
            if (a->master) {
                a->master[n] = now;
            }
            if (a->master || a->value_dtype == MS_DTYPE_F32) {
                msi_store_as(a->value, a->value_dtype, n, now);
            } else {
                msi_store_at_random(a->value, a->value_dtype, n, now,
                                    msi_random(keys[2], a->begin + n));
            }
        }
        for (int j = 0; j < states; ++j) {
            msi_store_state(a->state[j], msi_format_of_state(a->state_format[j]),
                            msi_state_is_signed(a->kind, j), at, count, a->count, &keys[j],
                            a->begin, s[j]);
        }
    }
}

/* Equal bits, except that a NaN may be any NaN. */
static bool are_same(const float *a, const float *b, size_t count) {
    bool same = memcmp(a, b, count * sizeof *a) == 0;
    for (size_t i = 0; i < count && !same; ++i) {
        if (memcmp(a + i, b + i, sizeof *a) != 0 && !(t_is_nan(a[i]) && t_is_nan(b[i]))) {
            return false;
        }
    }
    return true;
}

static bool leave_the_same(const updated *a, const updated *b) {
    return are_same(a->value, b->value, WIDEST + 16) &&
           are_same(a->master, b->master, WIDEST + 16) &&
           are_same(a->state[0], b->state[0], WIDEST + 80) &&
           are_same(a->state[1], b->state[1], WIDEST + 80);
}

/* Gradients around those that change nothing, and all kinds of odd numbers. */
static const uint32_t odd_bits[] = {
    0x5f800000u, 0xdf800000u, 0x5f7fffffu, 0xdf7fffffu, 0x5f800001u, 0xdf800001u, // 2^64
    0x7f800000u, 0xff800000u, 0x7fc00000u, 0xffc00000u, 0x7f800001u, 0x7f7fffffu, // not finite
    0x00000000u, 0x80000000u, 0x00000001u, 0x80000001u, 0x007fffffu, 0x00800000u, // tiny
    0x3f800000u, 0xbf800000u, 0x5f000000u, 0x1f800000u, 0x2f800000u, 0x33800000u};
enum { ODD = sizeof odd_bits / sizeof *odd_bits };

static float odd(uint32_t i) {
    return msi_f32_of_bits(odd_bits[i % ODD]);
}

static void fill_gradient(updated *u, const float *gradient, uint64_t count) {
    for (uint64_t i = 0; i < count; ++i) {
        msi_store_as(u->gradient, u->args.gradient_dtype, i, gradient[i]);
    }
}

static void fail_update(const mixture *k, uint64_t count, int how) {
    fail_msg("%u elements, round %d: optimizer %d, momentum %g, state in %d and %d, value in %s, "
             "master %d, half gradients %d",
             (unsigned)count, how, (int)k->kind, (double)k->momentum, (int)k->formats[0],
             (int)k->formats[1], ms_dtype_name(k->dtype), (int)k->has_master,
             (int)k->half_gradients);
}

/* Three updates of elements on both sides of 2^32: of usual gradients; with one odd number in each
   strip of 24 elements, at another place and with another number in each; and of odd numbers alone.
   */
static void check_update(const mixture *k, uint64_t count, t_rng *rng) {
    static updated fast, slow;
    static float gradient[WIDEST];
    static const float scales[] = {1.0f, 0.5f, 1e-3f};
    const ms_backend cpu = ms_backend_cpu();
    updated_init(&fast, k, count, rng);
    const bool has_groups =
        k->formats[0] == MS_STATE_FORMAT_8BIT || k->formats[1] == MS_STATE_FORMAT_8BIT;
    fast.args.begin = ((uint64_t)1 << 32) - (has_groups ? 4096 : count / 2);
    for (int round = 0; round < 3; ++round) {
        const uint32_t shift = t_below(rng, 1000);
        for (uint64_t i = 0; i < count; ++i) {
            const bool is_odd = round == 2 || (round == 1 && i % 24 == (i / 24 * 7 + shift) % 24);
            gradient[i] = is_odd ? odd((uint32_t)i + shift)
                                 : (float)((t_unit(rng) - 0.5) * exp2(-8.0 * t_unit(rng)));
        }
        fill_gradient(&fast, gradient, count);
        fast.args.gradient_scale = round == 0 ? NULL : &scales[(shift + (uint32_t)round) % 3];
        fast.step.seed += 1;
        slow = fast;
        assert_int_equal(cpu.update(cpu.user, args_of(&fast, k)), 0);
        update_elements(&slow, k);
        if (!leave_the_same(&fast, &slow)) {
            fail_update(k, count, round);
        }
    }
}

/* Calls `check` for each kind of optimizer with each format of state and value. */
static void for_each_mixture(void (*check)(const mixture *k, uint64_t number)) {
    static const struct {
        ms_dtype dtype;
        bool has_master, half_gradients;
    } values[] = {
        {MS_DTYPE_F32, false, false},  {MS_DTYPE_BF16, true, false}, {MS_DTYPE_BF16, true, true},
        {MS_DTYPE_BF16, false, false}, {MS_DTYPE_BF16, false, true}, {MS_DTYPE_F16, true, false},
        {MS_DTYPE_F16, true, true},    {MS_DTYPE_F16, false, false}, {MS_DTYPE_F16, false, true}};
    static mixture states[MOST_STATES];
    uint64_t number = 0;
    const uint32_t count = list_states(states);
    for (uint32_t s = 0; s < count; ++s) {
        for (size_t v = 0; v < sizeof values / sizeof *values; ++v) {
            mixture k = states[s];
            k.dtype = values[v].dtype;
            k.has_master = values[v].has_master;
            k.half_gradients = values[v].half_gradients;
            check(&k, number++);
        }
    }
}

static void check_sizes(const mixture *k, uint64_t number) {
    static const uint64_t around[] = {248, 256, 264, 272, 512, 768, 1024, 4096};
    const uint64_t stride = t_stride(5);
    t_rng rng = t_seed(20 + number);
    for (uint64_t count = 1 + number % stride; count <= 40; count += stride) {
        check_update(k, count, &rng);
    }
    for (size_t i = 0; i < sizeof around / sizeof *around; ++i) {
        for (uint64_t near = number % stride; near < 7; near += stride) {
            check_update(k, around[i] - 3 + near, &rng);
        }
    }
}

static void updates_of_any_size_are_those_of_elements(void **state) {
    (void)state;
#ifdef __FAST_MATH__
    skip(); // divisions and square roots of loops are approximate, and subnormal numbers are 0
#endif
    t_threads(1);
    for_each_mixture(check_sizes);
    t_threads(0);
}

/* One odd gradient in a block of 256, at each place in turn; where it is 2^64 or more, or NaN, its
   element stays what it was, as a value and as state of 16 bits or more. */
static void check_places(const mixture *k, uint64_t number) {
    static updated before, fast, slow;
    static float gradient[MSI_CODED_BLOCK];
    const ms_backend cpu = ms_backend_cpu();
    t_rng rng = t_seed(300 + number);
    updated_init(&before, k, MSI_CODED_BLOCK, &rng);
    t_fill(&rng, gradient, MSI_CODED_BLOCK, 0.01f);
    fill_gradient(&before, gradient, MSI_CODED_BLOCK);
    assert_int_equal(cpu.update(cpu.user, args_of(&before, k)), 0);
    const bool has_formats = msi_has_formats(&before.args);
    const uint64_t stride = t_stride(7);
    for (uint64_t at = number % stride; at < MSI_CODED_BLOCK; at += stride) {
        const uint32_t i = (uint32_t)(at / stride + number) % ODD;
        const float scale = i % 2 ? 1.0f : 2.0f; // a product that is 2^64, of 2^63
        fast = before;
        msi_store_as(fast.gradient, fast.args.gradient_dtype, at, odd(i) / scale);
        fast.args.gradient_scale = &scale;
        fast.step.seed += at;
        slow = fast;
        assert_int_equal(cpu.update(cpu.user, args_of(&fast, k)), 0);
        update_elements(&slow, k);
        if (!leave_the_same(&fast, &slow)) {
            fail_update(k, at, (int)i);
        }
        const volatile float seen = scale * msi_load(fast.gradient, fast.args.gradient_dtype, at);
        const bool stays = t_is_nan(seen) || fabs((double)seen) >= 18446744073709551616.0;
        bool stayed = msi_load(fast.value, k->dtype, at) == msi_load(before.value, k->dtype, at) &&
                      fast.master[at] == before.master[at];
        for (int s = 0; s < 2; ++s) {
            const bool halves = k->formats[s] == MS_STATE_FORMAT_BF16;
            const ms_dtype dtype = halves ? MS_DTYPE_BF16 : MS_DTYPE_F32;
            stayed &= k->formats[s] == MS_STATE_FORMAT_8BIT ||
                      msi_load(fast.state[s], dtype, at) == msi_load(before.state[s], dtype, at);
        }
        if (has_formats && stays && !stayed) {
            fail_update(k, at, (int)i);
        }
    }
}

static void what_is_no_gradient_changes_nothing_anywhere(void **state) {
    (void)state;
#ifdef __FAST_MATH__
    skip();
#endif
    for_each_mixture(check_places);
}

/* The functions for a block, by vector instructions and without them, side by side. */
static void check_block(const mixture *k, uint64_t number) {
#ifdef MSI_LANES
    static updated of[2];
    static float gradient[MSI_CODED_BLOCK];
    static msi_wide_waiting waiting;
    const int states = states_of(k);
    t_rng rng = t_seed(600 + number);
    if (k->dtype != MS_DTYPE_F32 || states == 0) {
        return; // converted before and after, or never wide
    }
    updated_init(&of[0], k, MSI_CODED_BLOCK, &rng);
    for (uint32_t round = 0; round < 2 * ODD; ++round) {
        t_fill(&rng, gradient, MSI_CODED_BLOCK, 0.01f);
        for (uint32_t i = round % 5; i < MSI_CODED_BLOCK && round > 0; i += 1 + t_below(&rng, 90)) {
            gradient[i] = odd(round % 2 ? round / 2 : i);
        }
        fill_gradient(&of[0], gradient, MSI_CODED_BLOCK);
        of[0].step.seed += 1;
        of[1] = of[0];
        for (int wide = 0; wide < 2; ++wide) {
            const ms_update_args *a = args_of(&of[wide], k);
            const uint32_t keys[2] = {msi_state_key(a, 0), msi_state_key(a, 1)};
            msi_update_floats b;
            b.at = 0;
            b.count = MSI_CODED_BLOCK;
            b.value = a->value;
            b.gradient = a->gradient;
            b.scale = round % 3 == 0 ? 1.0f : 0.7f;
            if (wide) {
                msi_update_wide(a, keys, &b, &waiting);
                msi_wide_close(a, &waiting);
            } else {
                msi_update_any(a, keys, states, &b);
            }
        }
        if (!leave_the_same(&of[0], &of[1])) {
            fail_update(k, MSI_CODED_BLOCK, (int)round);
        }
    }
#else
    (void)k;
    (void)number;
#endif
}

static void vector_instructions_give_the_bits_of_elements(void **state) {
    (void)state;
#if defined __FAST_MATH__ || !defined MSI_LANES
    skip();
#endif
    for_each_mixture(check_block);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(random_bits_are_those_written_down),
        cmocka_unit_test(neighbours_draw_other_bits),
        cmocka_unit_test(no_split_changes_a_bit),
        cmocka_unit_test(updates_draw_by_the_formula),
        cmocka_unit_test(layers_draw_by_the_formula),
        cmocka_unit_test(updates_of_any_size_are_those_of_elements),
        cmocka_unit_test(what_is_no_gradient_changes_nothing_anywhere),
        cmocka_unit_test(vector_instructions_give_the_bits_of_elements),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
