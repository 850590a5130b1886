/*  test_nn.c - the layers of nn.h against references in float64 that share no code with them:
    outputs directly, gradients by central differences of the reference. Then the models: both
    granularities alike, any number of threads alike, reshaped alike, initial values, sizes,
    errors. */
#include "private.h"

static int64_t tile_queries = 64, tile_keys = 256, tile_sums = 1024; // as in nn_cpu.h
#define NN_TILE_QUERIES tile_queries
#define NN_TILE_KEYS    tile_keys
#define NN_TILE_SUMS    tile_sums
static int64_t decoded = 1 << 18; // as in nn.h
#define NN_DECODED decoded
#include "nn.h"
#include "testing.h"
#include "testing_nn.h"

/* -Ofast may regroup x - n ln 2, and n is up to 127. */
#ifdef __FAST_MATH__
#define EXP_ERROR 2e-5
#else
#define EXP_ERROR 3e-7
#endif

// ------------------------------------------------------------------------------------------------
// the harness: leaves -> [lift] -> layer under test -> weighted sum

enum { C_LEAVES = 4, C_IDS = 2, C_WEIGHTS = 1 + C_LEAVES };

typedef struct c_case c_case;

/* One model that is being checked. */
typedef struct c_run {
    const c_case *what;
    ms_model *model;
    nn_net *net;
    ms_tensor leaf[C_LEAVES];   // params
    ms_tensor lifted[C_LEAVES]; // activations that copy them
    ms_tensor ids[C_IDS];
    ms_tensor weights[C_LEAVES + 1]; // of the sum; the last are those of the output
    ms_tensor out;
    bool shared; // the sum takes the leaves too, so that all gradients accumulate
} c_run;

/* A layer with its sizes. The first lifted_count leaves reach it as activations, the others as
   params; the sizes stand in d. */
struct c_case {
    const char *name;
    ms_tensor (*build)(c_run *run, const int64_t *d, uint32_t flags);
    void (*reference)(const c_case *c, const double *const *leaf, const float *library,
                      double *out);
    int64_t d[4];
    uint32_t flags;
    int leaf_count, lifted_count;
    ms_shape leaf[C_LEAVES];
    int64_t out_count;
    float scale; // of the values in the leaves
    bool exact;  // the output has the same bits on all devices, and in tiles
    bool whole;  // it is not computed in tiles
    /* In 16 bits: roundings of inner values, each of the size of the largest. In all other layers a
       result differs from that in float64 by its own rounding alone. */
    double inner_out, inner_gradient;
    bool distinct; // neighbours in the leaves are, where derivatives need that
    const int32_t *ids[C_IDS];
};

/* The dtype that layers are called in. All that they are given is exact in it. */
static ms_dtype c_dtype = MS_DTYPE_F32;

/* The rows of the tiles that the layer under test is computed in; 0: it is not. */
static int64_t c_tile_rows = 0;

/* Whether all runs are in debug mode, which copies what a model has many times for each call of a
   layer. That takes a GPU minutes: there one run of each case is, and models in tests of it. */
#if defined T_CUDA && !defined CUDART_EMULATION
enum { T_DEBUGS = 0 };
#else
enum { T_DEBUGS = 1 };
#endif
static bool c_checks = T_DEBUGS;

static float c_rounded(float x) {
    float stored;
    msi_store_as(&stored, c_dtype, 0, x);
    return msi_load(&stored, c_dtype, 0);
}

/* Weight of element i of operand j in the sum, in [-1, 1). */
static float c_weight(int j, int64_t i) {
    t_rng rng = t_seed((uint64_t)i * 16 + (uint64_t)j);
    return c_rounded((float)(2.0 * t_unit(&rng) - 1.0));
}

static int c_lift_forward(const ms_call *call) {
    return t_nn_device()->copy(call, nn_dest_of(nn_values_of(&call->out[0]), 0.0f),
                               nn_values_of(&call->param[0]), nn_count(&call->out[0]));
}

static int c_lift_backward(const ms_call *call) {
    return t_nn_device()->copy(call, nn_gradient_of(&call->grad_param[0]),
                               nn_values_of(&call->grad_out[0]), nn_count(&call->grad_out[0]));
}

/* in[0] is the output under test, in[1 + j] the lifted leaf j, param[j] the leaf that is a param,
   and C_WEIGHTS inputs after them the weights of them all: products, which any device has. */
static ms_matrix c_column(const ms_view *view) {
    const int64_t count = nn_count(view);
    return nn_matrix(nn_values_of(view), count, 1, 1);
}

/* The operand of the sum that has these weights; its gradient in backward. */
static const ms_view *c_operand(const ms_call *call, int j, bool gradient) {
    const c_run *run = (const c_run *)call->user;
    const ms_view *in = gradient ? call->grad_in : call->in;
    if (j == C_LEAVES) {
        return &in[0];
    }
    if (!run->shared || j >= run->what->leaf_count) {
        return NULL;
    }
    return j < run->what->lifted_count ? &in[1 + j]
                                       : &(gradient ? call->grad_param : call->param)[j];
}

static int c_sum_forward(const ms_call *call) {
    int result = 0;
    for (int j = C_LEAVES; j >= 0 && result == 0; j--) {
        const ms_view *operand = c_operand(call, j, false);
        if (operand != NULL) {
            result = (int)ms_gemm(call, 1.0f, ms_transpose(c_column(&call->in[C_WEIGHTS + j])),
                                  c_column(operand), j == C_LEAVES ? 0.0f : 1.0f,
                                  nn_matrix(nn_values_of(&call->out[0]), 1, 1, 1));
        }
    }
    return result;
}

static int c_sum_backward(const ms_call *call) {
    int result = 0;
    for (int j = C_LEAVES; j >= 0 && result == 0; j--) {
        const ms_view *gradient = c_operand(call, j, true);
        if (gradient != NULL && gradient->data != NULL) {
            result = (int)ms_gemm(call, 1.0f, c_column(&call->in[C_WEIGHTS + j]),
                                  nn_matrix(nn_values_of(&call->grad_out[0]), 1, 1, 1),
                                  gradient->beta, c_column(gradient));
        }
    }
    return result;
}

static ms_tensor c_lift(c_run *run, int j) {
    ms_layer_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.name = "lift";
    desc.forward = c_lift_forward;
    desc.backward = c_lift_backward;
    desc.param[0] = run->leaf[j];
    desc.out[0] = ms_activation(run->model, "lifted", MS_DTYPE_F32, run->what->leaf[j]);
    desc.backward_reads.nothing = true;
    ms_register_layer(run->model, &desc);
    return desc.out[0];
}

/* Registers the weights of operand j. */
static ms_tensor c_weights(c_run *run, int j) {
    const c_case *c = run->what;
    const int64_t count = j == C_LEAVES ? c->out_count : (int64_t)ms_shape_count(&c->leaf[j]);
    run->weights[j] = ms_input(run->model, "weights", MS_DTYPE_F32, ms_shape1(count));
    return run->weights[j];
}

static void c_sum(c_run *run) {
    ms_layer_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.name = "sum";
    desc.forward = c_sum_forward;
    desc.backward = c_sum_backward;
    desc.user = run;
    desc.in[0] = run->out;
    desc.in[C_WEIGHTS + C_LEAVES] = c_weights(run, C_LEAVES);
    for (int j = 0; run->shared && j < run->what->leaf_count; j++) {
        desc.in[C_WEIGHTS + j] = c_weights(run, j);
        if (j < run->what->lifted_count) {
            desc.in[1 + j] = run->lifted[j];
        } else {
            desc.param[j] = run->leaf[j];
        }
    }
    desc.out[0] = ms_activation(run->model, "sum", MS_DTYPE_F32, ms_shape1(1));
    desc.backward_reads.in = ((1u << (C_LEAVES + 1)) - 1) << C_WEIGHTS;
    ms_register_layer(run->model, &desc);
    ms_set_loss(run->model, desc.out[0]);
}

static void c_leaf_values(const c_case *c, int j, float *values) {
    t_rng rng = t_seed(77 + (uint64_t)j);
    const uint64_t count = ms_shape_count(&c->leaf[j]);
    t_fill(&rng, values, count, c->scale);
    for (uint64_t i = 0; i < count; i++) {
        const float number = (float)(i * 7919 % 241) / 64.0f - 2.0f; // no two of a window are alike
        values[i] = c->distinct ? number : c_rounded(values[i]);
    }
}

static float *c_floats(uint64_t count) {
    float *values = (float *)malloc((size_t)count * sizeof(float));
    assert_non_null(values);
    return values;
}

/* Whether a step runs some layer on a part of its rows. */
static bool c_is_in_tiles(const ms_model *model) {
    const msi_program *p = &model->run.plan->train;
    bool in_tiles = false;
    for (uint32_t i = 0; i < p->code.instructions.count; i++) {
        const msi_instruction *at = &p->code.instructions.items[i];
        in_tiles |= at->rows.of > 0 && at->rows.count > 0 && at->rows.count < at->rows.of;
    }
    return in_tiles;
}

/* Registers, wraps and writes. keep: outputs and inputs of the layer stay readable, and so nothing
   runs in place. frozen: this leaf takes no gradient; -1: none. */
static void c_start(c_run *run, const c_case *c, bool shared, bool keep, int frozen) {
    ms_config config = t_device_config();
    config.early_update = MS_SWITCH_OFF;
    config.debug = c_checks;
    config.seed = 5;
    config.mixed_dtype = c_dtype;
    config.loss_scaling.initial = 1.0f; // gradients are those of the loss
    memset(run, 0, sizeof *run);
    run->what = c;
    run->shared = shared;
    assert_int_equal(ms_create(&config, &run->model), MS_RESULT_OK);
    run->net = nn_create_on(run->model, t_nn_device());
    assert_non_null(run->net);
    for (int j = 0; j < c->leaf_count; j++) {
        run->leaf[j] = nn_param(run->net, "leaf", c->leaf[j], NN_INIT_ZEROS, 0.0f);
        run->lifted[j] = j < c->lifted_count ? c_lift(run, j) : run->leaf[j];
        if (keep && j < c->lifted_count) {
            ms_add_output(run->model, run->lifted[j]);
        }
        if (frozen == j) {
            ms_set_frozen(run->model, run->leaf[j], true);
        }
    }
    nn_force_half(run->net, c_dtype != MS_DTYPE_F32);
    nn_force_tiles(run->net, c_tile_rows);
    run->out = c->build(run, c->d, c->flags);
    if (keep) {
        ms_add_output(run->model, run->out);
    }
    c_sum(run);
    t_ok(run->model, ms_wrap(run->model));
    const msi_graph *g = &run->model->graph;
    const uint64_t rows = msi_layer_rows(g, &g->layers.items[g->layers.count - 2], false);
    assert_int_equal(c_is_in_tiles(run->model), c_tile_rows > 0 && !c->whole && rows > 1);
    for (int j = 0; j < c->leaf_count; j++) {
        float *values = c_floats(ms_shape_count(&c->leaf[j]));
        c_leaf_values(c, j, values);
        t_ok(run->model, ms_write(run->model, run->leaf[j], values));
        free(values);
    }
    for (int k = 0; k < C_IDS; k++) {
        if (run->ids[k].id != 0) {
            t_ok(run->model, ms_write(run->model, run->ids[k], c->ids[k]));
        }
    }
    for (int j = 0; j <= C_LEAVES; j++) {
        if (run->weights[j].id != 0) {
            const int64_t count = (int64_t)ms_tensor_count(run->model, run->weights[j]);
            float *values = c_floats((uint64_t)count);
            for (int64_t i = 0; i < count; i++) {
                values[i] = c_weight(j, i);
            }
            t_ok(run->model, ms_write(run->model, run->weights[j], values));
            free(values);
        }
    }
    t_ok(run->model, ms_forward(run->model, NULL));
    t_ok(run->model, ms_backward(run->model));
}

static void c_stop(c_run *run) {
    ms_destroy(run->model);
    nn_destroy(run->net);
}

static float *c_read(c_run *run, ms_tensor tensor, uint64_t count) {
    float *values = c_floats(count);
    assert_int_equal(ms_tensor_count(run->model, tensor), count);
    t_ok(run->model, ms_read(run->model, tensor, values));
    return values;
}

static float *c_gradient(c_run *run, int j) {
    return c_read(run, ms_gradient(run->model, run->leaf[j]), ms_shape_count(&run->what->leaf[j]));
}

// ---- reference side

typedef struct c_reference {
    double *leaf[C_LEAVES];
    double *out;
    float *library; // the library's output, for what only it knows: the mask of a dropout
} c_reference;

static double *c_doubles(uint64_t count) {
    double *values = (double *)malloc((size_t)count * sizeof(double));
    assert_non_null(values);
    return values;
}

static void c_evaluate(const c_case *c, c_reference *r) {
    const double *leaf[C_LEAVES];
    for (int j = 0; j < C_LEAVES; j++) {
        leaf[j] = r->leaf[j];
    }
    c->reference(c, leaf, r->library, r->out);
}

static double c_objective(const c_case *c, c_reference *r) {
    double sum = 0.0;
    c_evaluate(c, r);
    for (int64_t i = 0; i < c->out_count; i++) {
        sum += (double)c_weight(C_LEAVES, i) * r->out[i];
    }
    return sum;
}

static double c_difference(const c_case *c, c_reference *r, int j, int64_t i) {
    const double step = 1e-4;
    const double value = r->leaf[j][i];
    r->leaf[j][i] = value + step;
    const double above = c_objective(c, r);
    r->leaf[j][i] = value - step;
    const double below = c_objective(c, r);
    r->leaf[j][i] = value;
    return (above - below) / (2.0 * step);
}

/* Unit roundoff: half of the distance between 1 and the next number. */
static double c_roundoff(void) {
    return c_dtype == MS_DTYPE_BF16  ? ldexp(1.0, -8)
           : c_dtype == MS_DTYPE_F16 ? ldexp(1.0, -11)
                                     : 0.0;
}

/* Of a large leaf, and of one in 16 bits, some gradients are compared, since each one takes two evaluations. */
static int64_t c_stride(int64_t count) {
    return count / (c_dtype == MS_DTYPE_F32 ? (int64_t)t_size(200, 1 << 20) : 24) + 1;
}

/* The error of sums in F32, roundings of inner values, and `own` roundings of the result. */
static void c_close(const c_case *c, const char *what, const float *library, const double *expected,
                    int64_t count, int64_t stride, double inner, double own) {
    const double u = c_roundoff();
    double largest = 0.0;
    for (int64_t i = 0; i < count; i += stride) {
        largest = fabs(expected[i]) > largest ? fabs(expected[i]) : largest;
    }
    for (int64_t i = 0; i < count; i += stride) {
        const double error = fabs((double)library[i] - expected[i]);
        const double f32 = 5e-6 * largest, least = c_dtype == MS_DTYPE_F16 ? ldexp(1.0, -25) : 0.0;
        if (!(error <= f32 + 1e-7 + own * least + u * (inner * largest + own * fabs(expected[i])) +
                           u * own * f32)) {
            print_error("%s in %s: %s[%lld] is %.9g, expected %.9g\n", c->name,
                        ms_dtype_name(c_dtype), what, (long long)i, (double)library[i],
                        expected[i]);
            fail();
        }
    }
}

/* Outputs, and all gradients with overwriting and with accumulation, against `expected` of each
   leaf. */
static void c_check_run(const c_case *c, c_reference *r, double *const *expected) {
    c_run plain;
    c_run shared;
    c_start(&plain, c, false, true, -1);
    c_start(&shared, c, true, true, -1);
    float *values = c_read(&plain, plain.out, (uint64_t)c->out_count);
    c_close(c, "output", values, r->out, c->out_count, 1, c->inner_out, 1.0);
    free(values);
    for (int j = 0; j < c->leaf_count; j++) {
        const int64_t count = (int64_t)ms_shape_count(&c->leaf[j]);
        const double own = j < c->lifted_count ? 1.0 : 0.0; // gradients of params are F32
        const int64_t stride = c_stride(count);
        double *sum = c_doubles((uint64_t)count);
        for (int64_t i = 0; i < count; i += stride) {
            sum[i] = expected[j][i] + (double)c_weight(j, i);
        }
        float *gradient = c_gradient(&plain, j);
        c_close(c, "gradient", gradient, expected[j], count, stride, c->inner_gradient, own);
        free(gradient);
        gradient = c_gradient(&shared, j);
        c_close(c, "accumulated gradient", gradient, sum, count, stride, c->inner_gradient + own,
                own);
        free(gradient);
        free(sum);
    }
    c_stop(&plain);
    c_stop(&shared);
}

/* The library's output, for all rows at once. */
static float *c_output(const c_case *c) {
    c_run run;
    c_checks = true;
    c_start(&run, c, false, true, -1);
    c_checks = T_DEBUGS;
    float *values = c_read(&run, run.out, (uint64_t)c->out_count);
    c_stop(&run);
    return values;
}

/* For all rows at once, and in tiles: of unequal sizes, if the rows are no multiple of that. */
static const int64_t c_tiles[] = {0, 2, 4};

enum { C_TILES = sizeof c_tiles / sizeof c_tiles[0] };

static void c_check_values(const c_case *c) {
    c_reference r;
    double *expected[C_LEAVES] = {NULL};
    memset(&r, 0, sizeof r);
    r.library = c_output(c);
    r.out = c_doubles((uint64_t)c->out_count);
    for (int j = 0; j < c->leaf_count; j++) {
        const uint64_t count = ms_shape_count(&c->leaf[j]);
        float *values = c_floats(count);
        c_leaf_values(c, j, values);
        r.leaf[j] = c_doubles(count);
        for (uint64_t i = 0; i < count; i++) {
            r.leaf[j][i] = (double)values[i];
        }
        free(values);
    }
    c_evaluate(c, &r);
    double *out = r.out; // differences evaluate again
    r.out = c_doubles((uint64_t)c->out_count);
    for (int j = 0; j < c->leaf_count; j++) {
        const int64_t count = (int64_t)ms_shape_count(&c->leaf[j]);
        expected[j] = c_doubles((uint64_t)count);
        for (int64_t i = 0; i < count; i += c_stride(count)) {
            expected[j][i] = c_difference(c, &r, j, i);
        }
    }
    free(r.out);
    r.out = out;
    for (int k = 0; k < C_TILES; k++) {
        c_tile_rows = c_tiles[k];
        c_check_run(c, &r, expected);
    }
    c_tile_rows = 0;
    for (int j = 0; j < c->leaf_count; j++) {
        free(r.leaf[j]);
        free(expected[j]);
    }
    free(r.out);
    free(r.library);
}

/* The bits of outputs, and of the gradients of what is lifted, are those of all rows at once. */
static void c_check_tiles(const c_case *c, int64_t rows) {
    c_run whole;
    c_run tiled;
    c_start(&whole, c, false, true, -1);
    c_tile_rows = rows;
    c_start(&tiled, c, false, true, -1);
    c_tile_rows = 0;
    float *expected = c_read(&whole, whole.out, (uint64_t)c->out_count);
    float *values = c_read(&tiled, tiled.out, (uint64_t)c->out_count);
    assert_memory_equal(values, expected, (size_t)c->out_count * sizeof(float));
    free(expected);
    free(values);
    for (int j = 0; j < c->lifted_count; j++) {
        expected = c_gradient(&whole, j);
        values = c_gradient(&tiled, j);
        assert_memory_equal(values, expected, (size_t)ms_shape_count(&c->leaf[j]) * sizeof(float));
        free(expected);
        free(values);
    }
    c_stop(&whole);
    c_stop(&tiled);
}

/* Sharing memory, and leaving out the gradient of any one leaf, change no bit of the others. */
static void c_check_same(const c_case *c) {
    c_run plain;
    c_start(&plain, c, false, true, -1);
    const int frozen_end = c->leaf_count > 1 ? c->leaf_count : 0; // one leaf must be trained
    for (int frozen = -1; frozen < frozen_end; frozen++) {
        c_run other;
        c_start(&other, c, false, false, frozen);
        for (int j = 0; j < c->leaf_count; j++) {
            if (j == frozen) {
                float *nothing = c_floats(ms_shape_count(&c->leaf[j]));
                const ms_tensor gradient = ms_gradient(other.model, other.leaf[j]);
                assert_int_not_equal(ms_read(other.model, gradient, nothing), MS_RESULT_OK);
                free(nothing);
                continue;
            }
            float *expected = c_gradient(&plain, j);
            float *gradient = c_gradient(&other, j);
            assert_memory_equal(gradient, expected,
                                (size_t)ms_shape_count(&c->leaf[j]) * sizeof(float));
            free(expected);
            free(gradient);
        }
        c_stop(&other);
    }
    c_stop(&plain);
}

#ifdef T_CUDA
static void c_near(const c_case *c, const char *what, const float *values, const float *expected,
                   int64_t count, bool exact) {
    double *wanted = c_doubles((uint64_t)count);
    for (int64_t i = 0; i < count; i++) {
        wanted[i] = (double)expected[i];
    }
    if (exact) {
        assert_memory_equal(values, expected, (size_t)count * sizeof(float));
    }
    c_close(c, what, values, wanted, count, 1, 0.0, 0.0);
    free(wanted);
}

/* Both devices: masks of dropouts too, whose kept elements are 0 on neither. */
static void c_check_devices(const c_case *c) {
    c_run cpu;
    c_run cuda;
    t_on_cpu = true;
    c_start(&cpu, c, false, true, -1);
    t_on_cpu = false;
    c_start(&cuda, c, false, true, -1);
    float *expected = c_read(&cpu, cpu.out, (uint64_t)c->out_count);
    float *values = c_read(&cuda, cuda.out, (uint64_t)c->out_count);
    c_near(c, "output, CPU and CUDA", values, expected, c->out_count, c->exact);
    free(expected);
    free(values);
    for (int j = 0; j < c->leaf_count; j++) {
        expected = c_gradient(&cpu, j);
        values = c_gradient(&cuda, j);
        c_near(c, "gradient, CPU and CUDA", values, expected, (int64_t)ms_shape_count(&c->leaf[j]),
               false);
        free(expected);
        free(values);
    }
    c_stop(&cpu);
    c_stop(&cuda);
}
#endif

static void c_check(const c_case *c) {
    const ms_dtype half[] = {MS_DTYPE_BF16, MS_DTYPE_F16};
    c_check_values(c);
    c_check_same(c);
#ifdef T_CUDA
    c_check_devices(c);
#endif
    for (int k = 1; k < C_TILES && c->exact; k++) {
        c_check_tiles(c, c_tiles[k]);
    }
    for (int i = 0; i < 2; i++) {
        c_dtype = half[i];
        c_check_values(c);
    }
    c_dtype = MS_DTYPE_F32;
}

static c_case c_make(const char *name,
                     ms_tensor (*build)(c_run *run, const int64_t *d, uint32_t flags),
                     void (*reference)(const c_case *c, const double *const *leaf,
                                       const float *library, double *out),
                     int64_t d0, int64_t d1, int64_t d2, int64_t d3, uint32_t flags) {
    c_case c;
    memset(&c, 0, sizeof c);
    c.name = name;
    c.build = build;
    c.reference = reference;
    c.d[0] = d0;
    c.d[1] = d1;
    c.d[2] = d2;
    c.d[3] = d3;
    c.flags = flags;
    c.scale = 1.0f;
    return c;
}

static void c_add_leaf(c_case *c, ms_shape shape, bool lifted) {
    c->leaf[c->leaf_count++] = shape;
    c->lifted_count += lifted;
}

// ------------------------------------------------------------------------------------------------
// embedding: d = B, T, V, C; leaves: table [, positions] [, segment table]

static const int32_t e_tokens[] = {3, 0, 6, 3, 3, 5, 1, 0, 6, 3};
static const int32_t e_segments[] = {0, 0, 1, 1, 1, 0, 1, 1, 1, 1};

static ms_tensor e_build(c_run *run, const int64_t *d, uint32_t flags) {
    const ms_tensor none = {0};
    const bool segmented = (flags & T_SEGMENTS) != 0;
    const ms_tensor positions = (flags & T_POSITIONS) != 0 ? run->leaf[1] : none;
    run->ids[0] = ms_input(run->model, "tokens", MS_DTYPE_I32, ms_shape2(d[0], d[1]));
    if (segmented) {
        run->ids[1] = ms_input(run->model, "segments", MS_DTYPE_I32, ms_shape2(d[0], d[1]));
    }
    return nn_embedding(run->net, "embedding", run->ids[0], run->leaf[0], positions, run->ids[1],
                        segmented ? run->leaf[run->what->leaf_count - 1] : none);
}

static void e_reference(const c_case *c, const double *const *leaf, const float *library,
                        double *out) {
    (void)library;
    const int64_t channels = c->d[3];
    for (int64_t r = 0; r < c->d[0] * c->d[1]; r++) {
        for (int64_t k = 0; k < channels; k++) {
            double sum = leaf[0][c->ids[0][r] * channels + k];
            if ((c->flags & T_POSITIONS) != 0) {
                sum += leaf[1][r % c->d[1] * channels + k];
            }
            if ((c->flags & T_SEGMENTS) != 0) {
                sum += leaf[c->leaf_count - 1][c->ids[1][r] * channels + k];
            }
            out[r * channels + k] = sum;
        }
    }
}

/* More rows than are looked through at once, for a large and a small table; with some tokens, if
   late, that first occur after these rows. */
static void e_check_many(int64_t entries, bool late) {
    enum { ROWS = 2 * 140 };
    int32_t tokens[ROWS];
    t_rng rng = t_seed((uint64_t)entries);
    c_case c = c_make("embedding", e_build, e_reference, 2, ROWS / 2, entries, 3, 0);
    for (int i = 0; i < ROWS; i++) {
        const uint32_t half = (uint32_t)entries / 2;
        tokens[i] = (int32_t)(!late     ? t_below(&rng, (uint32_t)entries)
                              : i < 258 ? t_below(&rng, half)
                                        : half + t_below(&rng, half));
    }
    c_add_leaf(&c, ms_shape2(entries, 3), false);
    c.out_count = ROWS * 3;
    c.exact = true;
    c.ids[0] = tokens;
    c_check(&c);
}

static void embeddings_match_float64(void **state) {
    (void)state;
    for (uint32_t i = 0; i < 4; i++) {
        const uint32_t flags =
            ((i & 1) != 0 ? (uint32_t)T_POSITIONS : 0) | ((i & 2) != 0 ? (uint32_t)T_SEGMENTS : 0);
        const int64_t batch = i < 3 ? 2 : 1; // one sequence is computed in tiles as well
        c_case c = c_make("embedding", e_build, e_reference, batch, 10 / batch, 7, 67, flags);
        c_add_leaf(&c, ms_shape2(7, 67), false);
        if ((flags & T_POSITIONS) != 0) {
            c_add_leaf(&c, ms_shape2(11, 67), false);
        }
        if ((flags & T_SEGMENTS) != 0) {
            c_add_leaf(&c, ms_shape2(2, 67), false);
        }
        c.out_count = 2 * 5 * 67;
        c.exact = true;
        c.ids[0] = e_tokens;
        c.ids[1] = e_segments;
        c_check(&c);
    }
    e_check_many(3, false);
    e_check_many(30, false);
    e_check_many(30, true);
}

// ------------------------------------------------------------------------------------------------
// linear: d = rows, in, out; leaves: x, weight [, bias]

static ms_tensor l_build(c_run *run, const int64_t *d, uint32_t flags) {
    const ms_tensor none = {0};
    (void)d;
    return nn_linear_tied(run->net, "linear", run->lifted[0], run->leaf[1],
                          (flags & T_BIAS) != 0 ? run->leaf[2] : none);
}

static void l_reference(const c_case *c, const double *const *leaf, const float *library,
                        double *out) {
    (void)library;
    for (int64_t r = 0; r < c->d[0]; r++) {
        for (int64_t o = 0; o < c->d[2]; o++) {
            double sum = (c->flags & T_BIAS) != 0 ? leaf[2][o] : 0.0;
            for (int64_t i = 0; i < c->d[1]; i++) {
                sum += leaf[0][r * c->d[1] + i] * leaf[1][o * c->d[1] + i];
            }
            out[r * c->d[2] + o] = sum;
        }
    }
}

static void l_check(int64_t rows, int64_t in, int64_t out, uint32_t flags) {
    c_case c = c_make("linear", l_build, l_reference, rows, in, out, 0, flags);
    c_add_leaf(&c, ms_shape3(2, rows / 2, in), true);
    c_add_leaf(&c, ms_shape2(out, in), false);
    if ((flags & T_BIAS) != 0) {
        c_add_leaf(&c, ms_shape1(out), false);
        c.inner_out = 1.0; // the product is rounded before the bias is added, or the bias is
    }
    c.out_count = rows * out;
    c_check(&c);
}

static void linear_layers_match_float64(void **state) {
    (void)state;
    l_check(6, 5, 71, 0);
    l_check(6, 5, 71, T_BIAS);
    l_check(6, 3, 132, T_BIAS);
    l_check(102, 3, 4, T_BIAS);
}

// ------------------------------------------------------------------------------------------------
// linear and embedding over a matrix in blocks: d = rows, in, out, kind; leaves: x [, bias]

enum { CODED_MOST = 8192 }; // bytes of a matrix

/* Blocks of random numbers, some of them zeros and some far from the others. */
static void coded_fill(blocks_kind kind, int64_t rows, int64_t columns, uint8_t *blocks) {
    float *values = c_floats((uint64_t)(rows * columns));
    t_rng rng = t_seed(31 + (uint64_t)kind);
    t_fill(&rng, values, (uint64_t)(rows * columns), 0.5f);
    memset(values, 0, (size_t)blocks_length(kind) * sizeof *values);
    values[columns + 1] = 3.0f;
    assert_true(rows * blocks_row_bytes(kind, columns) <= CODED_MOST);
    blocks_encode(kind, values, rows * columns, blocks);
    free(values);
}

static double coded_half(const uint8_t *b) {
    const int code = b[0] | b[1] << 8, exponent = code >> 10 & 31, fraction = code & 1023;
    const double size =
        exponent == 0 ? ldexp(fraction, -24) : ldexp(1024 + fraction, exponent - 25);
    return code & 0x8000 ? -size : size;
}

/* Number i of a row, by the published layouts. */
static double coded_number(blocks_kind kind, const uint8_t *row, int64_t i) {
    static const double nf4[] = {-1.0,
                                 -0.6961928009986877,
                                 -0.5250730514526367,
                                 -0.39491748809814453,
                                 -0.28444138169288635,
                                 -0.18477343022823334,
                                 -0.09105003625154495,
                                 0.0,
                                 0.07958029955625534,
                                 0.16093020141124725,
                                 0.24611230194568634,
                                 0.33791524171829224,
                                 0.44070982933044434,
                                 0.5626170039176941,
                                 0.7229568362236023,
                                 1.0};
    const int64_t length = kind == BLOCKS_NF4 ? 64 : 32, in = i % length;
    const uint8_t *b = row + i / length *
                                 (kind == BLOCKS_Q8_0   ? 34
                                  : kind == BLOCKS_Q4_1 ? 20
                                                        : 36);
    float largest;
    memcpy(&largest, b, sizeof largest);
    return kind == BLOCKS_Q8_0 ? coded_half(b) * (double)(int8_t)b[2 + in]
           : kind == BLOCKS_Q4_1
               ? coded_half(b) * (double)(b[4 + in % 16] >> (in < 16 ? 0 : 4) & 15) +
                     coded_half(b + 2)
               : (double)largest * nf4[b[4 + in / 2] >> (in % 2 == 0 ? 4 : 0) & 15];
}

static ms_tensor coded_param(c_run *run, const int64_t *d) {
    uint8_t blocks[CODED_MOST];
    const blocks_kind kind = (blocks_kind)d[3];
    const ms_tensor weight = nn_param_in_blocks(run->net, "weight", kind, d[2], d[1], 0.1f);
    coded_fill(kind, d[2], d[1], blocks);
    t_ok(run->model, ms_write(run->model, weight, blocks));
    return weight;
}

static ms_tensor coded_build(c_run *run, const int64_t *d, uint32_t flags) {
    const ms_tensor none = {0};
    return nn_linear_tied(run->net, "linear", run->lifted[0], coded_param(run, d),
                          (flags & T_BIAS) != 0 ? run->leaf[1] : none);
}

static void coded_reference(const c_case *c, const double *const *leaf, const float *library,
                            double *out) {
    (void)library;
    uint8_t blocks[CODED_MOST];
    const blocks_kind kind = (blocks_kind)c->d[3];
    coded_fill(kind, c->d[2], c->d[1], blocks);
    for (int64_t r = 0; r < c->d[0]; r++) {
        for (int64_t o = 0; o < c->d[2]; o++) {
            const uint8_t *row = blocks + o * blocks_row_bytes(kind, c->d[1]);
            double sum = (c->flags & T_BIAS) != 0 ? leaf[1][o] : 0.0;
            for (int64_t i = 0; i < c->d[1]; i++) {
                sum += leaf[0][r * c->d[1] + i] * coded_number(kind, row, i);
            }
            out[r * c->d[2] + o] = sum;
        }
    }
}

/* Numbers are decoded to the dtype of the call; the rows of d[2] are not those of whole tiles. */
static void linear_layers_over_blocks_match_float64(void **state) {
    (void)state;
    decoded = 300;
    for (int kind = BLOCKS_Q8_0; kind <= BLOCKS_NF4; kind++) {
        for (uint32_t flags = 0; flags <= T_BIAS; flags += T_BIAS) {
            c_case c =
                c_make("linear over blocks", coded_build, coded_reference, 6, 128, 11, kind, flags);
            c_add_leaf(&c, ms_shape3(2, 3, 128), true);
            if (flags != 0) {
                c_add_leaf(&c, ms_shape1(11), false);
            }
            c.out_count = 6 * 11;
            c.inner_out = c.inner_gradient = 3.0;
            c_check(&c);
        }
    }
    decoded = 1 << 18;
}

static ms_tensor coded_build_embedding(c_run *run, const int64_t *d, uint32_t flags) {
    const ms_tensor none = {0};
    (void)flags;
    run->ids[0] = ms_input(run->model, "tokens", MS_DTYPE_I32, ms_shape2(2, d[0] / 2));
    return nn_add(
        run->net, "sum",
        nn_embedding(run->net, "embedding", run->ids[0], coded_param(run, d), none, none, none),
        run->lifted[0]);
}

static void coded_embedding_reference(const c_case *c, const double *const *leaf,
                                      const float *library, double *out) {
    (void)library;
    uint8_t blocks[CODED_MOST];
    const blocks_kind kind = (blocks_kind)c->d[3];
    coded_fill(kind, c->d[2], c->d[1], blocks);
    for (int64_t r = 0; r < c->d[0]; r++) {
        const uint8_t *row = blocks + c->ids[0][r] * blocks_row_bytes(kind, c->d[1]);
        for (int64_t i = 0; i < c->d[1]; i++) {
            out[r * c->d[1] + i] = coded_number(kind, row, i) + leaf[0][r * c->d[1] + i];
        }
    }
}

static void embeddings_over_blocks_match_float64(void **state) {
    (void)state;
    for (int kind = BLOCKS_Q8_0; kind <= BLOCKS_NF4; kind++) {
        c_case c = c_make("embedding over blocks", coded_build_embedding, coded_embedding_reference,
                          10, 128, 7, kind, 0);
        c_add_leaf(&c, ms_shape3(2, 5, 128), true);
        c.ids[0] = e_tokens;
        c.out_count = 10 * 128;
        c.inner_out = 1.0;
        c.exact = true;
        c_check(&c);
    }
}

/* What is written and read by its elements in F32; whole blocks; a table that has no positions. */
static void params_in_blocks_are_written_and_read_as_f32(void **state) {
    (void)state;
    const ms_tensor none = {0};
    for (int kind = BLOCKS_Q8_0; kind <= BLOCKS_NF4; kind++) {
        ms_config config = t_device_config();
        ms_model *model;
        uint8_t blocks[CODED_MOST], stored[CODED_MOST];
        float values[7 * 128];
        assert_int_equal(ms_create(&config, &model), MS_RESULT_OK);
        nn_net *net = nn_create_on(model, t_nn_device());
        assert_non_null(net);
        const ms_tensor weight = nn_param_in_blocks(net, "w", (blocks_kind)kind, 7, 128, 0.1f);
        const nn_param_info *info = nn_find_param(net, "w");
        coded_fill((blocks_kind)kind, 7, 128, blocks);
        t_ok(model, ms_write(model, weight, blocks));
        t_ok(model, nn_read_param(model, info, values));
        for (int64_t i = 0; i < 7 * 128; i++) {
            const double x = coded_number((blocks_kind)kind, blocks, i);
            assert_true(fabs((double)values[i] - x) <= 1e-7 * fabs(x));
        }
        t_ok(model, nn_init(net, 3));
        t_ok(model, nn_read_param(model, info, values));
        t_ok(model, ms_read(model, weight, blocks));
        t_ok(model, nn_write_param(model, info, values)); // of what was decoded: the same to a step
        t_ok(model, ms_read(model, weight, stored));
        float *again = c_floats(7 * 128);
        t_ok(model, nn_read_param(model, info, again));
        for (int i = 0; i < 7 * 128; i++) {
            assert_true(fabsf(again[i] - values[i]) <= 0.002f);
        }
        free(again);
        const ms_tensor tokens = ms_input(model, "tokens", MS_DTYPE_I32, ms_shape2(1, 2));
        if (kind == BLOCKS_Q8_0) {
            nn_embedding(net, "bad", tokens, weight, weight, none, none);
            t_text_has(ms_last_error(model), "positions");
        } else {
            nn_param_in_blocks(net, "odd", (blocks_kind)kind, 2, 48, 0.1f);
            t_text_has(ms_last_error(model), "odd: rows of 48 numbers");
        }
        ms_destroy(model);
        nn_destroy(net);
    }
}

// ------------------------------------------------------------------------------------------------
// layernorm: d = rows, width; leaves: x, weight, bias

static ms_tensor n_build(c_run *run, const int64_t *d, uint32_t flags) {
    (void)d;
    return nn_layernorm_tied(run->net, "norm", run->lifted[0], run->leaf[1], run->leaf[2],
                             flags != 0 ? 1e-12f : 1e-5f);
}

static void n_reference(const c_case *c, const double *const *leaf, const float *library,
                        double *out) {
    (void)library;
    const int64_t width = c->d[1];
    for (int64_t r = 0; r < c->d[0]; r++) {
        const double *x = leaf[0] + r * width;
        double mean = 0.0;
        double variance = 0.0;
        for (int64_t i = 0; i < width; i++) {
            mean += x[i] / (double)width;
        }
        for (int64_t i = 0; i < width; i++) {
            variance += (x[i] - mean) * (x[i] - mean) / (double)width;
        }
        const double spread = sqrt(variance + (c->flags != 0 ? 1e-12 : 1e-5));
        for (int64_t i = 0; i < width; i++) {
            out[r * width + i] = (x[i] - mean) / spread * leaf[1][i] + leaf[2][i];
        }
    }
}

static void n_check(int64_t rows, int64_t width, uint32_t flags) {
    c_case c = c_make("layernorm", n_build, n_reference, rows, width, 0, 0, flags);
    c_add_leaf(&c, ms_shape2(rows, width), true);
    c_add_leaf(&c, ms_shape1(width), false);
    c_add_leaf(&c, ms_shape1(width), false);
    c.out_count = rows * width;
    c_check(&c);
}

/* Rows of all that a thread, a warp and a block hold; more rows than one of them adds up. */
static void layernorms_match_float64(void **state) {
    (void)state;
    const int64_t widths[] = {7, 13, 32, 77};
    for (uint32_t i = 0; i < 8; i++) {
        n_check(5, widths[i / 2], i % 2);
    }
    n_check(2, 300, 0);
    n_check(1, 516, 0);
    n_check(1, 1030, 0);
    n_check(1, 2056, 0);
    n_check(70, 6, 0);
}

// ------------------------------------------------------------------------------------------------
// rmsnorm: d = rows, width; leaves: x, weight

static ms_tensor z_build(c_run *run, const int64_t *d, uint32_t flags) {
    (void)d;
    return nn_rmsnorm_tied(run->net, "norm", run->lifted[0], run->leaf[1],
                           flags != 0 ? 1e-6f : 1e-5f, flags != 0);
}

static void z_reference(const c_case *c, const double *const *leaf, const float *library,
                        double *out) {
    (void)library;
    const int64_t width = c->d[1];
    for (int64_t r = 0; r < c->d[0]; r++) {
        const double *x = leaf[0] + r * width;
        double squares = 0.0;
        for (int64_t i = 0; i < width; i++) {
            squares += x[i] * x[i] / (double)width;
        }
        const double spread = sqrt(squares + (c->flags != 0 ? 1e-6 : 1e-5));
        for (int64_t i = 0; i < width; i++) {
            out[r * width + i] = x[i] / spread * (leaf[1][i] + (c->flags != 0 ? 1.0 : 0.0));
        }
    }
}

static void rmsnorms_match_float64(void **state) {
    (void)state;
    const int64_t sizes[][2] = {{5, 7},   {5, 13},   {5, 32},   {5, 77}, {2, 300},
                                {1, 516}, {1, 1030}, {1, 2056}, {70, 6}};
    for (size_t k = 0; k < sizeof sizes / sizeof sizes[0]; k++) {
        const int64_t rows = sizes[k][0], width = sizes[k][1];
        c_case c = c_make("rmsnorm", z_build, z_reference, rows, width, 0, 0, (uint32_t)k % 2);
        c_add_leaf(&c, ms_shape2(rows, width), true);
        c_add_leaf(&c, ms_shape1(width), false);
        c.out_count = rows * width;
        c_check(&c);
    }
}

// ------------------------------------------------------------------------------------------------
// norms of heads: d = B, T, H, K; flags: size of a head; leaves: qkv, weights of queries and of keys

static ms_tensor q_build(c_run *run, const int64_t *d, uint32_t flags) {
    nn_head_norm_desc norm;
    (void)flags;
    memset(&norm, 0, sizeof norm);
    norm.heads = d[2];
    norm.kv_heads = d[3];
    norm.queries = run->leaf[1];
    norm.keys = run->leaf[2];
    norm.epsilon = 1e-6f;
    norm.from_one = d[2] % 2 != 0;
    return nn_head_norm(run->net, "norm", run->lifted[0], &norm);
}

static void q_reference(const c_case *c, const double *const *leaf, const float *library,
                        double *out) {
    (void)library;
    const int64_t size = c->flags, heads = c->d[2] + 2 * c->d[3];
    for (int64_t row = 0; row < c->d[0] * c->d[1] * heads; row++) {
        const int64_t head = row % heads;
        const double *x = leaf[0] + row * size;
        const double *weight = leaf[head < c->d[2] ? 1 : 2];
        const double one = c->d[2] % 2 != 0 ? 1.0 : 0.0;
        double squares = 0.0;
        for (int64_t i = 0; i < size; i++) {
            squares += x[i] * x[i] / (double)size;
        }
        for (int64_t i = 0; i < size; i++) {
            out[row * size + i] =
                head >= c->d[2] + c->d[3] ? x[i] : x[i] / sqrt(squares + 1e-6) * (one + weight[i]);
        }
    }
}

static void norms_of_heads_match_float64(void **state) {
    (void)state;
    const int64_t sizes[][5] = {
        {2, 3, 4, 2, 8}, {1, 5, 3, 1, 5}, {2, 2, 2, 2, 16}, {1, 70, 1, 1, 4}};
    for (size_t k = 0; k < sizeof sizes / sizeof sizes[0]; k++) {
        const int64_t *s = sizes[k];
        c_case c =
            c_make("norm of heads", q_build, q_reference, s[0], s[1], s[2], s[3], (uint32_t)s[4]);
        c_add_leaf(&c, ms_shape3(s[0], s[1], (s[2] + 2 * s[3]) * s[4]), true);
        c_add_leaf(&c, ms_shape1(s[4]), false);
        c_add_leaf(&c, ms_shape1(s[4]), false);
        c.out_count = (int64_t)ms_shape_count(&c.leaf[0]);
        c_check(&c);
    }
}

// ------------------------------------------------------------------------------------------------
// rotary positions: d = T, heads, size, columns after them; flags: which layout, scaling, how much of a
// head; 3 sequences

enum { T_ADJACENT = 1, T_LINEAR = 2, T_LLAMA3 = 4, T_PARTLY = 8 };

static nn_rotary_desc t_rotary(const int64_t *d, uint32_t flags) {
    nn_rotary_desc turn;
    memset(&turn, 0, sizeof turn);
    turn.heads = d[1];
    turn.size = d[2];
    turn.turned = (flags & T_PARTLY) != 0 ? d[2] / 4 * 2 : 0;
    turn.theta = (flags & T_LLAMA3) != 0 ? 500.0f : 0.0f;
    turn.adjacent = (flags & T_ADJACENT) != 0;
    turn.scaling.kind = (flags & T_LINEAR) != 0   ? NN_ROTARY_LINEAR
                        : (flags & T_LLAMA3) != 0 ? NN_ROTARY_LLAMA3
                                                  : NN_ROTARY_PLAIN;
    turn.scaling.factor = 4.0f;
    turn.scaling.low = 1.0f;
    turn.scaling.high = 4.0f;
    turn.scaling.original = 24; // pairs turn between 3.8 times and 0.01 times
    return turn;
}

static ms_tensor t_build(c_run *run, const int64_t *d, uint32_t flags) {
    const nn_rotary_desc turn = t_rotary(d, flags);
    return nn_rotary(run->net, "rotary", run->lifted[0], &turn);
}

/* The published rule of Llama 3.1, by wavelengths. */
static double t_llama3(double angle) {
    const double length = 2.0 * 3.14159265358979323846 / angle;
    if (length > 24.0 / 1.0) {
        return angle / 4.0;
    }
    const double smooth = (24.0 / length - 1.0) / (4.0 - 1.0);
    return length < 24.0 / 4.0 ? angle : (1.0 - smooth) * angle / 4.0 + smooth * angle;
}

static void t_reference(const c_case *c, const double *const *leaf, const float *library,
                        double *out) {
    (void)library;
    const int64_t size = c->d[2], columns = c->d[1] * size + c->d[3];
    const int64_t pairs = (c->flags & T_PARTLY) != 0 ? size / 4 : size / 2;
    const double theta = (c->flags & T_LLAMA3) != 0 ? 500.0 : 10000.0;
    memcpy(out, leaf[0], (size_t)(3 * c->d[0] * columns) * sizeof *out);
    for (int64_t i = 0; i < 3 * c->d[0] * c->d[1] * pairs; i++) {
        const int64_t pair = i % pairs, head = i / pairs % c->d[1], row = i / pairs / c->d[1];
        double angle = pow(theta, -(double)pair / (double)pairs);
        angle = (c->flags & T_LINEAR) != 0   ? angle / 4.0
                : (c->flags & T_LLAMA3) != 0 ? t_llama3(angle)
                                             : angle;
        angle *= (double)(row % c->d[0]);
        const bool adjacent = (c->flags & T_ADJACENT) != 0;
        const int64_t at = row * columns + head * size + (adjacent ? 2 * pair : pair);
        const int64_t other = at + (adjacent ? 1 : pairs);
        out[at] = leaf[0][at] * cos(angle) - leaf[0][other] * sin(angle);
        out[other] = leaf[0][other] * cos(angle) + leaf[0][at] * sin(angle);
    }
}

static void rotary_positions_match_float64(void **state) {
    (void)state;
    const int64_t sizes[][4] = {{5, 3, 8, 4}, {1, 1, 2, 0}, {40, 2, 12, 12}, {7, 1, 64, 3}};
    for (size_t k = 0; k < sizeof sizes / sizeof sizes[0]; k++) {
        for (uint32_t flags = 0; flags < 10; flags += k == 1 ? 1 : 3) {
            const int64_t *d = sizes[k];
            if ((flags & T_PARTLY) != 0 && d[2] < 4) {
                continue;
            }
            c_case c = c_make("rotary", t_build, t_reference, d[0], d[1], d[2], d[3], flags);
            c_add_leaf(&c, ms_shape3(3, d[0], d[1] * d[2] + d[3]), true);
            c.out_count = (int64_t)ms_shape_count(&c.leaf[0]);
            c_check(&c);
        }
    }
}

// ------------------------------------------------------------------------------------------------
// gated units, factors, soft caps: d = count

static ms_tensor u_build(c_run *run, const int64_t *d, uint32_t flags) {
    (void)d;
    return flags != 0 ? nn_geglu(run->net, "gated", run->lifted[0], run->lifted[1])
                      : nn_swiglu(run->net, "gated", run->lifted[0], run->lifted[1]);
}

static void u_reference(const c_case *c, const double *const *leaf, const float *library,
                        double *out) {
    (void)library;
    const double pi = 3.14159265358979323846;
    for (int64_t i = 0; i < c->d[0]; i++) {
        const double x = leaf[0][i];
        const double gelu = 0.5 * x * (1.0 + tanh(sqrt(2.0 / pi) * (x + 0.044715 * x * x * x)));
        out[i] = (c->flags != 0 ? gelu : x / (1.0 + exp(-x))) * leaf[1][i];
    }
}

static void gated_units_match_float64(void **state) {
    (void)state;
    for (uint32_t flags = 0; flags < 2; flags++) {
        c_case c = c_make("gated unit", u_build, u_reference, 133, 0, 0, 0, flags);
        c_add_leaf(&c, ms_shape2(7, 19), true);
        c_add_leaf(&c, ms_shape2(7, 19), true);
        c.out_count = 133;
        c.scale = 6.0f;
        c_check(&c);
        c.d[0] = 2 * 3001;
        c.leaf[0] = c.leaf[1] = ms_shape2(2, 3001);
        c.out_count = c.d[0];
        c_check_same(&c);
    }
}

static ms_tensor s_build(c_run *run, const int64_t *d, uint32_t flags) {
    (void)d;
    return flags != 0 ? nn_softcap(run->net, "cap", run->lifted[0], 3.0f)
                      : nn_scale(run->net, "scale", run->lifted[0], 1.625f);
}

static void s_reference(const c_case *c, const double *const *leaf, const float *library,
                        double *out) {
    (void)library;
    for (int64_t i = 0; i < c->d[0]; i++) {
        out[i] = c->flags != 0 ? 3.0 * tanh(leaf[0][i] / 3.0) : leaf[0][i] * 1.625;
    }
}

/* The slope of a cap is small where the output, of which it is computed, is near the cap. */
static void factors_and_caps_match_float64(void **state) {
    (void)state;
    for (uint32_t flags = 0; flags < 2; flags++) {
        c_case c =
            c_make(flags != 0 ? "soft cap" : "factor", s_build, s_reference, 133, 0, 0, 0, flags);
        c_add_leaf(&c, ms_shape2(7, 19), true);
        c.out_count = 133;
        c.scale = 9.0f;
        c.inner_gradient = flags != 0 ? 2.0 : 0.0;
        c_check(&c);
        c.d[0] = 2 * 3001;
        c.leaf[0] = ms_shape2(2, 3001);
        c.out_count = c.d[0];
        c_check_same(&c);
    }
}

// ------------------------------------------------------------------------------------------------
// gelu, add, dropout: d = count

static ms_tensor g_build(c_run *run, const int64_t *d, uint32_t flags) {
    (void)d;
    return flags != 0 ? nn_gelu_erf(run->net, "gelu", run->lifted[0])
                      : nn_gelu(run->net, "gelu", run->lifted[0]);
}

static void g_reference(const c_case *c, const double *const *leaf, const float *library,
                        double *out) {
    (void)library;
    const double pi = 3.14159265358979323846;
    for (int64_t i = 0; i < c->d[0]; i++) {
        const double x = leaf[0][i];
        out[i] = c->flags != 0
                     ? 0.5 * x * (1.0 + erf(x / sqrt(2.0)))
                     : 0.5 * x * (1.0 + tanh(sqrt(2.0 / pi) * (x + 0.044715 * x * x * x)));
    }
}

static void gelus_match_float64(void **state) {
    (void)state;
    for (uint32_t erf_form = 0; erf_form < 2; erf_form++) {
        c_case c = c_make("gelu", g_build, g_reference, 2 * 3001, 0, 0, 0, erf_form);
        c_add_leaf(&c, ms_shape2(2, 3001), true);
        c.out_count = c.d[0];
        c.scale = 6.0f;
        c_check_same(&c);
        c.d[0] = 133;
        c.leaf[0] = ms_shape2(7, 19);
        c.out_count = 133;
        c_check(&c);
        c.leaf[0] = ms_shape1(133);
        c.whole = true;
        c_check_same(&c);
    }
}

static ms_tensor a_build(c_run *run, const int64_t *d, uint32_t flags) {
    (void)d;
    return nn_add(run->net, "add", run->lifted[0], run->lifted[flags != 0 ? 0 : 1]);
}

static void a_reference(const c_case *c, const double *const *leaf, const float *library,
                        double *out) {
    (void)library;
    for (int64_t i = 0; i < c->d[0]; i++) {
        out[i] = leaf[0][i] + leaf[c->flags != 0 ? 0 : 1][i];
    }
}

/* Two tensors, one tensor in both slots, tensors whose leading dims are the same rows, and a
   gradient that is added to itself. */
static void sums_match_float64(void **state) {
    (void)state;
    float twice[] = {3.0f, -4.0f};
    nn_copy_kernel(NULL, nn_dest_of(nn_f32(twice), 1.0f), nn_f32(twice), 2);
    assert_true(twice[0] > 5.5f && twice[1] < -7.5f);
    for (uint32_t same = 0; same < 2; same++) {
        c_case c = c_make("add", a_build, a_reference, 91, 0, 0, 0, same);
        c_add_leaf(&c, ms_shape2(7, 13), true);
        if (same == 0) {
            c_add_leaf(&c, ms_shape2(7, 13), true);
        }
        c.out_count = 91;
        c.exact = true;
        c_check(&c);
    }
    const ms_shape shapes[] = {ms_shape3(7, 3, 4), ms_shape2(21, 4), ms_shape2(7, 12),
                               ms_shape4(7, 2, 3, 2), ms_shape2(12, 7)};
    for (int i = 0; i < 5; i++) {
        c_case c = c_make("add", a_build, a_reference, 84, 0, 0, 0, 0);
        c_add_leaf(&c, shapes[i == 4 ? 0 : i], true);
        c_add_leaf(&c, shapes[i == 0 ? 1 : i == 1 ? 0 : i == 2 ? 3 : i == 3 ? 2 : 4], true);
        c.out_count = 84;
        c.exact = true;
        c.whole = i == 4; // 21 rows are no leading dims of (12, 7)
        c_check_values(&c);
        if (i < 4) {
            c_check_tiles(&c, 2);
        }
    }
}

static ms_tensor d_build(c_run *run, const int64_t *d, uint32_t flags) {
    (void)d;
    (void)flags;
    return nn_dropout(run->net, "dropout", run->lifted[0], 0.3f);
}

/* Where the library's output is zero the element was dropped. */
static void d_reference(const c_case *c, const double *const *leaf, const float *library,
                        double *out) {
    for (int64_t i = 0; i < c->d[0]; i++) {
        out[i] = fabs((double)library[i]) > 0.0 ? leaf[0][i] / (1.0 - 0.3) : 0.0;
    }
}

static int64_t d_dropped(const float *out, int64_t count) {
    int64_t dropped = 0;
    for (int64_t i = 0; i < count; i++) {
        dropped += !(fabsf(out[i]) > 0.0f);
    }
    return dropped;
}

static void dropout_matches_its_reference(void **state) {
    (void)state;
    c_case c = c_make("dropout", d_build, d_reference, 299, 0, 0, 0, 0);
    c_add_leaf(&c, ms_shape2(23, 13), true);
    c.out_count = 299;
    c.exact = true;
    c_check(&c);
    c.d[0] = 100 * 131;
    c.leaf[0] = ms_shape2(100, 131);
    c.out_count = c.d[0];
    c_check_same(&c);
#ifdef T_CUDA
    c_check_devices(&c);
#endif
    c_check_tiles(&c, 9); // these begin and end within chunks, at any element of a wide access
    c_check_tiles(&c, 50);
    c.leaf[0] = ms_shape3(4, 25, 131);
    c_check_tiles(&c, 37);
    c_dtype = MS_DTYPE_BF16;
    c_check_tiles(&c, 37);
    c_dtype = MS_DTYPE_F32;
}

static int64_t d_dropped_in_both(const float *a, const float *b, int64_t count) {
    int64_t both = 0;
    for (int64_t i = 0; i < count; i++) {
        both += !(fabsf(a[i]) > 0.0f) && !(fabsf(b[i]) > 0.0f);
    }
    return both;
}

/* The share of dropped elements, another mask in each chunk and each step, and the identity in
   ms_eval. */
static void dropout_draws_its_share_anew_each_step(void **state) {
    (void)state;
    enum { COUNT = 100 * 131 };
    c_run run;
    c_case c = c_make("dropout", d_build, d_reference, COUNT, 0, 0, 0, 0);
    c_add_leaf(&c, ms_shape2(100, 131), true);
    c.out_count = COUNT;
    c_start(&run, &c, false, true, -1);
    float *first = c_read(&run, run.out, COUNT);
    assert_in_range(d_dropped(first, COUNT), COUNT * 28 / 100, COUNT * 32 / 100);
    assert_in_range(d_dropped(first + 2 * NN_CHUNK, NN_CHUNK), NN_CHUNK * 27 / 100,
                    NN_CHUNK * 33 / 100);
    assert_in_range(d_dropped_in_both(first, first + NN_CHUNK, NN_CHUNK), NN_CHUNK * 7 / 100,
                    NN_CHUNK * 11 / 100);
    ms_set_learning_rate(run.model, 0.0f);
    t_ok(run.model, ms_update(run.model));
    t_ok(run.model, ms_step(run.model, NULL));
    float *second = c_read(&run, run.out, COUNT);
    assert_in_range(d_dropped_in_both(first, second, COUNT), COUNT * 7 / 100, COUNT * 11 / 100);
    t_ok(run.model, ms_eval(run.model, NULL));
    t_ok(run.model, ms_read(run.model, run.out, first));
    t_ok(run.model, ms_read(run.model, run.leaf[0], second));
    assert_memory_equal(first, second, COUNT * sizeof(float));
    free(first);
    free(second);
    c_stop(&run);
}

// ------------------------------------------------------------------------------------------------
// attention: d = B, T, H, size of a head; leaf: qkv

static ms_tensor h_build(c_run *run, const int64_t *d, uint32_t flags) {
    return nn_attention(run->net, "attention", run->lifted[0], d[2], (flags & T_CAUSAL) != 0,
                        (flags & T_SAVE_SCORES) != 0);
}

/* Row t of one head: q points at the query, k and v at those of time 0. */
static void h_reference_row(const double *q, const double *k, const double *v, int64_t stride,
                            int64_t seen, int64_t size, double *out) {
    double total = 0.0;
    double most = -1e300;
    for (int pass = 0; pass < 2; pass++) {
        for (int64_t u = 0; u < seen; u++) {
            double score = 0.0;
            for (int64_t i = 0; i < size; i++) {
                score += q[i] * k[u * stride + i];
            }
            score /= sqrt((double)size);
            if (pass == 0) {
                most = score > most ? score : most;
                continue;
            }
            const double share = exp(score - most);
            total += share;
            for (int64_t i = 0; i < size; i++) {
                out[i] = (u == 0 ? 0.0 : out[i]) + share * v[u * stride + i];
            }
        }
    }
    for (int64_t i = 0; i < size; i++) {
        out[i] /= total;
    }
}

static void h_reference(const c_case *c, const double *const *leaf, const float *library,
                        double *out) {
    (void)library;
    const int64_t channels = c->d[2] * c->d[3];
    for (int64_t r = 0; r < c->d[0] * c->d[1]; r++) {
        const int64_t time = r % c->d[1];
        const int64_t seen = (c->flags & T_CAUSAL) != 0 ? time + 1 : c->d[1];
        for (int64_t h = 0; h < c->d[2]; h++) {
            const double *q = leaf[0] + r * 3 * channels + h * c->d[3];
            const double *k = q - time * 3 * channels + channels;
            h_reference_row(q, k, k + channels, 3 * channels, seen, c->d[3],
                            out + r * channels + h * c->d[3]);
        }
    }
}

static void h_check(int64_t batch, int64_t sequence, int64_t heads, int64_t size) {
    for (uint32_t flags = 0; flags < 4; flags++) {
        c_case c = c_make("attention", h_build, h_reference, batch, sequence, heads, size, flags);
        c_add_leaf(&c, ms_shape3(batch, sequence, 3 * heads * size), true);
        c.out_count = batch * sequence * heads * size;
        c.scale = 2.0f;
        c.inner_out = 1.0; // of probabilities, at most 1, and of their gradients
        c.inner_gradient = 2.0;
        c_check(&c);
    }
}

// ---- in tiles: the kernels themselves against sums in float64, with a bound for each element

/* Memory of the device. */
typedef struct a_memory {
    void *data;
    size_t bytes;
} a_memory;

enum { A_QKV, A_OUT, A_DOUT, A_DQKV, A_SUMS, A_WORK, A_COUNT };

/* A call: operands, and the results as floats. */
typedef struct a_run {
    ms_model *model;
    nn_attention_size n;
    int64_t rows, channels;
    ms_dtype dtype;
    float beta;
    a_memory memory[A_COUNT];
    float *qkv, *out, *dout, *dqkv, *old, *sums;
} a_run;

/* What is expected; the bounds are to be multiplied by the relative error of a probability or its
   gradient. */
typedef struct a_reference {
    double *out, *out_bound, *dqkv, *dqkv_bound, *sums;
    double largest; // score
} a_expected;

static void a_alloc(a_run *run, int which, int64_t count, ms_dtype dtype) {
    const ms_backend *b = &run->model->config.backend;
    a_memory *m = &run->memory[which];
    m->bytes = (size_t)count * nn_value_bytes(dtype);
    assert_int_equal(b->memory_alloc(b->user, &run->model->config.allocator, m->bytes, &m->data),
                     0);
}

/* Values to the device, in this dtype; values NULL: NaN, in all bytes. */
static void a_put(a_run *run, int which, const float *values, int64_t count, ms_dtype dtype) {
    const ms_backend *b = &run->model->config.backend;
    a_alloc(run, which, count, dtype);
    uint8_t *bytes = (uint8_t *)malloc(run->memory[which].bytes);
    assert_non_null(bytes);
    memset(bytes, 0xff, run->memory[which].bytes);
    for (int64_t i = 0; i < count && values != NULL; i++) {
        msi_store_as(bytes, dtype, (uint64_t)i, values[i]);
    }
    assert_int_equal(
        b->copy_in(run->model->device, run->memory[which].data, bytes, run->memory[which].bytes),
        0);
    assert_true(b->synchronize == NULL || b->synchronize(run->model->device) == 0);
    free(bytes);
}

static void a_get(a_run *run, int which, float *values, int64_t count, ms_dtype dtype) {
    const ms_backend *b = &run->model->config.backend;
    uint8_t *bytes = (uint8_t *)malloc(run->memory[which].bytes);
    assert_non_null(bytes);
    assert_true(b->synchronize == NULL || b->synchronize(run->model->device) == 0);
    assert_int_equal(
        b->copy_out(run->model->device, bytes, run->memory[which].data, run->memory[which].bytes),
        0);
    assert_true(b->synchronize == NULL || b->synchronize(run->model->device) == 0);
    for (int64_t i = 0; i < count; i++) {
        values[i] = msi_load(bytes, dtype, (uint64_t)i);
    }
    free(bytes);
}

/* Scores of about 1; or, if hard, between -80 and 80, the largest of which a row sees late: the
   first component of all queries is alike, and that of a late key is large. */
static void a_fill(a_run *run, bool hard) {
    t_rng rng = t_seed(41);
    const int64_t columns = nn_attention_columns(&run->n), all = run->rows * columns;
    for (int64_t i = 0; i < all; i++) {
        const int64_t time = i / columns % run->n.sequence;
        const int64_t part = i % columns < nn_attention_keys(&run->n)     ? 0
                             : i % columns < nn_attention_values(&run->n) ? 1
                                                                          : 2;
        const float value = (float)(2.0 * t_unit(&rng) - 1.0);
        run->qkv[i] = value;
        if (hard && part < 2 && i % run->n.size == 0) {
            const float size = (float)run->n.size;
            const float key = time % 13 == 11 ? 26.0f : time % 3 == 0 ? -26.0f : 8.0f * value;
            run->qkv[i] = part == 0 ? 3.0f * sqrtf(size) : key; // of a scale of 1 / sqrt(size)
        }
        run->qkv[i] = c_rounded(run->qkv[i]);
    }
    for (int64_t i = 0; i < run->rows * run->channels; i++) {
        run->dout[i] = c_rounded((float)(2.0 * t_unit(&rng) - 1.0));
    }
    for (int64_t i = 0; i < all; i++) {
        run->old[i] = c_rounded((float)(2.0 * t_unit(&rng) - 1.0));
    }
}

/* Forward and backward; scratch memory and results are NaN at first. */
static void a_call(a_run *run) {
    const nn_device *device = t_nn_device();
    const int64_t all = run->rows * nn_attention_columns(&run->n);
    const int64_t heads = run->n.batch * run->n.heads * run->n.sequence;
    ms_call call;
    memset(&call, 0, sizeof call);
    call.model = run->model;
    call.stream = ms_stream(run->model);
    a_put(run, A_QKV, run->qkv, all, run->dtype);
    a_put(run, A_DOUT, run->dout, run->rows * run->channels, run->dtype);
    a_put(run, A_OUT, NULL, run->rows * run->channels, run->dtype);
    a_put(run, A_DQKV, run->beta != 0.0f ? run->old : NULL, all, run->dtype);
    a_put(run, A_SUMS, NULL, heads, MS_DTYPE_F32);
    a_put(run, A_WORK, NULL,
          nn_most(device->tiled_attention_floats(run->n, false),
                  device->tiled_attention_floats(run->n, true)),
          MS_DTYPE_F32);
    const nn_values qkv = nn_values_in(run->memory[A_QKV].data, run->dtype);
    const nn_values out = nn_values_in(run->memory[A_OUT].data, run->dtype);
    float *sums = (float *)run->memory[A_SUMS].data;
    float *work = (float *)run->memory[A_WORK].data;
    assert_int_equal(device->tiled_attention(&call, out, sums, qkv, work, run->n), 0);
    assert_int_equal(
        device->tiled_attention_backward(
            &call, nn_dest_of(nn_values_in(run->memory[A_DQKV].data, run->dtype), run->beta),
            nn_values_in(run->memory[A_DOUT].data, run->dtype), out, sums, qkv, work, run->n),
        0);
    a_get(run, A_OUT, run->out, run->rows * run->channels, run->dtype);
    a_get(run, A_DQKV, run->dqkv, all, run->dtype);
    a_get(run, A_SUMS, run->sums, heads, MS_DTYPE_F32);
}

static void a_start(a_run *run, ms_model *model, nn_attention_size n, float beta, bool hard) {
    memset(run, 0, sizeof *run);
    run->model = model;
    run->n = n;
    run->dtype = c_dtype;
    run->beta = beta;
    run->rows = n.batch * n.sequence;
    run->channels = n.heads * n.size;
    const uint64_t count = (uint64_t)(run->rows * run->channels);
    const uint64_t all = (uint64_t)(run->rows * nn_attention_columns(&n));
    run->qkv = c_floats(all);
    run->dqkv = c_floats(all);
    run->old = c_floats(all);
    run->out = c_floats(count);
    run->dout = c_floats(count);
    run->sums = c_floats((uint64_t)(run->rows * n.heads));
    a_fill(run, hard);
    a_call(run);
}

static void a_release(a_run *run, int which) {
    const ms_backend *b = &run->model->config.backend;
    b->memory_release(b->user, &run->model->config.allocator, run->memory[which].data,
                      run->memory[which].bytes);
}

static void a_stop(a_run *run) {
    for (int i = 0; i < A_COUNT; i++) {
        a_release(run, i);
    }
    free(run->qkv);
    free(run->dqkv);
    free(run->old);
    free(run->out);
    free(run->dout);
    free(run->sums);
}

/* One query: offsets of it and of the head's first key, value, output. p has room for two rows. */
static void a_expect_row(const a_run *run, a_expected *r, int64_t head, int64_t time, double *p) {
    double *bend = p + run->n.sequence; // what the cap does to a slope
    const int64_t size = run->n.size, channels = run->channels;
    const int64_t stride = nn_attention_columns(&run->n);
    const int64_t token = head / run->n.heads * run->n.sequence;
    const int64_t own = head % run->n.heads, shared = own / (run->n.heads / run->n.kv_heads);
    const int64_t q = (token + time) * stride + own * size;
    const int64_t k = token * stride + (run->n.heads + shared) * size;
    const int64_t v = k + run->n.kv_heads * size;
    const int64_t o = (token + time) * channels + own * size;
    const int64_t seen = run->n.causal ? time + 1 : run->n.sequence;
    const int64_t first = run->n.window > 0 && seen > run->n.window ? seen - run->n.window : 0;
    const double scale = (double)run->n.scale, cap = (double)run->n.cap;
    double most = -1e300, total = 0.0, mean = 0.0, terms = 0.0;
    for (int64_t u = first; u < seen; u++) {
        p[u] = 0.0;
        for (int64_t i = 0; i < size; i++) {
            p[u] += (double)run->qkv[q + i] * (double)run->qkv[k + u * stride + i] * scale;
        }
        bend[u] = cap > 0.0 ? 1.0 - pow(tanh(p[u] / cap), 2.0) : 1.0;
        p[u] = cap > 0.0 ? cap * tanh(p[u] / cap) : p[u];
        most = p[u] > most ? p[u] : most;
        r->largest = fabs(p[u]) > r->largest ? fabs(p[u]) : r->largest;
    }
    for (int64_t u = first; u < seen; u++) {
        p[u] = exp(p[u] - most);
        total += p[u];
    }
    r->sums[head * run->n.sequence + time] = most + log(total);
    for (int64_t u = first; u < seen; u++) {
        p[u] /= total;
        for (int64_t i = 0; i < size; i++) {
            const double value = p[u] * (double)run->qkv[v + u * stride + i];
            r->out[o + i] += value;
            r->out_bound[o + i] += fabs(value);
        }
    }
    for (int64_t i = 0; i < size; i++) {
        mean += r->out[o + i] * (double)run->dout[o + i];
        terms += fabs(r->out[o + i] * (double)run->dout[o + i]);
    }
    for (int64_t u = first; u < seen; u++) {
        double slope = 0.0, slopes = 0.0;
        for (int64_t i = 0; i < size; i++) {
            const double value = (double)run->qkv[v + u * stride + i];
            const double above = (double)run->dout[o + i];
            slope += above * value;
            slopes += fabs(above * value);
            r->dqkv[v + u * stride + i] += p[u] * above;
            r->dqkv_bound[v + u * stride + i] += p[u] * fabs(above);
        }
        const double ds = p[u] * (slope - mean) * scale * bend[u];
        const double bound = p[u] * (slopes + terms) * scale;
        for (int64_t i = 0; i < size; i++) {
            const double query = (double)run->qkv[q + i];
            const double key = (double)run->qkv[k + u * stride + i];
            r->dqkv[q + i] += ds * key;
            r->dqkv_bound[q + i] += bound * fabs(key);
            r->dqkv[k + u * stride + i] += ds * query;
            r->dqkv_bound[k + u * stride + i] += bound * fabs(query);
        }
    }
}

static void a_within(const char *what, double value, double expected, double bound, int64_t i) {
    if (!(fabs(value - expected) <= bound)) {
        print_error("attention in tiles in %s: %s[%lld] is %.9g, expected %.9g +- %.3g\n",
                    ms_dtype_name(c_dtype), what, (long long)i, value, expected, bound);
        fail();
    }
}

/* A probability is the exponential of a score, whose error grows with it. In 16 bits the operands
   of products are rounded, and so is the output that backward reads; small ones in F16 are not
   exact either. */
static void a_compare(const a_run *run, const a_expected *r) {
    const int64_t count = run->rows * run->channels;
    const int64_t all = run->rows * nn_attention_columns(&run->n);
    const double u = c_roundoff();
    const double f32 = 4e-7 * (8.0 + r->largest) + 4.0 * EXP_ERROR;
    const double least = c_dtype == MS_DTYPE_F16 ? ldexp(1.0, -24) * (double)run->n.sequence : 0.0;
    const double small = 1e-7 + 30.0 * least;
    for (int64_t i = 0; i < run->rows * run->n.heads; i++) {
        a_within("sum", (double)run->sums[i], r->sums[i], f32, i);
    }
    for (int64_t i = 0; i < count; i++) {
        const double bound = (u + f32) * r->out_bound[i] + 1.01 * u * fabs(r->out[i]) + small;
        a_within("out", (double)run->out[i], r->out[i], bound, i);
    }
    for (int64_t i = 0; i < all; i++) {
        const double old = run->beta != 0.0f ? (double)run->old[i] : 0.0;
        const double expected = r->dqkv[i] + old;
        const double own = 1.01 * u * (fabs(expected) + (3.0 * u + f32) * r->dqkv_bound[i]);
        const double bound = (3.0 * u + f32) * r->dqkv_bound[i] + own + small;
        a_within("gradient", (double)run->dqkv[i], expected, bound, i);
    }
}

static double *a_zeros(int64_t count) {
    double *values = c_doubles((uint64_t)count);
    for (int64_t i = 0; i < count; i++) {
        values[i] = 0.0;
    }
    return values;
}

/* The same bits in another run, too. */
static void a_check_size(ms_model *model, nn_attention_size n, bool hard) {
    const int64_t count = n.batch * n.sequence * nn_attention_width(&n);
    const int64_t all = n.batch * n.sequence * nn_attention_columns(&n);
    for (int beta = 0; beta < 2; beta++) {
        a_run run, again;
        a_expected r;
        a_start(&run, model, n, (float)beta, hard);
        a_start(&again, model, n, (float)beta, hard);
        assert_memory_equal(run.out, again.out, (size_t)count * sizeof(float));
        assert_memory_equal(run.dqkv, again.dqkv, (size_t)all * sizeof(float));
        r.out = a_zeros(count);
        r.out_bound = a_zeros(count);
        r.dqkv = a_zeros(all);
        r.dqkv_bound = a_zeros(all);
        r.sums = a_zeros(n.batch * n.heads * n.sequence);
        r.largest = 0.0;
        double *row = a_zeros(2 * n.sequence);
        for (int64_t head = 0; head < n.batch * n.heads; head++) {
            for (int64_t time = 0; time < n.sequence; time++) {
                a_expect_row(&run, &r, head, time, row);
            }
        }
        assert_true(!hard || (r.largest > 70.0 && r.largest < 90.0) || n.sequence < 12);
        a_compare(&run, &r);
        free(row);
        free(r.out);
        free(r.out_bound);
        free(r.dqkv);
        free(r.dqkv_bound);
        free(r.sums);
        a_stop(&run);
        a_stop(&again);
    }
}

static void a_check(ms_model *model, int64_t batch, int64_t sequence, int64_t heads, int64_t size,
                    bool causal, bool hard) {
    nn_attention_size n = nn_plain_attention(heads, size, causal);
    n.batch = batch;
    n.sequence = sequence;
    a_check_size(model, n, hard);
}

/* Heads that share keys, windows and caps, each by itself and together. */
static void a_check_grouped(ms_model *model) {
    const int64_t sizes[][5] = {// batch, sequence, heads, heads of keys, size
                                {2, 5, 4, 2, 4},  {1, 1, 2, 1, 3},  {3, 24, 6, 2, 8},
                                {2, 70, 6, 3, 8}, {1, 97, 8, 1, 5}, {2, 64, 9, 3, 16}};
    const int64_t windows[] = {0, 1, 7, 30};
    for (size_t k = 0; k < sizeof sizes / sizeof sizes[0]; k++) {
        for (int i = 0; i < 8; i++) {
            nn_attention_size n = nn_plain_attention(sizes[k][2], sizes[k][4], i != 0);
            n.batch = sizes[k][0];
            n.sequence = sizes[k][1];
            n.kv_heads = i % 3 == 2 ? n.heads : sizes[k][3];
            n.window = i != 0 ? windows[(size_t)i / 2] : 0;
            n.cap = i % 2 != 0 ? 2.5f : 0.0f;
            n.scale = i > 4 ? 0.3f : n.scale;
            a_check_size(model, n, false);
        }
    }
}

/* A model for products. */
static ms_model *a_open(void) {
    const ms_config config = t_device_config();
    ms_model *model;
    assert_int_equal(ms_create(&config, &model), MS_RESULT_OK);
    nn_net *net = nn_create_on(model, t_nn_device());
    assert_non_null(net);
    const ms_tensor x = ms_input(model, "x", MS_DTYPE_F32, ms_shape2(1, 1));
    ms_set_loss(model, nn_linear(net, "y", x, 1, 1.0f));
    t_ok(model, ms_wrap(model));
    nn_destroy(net); // no step is made
    return model;
}

/* A key that is NaN makes the rows NaN that see it, and no others; minus infinity as the only score
   of a row makes it NaN too. */
static void a_check_nan(ms_model *model) {
    nn_attention_size n = nn_plain_attention(1, 4, true);
    n.batch = 1;
    n.sequence = 70;
    a_run run;
    a_start(&run, model, n, 0.0f, false);
    for (int i = 0; i < A_COUNT; i++) {
        a_release(&run, i);
    }
    run.qkv[40 * 12 + 4] = nanf("");
    for (int i = 0; i < 4; i++) {
        run.qkv[i] = 1e30f;
        run.qkv[4 + i] = -1e30f;
    }
    a_call(&run);
    for (int time = 0; time < n.sequence; time++) {
        const bool wrong = time == 0 || time >= 40;
        assert_int_equal(t_is_nan(run.sums[time]), wrong);
        assert_int_equal(t_is_nan(run.out[time * 4]), wrong);
    }
    a_stop(&run);
}

/* Sequences of less than one tile, of one, of several and a part. */
static void a_check_all(void) {
    const int64_t sizes[][4] = {{2, 1, 1, 3},   {2, 5, 3, 4},  {1, 16, 2, 8}, {3, 24, 2, 5},
                                {2, 70, 3, 16}, {1, 97, 2, 7}, {1, 64, 9, 8}};
    const ms_dtype dtypes[] = {MS_DTYPE_F32, MS_DTYPE_BF16, MS_DTYPE_F16};
    const int64_t tiles[][3] = {{64, 256, 1024}, {16, 24, 64}, {24, 16, 1}, {7, 5, 70}};
    ms_model *model = a_open();
    const int kinds = t_on_cpu ? 4 : 1; // of tiles
    for (int i = 0; i < kinds * 3 * 4; i++) {
        c_dtype = dtypes[i / 4 % 3];
        tile_queries = tiles[i / 12][0];
        tile_keys = tiles[i / 12][1];
        tile_sums = tiles[i / 12][2];
        for (size_t k = 0; k < sizeof sizes / sizeof sizes[0]; k++) {
            const int64_t *d = sizes[k];
            a_check(model, d[0], d[1], d[2], d[3], (i & 1) != 0, (i & 2) != 0);
        }
        if ((i & 3) == 3 && i / 12 * 5 % 3 != i / 4 % 3) { // two dtypes for each kind of tiles
            a_check_grouped(model);
        }
        if (i / 12 == 0 && (i & 3) == 3) { // several of the tiles that CUDA has
            a_check(model, 1, i == 3 ? 1100 : (int64_t)t_size(300, 1100), 1, 4, true, true);
        }
    }
    c_dtype = MS_DTYPE_F32;
    a_check_nan(model);
    ms_destroy(model);
    tile_queries = 64;
    tile_keys = 256;
    tile_sums = 1024;
}

/* Scratch memory for 12 heads of 64: on the CPU it does not grow, with CUDA it grows no faster than
   the sequence. */
static void a_check_scratch(const nn_device *device, bool grows) {
    nn_attention_size n = nn_plain_attention(12, 64, true);
    n.batch = 1;
    for (int backward = 0; backward < 2; backward++) {
        int64_t before = 0;
        for (n.sequence = 64; n.sequence <= 1 << 20; n.sequence *= 2) {
            const int64_t floats = device->tiled_attention_floats(n, backward != 0);
            const int64_t qkv = n.sequence * 3 * n.heads * n.size;
            assert_true(floats >= before);
            assert_true(n.sequence <= 32768 || floats <= 2 * before);
            assert_true(n.sequence < 32768 || grows || floats == before);
            assert_true(n.sequence != 32768 || floats <= (grows ? qkv / 6 : 7 << 18));
            before = floats;
        }
    }
}

static void attention_has_scratch_for_every_size(void **state) {
    (void)state;
    a_check_scratch(nn_cpu(), false);
    a_check_scratch(nn_cuda_dry(), true);
}

/* More heads than run at once, and more rows than a band has. */
static void attention_matches_float64(void **state) {
    (void)state;
    assert_int_equal(T_CAUSAL | T_SAVE_SCORES, 3);
    h_check(2, 7, 3, 5);
    h_check(1, 1, 1, 4);
    h_check(6, 3, 3, 2);
    h_check(1, 70, 1, 3);
    h_check(1, 132, 1, 2);
    a_check_all();
}

// ------------------------------------------------------------------------------------------------
// cross-entropy: d = rows, classes; leaf: logits

static const int32_t x_some[] = {4, -1, 0, 10, -100, 4};
static const int32_t x_none[] = {-1, -1, -1, -100, -1, -1};
static const int32_t x_last[] = {4098};

static ms_tensor x_build(c_run *run, const int64_t *d, uint32_t flags) {
    (void)flags;
    run->ids[0] = ms_input(run->model, "targets", MS_DTYPE_I32, ms_shape1(d[0]));
    return nn_cross_entropy(run->net, "loss", run->lifted[0], run->ids[0]);
}

static void x_reference(const c_case *c, const double *const *leaf, const float *library,
                        double *out) {
    (void)library;
    for (int64_t r = 0; r < c->d[0]; r++) {
        const double *row = leaf[0] + r * c->d[1];
        const int32_t target = c->ids[0][r];
        double total = 0.0;
        for (int64_t i = 0; target >= 0 && i < c->d[1]; i++) {
            total += exp(row[i] - row[target]);
        }
        out[r] = target >= 0 ? log(total) : 0.0;
    }
}

static void cross_entropies_match_float64(void **state) {
    (void)state;
    const int32_t *targets[] = {x_some, x_none, x_last};
    for (int i = 0; i < 3; i++) {
        const int64_t rows = i < 2 ? 6 : 1;
        const int64_t classes = i < 2 ? 11 : 4099;
        c_case c = c_make("cross-entropy", x_build, x_reference, rows, classes, 0, 0, 0);
        c_add_leaf(&c, ms_shape2(rows, classes), true);
        c.out_count = rows;
        c.scale = 5.0f;
        c.ids[0] = targets[i];
        c_check(&c);
    }
}

// ------------------------------------------------------------------------------------------------
// relu: d = count

static ms_tensor r_build(c_run *run, const int64_t *d, uint32_t flags) {
    (void)d;
    (void)flags;
    return nn_relu(run->net, "relu", run->lifted[0]);
}

static void r_reference(const c_case *c, const double *const *leaf, const float *library,
                        double *out) {
    (void)library;
    for (int64_t i = 0; i < c->d[0]; i++) {
        out[i] = leaf[0][i] > 0.0 ? leaf[0][i] : 0.0;
    }
}

static void relus_match_float64_and_pass_nan_on(void **state) {
    (void)state;
    c_case c = c_make("relu", r_build, r_reference, 2 * 3001, 0, 0, 0, 0);
    c_add_leaf(&c, ms_shape2(2, 3001), true);
    c.out_count = c.d[0];
    c_check_same(&c);
    c.d[0] = 133;
    c.leaf[0] = ms_shape2(7, 19);
    c.out_count = 133;
    c.exact = true;
    c_check(&c);
    const float x[] = {nanf(""), 1.0f, -1.0f};
    const float dy[] = {1.0f, 2.0f, 3.0f};
    float y[3];
    float dx[] = {5.0f, 5.0f, 5.0f};
    nn_relu_kernel(NULL, nn_f32(y), nn_f32(x), 3);
    assert_true(t_is_nan(y[0]));
    nn_relu_backward_kernel(NULL, nn_dest_of(nn_f32(dx), 1.0f), nn_f32(dy), nn_f32(y), 3);
    assert_true(dx[1] > 6.5f && dx[1] < 7.5f && dx[2] > 4.5f && dx[2] < 5.5f);
}

// ------------------------------------------------------------------------------------------------
// images: d = B, C, height, width; leaves: x and, for a convolution, weight [, bias]. The flags
// are kernel, stride and padding, a byte each.

static uint32_t w_flags(int64_t kernel, int64_t stride, int64_t padding) {
    return (uint32_t)(kernel | stride << 8 | padding << 16);
}

static int64_t w_kernel(const c_case *c) {
    return c->flags & 255u;
}

static int64_t w_stride(const c_case *c) {
    return c->flags >> 8 & 255u;
}

static int64_t w_padding(const c_case *c) {
    return c->flags >> 16;
}

/* Squares along an extent: counted. */
static int64_t w_places(const c_case *c, int64_t extent) {
    int64_t count = 0;
    while (count * w_stride(c) + w_kernel(c) <= extent + 2 * w_padding(c)) {
        count++;
    }
    return count;
}

/* The offset of a pixel in image b, channel k; -1 outside the image. */
static int64_t w_pixel(const c_case *c, int64_t b, int64_t k, int64_t y, int64_t x) {
    if (y < 0 || y >= c->d[2] || x < 0 || x >= c->d[3]) {
        return -1;
    }
    return ((b * c->d[1] + k) * c->d[2] + y) * c->d[3] + x;
}

static ms_tensor v_build(c_run *run, const int64_t *d, uint32_t flags) {
    const ms_tensor none = {0};
    (void)d;
    (void)flags;
    const c_case *c = run->what;
    return nn_conv2d_tied(run->net, "conv", run->lifted[0], run->leaf[1],
                          c->leaf_count > 2 ? run->leaf[2] : none, w_kernel(c), w_stride(c),
                          w_padding(c));
}

static double v_reference_at(const c_case *c, const double *const *leaf, int64_t b, int64_t o,
                             int64_t top, int64_t left) {
    const int64_t kernel = w_kernel(c);
    double sum = c->leaf_count > 2 ? leaf[2][o] : 0.0;
    for (int64_t k = 0; k < c->d[1]; k++) {
        for (int64_t y = 0; y < kernel; y++) {
            for (int64_t x = 0; x < kernel; x++) {
                const int64_t pixel = w_pixel(c, b, k, top + y, left + x);
                const double weight = leaf[1][((o * c->d[1] + k) * kernel + y) * kernel + x];
                sum += pixel < 0 ? 0.0 : weight * leaf[0][pixel];
            }
        }
    }
    return sum;
}

static void v_reference(const c_case *c, const double *const *leaf, const float *library,
                        double *out) {
    (void)library;
    const int64_t down = w_places(c, c->d[2]);
    const int64_t across = w_places(c, c->d[3]);
    const int64_t outputs = c->leaf[1].dim[0];
    for (int64_t i = 0; i < c->out_count; i++) {
        const int64_t x = i % across;
        const int64_t y = i / across % down;
        const int64_t o = i / across / down % outputs;
        const int64_t b = i / across / down / outputs;
        out[i] = v_reference_at(c, leaf, b, o, y * w_stride(c) - w_padding(c),
                                x * w_stride(c) - w_padding(c));
    }
}

static void v_check(ms_shape x, int64_t outputs, int64_t kernel, int64_t stride, int64_t padding) {
    for (int bias = 0; bias < 2; bias++) {
        c_case c = c_make("conv2d", v_build, v_reference, x.dim[0], x.dim[1], x.dim[2], x.dim[3],
                          w_flags(kernel, stride, padding));
        c_add_leaf(&c, x, true);
        c_add_leaf(&c, ms_shape2(outputs, x.dim[1] * kernel * kernel), false);
        if (bias != 0) {
            c_add_leaf(&c, ms_shape1(outputs), false);
        }
        c.out_count = x.dim[0] * outputs * w_places(&c, x.dim[2]) * w_places(&c, x.dim[3]);
        c.inner_out = bias; // it is added to a product that is rounded
        c.inner_gradient = (double)nn_divide_up(kernel, stride) - 1.0; // bands that cover a pixel
        c_check(&c);
    }
}

/* Squares, strips, strides that leave pixels out, padding wider than the image, one pixel; more
   images than run at once, and more patches than are in memory at once. */
static void convolutions_match_float64(void **state) {
    (void)state;
    v_check(ms_shape4(2, 3, 6, 5), 4, 3, 1, 1);
    v_check(ms_shape4(2, 2, 7, 6), 3, 3, 2, 0);
    v_check(ms_shape4(3, 2, 4, 5), 2, 2, 3, 1);
    v_check(ms_shape4(1, 1, 2, 1), 2, 5, 1, 4);
    v_check(ms_shape4(2, 3, 4, 5), 6, 1, 1, 0);
    v_check(ms_shape4(2, 3, 4, 5), 2, 1, 2, 0);
    v_check(ms_shape4(2, 4, 3, 3), 2, 3, 1, 0);
    v_check(ms_shape4(6, 1, 3, 4), 2, 3, 1, 1);
    assert_true(2 * 100 < NN_PATCHES && 5 * 100 > NN_PATCHES);
    v_check(ms_shape4(1, 1, 5, 100), 2, 3, 1, 1);
    v_check(ms_shape4(5, 1, 3, 258), 1, 2, 1, 1);
}

static ms_tensor o_build(c_run *run, const int64_t *d, uint32_t flags) {
    (void)d;
    (void)flags;
    const c_case *c = run->what;
    return nn_max_pool(run->net, "pool", run->lifted[0], w_kernel(c), w_stride(c), w_padding(c));
}

static void o_reference(const c_case *c, const double *const *leaf, const float *library,
                        double *out) {
    (void)library;
    const int64_t down = w_places(c, c->d[2]);
    const int64_t across = w_places(c, c->d[3]);
    for (int64_t i = 0; i < c->out_count; i++) {
        const int64_t left = i % across * w_stride(c) - w_padding(c);
        const int64_t top = i / across % down * w_stride(c) - w_padding(c);
        const int64_t plane = i / across / down;
        out[i] = -1e300;
        for (int64_t k = 0; k < w_kernel(c) * w_kernel(c); k++) {
            const int64_t pixel = w_pixel(c, plane / c->d[1], plane % c->d[1],
                                          top + k / w_kernel(c), left + k % w_kernel(c));
            if (pixel >= 0 && leaf[0][pixel] > out[i]) {
                out[i] = leaf[0][pixel];
            }
        }
    }
}

static void o_check(ms_shape x, int64_t kernel, int64_t stride, int64_t padding) {
    c_case c = c_make("max_pool", o_build, o_reference, x.dim[0], x.dim[1], x.dim[2], x.dim[3],
                      w_flags(kernel, stride, padding));
    c_add_leaf(&c, x, true);
    c.out_count = x.dim[0] * x.dim[1] * w_places(&c, x.dim[2]) * w_places(&c, x.dim[3]);
    c.distinct = true;
    c_check(&c);
}

/* Squares apart, side by side and overlapping; of equal values the first, of NaN and a number
   NaN. */
static void max_pools_match_float64_and_choose_the_first_of_equals(void **state) {
    (void)state;
    o_check(ms_shape4(2, 3, 6, 4), 2, 2, 0);
    o_check(ms_shape4(2, 2, 7, 5), 3, 2, 1);
    o_check(ms_shape4(1, 2, 5, 6), 3, 1, 1);
    o_check(ms_shape4(2, 1, 7, 7), 2, 3, 0);
    o_check(ms_shape4(1, 2, 3, 3), 1, 1, 0);
    const float equal[] = {1.0f, 2.0f, 2.0f, 2.0f};
    const float nan_first[] = {nanf(""), 2.0f, 3.0f, 1.0f};
    const float nan_last[] = {1.0f, 2.0f, 3.0f, nanf("")};
    const nn_window w = nn_window_of(ms_shape4(1, 1, 2, 2), 2, 2, 0);
    assert_int_equal(nn_largest_place(nn_f32(equal), &w, 0, 0), 1);
    assert_int_equal(nn_largest_place(nn_f32(nan_first), &w, 0, 0), 0);
    assert_int_equal(nn_largest_place(nn_f32(nan_last), &w, 0, 0), 3);
}

// ------------------------------------------------------------------------------------------------
// batch norm: d = B, C, plane; leaves: x, weight, bias

static ms_tensor b_build(c_run *run, const int64_t *d, uint32_t flags) {
    (void)d;
    (void)flags;
    return nn_batch_norm_tied(run->net, "norm", run->lifted[0], run->leaf[1], run->leaf[2]);
}

static void b_reference(const c_case *c, const double *const *leaf, const float *library,
                        double *out) {
    (void)library;
    const int64_t count = c->d[0] * c->d[2];
    for (int64_t k = 0; k < c->d[1]; k++) {
        double mean = 0.0;
        double variance = 0.0;
        for (int64_t i = 0; i < count; i++) {
            mean += leaf[0][(i / c->d[2] * c->d[1] + k) * c->d[2] + i % c->d[2]] / (double)count;
        }
        for (int64_t i = 0; i < count; i++) {
            const double x = leaf[0][(i / c->d[2] * c->d[1] + k) * c->d[2] + i % c->d[2]];
            variance += (x - mean) * (x - mean) / (double)count;
        }
        for (int64_t i = 0; i < count; i++) {
            const int64_t at = (i / c->d[2] * c->d[1] + k) * c->d[2] + i % c->d[2];
            out[at] = (leaf[0][at] - mean) / sqrt(variance + 1e-5) * leaf[1][k] + leaf[2][k];
        }
    }
}

static void b_check(ms_shape x) {
    const int64_t plane = (int64_t)ms_shape_count(&x) / (x.dim[0] * x.dim[1]);
    c_case c = c_make("batch_norm", b_build, b_reference, x.dim[0], x.dim[1], plane, 0, 0);
    c_add_leaf(&c, x, true);
    c_add_leaf(&c, ms_shape1(x.dim[1]), false);
    c_add_leaf(&c, ms_shape1(x.dim[1]), false);
    c.out_count = (int64_t)ms_shape_count(&x);
    c.whole = true; // its sums are over all images
    c_check(&c);
}

static void batch_norms_match_float64(void **state) {
    (void)state;
    b_check(ms_shape4(3, 2, 5, 7));
    b_check(ms_shape4(1, 3, 4, 5));
    b_check(ms_shape3(2, 3, 17));
    b_check(ms_shape2(9, 4));
}

// ------------------------------------------------------------------------------------------------
// average pool, flatten: d = B, C, plane

static ms_tensor p_build(c_run *run, const int64_t *d, uint32_t flags) {
    (void)d;
    return flags != 0 ? nn_flatten(run->net, "flatten", run->lifted[0])
                      : nn_average_pool(run->net, "mean", run->lifted[0]);
}

static void p_reference(const c_case *c, const double *const *leaf, const float *library,
                        double *out) {
    (void)library;
    const int64_t width = c->flags != 0 ? 1 : c->d[2];
    for (int64_t i = 0; i < c->out_count; i++) {
        out[i] = 0.0;
        for (int64_t k = 0; k < width; k++) {
            out[i] += leaf[0][i * width + k] / (double)width;
        }
    }
}

static void average_pools_and_flattened_images_match_float64(void **state) {
    (void)state;
    for (uint32_t flatten = 0; flatten < 2; flatten++) {
        c_case c = c_make(flatten != 0 ? "flatten" : "average_pool", p_build, p_reference, 3, 2, 20,
                          0, flatten);
        c_add_leaf(&c, ms_shape4(3, 2, 5, 4), true);
        c.out_count = flatten != 0 ? 120 : 6;
        c_check(&c);
    }
}

// ------------------------------------------------------------------------------------------------
// elementary functions

static void exp_and_the_normal_distribution_match_libm(void **state) {
    (void)state;
    for (int i = -86999; i <= 87999; i++) {
        const float x = (float)i * 1e-3f;
        const double expected = exp((double)x);
        assert_true(fabs((double)nn_exp(x) - expected) <= EXP_ERROR * expected);
    }
    for (int i = -10000; i <= 10000; i++) {
        const float x = (float)i * 1e-3f;
        const double expected = 0.5 * erfc(-(double)x / sqrt(2.0));
        const float bell = nn_exp(-0.5f * x * x);
        const double tolerance = (4.0 * EXP_ERROR + 1e-7 * (double)(x * x)) * expected;
        assert_true(fabs((double)nn_normal(x, bell) - expected) <= tolerance);
    }
    assert_true(t_is_nan(nn_exp(nanf(""))));
    assert_true(nn_exp(-1e30f) > 0.0f && nn_exp(-1e30f) < 1e-37f);
    assert_true(nn_gelu_tanh_value(-1e6f) > -1e-20f && nn_gelu_erf_value(-1e6f) > -1e-20f);
}

// ------------------------------------------------------------------------------------------------
// models

typedef struct m_net {
    ms_model *model;
    nn_net *net;
    nn_transformer t;
    nn_transformer_config config;
} m_net;

static nn_transformer_config m_config(nn_granularity granularity, float dropout) {
    nn_transformer_config config;
    memset(&config, 0, sizeof config);
    config.vocabulary = 37;
    config.context = 19;
    config.layers = 2;
    config.heads = 5;
    config.channels = 75;
    config.batch = 2;
    config.sequence = 17;
    config.dropout = dropout;
    config.granularity = granularity;
    return config;
}

enum { M_IDS = 512 }; // at most, in a batch

static void m_write_batch(m_net *n, bool ignored) {
    int32_t ids[M_IDS];
    t_rng rng = t_seed(9);
    const uint32_t vocabulary = (uint32_t)n->config.vocabulary;
    const uint32_t count = (uint32_t)(n->config.batch * n->config.sequence);
    assert_in_range(count, 1, M_IDS);
    for (uint32_t i = 0; i < count; i++) {
        ids[i] = (int32_t)t_below(&rng, vocabulary);
    }
    t_ok(n->model, ms_write(n->model, n->t.tokens, ids));
    for (uint32_t i = 0; i < count; i++) {
        ids[i] = ignored || i % 5 == 0 ? -1 : (int32_t)t_below(&rng, vocabulary);
    }
    t_ok(n->model, ms_write(n->model, n->t.targets, ids));
    for (uint32_t i = 0; i < count; i++) {
        ids[i] = i % 17 > 8;
    }
    if (n->t.segments.id != 0) {
        t_ok(n->model, ms_write(n->model, n->t.segments, ids));
    }
}

/* With a matrix product that adds up in one order whatever the sizes. */
static ms_config m_backend(void) {
    ms_config config = t_device_config();
    if (t_on_cpu) {
        config.backend = ms_backend_cpu();
        config.backend.gemm = t_gemm;
    }
    return config;
}

static bool m_records = false;                  // steps, as CUDA graphs
static bool m_checks = T_DEBUGS;                // in debug mode
static ms_dtype m_dtype = MS_DTYPE_F32;         // of values and params
static ms_switch m_masters = MS_SWITCH_DEFAULT; // of params in 16 bits

static void m_start(m_net *n, bool bert, const nn_transformer_config *shape) {
    const bool half = m_dtype != MS_DTYPE_F32;
    ms_config config = half ? t_device_config() : m_backend();
    ms_optimizer_desc adamw;
    memset(&adamw, 0, sizeof adamw);
    adamw.weight_decay = 0.1f;
    config.early_update = MS_SWITCH_OFF;
    config.debug = m_checks && !m_records && shape->batch * shape->sequence < 100; // slow
    config.cuda_graph = m_records;
    config.mixed_dtype = half ? m_dtype : config.mixed_dtype;
    config.mixed_precision = half ? MS_SWITCH_ON : MS_SWITCH_DEFAULT;
    config.master_weights = m_masters;
    memset(n, 0, sizeof *n);
    n->config = *shape;
    assert_int_equal(ms_create(&config, &n->model), MS_RESULT_OK);
    n->net = nn_create_on(n->model, t_nn_device());
    assert_non_null(n->net);
    nn_force_half(n->net, half);
    n->t = bert ? nn_bert(n->net, shape) : nn_gpt2(n->net, shape);
    ms_add_output(n->model, n->t.losses);
    ms_set_optimizer(n->model, &adamw);
    t_ok(n->model, ms_wrap(n->model));
    assert_int_equal(t_is_half(n->model), half);
    t_ok(n->model, nn_init(n->net, 3));
    m_write_batch(n, false);
}

static void m_stop(m_net *n) {
    ms_destroy(n->model);
    nn_destroy(n->net);
}

static bool m_equal(m_net *a, m_net *b, ms_tensor of_a, ms_tensor of_b) {
    const uint64_t count = ms_tensor_count(a->model, of_a);
    float *values_a = c_floats(count);
    float *values_b = c_floats(count);
    assert_int_equal(ms_tensor_count(b->model, of_b), count);
    t_ok(a->model, ms_read(a->model, of_a, values_a));
    t_ok(b->model, ms_read(b->model, of_b, values_b));
    const bool equal = memcmp(values_a, values_b, (size_t)count * sizeof(float)) == 0;
    free(values_a);
    free(values_b);
    return equal;
}

static void m_same(m_net *a, m_net *b, ms_tensor of_a, ms_tensor of_b) {
    if (!m_equal(a, b, of_a, of_b)) {
        fail_msg("\"%s\" differs", ms_tensor_name(a->model, of_a));
    }
}

/* Losses and the gradients of all params. */
static void m_same_nets(m_net *a, m_net *b) {
    m_same(a, b, a->t.losses, b->t.losses);
    assert_int_equal(nn_param_count(a->net), nn_param_count(b->net));
    for (int64_t i = 0; i < nn_param_count(a->net); i++) {
        const nn_param_info *of_a = nn_param_at(a->net, i);
        const nn_param_info *of_b = nn_param_at(b->net, i);
        assert_string_equal(of_a->name, of_b->name);
        m_same(a, b, ms_gradient(a->model, of_a->tensor), ms_gradient(b->model, of_b->tensor));
    }
}

static uint32_t m_layers(const m_net *n) {
    ms_memory_report report;
    t_report(n->model, &report);
    return report.layer_count;
}

static void blocks_give_the_bits_of_operators(void **state) {
    (void)state;
    for (int i = 0; i < 8; i++) {
        const bool bert = (i & 1) != 0;
        m_net operators;
        m_net blocks;
        nn_transformer_config config = m_config(NN_OPERATORS, 0.0f);
        config.save_scores = (i & 2) != 0;
        config.channels = (int64_t)t_size(35, 75);
        config.sequence = (int64_t)t_size(9, 17);
        m_start(&operators, bert, &config);
        config.granularity = NN_BLOCKS;
        m_start(&blocks, bert, &config);
        assert_true(m_layers(&blocks) + 10 < m_layers(&operators));
        if ((i & 4) != 0) {
            t_ok(operators.model, ms_step(operators.model, NULL));
            t_ok(blocks.model, ms_step(blocks.model, NULL));
        }
        t_ok(operators.model, ms_forward(operators.model, NULL));
        t_ok(blocks.model, ms_forward(blocks.model, NULL));
        t_ok(operators.model, ms_backward(operators.model));
        t_ok(blocks.model, ms_backward(blocks.model));
        m_same_nets(&operators, &blocks);
        t_ok(operators.model, ms_eval(operators.model, NULL));
        t_ok(blocks.model, ms_eval(blocks.model, NULL));
        m_same(&operators, &blocks, operators.t.losses, blocks.t.losses);
        m_stop(&operators);
        m_stop(&blocks);
    }
}

typedef struct h_part {
    int64_t row, rows, column, columns; // in the matrix of all heads
} h_part;

/* What a param of a group of heads is in that of all: up to three parts, one below the other. The
   shape of the whole is rows x columns; a vector has one column. */
static int h_parts(const nn_transformer_config *c, const char *kind, bool weight, int64_t group,
                   h_part part[3]) {
    const int64_t channels = c->channels;
    const int64_t share = channels / c->head_groups;
    const int64_t columns = weight ? channels : 1;
    if (strcmp(kind, "qkv") == 0) { // queries, keys, values of these heads
        for (int k = 0; k < 3; k++) {
            const h_part at = {k * channels + group * share, share, 0, columns};
            part[k] = at;
        }
        return 3;
    }
    const h_part columns_of = {0, channels, weight ? group * share : 0, weight ? share : 1};
    part[0] = columns_of;
    return 1;
}

/* The param of all heads that one of a group is a part of, or NULL. */
static const nn_param_info *h_whole(const m_net *all, const char *name, char kind[8],
                                    int64_t *group) {
    char block[16], rest[32], whole[64];
    long long number = 0;
    if (sscanf(name, "%15[^.].%7[a-z]%lld.%31s", block, kind, &number, rest) != 4 ||
        (strcmp(kind, "qkv") != 0 && strcmp(kind, "proj") != 0)) {
        return NULL;
    }
    snprintf(whole, sizeof whole, "%s.%s.%s", block, kind, rest);
    *group = number;
    for (int64_t i = 0; i < nn_param_count(all->net); i++) {
        if (strcmp(nn_param_at(all->net, i)->name, whole) == 0) {
            return nn_param_at(all->net, i);
        }
    }
    fail_msg("no param %s", whole);
    return NULL;
}

/* The values of all heads that are those of this param of a group, from a tensor of the whole. */
static float *h_take(const m_net *all, const nn_transformer_config *c, const nn_param_info *whole,
                     ms_tensor tensor, const char *kind, int64_t group) {
    const bool weight = strstr(whole->name, ".weight") != NULL;
    float *from = c_floats(ms_tensor_count(all->model, tensor));
    float *to = c_floats(ms_tensor_count(all->model, tensor));
    h_part part[3];
    int64_t next = 0;
    t_ok(all->model, ms_read(all->model, tensor, from));
    const int count = h_parts(c, kind, weight, group, part);
    for (int k = 0; k < count; k++) {
        for (int64_t i = 0; i < part[k].rows; i++) {
            for (int64_t j = 0; j < part[k].columns; j++) {
                to[next++] =
                    from[(part[k].row + i) * (weight ? c->channels : 1) + part[k].column + j];
            }
        }
    }
    free(from);
    return to;
}

static float *h_values(const m_net *all, const m_net *groups, int64_t i, bool gradient) {
    char kind[8] = "";
    int64_t group = 0;
    const nn_param_info *p = nn_param_at(groups->net, i);
    const nn_param_info *whole = h_whole(all, p->name, kind, &group);
    if (whole) {
        return h_take(all, &groups->config, whole,
                      gradient ? ms_gradient(all->model, whole->tensor) : whole->tensor, kind,
                      group);
    }
    for (int64_t k = 0; k < nn_param_count(all->net); k++) {
        const nn_param_info *same = nn_param_at(all->net, k);
        if (strcmp(same->name, p->name) == 0) {
            const ms_tensor tensor =
                gradient ? ms_gradient(all->model, same->tensor) : same->tensor;
            float *values = c_floats(ms_tensor_count(all->model, tensor));
            t_ok(all->model, ms_read(all->model, tensor, values));
            return values;
        }
    }
    fail_msg("no param %s", p->name);
    return NULL;
}

static void h_near(const m_net *n, ms_tensor tensor, const float *expected, const char *name) {
    const uint64_t count = ms_tensor_count(n->model, tensor);
    float *values = c_floats(count);
    double largest = 0.0;
    t_ok(n->model, ms_read(n->model, tensor, values));
    for (uint64_t i = 0; i < count; i++) {
        largest = fmax(largest, fabs((double)expected[i]));
    }
    for (uint64_t i = 0; i < count; i++) {
        if (!(fabs((double)values[i] - (double)expected[i]) <= 1e-5 * largest + 1e-7)) {
            fail_msg("%s[%d] is %.9g, with all heads together %.9g", name, (int)i,
                     (double)values[i], (double)expected[i]);
        }
    }
    free(values);
}

/* Groups of heads with the weights of all heads together: the same losses and gradients, but for the
   order of sums. */
static void groups_of_heads_give_what_all_heads_give(void **state) {
    (void)state;
    for (int i = 0; i < 4; i++) {
        const bool bert = (i & 1) != 0;
        nn_transformer_config config = m_config(NN_OPERATORS, 0.0f);
        m_net all, groups;
        m_start(&all, bert, &config);
        config.head_groups = (i & 2) != 0 ? config.heads : 1;
        m_start(&groups, bert, &config);
        assert_int_equal(m_layers(&groups) > m_layers(&all), config.head_groups > 1);
        for (int64_t k = 0; k < nn_param_count(groups.net); k++) {
            float *values = h_values(&all, &groups, k, false);
            t_ok(groups.model, ms_write(groups.model, nn_param_at(groups.net, k)->tensor, values));
            free(values);
        }
        t_ok(all.model, ms_forward(all.model, NULL));
        t_ok(groups.model, ms_forward(groups.model, NULL));
        t_ok(all.model, ms_backward(all.model));
        t_ok(groups.model, ms_backward(groups.model));
        float *losses = c_floats(ms_tensor_count(all.model, all.t.losses));
        t_ok(all.model, ms_read(all.model, all.t.losses, losses));
        h_near(&groups, groups.t.losses, losses, "losses");
        free(losses);
        for (int64_t k = 0; k < nn_param_count(groups.net); k++) {
            const nn_param_info *p = nn_param_at(groups.net, k);
            float *values = h_values(&all, &groups, k, true);
            h_near(&groups, ms_gradient(groups.model, p->tensor), values, p->name);
            free(values);
        }
        m_stop(&all);
        m_stop(&groups);
    }
}

/* With dropout: the loss along a random direction in the space of all params changes as the
   gradients say. The mask is that of the first step each time. */
static double m_loss_along(bool bert, const nn_transformer_config *config, float step,
                           double *slope) {
    m_net n;
    double loss = 0.0;
    m_start(&n, bert, config);
    for (int64_t i = 0; i < nn_param_count(n.net); i++) {
        const nn_param_info *info = nn_param_at(n.net, i);
        const uint64_t count = ms_shape_count(&info->shape);
        float *values = c_floats(count);
        t_ok(n.model, ms_read(n.model, info->tensor, values));
        for (uint64_t k = 0; k < count; k++) {
            values[k] += step * c_weight((int)(i % 16), (int64_t)k);
        }
        t_ok(n.model, ms_write(n.model, info->tensor, values));
        free(values);
    }
    t_ok(n.model, ms_forward(n.model, &loss));
    t_ok(n.model, ms_backward(n.model));
    *slope = 0.0;
    for (int64_t i = 0; i < nn_param_count(n.net); i++) {
        const nn_param_info *info = nn_param_at(n.net, i);
        const uint64_t count = ms_shape_count(&info->shape);
        float *values = c_floats(count);
        t_ok(n.model, ms_read(n.model, ms_gradient(n.model, info->tensor), values));
        for (uint64_t k = 0; k < count; k++) {
            *slope += (double)values[k] * (double)c_weight((int)(i % 16), (int64_t)k);
        }
        free(values);
    }
    m_stop(&n);
    return loss;
}

static void gradients_of_models_with_dropout_are_slopes(void **state) {
    (void)state;
    for (int i = 0; i < 6; i++) {
        const bool bert = (i & 1) != 0;
        nn_transformer_config config = m_config((i & 2) != 0 ? NN_BLOCKS : NN_OPERATORS, 0.2f);
        config.head_groups = i >= 4 ? config.heads : 0;
        const float step = 1e-3f;
        double slope = 0.0;
        double ignored = 0.0;
        const double above = m_loss_along(bert, &config, step, &ignored);
        const double below = m_loss_along(bert, &config, -step, &ignored);
        (void)m_loss_along(bert, &config, 0.0f, &slope);
        const double measured = (above - below) / (2.0 * (double)step);
        if (!(fabs(measured - slope) <= 0.01 * fabs(slope) + 1e-3)) {
            print_error("%s: slope %g, measured %g\n", bert ? "bert" : "gpt2", slope, measured);
            fail();
        }
    }
}

/* In 16 bits, debug mode finds nothing to say, and changes no bit. The first losses in F16 may
   overflow, times their scale. */
static void debug_mode_changes_no_bit_in_16_bits(void **state) {
    (void)state;
    for (uint64_t i = 0; i < 16; i += t_sweep(5, 1)) {
        const nn_transformer_config config =
            m_config((i & 1) != 0 ? NN_BLOCKS : NN_OPERATORS, (i & 2) != 0 ? 0.2f : 0.0f);
        m_net nets[2];
        m_dtype = (i & 4) != 0 ? MS_DTYPE_F16 : MS_DTYPE_BF16;
        m_masters = (i & 2) != 0 ? MS_SWITCH_OFF : MS_SWITCH_DEFAULT;
        for (int k = 0; k < 2; k++) {
            m_checks = k == 0;
            m_start(&nets[k], (i & 8) != 0, &config);
            t_ok(nets[k].model, ms_step(nets[k].model, NULL));
            t_ok(nets[k].model, ms_eval(nets[k].model, NULL));
            t_ok(nets[k].model, ms_forward(nets[k].model, NULL));
            t_ok(nets[k].model, ms_backward(nets[k].model));
        }
        m_same_nets(&nets[0], &nets[1]);
        m_stop(&nets[0]);
        m_stop(&nets[1]);
    }
    m_checks = T_DEBUGS;
    m_dtype = MS_DTYPE_F32;
    m_masters = MS_SWITCH_DEFAULT;
}

/* Dropout is no part of an evaluation, and the two branches of a block draw different masks. */
static void dropout_is_for_training_only(void **state) {
    (void)state;
    for (int i = 0; i < 4; i++) {
        const nn_granularity granularity = (i & 2) != 0 ? NN_BLOCKS : NN_OPERATORS;
        const nn_transformer_config with = m_config(granularity, 0.2f);
        const nn_transformer_config without = m_config(granularity, 0.0f);
        m_net a;
        m_net b;
        m_start(&a, (i & 1) != 0, &with);
        m_start(&b, (i & 1) != 0, &without);
        t_ok(a.model, ms_eval(a.model, NULL));
        t_ok(b.model, ms_eval(b.model, NULL));
        m_same(&a, &b, a.t.losses, b.t.losses);
        t_ok(a.model, ms_step(a.model, NULL));
        t_ok(b.model, ms_step(b.model, NULL));
        assert_false(m_equal(&a, &b, a.t.losses, b.t.losses));
        m_stop(&a);
        m_stop(&b);
    }
    ms_call call;
    const uint64_t step_seed = 7;
    memset(&call, 0, sizeof call);
    call.step_seed = &step_seed;
    call.row_count = 1;
    assert_true(nn_seed_value(nn_seed_of(&call, 0, 1)) != nn_seed_value(nn_seed_of(&call, 1, 1)));
}

// ------------------------------------------------------------------------------------------------
// models in tiles: losses and gradients near those of the plain plan, whose sums over rows have
// another order

typedef enum u_kind {
    U_GPT2,
    U_GPT2_BLOCKS,
    U_GPT2_GROUPS, // of heads
    U_BERT,
    U_BERT_BLOCKS,
    U_CNN,
    U_KINDS
} u_kind;

enum { U_BATCH = 8, U_TOKENS = 32, U_SIDE = 10, U_CLASSES = 211 };

/* How a model is computed. */
typedef struct u_way {
    u_kind kind;
    ms_dtype dtype;
    bool clips;
    uint32_t micro_count;
    bool by_plan;      // the smallest plan chooses the tiles
    int64_t tile_rows; // these are forced; both 0: none
    bool debug;
    bool half_gradients;
} u_way;

typedef struct u_net {
    ms_model *model;
    nn_net *net;
    u_way way;
    ms_tensor tokens, segments, targets, images, losses;
} u_net;

static void u_transformer(u_net *n) {
    nn_transformer_config shape = m_config(NN_OPERATORS, 0.2f);
    const bool blocks = n->way.kind == U_GPT2_BLOCKS || n->way.kind == U_BERT_BLOCKS;
    shape.granularity = blocks ? NN_BLOCKS : NN_OPERATORS;
    shape.head_groups = n->way.kind == U_GPT2_GROUPS ? shape.heads : 0;
    shape.layers = n->way.debug ? (int64_t)t_size(1, 2) : 2;
    shape.vocabulary = U_CLASSES;
    shape.context = U_TOKENS + 3;
    shape.channels = n->way.debug ? (int64_t)t_size(20, 40) : 40;
    shape.batch = n->way.debug ? 2 : U_BATCH;
    shape.sequence = n->way.debug ? 9 : U_TOKENS;
    const bool bert = n->way.kind == U_BERT || n->way.kind == U_BERT_BLOCKS;
    const nn_transformer t = bert ? nn_bert(n->net, &shape) : nn_gpt2(n->net, &shape);
    n->tokens = t.tokens;
    n->segments = t.segments;
    n->targets = t.targets;
    n->losses = t.losses;
}

/* All layers of images; the batch normalization parts the groups around it. */
static void u_cnn(u_net *n) {
    const ms_tensor none = {0};
    n->images = ms_input(n->model, "images", MS_DTYPE_F32, ms_shape4(U_BATCH, 3, U_SIDE, U_SIDE));
    n->targets = ms_input(n->model, "targets", MS_DTYPE_I32, ms_shape1(U_BATCH));
    ms_tensor x = nn_conv2d(n->net, "conv1", n->images, 6, 3, 1, 1);
    x = nn_relu(n->net, "relu1", x);
    x = nn_max_pool(n->net, "pool", x, 3, 2, 1);
    x = nn_conv2d_tied(n->net, "conv2", x,
                       nn_param(n->net, "conv2", ms_shape2(8, 6), NN_INIT_NORMAL, 0.5f), none, 1, 1,
                       0); // the normalization takes a bias away
    x = nn_batch_norm(n->net, "norm", x);
    x = nn_relu(n->net, "relu2", x);
    x = nn_conv2d(n->net, "conv3", x, 7, 3, 2, 1);
    const ms_tensor means = nn_average_pool(n->net, "means", x);
    const ms_tensor flat = nn_flatten(n->net, "flat", nn_dropout(n->net, "drop", x, 0.2f));
    x = nn_add(n->net, "sum", nn_linear(n->net, "fc1", means, U_CLASSES, 0.3f),
               nn_linear(n->net, "fc2", flat, U_CLASSES, 0.1f));
    n->losses = nn_cross_entropy(n->net, "loss", x, n->targets);
    ms_set_loss(n->model, n->losses);
}

static void u_start(u_net *n, const u_way *way) {
    ms_config config = t_device_config();
    ms_optimizer_desc sgd;
    const bool half = way->dtype != MS_DTYPE_F32;
    memset(&sgd, 0, sizeof sgd);
    sgd.kind = MS_OPTIMIZER_SGD;
    sgd.learning_rate = 0.05f;
    sgd.grad_clip_norm = way->clips ? 0.2f : 0.0f;
    config.early_update = MS_SWITCH_OFF;
    config.tiling = way->by_plan ? MS_SWITCH_ON : MS_SWITCH_OFF;
    config.force_optimize = way->by_plan;
    config.accumulation_steps = way->micro_count;
    config.mixed_dtype = way->dtype;
    config.mixed_precision = MS_SWITCH_OFF;
    config.loss_scaling.initial = 1024.0f; // so that gradients in F16 are no subnormal numbers
    config.debug = way->debug;
    config.seed = 11;
    memset(n, 0, sizeof *n);
    n->way = *way;
    assert_int_equal(ms_create(&config, &n->model), MS_RESULT_OK);
    n->net = nn_create_on(n->model, t_nn_device());
    assert_non_null(n->net);
    nn_force_half(n->net, half);
    nn_half_gradients(n->net, way->half_gradients);
    nn_force_tiles(n->net, way->tile_rows);
    if (way->kind == U_CNN) {
        u_cnn(n);
    } else {
        u_transformer(n);
    }
    ms_add_output(n->model, n->losses);
    ms_set_optimizer(n->model, &sgd);
    t_ok(n->model, ms_wrap(n->model));
    t_ok(n->model, nn_init(n->net, 3));
    assert_int_equal(c_is_in_tiles(n->model), way->by_plan || way->tile_rows > 0);
    assert_int_equal(t_is_half(n->model), half);
}

static void u_stop(u_net *n) {
    ms_destroy(n->model);
    nn_destroy(n->net);
}

static void u_write_ids(u_net *n, ms_tensor tensor, t_rng *rng, uint32_t below, bool ignores) {
    const uint64_t count = tensor.id != 0 ? ms_tensor_count(n->model, tensor) : 0;
    int32_t ids[U_BATCH * U_TOKENS];
    for (uint64_t i = 0; i < count; i++) {
        ids[i] = ignores && i % 7 == 2 ? -1 : (int32_t)t_below(rng, below);
    }
    if (tensor.id != 0) {
        t_ok(n->model, ms_write(n->model, tensor, ids));
    }
}

static void u_write(u_net *n, uint64_t seed) {
    t_rng rng = t_seed(seed);
    u_write_ids(n, n->tokens, &rng, U_CLASSES, false);
    u_write_ids(n, n->segments, &rng, 2, false);
    u_write_ids(n, n->targets, &rng, U_CLASSES, true);
    if (n->images.id != 0) {
        float values[U_BATCH * 3 * U_SIDE * U_SIDE];
        t_fill(&rng, values, sizeof values / sizeof values[0], 1.0f);
        t_ok(n->model, ms_write(n->model, n->images, values));
    }
}

/* Of sums of a few hundred terms in another order; in 16 bits, where their last bits decide how
   values are rounded, a few roundings, and one more for each tile that adds to a gradient. Of
   images, another pixel may then be the largest of a patch. */
static void u_near(u_net *a, u_net *b, ms_tensor of_a, ms_tensor of_b, const char *name) {
    const double roundings =
        (a->way.half_gradients ? 16.0 : 8.0) * (a->way.kind == U_CNN ? 4.0 : 1.0);
    const double share = a->way.dtype == MS_DTYPE_F32    ? 2e-5
                         : a->way.dtype == MS_DTYPE_BF16 ? roundings * ldexp(1.0, -8)
                                                         : roundings * ldexp(1.0, -11);
    const uint64_t count = ms_tensor_count(a->model, of_a);
    float *values_a = c_floats(count);
    float *values_b = c_floats(count);
    double largest = 0.0;
    t_ok(a->model, ms_read(a->model, of_a, values_a));
    t_ok(b->model, ms_read(b->model, of_b, values_b));
    for (uint64_t i = 0; i < count; i++) {
        largest = fabs((double)values_a[i]) > largest ? fabs((double)values_a[i]) : largest;
    }
    for (uint64_t i = 0; i < count; i++) {
        if (!(fabs((double)values_a[i] - (double)values_b[i]) <= share * largest + 1e-9)) {
            print_error("model %d in %s: %s[%d] is %.9g, in tiles %.9g; the largest is %.9g\n",
                        (int)a->way.kind, ms_dtype_name(a->way.dtype), name, (int)i,
                        (double)values_a[i], (double)values_b[i], largest);
            fail();
        }
    }
    free(values_a);
    free(values_b);
}

static void u_near_params(u_net *a, u_net *b, bool gradients) {
    for (int64_t i = 0; i < nn_param_count(a->net); i++) {
        const nn_param_info *p = nn_param_at(a->net, i), *q = nn_param_at(b->net, i);
        u_near(a, b, gradients ? ms_gradient(a->model, p->tensor) : p->tensor,
               gradients ? ms_gradient(b->model, q->tensor) : q->tensor, p->name);
    }
    for (int64_t i = 0; i < nn_buffer_count(a->net); i++) {
        const nn_param_info *p = nn_buffer_at(a->net, i);
        u_near(a, b, p->tensor, nn_buffer_at(b->net, i)->tensor, p->name);
    }
}

/* ms_verify finds the other order of sums, and roundings to 16 bits, and no more. */
static void u_verify(u_net *n) {
    ms_verify_report r;
    const bool half = n->way.dtype != MS_DTYPE_F32;
    t_ok(n->model, ms_verify(n->model, NULL, NULL, &r));
    assert_in_range(r.differ_count, 1, r.tensor_count);
    assert_true(r.absolute < (half ? 0.1 : 1e-5));
    assert_true(fabs(r.plain_loss - r.wrapped_loss) <= (half ? 0.02 : 1e-6) * fabs(r.plain_loss));
}

/* One or two steps, each with an eval. */
static void u_check(u_way way) {
    u_net nets[2];
    u_way plain = way;
    plain.by_plan = false;
    plain.tile_rows = 0;
    u_start(&nets[0], &plain);
    u_start(&nets[1], &way);
    const uint64_t steps = way.debug ? t_size(1, 2) : 2;
    for (uint64_t step = 0; step < steps; step++) {
        for (uint64_t micro = 0; micro < way.micro_count; micro++) {
            double loss[2];
            for (int k = 0; k < 2; k++) {
                u_write(&nets[k], step * 8 + micro + 1);
                t_ok(nets[k].model, ms_forward(nets[k].model, &loss[k]));
            }
            u_near(&nets[0], &nets[1], nets[0].losses, nets[1].losses, "losses");
            assert_true(fabs(loss[0] - loss[1]) <= 0.01 * fabs(loss[0]));
            for (int k = 0; k < 2; k++) {
                t_ok(nets[k].model, ms_backward(nets[k].model));
            }
        }
        u_near_params(&nets[0], &nets[1], true);
        for (int k = 0; k < 2; k++) {
            t_ok(nets[k].model, ms_update(nets[k].model));
        }
        u_near_params(&nets[0], &nets[1], false);
        for (int k = 0; k < 2; k++) {
            u_write(&nets[k], 100 + step);
            t_ok(nets[k].model, ms_eval(nets[k].model, NULL));
        }
        u_near(&nets[0], &nets[1], nets[0].losses, nets[1].losses, "losses of eval");
    }
    u_verify(&nets[1]);
    u_stop(&nets[0]);
    u_stop(&nets[1]);
}

static u_way u_way_of(u_kind kind, ms_dtype dtype, bool by_plan, int64_t tile_rows) {
    u_way way;
    memset(&way, 0, sizeof way);
    way.kind = kind;
    way.dtype = dtype;
    way.by_plan = by_plan;
    way.tile_rows = tile_rows;
    way.micro_count = 1;
    return way;
}

/* By the smallest plan, and forced; with clipping and accumulation too. */
static void models_in_tiles_are_near_the_plain_plan(void **state) {
    (void)state;
    for (int kind = 0; kind < U_KINDS; kind++) {
        for (uint64_t k = 0; k < 8; k += t_stride(7)) {
            const uint64_t i = k ^ (uint64_t)(kind & 1);
            const int64_t rows = kind == U_CNN ? 3 : 37;
            const bool by_plan = (i & 1) == 0;
            u_way way = u_way_of((u_kind)kind, MS_DTYPE_F32, by_plan, by_plan ? 0 : rows);
            way.clips = (i & 4) != 0;
            way.micro_count = (i & 2) != 0 ? 3 : 1;
            u_check(way);
        }
    }
}

static void models_in_tiles_are_near_the_plain_plan_in_16_bits(void **state) {
    (void)state;
    for (uint64_t i = 0; i < 4 * U_KINDS; i += t_stride(3)) {
        const u_kind kind = (u_kind)(i % U_KINDS);
        u_way way = u_way_of(kind, i / U_KINDS % 2 != 0 ? MS_DTYPE_F16 : MS_DTYPE_BF16, false,
                             kind == U_CNN ? 3 : 37);
        way.half_gradients = i / U_KINDS >= 2;
        way.micro_count = way.half_gradients ? 2 : 1;
        u_check(way);
    }
}

/* Debug mode finds nothing to say about layers in tiles. */
static void debug_mode_passes_models_in_tiles(void **state) {
    (void)state;
    for (int kind = 0; kind < U_KINDS; kind++) {
        u_way way = u_way_of((u_kind)kind, MS_DTYPE_F32, false, kind == U_CNN ? 3 : 7);
        way.debug = true;
        way.micro_count = 2;
        u_check(way);
        way.dtype = MS_DTYPE_BF16;
        u_check(way);
    }
}

// ------------------------------------------------------------------------------------------------
// other sizes: a model that is reshaped against a model made for that size

static ms_optimizer_desc z_optimizer(void) {
    ms_optimizer_desc sgd;
    memset(&sgd, 0, sizeof sgd);
    sgd.kind = MS_OPTIMIZER_SGD;
    sgd.learning_rate = 0.05f;
    sgd.momentum = 0.9f;
    return sgd;
}

/* With the smallest budget or with all the memory. */
static void z_start(m_net *n, bool bert, const nn_transformer_config *shape, bool smallest) {
    const ms_optimizer_desc sgd = z_optimizer();
    ms_config config = m_backend();
    uint64_t budget = 0;
    memset(n, 0, sizeof *n);
    n->config = *shape;
    assert_int_equal(ms_create(&config, &n->model), MS_RESULT_OK);
    n->net = nn_create_on(n->model, t_nn_device());
    assert_non_null(n->net);
    n->t = bert ? nn_bert(n->net, shape) : nn_gpt2(n->net, shape);
    ms_add_output(n->model, n->t.losses);
    ms_set_optimizer(n->model, &sgd);
    if (smallest) {
        t_ok(n->model, ms_smallest_budget(n->model, &budget));
        ms_set_budget(n->model, budget);
    }
    t_ok(n->model, ms_wrap(n->model));
    t_ok(n->model, nn_init(n->net, 3));
}

static void z_copy_tensor(m_net *to, m_net *from, ms_tensor of_to, ms_tensor of_from) {
    float *values = c_floats(ms_tensor_count(from->model, of_from));
    t_ok(from->model, ms_read(from->model, of_from, values));
    t_ok(to->model, ms_write(to->model, of_to, values));
    free(values);
}

/* Params and their momentum. */
static void z_copy(m_net *to, m_net *from) {
    for (int64_t i = 0; i < nn_param_count(from->net); i++) {
        const ms_tensor of_to = nn_param_at(to->net, i)->tensor;
        const ms_tensor of_from = nn_param_at(from->net, i)->tensor;
        z_copy_tensor(to, from, of_to, of_from);
        z_copy_tensor(to, from, ms_optimizer_state(to->model, of_to, 0),
                      ms_optimizer_state(from->model, of_from, 0));
    }
}

static void z_same(m_net *a, m_net *b) {
    m_same(a, b, a->t.losses, b->t.losses);
    for (int64_t i = 0; i < nn_param_count(a->net); i++) {
        const ms_tensor of_a = nn_param_at(a->net, i)->tensor;
        const ms_tensor of_b = nn_param_at(b->net, i)->tensor;
        m_same(a, b, of_a, of_b);
        m_same(a, b, ms_optimizer_state(a->model, of_a, 0), ms_optimizer_state(b->model, of_b, 0));
    }
}

/* One step of both at this size, from the same values: the same bits. */
static void z_step(m_net *n, bool bert, int64_t batch, int64_t sequence) {
    const int64_t both[2] = {batch, sequence};
    nn_transformer_config shape = n->config;
    const bool has_batch = shape.largest_batch != 0;
    const bool has_sequence = shape.largest_sequence != 0;
    m_net fresh;
    shape.batch = has_batch ? batch : shape.batch;
    shape.sequence = has_sequence ? sequence : shape.sequence;
    n->config = shape;
    if (has_batch || has_sequence) {
        t_ok(n->model, ms_reshape(n->model, has_batch ? both : both + 1));
    }
    shape.largest_batch = 0;
    shape.largest_sequence = 0;
    z_start(&fresh, bert, &shape, false);
    z_copy(&fresh, n);
    m_write_batch(n, false);
    m_write_batch(&fresh, false);
    t_ok(n->model, ms_step(n->model, NULL));
    t_ok(fresh.model, ms_step(fresh.model, NULL));
    z_same(n, &fresh);
    t_ok(n->model, ms_eval(n->model, NULL));
    t_ok(fresh.model, ms_eval(fresh.model, NULL));
    m_same(n, &fresh, n->t.losses, fresh.t.losses);
    m_stop(&fresh);
}

static void z_check(bool bert, nn_transformer_config shape, bool smallest) {
    const int64_t sizes[][2] = {{2, 17}, {1, 5}, {4, 70}, {3, 1}, {2, 17}, {4, 66}};
    m_net n;
    z_start(&n, bert, &shape, smallest);
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        z_step(&n, bert, sizes[i][0], sizes[i][1]);
    }
    if (shape.largest_batch != 0) {
        const int64_t above[2] = {5, 17};
        const int64_t below[2] = {0, 17};
        t_error(n.model, ms_reshape(n.model, above), MS_RESULT_INVALID);
        t_error(n.model, ms_reshape(n.model, below), MS_RESULT_INVALID);
        z_step(&n, bert, 3, 9);
    }
    m_stop(&n);
}

/* Axes: batch, sequence, both. Sequences of more and of less than one band of attention. */
static void a_reshaped_model_gives_the_bits_of_a_fresh_one(void **state) {
    (void)state;
    for (int i = 0; i < 12; i++) {
        const int axes = 1 + i / 4;
        nn_transformer_config shape = m_config((i & 2) != 0 ? NN_BLOCKS : NN_OPERATORS, 0.0f);
        shape.layers = 1;
        shape.channels = 20;
        shape.context = 72;
        shape.save_scores = axes != 2;
        shape.largest_batch = (axes & 1) != 0 ? 4 : 0;
        shape.largest_sequence = (axes & 2) != 0 ? 70 : 0;
        z_check((i & 1) != 0, shape, (i & 1) == (i >> 1 & 1) || axes == 3);
    }
}

/* Large enough that every loop of nn_cpu.h is worth a second thread. */
static void threads_change_no_bit_of_transformers(void **state) {
    (void)state;
#ifndef _OPENMP
    if (t_on_cpu) {
        skip(); // a GPU has to give the same bits again
    }
#endif
#ifdef __FAST_MATH__
    if (t_on_cpu) {
        skip(); // a column is rounded as part of a vector or as a remainder, as threads share them out
    }
#endif
    for (int i = 0; i < 4; i++) {
        const bool bert = (i & 1) != 0;
        nn_transformer_config config = m_config((i & 2) != 0 ? NN_BLOCKS : NN_OPERATORS, 0.2f);
        config.layers = 1;
        config.vocabulary = 67;
        config.context = 32;
        config.batch = 8;
        config.sequence = 32;
        assert_true(config.batch * config.sequence * config.vocabulary >= NN_WORTH);
        m_net net[2];
        for (int threads = 1; threads <= 2; threads++) {
            t_threads(threads);
            m_net *n = &net[threads - 1];
            m_start(n, bert, &config);
            t_ok(n->model, ms_step(n->model, NULL));
            t_ok(n->model, ms_forward(n->model, NULL));
            t_ok(n->model, ms_backward(n->model));
        }
        m_same_nets(&net[0], &net[1]);
        m_stop(&net[0]);
        m_stop(&net[1]);
    }
}

#ifdef T_CUDA
/* A recorded step draws other masks each time that it runs: those of a step without recording. */
static void recorded_steps_draw_the_masks_of_plain_ones(void **state) {
    (void)state;
    for (int i = 0; i < 4; i++) {
        const nn_transformer_config config =
            m_config((i & 2) != 0 ? NN_BLOCKS : NN_OPERATORS, 0.2f);
        double loss[2] = {0.0, 0.0};
        m_net plain;
        m_net recorded;
        m_start(&plain, (i & 1) != 0, &config);
        m_records = true;
        m_start(&recorded, (i & 1) != 0, &config);
        m_records = false;
        ms_set_learning_rate(plain.model, 0.0f);
        ms_set_learning_rate(recorded.model, 0.0f);
        for (int step = 0; step < 4; step++) {
            const double before = loss[0];
            t_ok(plain.model, ms_step(plain.model, &loss[0]));
            t_ok(recorded.model, ms_step(recorded.model, &loss[1]));
            assert_memory_equal(&loss[0], &loss[1], sizeof loss[0]);
            assert_true(fabs(loss[0] - before) > 1e-6);
        }
        m_stop(&plain);
        m_stop(&recorded);
    }
}
#endif

/* A step in which no row counts leaves weight decay alone to move params: those of rank 2. */
static void weight_decay_moves_matrices_alone(void **state) {
    (void)state;
    const nn_transformer_config config = m_config(NN_BLOCKS, 0.0f);
    m_net moved;
    m_net still;
    m_start(&moved, false, &config);
    m_start(&still, false, &config);
    m_write_batch(&moved, true);
    t_ok(moved.model, ms_step(moved.model, NULL));
    for (int64_t i = 0; i < nn_param_count(moved.net); i++) {
        const nn_param_info *info = nn_param_at(moved.net, i);
        const uint64_t count = ms_shape_count(&info->shape);
        float *after = c_floats(count);
        float *before = c_floats(count);
        t_ok(moved.model, ms_read(moved.model, info->tensor, after));
        t_ok(still.model, ms_read(still.model, nn_param_at(still.net, i)->tensor, before));
        for (uint64_t k = 0; k < count; k++) {
            const float share = info->shape.rank == 1 ? 1.0f : 1.0f - 0.001f * 0.1f;
            assert_true(fabsf(after[k] - share * before[k]) <= 1e-6f * fabsf(before[k]));
        }
        free(after);
        free(before);
    }
    m_stop(&moved);
    m_stop(&still);
}

static void m_moments(m_net *n, const char *name, double *mean, double *deviation) {
    const nn_param_info *info = nn_find_param(n->net, name);
    assert_non_null(info);
    const uint64_t count = ms_shape_count(&info->shape);
    float *values = c_floats(count);
    t_ok(n->model, ms_read(n->model, info->tensor, values));
    *mean = 0.0;
    *deviation = 0.0;
    for (uint64_t i = 0; i < count; i++) {
        *mean += (double)values[i] / (double)count;
        *deviation += (double)values[i] * (double)values[i] / (double)count;
    }
    *deviation = sqrt(*deviation - *mean * *mean);
    free(values);
}

static void initial_values_have_their_mean_and_deviation(void **state) {
    (void)state;
    const struct {
        const char *name;
        double mean, deviation;
    } expected[] = {{"h0.fc.weight", 0.0, 0.02},
                    {"h1.fcproj.weight", 0.0, 0.01},
                    {"h0.proj.weight", 0.0, 0.01},
                    {"h1.ln2.weight", 1.0, 0.0},
                    {"h1.fc.bias", 0.0, 0.0}};
    const nn_transformer_config config = m_config(NN_OPERATORS, 0.0f);
    m_net n;
    m_start(&n, false, &config);
    for (size_t i = 0; i < sizeof expected / sizeof expected[0]; i++) {
        double mean = 0.0;
        double deviation = 0.0;
        m_moments(&n, expected[i].name, &mean, &deviation);
        assert_true(fabs(mean - expected[i].mean) <= 0.05 * expected[i].deviation + 1e-7);
        assert_true(fabs(deviation - expected[i].deviation) <= 0.03 * expected[i].deviation + 1e-7);
    }
    assert_null(nn_find_param(n.net, "h2.fc.weight"));
    assert_null(nn_param_at(n.net, nn_param_count(n.net)));
    m_stop(&n);
}

/* The published numbers of params; BERT with its masked-language-model head, without pooler. */
static void presets_have_the_published_number_of_params(void **state) {
    (void)state;
    const struct {
        const char *name;
        uint64_t params;
    } presets[] = {{"gpt2-124M", 124439808},   {"gpt2-355M", 354823168}, {"gpt2-774M", 774030080},
                   {"gpt2-1558M", 1557611200}, {"bert-base", 109514298}, {"bert-large", 335174458}};
    for (size_t i = 0; i < sizeof presets / sizeof presets[0]; i++) {
        nn_transformer_config shape;
        ms_memory_report report;
        memset(&report, 0, sizeof report);
        ms_config config = t_device_config();
        ms_model *model = NULL;
        config.dry_run = true;
        memset(&shape, 0, sizeof shape);
        assert_true(nn_preset(presets[i].name, &shape));
        shape.batch = 1;
        shape.sequence = 8;
        shape.granularity = NN_BLOCKS;
        assert_int_equal(ms_create(&config, &model), MS_RESULT_OK);
        nn_net *net = nn_create_on(model, t_nn_device());
        assert_non_null(net);
        if (presets[i].name[0] == 'b') {
            nn_bert(net, &shape);
        } else {
            nn_gpt2(net, &shape);
        }
        t_ok(model, ms_wrap(model));
        t_report(model, &report);
        assert_int_equal(report.param_count, presets[i].params);
        ms_destroy(model);
        nn_destroy(net);
    }
    nn_transformer_config shape;
    memset(&shape, 0, sizeof shape);
    assert_false(nn_preset("gpt2", &shape));
    assert_int_equal(shape.layers, 0);
}

static bool f_is_frozen(const nn_param_info *p) {
    static const char *const names[] = {"wpe", "h0.fc.bias", "h1.proj.weight"};
    bool is_one = false;
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        is_one |= strcmp(p->name, names[i]) == 0;
    }
    return is_one;
}

/* Neither a gradient nor weight decay moves them. All other params have the gradients that they have
   where nothing is frozen, and move as they do there. */
static void frozen_params_stand_still_and_take_no_memory(void **state) {
    (void)state;
    const nn_transformer_config config = m_config(NN_OPERATORS, 0.0f);
    m_net all, n;
    ms_memory_report of_all, of_some;
    uint64_t bytes = 0;
    m_start(&all, false, &config);
    m_start(&n, false, &config);
    for (int64_t i = 0; i < nn_param_count(n.net); i++) {
        const nn_param_info *p = nn_param_at(n.net, i);
        ms_set_frozen(n.model, p->tensor, f_is_frozen(p));
        bytes += f_is_frozen(p) ? msi_align(ms_tensor_bytes(n.model, p->tensor)) : 0;
    }
    t_ok(n.model, ms_wrap(n.model));
    t_report(all.model, &of_all);
    t_report(n.model, &of_some);
    assert_true(of_some.peak_bytes[MS_CATEGORY_OPTIMIZER] + 2 * bytes ==
                of_all.peak_bytes[MS_CATEGORY_OPTIMIZER]);
    assert_true(of_some.plain_bytes + 2 * bytes <= of_all.plain_bytes);
    assert_true(of_some.peak_bytes[MS_CATEGORY_GRADIENT] < of_all.peak_bytes[MS_CATEGORY_GRADIENT]);
    for (int k = 0; k < 2; k++) {
        m_net *one = k == 0 ? &all : &n;
        t_ok(one->model, ms_forward(one->model, NULL));
        t_ok(one->model, ms_backward(one->model));
    }
    for (int64_t i = 0; i < nn_param_count(n.net); i++) {
        const nn_param_info *p = nn_param_at(n.net, i);
        const ms_tensor of_p = nn_param_at(all.net, i)->tensor;
        const ms_tensor gradient = ms_gradient(n.model, p->tensor);
        if (f_is_frozen(p)) {
            float *values = c_floats(ms_tensor_count(n.model, p->tensor));
            assert_true(ms_read(n.model, gradient, values) != MS_RESULT_OK);
            free(values);
        } else {
            m_same(&n, &all, gradient, ms_gradient(all.model, of_p));
        }
    }
    t_ok(all.model, ms_update(all.model));
    t_ok(n.model, ms_update(n.model));
    m_net first; // values
    m_start(&first, false, &config);
    for (int64_t i = 0; i < nn_param_count(n.net); i++) {
        const nn_param_info *p = nn_param_at(n.net, i);
        const ms_tensor of_p = nn_param_at(all.net, i)->tensor;
        const ms_tensor of_first = nn_param_at(first.net, i)->tensor;
        m_same(&n, f_is_frozen(p) ? &first : &all, p->tensor, f_is_frozen(p) ? of_first : of_p);
        assert_false(m_equal(&all, &first, of_p, of_first)); // it would have moved
    }
    m_stop(&first);
    m_stop(&n);
    m_stop(&all);
}

enum { L_ROWS = 24, L_COLUMNS = 64, L_LENT = 8 };

/* A net whose input and params are in memory of the trainer's own, if `lent`: 4 bytes beyond what is
   aligned to anything wider. */
typedef struct l_net {
    ms_model *model;
    nn_net *net;
    ms_tensor x, losses;
    ms_backend backend;
    uint8_t *memory[L_LENT];
    ms_tensor lent[L_LENT];
    int count;
} l_net;

static const ms_allocator l_malloc = {NULL, NULL, NULL, NULL};

enum { L_BYTES = sizeof(float) * (L_COLUMNS * L_COLUMNS + 1) };

static void l_lend(l_net *n, ms_tensor tensor) {
    void *memory = NULL;
    assert_true(n->count < L_LENT);
    assert_int_equal(n->backend.memory_alloc(n->backend.user, &l_malloc, L_BYTES, &memory), 0);
    n->memory[n->count] = (uint8_t *)memory;
    n->lent[n->count] = tensor;
    t_ok(n->model, ms_borrow(n->model, tensor, n->memory[n->count++] + sizeof(float)));
}

static void l_start(l_net *n, bool lent) {
    float data[L_ROWS * L_COLUMNS];
    int32_t ids[L_ROWS];
    t_rng rng = t_seed(4);
    const ms_config config = m_backend();
    memset(n, 0, sizeof *n);
    n->backend = config.backend;
    assert_int_equal(ms_create(&config, &n->model), MS_RESULT_OK);
    n->net = nn_create_on(n->model, t_nn_device());
    n->x = ms_input(n->model, "x", MS_DTYPE_F32, ms_shape2(L_ROWS, L_COLUMNS));
    const ms_tensor targets = ms_input(n->model, "targets", MS_DTYPE_I32, ms_shape1(L_ROWS));
    ms_tensor h = nn_layernorm(n->net, "norm", n->x);
    h = nn_gelu(n->net, "gelu", nn_linear(n->net, "up", h, L_COLUMNS, 0.2f));
    h = nn_add(n->net, "add", h, nn_linear(n->net, "by", n->x, L_COLUMNS, 0.2f));
    n->losses = nn_cross_entropy(n->net, "loss", h, targets);
    ms_set_loss(n->model, n->losses);
    ms_add_output(n->model, n->losses);
    if (lent) {
        l_lend(n, n->x);
        for (int64_t i = 0; i < nn_param_count(n->net); i++) {
            l_lend(n, nn_param_at(n->net, i)->tensor);
        }
    }
    t_ok(n->model, ms_wrap(n->model));
    t_ok(n->model, nn_init(n->net, 3));
    t_fill(&rng, data, L_ROWS * L_COLUMNS, 1.0f);
    for (uint32_t i = 0; i < L_ROWS; i++) {
        ids[i] = (int32_t)t_below(&rng, L_COLUMNS);
    }
    t_ok(n->model, ms_write(n->model, n->x, data));
    t_ok(n->model, ms_write(n->model, targets, ids));
    t_ok(n->model, ms_forward(n->model, NULL));
    t_ok(n->model, ms_backward(n->model));
}

static void l_near(l_net *a, l_net *b, ms_tensor of_a, ms_tensor of_b) {
    const uint64_t count = ms_tensor_count(a->model, of_a);
    float *values_a = c_floats(count), *values_b = c_floats(count);
    t_ok(a->model, ms_read(a->model, of_a, values_a));
    t_ok(b->model, ms_read(b->model, of_b, values_b));
    for (uint64_t i = 0; i < count; i++) {
        assert_true(fabsf(values_a[i] - values_b[i]) <= 1e-5f * (1.0f + fabsf(values_b[i])));
    }
    free(values_a);
    free(values_b);
}

static void lent_memory_is_used_where_it_lies(void **state) {
    (void)state;
    l_net own, lent;
    l_start(&own, false);
    l_start(&lent, true);
    assert_int_equal(lent.count, 7);
    for (int i = 0; i < lent.count; i++) { // used where it lies
        assert_ptr_equal(ms_data(lent.model, lent.lent[i]), lent.memory[i] + sizeof(float));
    }
    l_near(&own, &lent, own.losses, lent.losses);
    for (int64_t i = 0; i < nn_param_count(own.net); i++) {
        l_near(&own, &lent, ms_gradient(own.model, nn_param_at(own.net, i)->tensor),
               ms_gradient(lent.model, nn_param_at(lent.net, i)->tensor));
    }
    ms_destroy(own.model);
    nn_destroy(own.net);
    ms_destroy(lent.model);
    nn_destroy(lent.net);
    for (int i = 0; i < lent.count; i++) {
        lent.backend.memory_release(lent.backend.user, &l_malloc, lent.memory[i], L_BYTES);
    }
}

/* Makes one mistake with images, and returns what the error says. */
static const char *m_refused_images(ms_model *model, nn_net *net, int mistake) {
    const ms_tensor none = {0};
    const ms_axis axis = nn_axis(net, "width", 6, 12);
    const ms_shape shape = ms_shape4(2, 3, 5, 6);
    const ms_tensor x = ms_input(model, "x", MS_DTYPE_F32, shape);
    const ms_tensor along = ms_input(model, "along", MS_DTYPE_F32, ms_along(shape, 3, axis));
    const ms_tensor row = ms_input(model, "row", MS_DTYPE_F32, ms_shape1(6));
    const ms_tensor weight = nn_param(net, "w", ms_shape2(2, 12), NN_INIT_ZEROS, 0.0f);
    switch (mistake) {
    case 0:
        nn_conv2d_tied(net, "bad", x, weight, none, 3, 1, 0);
        return "does not fit the images";
    case 1:
        nn_conv2d(net, "bad", x, 4, 6, 1, 0);
        return "larger than the image";
    case 2:
        nn_conv2d(net, "bad", x, 4, 3, 0, 0);
        return "stride must be at least 1";
    case 3:
        nn_max_pool(net, "bad", along, 2, 2, 0);
        return "only B along an axis";
    case 4:
        nn_max_pool(net, "bad", x, 3, 1, 2);
        return "padding is above kernel / 2";
    case 5:
        nn_batch_norm(net, "bad", row);
        return "must be (B, C, ...)";
    case 6:
        nn_average_pool(net, "bad", row);
        return "images must be (B, C, height, width)";
    case 7:
        nn_flatten(net, "bad", row);
        return "must be (B, ...)";
    default: { // enough now, too few for the largest size
        const ms_tensor table = nn_param(net, "table", ms_shape2(8, 4), NN_INIT_ZEROS, 0.0f);
        const ms_shape shape_of_ids = ms_along(ms_shape2(2, 6), 1, axis);
        const ms_tensor ids = ms_input(model, "ids", MS_DTYPE_I32, shape_of_ids);
        nn_embedding(net, "bad", ids, table, table, none, none);
        return "fewer positions";
    }
    }
}

/* Makes one mistake with what models of the family of Llama have, and returns what the error says. */
static const char *m_refused_llama_layers(ms_model *model, nn_net *net, int mistake) {
    const ms_tensor x = ms_input(model, "qkv", MS_DTYPE_F32, ms_shape3(2, 5, 32));
    const ms_tensor other = ms_input(model, "other", MS_DTYPE_F32, ms_shape3(2, 5, 31));
    const ms_tensor row = nn_param(net, "row", ms_shape1(4), NN_INIT_ONES, 0.0f);
    const ms_tensor rows = nn_param(net, "rows", ms_shape2(2, 4), NN_INIT_ONES, 0.0f);
    nn_head_norm_desc norm;
    nn_rotary_desc turn;
    nn_heads_desc heads;
    memset(&norm, 0, sizeof norm);
    memset(&turn, 0, sizeof turn);
    memset(&heads, 0, sizeof heads);
    norm.heads = turn.heads = heads.heads = 4;
    norm.kv_heads = heads.kv_heads = 2;
    norm.queries = norm.keys = row;
    turn.size = 4;
    heads.causal = true;
    switch (mistake) {
    case 0:
        nn_rmsnorm_tied(net, "bad", x, row, 1e-5f, false);
        return "does not fit";
    case 1:
        nn_rmsnorm(net, "bad", x, NAN, false);
        return "epsilon must be";
    case 2:
        norm.keys = rows;
        nn_head_norm(net, "bad", x, &norm);
        return "the weights (size)";
    case 3:
        norm.heads = norm.kv_heads = INT64_MAX / 2;
        nn_head_norm(net, "bad", x, &norm);
        return "(heads + 2 * kv_heads) * size";
    case 4:
        norm.epsilon = -1.0f;
        nn_head_norm(net, "bad", x, &norm);
        return "epsilon must be";
    case 5:
        turn.size = 5;
        nn_rotary(net, "bad", x, &turn);
        return "of a head even";
    case 6:
        turn.heads = INT64_MAX / 2;
        nn_rotary(net, "bad", x, &turn);
        return "at least heads * size";
    case 7:
        turn.theta = NAN;
        nn_rotary(net, "bad", x, &turn);
        return "theta must be";
    case 8:
        turn.scaling.kind = NN_ROTARY_LLAMA3;
        nn_rotary(net, "bad", x, &turn);
        return "high above low";
    case 9:
        nn_swiglu(net, "bad", x, other);
        return "gate and up differ";
    case 10:
        nn_softcap(net, "bad", x, INFINITY);
        return "cap must be above 0";
    case 11:
        heads.kv_heads = 3;
        nn_grouped_attention(net, "bad", x, &heads);
        return "a multiple of kv_heads";
    case 12:
        heads.heads = heads.kv_heads = INT64_MAX / 2;
        nn_grouped_attention(net, "bad", x, &heads);
        return "a multiple of kv_heads";
    case 13:
        heads.cap = NAN;
        nn_grouped_attention(net, "bad", x, &heads);
        return "cap and scale are at least 0";
    default:
        heads.causal = false;
        heads.window = 3;
        nn_grouped_attention(net, "bad", x, &heads);
        return "a window is for causal attention";
    }
}

/* What goes wrong at registration comes back from ms_wrap, in words. */
static void wrong_layers_are_refused_in_words(void **state) {
    (void)state;
    for (int i = 0; i < 30; i++) {
        ms_config config = t_device_config();
        ms_model *model = NULL;
        assert_int_equal(ms_create(&config, &model), MS_RESULT_OK);
        nn_net *net = nn_create_on(model, t_nn_device());
        assert_non_null(net);
        const ms_tensor none = {0};
        const ms_tensor ids = ms_input(model, "ids", MS_DTYPE_I32, ms_shape2(2, 3));
        const ms_tensor x = ms_input(model, "x", MS_DTYPE_F32, ms_shape3(2, 3, 30));
        const ms_tensor table = nn_param(net, "table", ms_shape2(2, 31), NN_INIT_ZEROS, 0.0f);
        const ms_tensor odd = ms_input(model, "odd", MS_DTYPE_F32, ms_shape2(3, 31));
        const char *text = "";
        switch (i) {
        case 0:
            nn_attention(net, "bad", x, 4, false, false);
            text = "3 * heads * size";
            break;
        case 1:
            nn_linear_tied(net, "bad", x, table, none);
            text = "does not fit";
            break;
        case 2:
            nn_embedding(net, "bad", ids, table, table, none, none);
            text = "fewer positions";
            break;
        case 3:
            nn_add(net, "bad", x, odd);
            text = "sizes differ";
            break;
        case 4:
            nn_dropout(net, "bad", x, 1.0f);
            text = "below 1";
            break;
        case 5:
            nn_cross_entropy(net, "bad", odd, ids);
            text = "one target per row";
            break;
        default:
            text = i < 15 ? m_refused_images(model, net, i - 6)
                          : m_refused_llama_layers(model, net, i - 15);
            break;
        }
        t_error(model, ms_wrap(model), MS_RESULT_INVALID);
        t_text_has(ms_last_error(model), text);
        ms_destroy(model);
        nn_destroy(net);
    }
    nn_destroy(NULL);
}

static void wrong_transformers_are_refused_in_words(void **state) {
    static const struct {
        nn_granularity granularity;
        int64_t head_groups, adapter_rank;
        const char *text;
    } cases[] = {
        {NN_OPERATORS, 2, 0, "multiple of head_groups"}, // of 5 heads
        {NN_OPERATORS, -1, 0, "multiple of head_groups"},
        {NN_OPERATORS, 25, 0, "multiple of head_groups"},
        {NN_BLOCKS, 5, 0, "groups of heads"},
        {NN_BLOCKS, 0, 2, "adapters"},
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        nn_transformer_config shape = m_config(cases[i].granularity, 0.0f);
        ms_config config = t_device_config();
        ms_model *model = NULL;
        assert_int_equal(ms_create(&config, &model), MS_RESULT_OK);
        nn_net *net = nn_create_on(model, t_nn_device());
        assert_non_null(net);
        shape.head_groups = cases[i].head_groups;
        shape.adapter_rank = cases[i].adapter_rank;
        (void)nn_gpt2(net, &shape);
        t_error(model, ms_wrap(model), MS_RESULT_INVALID);
        t_text_has(ms_last_error(model), cases[i].text);
        ms_destroy(model);
        nn_destroy(net);
    }
}

static void m_refuse_llama(const nn_llama_config *config, const char *text) {
    ms_config device = t_device_config();
    ms_model *model = NULL;
    assert_int_equal(ms_create(&device, &model), MS_RESULT_OK);
    nn_net *net = nn_create_on(model, t_nn_device());
    assert_non_null(net);
    (void)nn_llama(net, config);
    t_error(model, ms_wrap(model), MS_RESULT_INVALID);
    t_text_has(ms_last_error(model), text);
    ms_destroy(model);
    nn_destroy(net);
}

static void wrong_llamas_are_refused_in_words(void **state) {
    (void)state;
    nn_llama_config right, c;
    memset(&right, 0, sizeof right);
    right.vocabulary = 11;
    right.layers = right.batch = 1;
    right.channels = right.feed_forward = right.sequence = 8;
    right.heads = 2;
    c = right;
    c.heads = 3;
    m_refuse_llama(&c, "a multiple of heads");
    c.heads = 0;
    m_refuse_llama(&c, "a multiple of heads");
    c = right;
    c.window = -1;
    m_refuse_llama(&c, "below 0");
    c = right;
    c.logit_cap = NAN;
    m_refuse_llama(&c, "no number");
    c = right;
    c.query_scale = -1.0f;
    m_refuse_llama(&c, "below 0");
    c = right;
    c.kv_heads = -1;
    m_refuse_llama(&c, "");
}

/* A kernel cannot return an error: what it makes is NaN. */
static void m_expect_index_error(m_net *n, ms_tensor ids, int32_t value, bool wrong) {
    const ms_result error = t_on_cpu ? MS_RESULT_CALLBACK : MS_RESULT_NONFINITE;
    int32_t values[2 * 17] = {0};
    double loss;
    values[n->config.sequence + 3] = value;
    t_ok(n->model, ms_write(n->model, ids, values));
    t_error(n->model, ms_step(n->model, &loss), wrong ? error : MS_RESULT_OK);
    m_write_batch(n, false);
}

static void indices_out_of_range_are_errors(void **state) {
    (void)state;
    const nn_transformer_config config = m_config(NN_OPERATORS, 0.0f);
    m_net n;
    m_start(&n, true, &config);
    m_expect_index_error(&n, n.t.tokens, 37, true);
    m_expect_index_error(&n, n.t.tokens, -1, true);
    m_expect_index_error(&n, n.t.tokens, 36, false);
    m_expect_index_error(&n, n.t.segments, 2, true);
    m_expect_index_error(&n, n.t.segments, 1, false);
    m_expect_index_error(&n, n.t.targets, 37, true);
    m_expect_index_error(&n, n.t.targets, -5, false);
    m_stop(&n);
    m_start(&n, false, &config); // the last row of a sequence, which nobody sees, does not count
    int32_t targets[2 * 17];
    for (int i = 0; i < 2 * 17; i++) {
        targets[i] = i == 16 || i == 20 ? -1 : 1;
    }
    t_ok(n.model, ms_write(n.model, n.t.targets, targets));
    int32_t tokens[2 * 17] = {0};
    double loss;
    tokens[16] = 37;
    t_ok(n.model, ms_write(n.model, n.t.tokens, tokens));
    t_error(n.model, ms_step(n.model, &loss), t_on_cpu ? MS_RESULT_CALLBACK : MS_RESULT_NONFINITE);
    m_stop(&n);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(embeddings_match_float64),
        cmocka_unit_test(linear_layers_match_float64),
        cmocka_unit_test(linear_layers_over_blocks_match_float64),
        cmocka_unit_test(embeddings_over_blocks_match_float64),
        cmocka_unit_test(params_in_blocks_are_written_and_read_as_f32),
        cmocka_unit_test(layernorms_match_float64),
        cmocka_unit_test(rmsnorms_match_float64),
        cmocka_unit_test(norms_of_heads_match_float64),
        cmocka_unit_test(rotary_positions_match_float64),
        cmocka_unit_test(gated_units_match_float64),
        cmocka_unit_test(factors_and_caps_match_float64),
        cmocka_unit_test(gelus_match_float64),
        cmocka_unit_test(sums_match_float64),
        cmocka_unit_test(dropout_matches_its_reference),
        cmocka_unit_test(dropout_draws_its_share_anew_each_step),
        cmocka_unit_test(attention_matches_float64),
        cmocka_unit_test(attention_has_scratch_for_every_size),
        cmocka_unit_test(cross_entropies_match_float64),
        cmocka_unit_test(relus_match_float64_and_pass_nan_on),
        cmocka_unit_test(convolutions_match_float64),
        cmocka_unit_test(max_pools_match_float64_and_choose_the_first_of_equals),
        cmocka_unit_test(batch_norms_match_float64),
        cmocka_unit_test(average_pools_and_flattened_images_match_float64),
        cmocka_unit_test(exp_and_the_normal_distribution_match_libm),
        cmocka_unit_test(a_reshaped_model_gives_the_bits_of_a_fresh_one),
        cmocka_unit_test(blocks_give_the_bits_of_operators),
        cmocka_unit_test(gradients_of_models_with_dropout_are_slopes),
        cmocka_unit_test(groups_of_heads_give_what_all_heads_give),
        cmocka_unit_test(debug_mode_changes_no_bit_in_16_bits),
        cmocka_unit_test(dropout_is_for_training_only),
        cmocka_unit_test(models_in_tiles_are_near_the_plain_plan),
        cmocka_unit_test(models_in_tiles_are_near_the_plain_plan_in_16_bits),
        cmocka_unit_test(debug_mode_passes_models_in_tiles),
        cmocka_unit_test(threads_change_no_bit_of_transformers),
        cmocka_unit_test(weight_decay_moves_matrices_alone),
        cmocka_unit_test(initial_values_have_their_mean_and_deviation),
        cmocka_unit_test(presets_have_the_published_number_of_params),
        cmocka_unit_test(frozen_params_stand_still_and_take_no_memory),
        cmocka_unit_test(lent_memory_is_used_where_it_lies),
        cmocka_unit_test(wrong_layers_are_refused_in_words),
        cmocka_unit_test(wrong_transformers_are_refused_in_words),
        cmocka_unit_test(wrong_llamas_are_refused_in_words),
        cmocka_unit_test(indices_out_of_range_are_errors),
#ifdef T_CUDA
        cmocka_unit_test(recorded_steps_draw_the_masks_of_plain_ones),
#endif
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
