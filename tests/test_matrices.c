/*  test_matrices.c - updates of whole matrices, Muon and Adafactor, in float64 as the papers have them:
    over shapes, formats and losses that overflow; that no plan changes a bit of them; their scratch
    memory; and updates of the trainer's own, with products, scratch memory and formats. */
#include "private.h"
#include "toy_layers.h"
#include "files.h"
#include "slices.h"
#include "virtual.h"

// ------------------------------------------------------------------------------------------------
// params that are pulled: the loss is the sum of p * x over all params, so the gradient of p is x

enum { PULLS = 4, MOST = 600, SCALE = 64 };

typedef struct pull {
    ms_model *m;
    int count;
    ms_shape shape[PULLS];
    ms_tensor p[PULLS], x[PULLS];
    int64_t elements[PULLS];
    v_layer late[PULLS]; // on a virtual device
} pull;

static float load(const ms_view *view, int64_t i) {
    return msi_load(view->data, view->dtype, (uint64_t)i);
}

static int pull_forward(const ms_call *call) {
    float sum = call->in[1].data ? t_data(&call->in[1])[0] : 0.0f;
    for (int64_t i = 0; i < t_count(&call->param[0]); ++i) {
        sum += load(&call->param[0], i) * load(&call->in[0], i);
    }
    t_data(&call->out[0])[0] = isfinite(sum) ? sum : 0.0f; // gradients may be anything
    return 0;
}

static int pull_backward(const ms_call *call) {
    const ms_view *to = &call->grad_param[0];
    const float slope = t_data(&call->grad_out[0])[0];
    for (int64_t i = 0; i < t_count(&call->param[0]) && to->data; ++i) {
        const float old = to->beta == 0.0f ? 0.0f : load(to, i);
        msi_store_as(to->data, to->dtype, (uint64_t)i, old + slope * load(&call->in[0], i));
    }
    if (call->grad_in[1].data) {
        t_contribute(&call->grad_in[1], 0, slope);
    }
    return 0;
}

static void pull_create(pull *z, const ms_config *config, const ms_shape *shapes, int count,
                        bool half) {
    ms_tensor sum = {0};
    memset(z, 0, sizeof *z);
    z->count = count;
    t_ok(NULL, ms_create(config, &z->m));
    for (int k = 0; k < count; ++k) {
        char name[20];
        snprintf(name, sizeof name, "p%d", k);
        z->shape[k] = shapes[k];
        z->elements[k] = (int64_t)ms_shape_count(&shapes[k]);
        assert_true(z->elements[k] <= MOST);
        z->p[k] = ms_param(z->m, name, MS_DTYPE_F32, shapes[k]);
        z->x[k] = ms_input(z->m, "x", MS_DTYPE_F32, shapes[k]);
        ms_layer_desc d = t_new_layer("pull", pull_forward, pull_backward, NULL);
        d.in[0] = z->x[k];
        d.in[1] = sum;
        d.param[0] = z->p[k];
        d.out[0] = sum = ms_activation(z->m, "sum", MS_DTYPE_F32, ms_shape1(1));
        d.backward_reads.in = 1;
        if (half) {
            d.dtypes.accepts = 1u << MS_DTYPE_BF16 | 1u << MS_DTYPE_F16;
            d.dtypes.f32_in = k > 0 ? 2u : 0u;
            d.dtypes.f32_out = 1;
            d.dtypes.half_gradients = 1;
        }
        if (config->backend.name && strcmp(config->backend.name, "virtual") == 0) {
            d = v_wrap(&d, &z->late[k]);
        }
        const ms_layer layer = ms_register_layer(z->m, &d);
        if (half) {
            ms_set_layer_technique(z->m, layer, MS_TECHNIQUE_MIXED_PRECISION, MS_SWITCH_ON);
            ms_set_tensor_technique(z->m, z->p[k], MS_TECHNIQUE_MIXED_PRECISION, MS_SWITCH_ON);
        }
    }
    ms_set_loss(z->m, sum);
    ms_set_loss_factor(z->m, 1.0f);
}

static void pull_write_scaled(pull *z, uint64_t seed, float scale) {
    t_rng rng = t_seed(seed);
    float data[MOST];
    for (int k = 0; k < z->count; ++k) {
        t_fill(&rng, data, (uint64_t)z->elements[k], scale);
        t_ok(z->m, ms_write(z->m, z->p[k], data));
    }
}

static void pull_write(pull *z, uint64_t seed) {
    pull_write_scaled(z, seed, 1.0f);
}

/* Multiples of 1/8 up to 2, which 16 bits hold, times a power of two. */
static void draw(t_rng *rng, float *x, int64_t count, float scale) {
    for (int64_t i = 0; i < count; ++i) {
        x[i] = ((float)t_below(rng, 33) - 16.0f) * 0.125f * scale;
    }
}

static void read_to(const pull *z, ms_tensor t, double *to) {
    float data[MOST];
    const uint64_t count = ms_tensor_count(z->m, t);
    t_ok(z->m, ms_read(z->m, t, data));
    for (uint64_t i = 0; i < count; ++i) {
        to[i] = (double)data[i];
    }
}

/* The format in which the value of a param is kept. */
static msi_format format_of(const pull *z, int k) {
    return msi_find_resident(z->m->run.store, msi_index(&z->m->graph, z->p[k]), MSI_ROLE_VALUE)
        ->format;
}

// ------------------------------------------------------------------------------------------------
// the papers, in float64

/* rows x cols of a shape for Muon, or for Adafactor. */
static int rows_of(const ms_shape *s, bool muon) {
    const int count = (int)ms_shape_count(s);
    return s->rank < 2 ? 1 : muon ? (int)s->dim[0] : count / (int)s->dim[s->rank - 1];
}

/* Jordan's zeropower_via_newtonschulz5, as the page has it: of the transpose if there are more rows. */
static void newton_schulz(double *x, int rows, int cols) {
    static double z[MOST], a[MOST], b[MOST], y[MOST];
    const bool turned = rows > cols;
    const int m = turned ? cols : rows, n = turned ? rows : cols;
    double norm = 0.0;
    for (int i = 0; i < rows * cols; ++i) {
        norm += x[i] * x[i];
    }
    norm = sqrt(norm) + 1e-7;
    for (int i = 0; i < rows; ++i) {
        for (int j = 0; j < cols; ++j) {
            z[turned ? j * n + i : i * n + j] = x[i * cols + j] / norm;
        }
    }
    for (int step = 0; step < 5; ++step) {
        for (int i = 0; i < m; ++i) {
            for (int j = 0; j < m; ++j) {
                a[i * m + j] = 0.0;
                for (int k = 0; k < n; ++k) {
                    a[i * m + j] += z[i * n + k] * z[j * n + k];
                }
            }
        }
        for (int i = 0; i < m; ++i) {
            for (int j = 0; j < m; ++j) {
                double sum = 0.0;
                for (int k = 0; k < m; ++k) {
                    sum += a[i * m + k] * a[k * m + j];
                }
                b[i * m + j] = -4.7750 * a[i * m + j] + 2.0315 * sum;
            }
        }
        for (int i = 0; i < m; ++i) {
            for (int j = 0; j < n; ++j) {
                y[i * n + j] = 3.4445 * z[i * n + j];
                for (int k = 0; k < m; ++k) {
                    y[i * n + j] += b[i * m + k] * z[k * n + j];
                }
            }
        }
        memcpy(z, y, sizeof z);
    }
    for (int i = 0; i < rows; ++i) {
        for (int j = 0; j < cols; ++j) {
            x[i * cols + j] = z[turned ? j * n + i : i * n + j];
        }
    }
}

/* p and m after an update with gradient g, by a momentum and a weight decay; *unit is about the size of
   a change. */
static void muon_reference(const ms_shape *shape, double rate, double mu, double decay,
                           const double *g, bool still, double *m, double *p, double *unit) {
    static double x[MOST];
    const double kept = m[0];
    const int count = (int)ms_shape_count(shape), rows = rows_of(shape, true), cols = count / rows;
    for (int i = 0; i < count; ++i) {
        m[i] = mu * m[i] + g[i];
        x[i] = g[i] + mu * m[i];
    }
    x[0] = still ? 0.0 : x[0];
    m[0] = still ? kept : m[0];
    newton_schulz(x, rows, cols);
    *unit = rate * 0.2 * sqrt((double)(rows > cols ? rows : cols));
    for (int i = 0; i < count; ++i) {
        p[i] -= *unit * x[i] + rate * decay * p[i];
    }
}

static double root_mean_square(const double *x, int count) {
    double sum = 0.0;
    for (int i = 0; i < count; ++i) {
        sum += x[i] * x[i];
    }
    return sqrt(sum / count);
}

/* Algorithms 4 and 5 of Shazeer and Stern; beta2 0: 1 - t^-0.8. v: means of rows, then those of cols,
   in two arrays, or all. */
static void adafactor_reference(const ms_shape *shape, double rate, double beta2, double epsilon,
                                double decay, int t, const double *g, double v[2][MOST], double *p,
                                double *unit) {
    static double u[MOST];
    const int count = (int)ms_shape_count(shape), rows = rows_of(shape, false), cols = count / rows;
    const double b2 = beta2 > 0.0 ? beta2 : 1.0 - pow((double)t, -0.8);
    const double rho = fmin(rate, 1.0 / sqrt((double)t));
    const double alpha = fmax(1e-3, root_mean_square(p, count)) * rho;
    if (rows > 1 && cols > 1) {
        double all = 0.0;
        for (int i = 0; i < rows; ++i) {
            double sum = 0.0;
            for (int j = 0; j < cols; ++j) {
                sum += g[i * cols + j] * g[i * cols + j] + epsilon;
            }
            v[0][i] = b2 * v[0][i] + (1.0 - b2) * sum / cols;
            all += v[0][i];
        }
        for (int j = 0; j < cols; ++j) {
            double sum = 0.0;
            for (int i = 0; i < rows; ++i) {
                sum += g[i * cols + j] * g[i * cols + j] + epsilon;
            }
            v[1][j] = b2 * v[1][j] + (1.0 - b2) * sum / rows;
        }
        for (int i = 0; i < count; ++i) {
            u[i] = g[i] / sqrt(v[0][i / cols] * v[1][i % cols] / (all / rows));
        }
    } else {
        for (int i = 0; i < count; ++i) {
            v[0][i] = b2 * v[0][i] + (1.0 - b2) * (g[i] * g[i] + epsilon);
            u[i] = g[i] / sqrt(v[0][i]);
        }
    }
    const double most = fmax(1.0, root_mean_square(u, count));
    *unit = alpha;
    for (int i = 0; i < count; ++i) {
        p[i] -= alpha * u[i] / most + rate * decay * p[i];
    }
}

// ------------------------------------------------------------------------------------------------
// a model against them

typedef struct way {
    ms_optimizer_desc o;
    float scale;     // of the gradients; 0: they are 0
    uint32_t micros; // 0: 1
    bool lent_gradient, lent_param;
    ms_dtype half; // F32: nothing is in 16 bits
    bool no_masters;
    float param_scale; // of the first values; 0: 1
    bool has_still;    // the first gradient is too large for what is not all in F32
    uint32_t bad_step; // from 1: its gradient is infinite (F16), or above skip_above_norm
} way;

static double or_else(const ms_optimizer_desc *o, float value, double otherwise) {
    return value == 0.0f && !o->is_filled ? otherwise : (double)value;
}

static void expect(const way *w, const char *what, int step, int i, double got, double expected,
                   double error) {
    if (!(fabs(got - expected) <= error)) {
        fail_msg("%s %d in step %d: %.9g, expected %.9g within %.3g (kind %d, scale %g, half %d)",
                 what, i, step, got, expected, error, (int)w->o.kind, (double)w->scale,
                 (int)w->half);
    }
}

/* One shape, some steps. */
static void follow(const way *w, ms_shape shape) {
    enum { STEPS = 6 };
    static double p[MOST], v[2][MOST], g[MOST], before[MOST], kept[2][MOST];
    static float x[MOST];
    const bool muon = w->o.kind == MS_OPTIMIZER_MUON;
    const int count = (int)ms_shape_count(&shape);
    const uint32_t micros = w->micros > 0 ? w->micros : 1;
    const bool grouped = w->half == MS_DTYPE_F16;
    float *lent_gradient = w->lent_gradient ? (float *)t_lend(MOST * sizeof(float)) : NULL;
    float *lent_param = w->lent_param ? (float *)t_lend(MOST * sizeof(float)) : NULL;
    ms_config config = t_config();
    pull z;
    config.accumulation_steps = micros;
    config.mixed_dtype = w->half;
    config.mixed_precision = w->half != MS_DTYPE_F32 ? MS_SWITCH_ON : MS_SWITCH_DEFAULT;
    config.loss_scaling.initial = SCALE;
    config.master_weights = w->no_masters ? MS_SWITCH_OFF : MS_SWITCH_DEFAULT;
    pull_create(&z, &config, &shape, 1, w->half != MS_DTYPE_F32);
    ms_set_optimizer(z.m, &w->o);
    if (lent_gradient) {
        memset(lent_gradient, 0, MOST * sizeof(float));
        t_ok(z.m, ms_borrow(z.m, ms_gradient(z.m, z.p[0]), lent_gradient));
    }
    if (lent_param) {
        t_ok(z.m, ms_borrow(z.m, z.p[0], lent_param));
    }
    t_ok(z.m, ms_wrap(z.m));
    pull_write_scaled(&z, 5, w->param_scale > 0.0f ? w->param_scale : 1.0f);
    assert_int_equal(format_of(&z, 0), w->half == MS_DTYPE_F32 || w->lent_param ? MSI_FORMAT_F32
                                       : w->half == MS_DTYPE_BF16               ? MSI_FORMAT_BF16
                                                                                : MSI_FORMAT_F16);
    t_rng rng = t_seed(77);
    const uint32_t states = msi_state_count(
        &z.m->optimizers, &z.m->graph.tensors.items[msi_index(&z.m->graph, z.p[0])]);
    memset(v, 0, sizeof v);
    int number = 0;
    for (int step = 1; step <= STEPS; ++step) {
        const bool bad = step == (int)w->bad_step;
        double norm = 0.0, unit = 0.0;
        float learning_rate = (float)or_else(&w->o, w->o.learning_rate, muon ? 1e-3 : 1e-2);
        memset(g, 0, sizeof g);
        read_to(&z, z.p[0], p);
        for (uint32_t k = 0; k < states; ++k) {
            read_to(&z, ms_optimizer_state(z.m, z.p[0], (int)k), kept[k]);
        }
        memcpy(before, p, sizeof before);
        if (lent_gradient) {
            memset(lent_gradient, 0, MOST * sizeof(float));
        }
        for (uint32_t micro = 0; micro < micros; ++micro) {
            draw(&rng, x, count, w->scale);
            x[count / 2] = bad ? (grouped ? INFINITY : 1e6f) : x[count / 2];
            x[0] = w->has_still ? 1e20f : x[0];
            for (int i = 0; i < count; ++i) {
                g[i] += i == 0 && w->has_still ? 0.0 : (double)x[i];
            }
            t_ok(z.m, ms_write(z.m, z.x[0], x));
            t_ok(z.m, ms_step(z.m, NULL));
        }
        for (int i = 0; i < count; ++i) {
            norm += g[i] * g[i];
        }
        norm = sqrt(norm);
        if (w->o.grad_clip_norm > 0.0f && norm > (double)w->o.grad_clip_norm) {
            for (int i = 0; i < count; ++i) {
                g[i] *= (double)w->o.grad_clip_norm / norm;
            }
        }
        if (!bad) {
            number += 1;
            memcpy(v, kept, sizeof v); // as it was stored: in BF16, rounded at random
            if (muon) {
                muon_reference(&shape, (double)learning_rate, or_else(&w->o, w->o.momentum, 0.95),
                               (double)w->o.weight_decay, g, w->has_still, v[0], p, &unit);
            } else {
                adafactor_reference(&shape, (double)learning_rate, (double)w->o.beta2,
                                    or_else(&w->o, w->o.epsilon, 1e-30), (double)w->o.weight_decay,
                                    number, g, v, p, &unit);
            }
        }
        read_to(&z, z.p[0], before);
        for (int i = 0; i < count; ++i) {
            const double bits = w->half == MS_DTYPE_F32 || !w->no_masters ? 0.0
                                : w->half == MS_DTYPE_BF16                ? 1.0 / 128
                                                                          : 1.0 / 1024;
            const double error =
                bad ? 0.0 : 5e-4 * unit + 3e-7 * fabs(p[i]) + bits * (fabs(p[i]) + unit);
            expect(w, "value", step, i, before[i], p[i], error);
        }
        for (uint32_t k = 0; k < states; ++k) {
            const ms_tensor t = ms_optimizer_state(z.m, z.p[0], (int)k);
            const double unit_of_state =
                w->o.state_format[k] == MS_STATE_FORMAT_BF16 ? 1.0 / 128 : 3e-6;
            read_to(&z, t, before);
            for (int i = 0; i < (int)ms_tensor_count(z.m, t); ++i) {
                const double expected = bad ? kept[k][i] : v[k][i];
                expect(w, k == 0 ? "state 0" : "state 1", step, i, before[i], expected,
                       bad ? 0.0
                           : unit_of_state * (fabs(expected) + (double)(muon ? w->scale : 0.0f)));
            }
        }
    }
    ms_destroy(z.m);
    if (lent_gradient) {
        t_take_back(lent_gradient);
    }
    if (lent_param) {
        t_take_back(lent_param);
    }
}

static ms_optimizer_desc desc_of(ms_optimizer_kind kind, float rate, float decay) {
    ms_optimizer_desc o = t_optimizer(kind, rate);
    o.weight_decay = decay;
    return o;
}

static void each_shape(const way *w) {
    const ms_shape shapes[] = {ms_shape2(6, 10),   ms_shape2(10, 6),      ms_shape2(8, 8),
                               ms_shape2(1, 7),    ms_shape2(7, 1),       ms_shape2(17, 33),
                               ms_shape3(4, 3, 5), ms_shape4(3, 2, 2, 4), ms_shape2(1, 1),
                               ms_shape1(13),      ms_shape1(1)};
    for (size_t k = 0; k < sizeof shapes / sizeof shapes[0]; ++k) {
        if (shapes[k].rank > 1 || w->o.kind == MS_OPTIMIZER_ADAFACTOR) {
            follow(w, shapes[k]);
        }
    }
}

static const ms_optimizer_kind kinds[] = {MS_OPTIMIZER_MUON, MS_OPTIMIZER_ADAFACTOR};

static void updates_follow_the_papers(void **state) {
    (void)state;
    for (int k = 0; k < 2; ++k) {
        way w;
        memset(&w, 0, sizeof w);
        w.scale = 1.0f;
        w.o = t_optimizer(kinds[k], 0.0f);
        each_shape(&w);
        w.o = desc_of(kinds[k], 0.02f, 0.1f);
        each_shape(&w);
        w.o = ms_optimizer_defaults(kinds[k]);
        w.o.learning_rate = 0.7f; // above 1 / sqrt(t) from the third on
        w.o.momentum = 0.0f;
        each_shape(&w);
        w.o = desc_of(kinds[k], 0.01f, 0.05f);
        w.o.momentum = k == 0 ? 0.7f : 0.0f;
        w.o.beta2 = k == 1 ? 0.9f : 0.0f;
        w.o.epsilon = k == 1 ? 1e-2f : 0.0f;
        w.o.grad_clip_norm = 0.5f;
        w.micros = 3;
        each_shape(&w);
    }
}

static void gradients_of_any_size_are_followed(void **state) {
    (void)state;
    static const float scales[] = {0.0f, 9.094947e-13f, 8.673617e-19f, 1048576.0f,
                                   3.6893488e19f / 64};
    for (int k = 0; k < 2; ++k) {
        for (int i = 0; i < 5; ++i) {
            way w;
            memset(&w, 0, sizeof w);
            w.scale = scales[i];
            w.o = desc_of(kinds[k], 0.02f, 0.1f);
            each_shape(&w);
        }
    }
}

static void what_is_lent_is_updated(void **state) {
    (void)state;
    for (int k = 0; k < 2; ++k) {
        for (int how = 1; how < 8; ++how) {
            way w;
            memset(&w, 0, sizeof w);
            w.scale = 1.0f;
            w.o = desc_of(kinds[k], 0.02f, 0.1f);
            w.lent_gradient = how & 1;
            w.lent_param = how & 2;
            w.micros = how & 4 ? 2 : 1;
            each_shape(&w);
        }
    }
}

static void formats_are_followed(void **state) {
    (void)state;
    static const ms_dtype halves[] = {MS_DTYPE_F32, MS_DTYPE_BF16, MS_DTYPE_F16};
    for (int k = 0; k < 2; ++k) {
        for (int h = 0; h < 3; ++h) {
            for (int how = 0; how < 8; ++how) {
                way w;
                memset(&w, 0, sizeof w);
                w.scale = 1.0f;
                w.o = desc_of(kinds[k], 0.02f, 0.1f);
                w.half = halves[h];
                w.no_masters = how & 1;
                w.o.state_format[0] =
                    how & 2 && k == 0 ? MS_STATE_FORMAT_BF16 : MS_STATE_FORMAT_F32;
                w.bad_step = h != 2 ? 0 : how & 4 ? 1 : 3;
                w.micros = how & 4 ? 2 : 1;
                each_shape(&w);
            }
        }
    }
}

/* Where anything is in 16 bits, elements whose gradient is not below 2^64 are left out. */
static void gradients_that_are_too_large_are_left_out(void **state) {
    (void)state;
    for (int k = 0; k < 2; ++k) {
        for (int how = 0; how < 4; ++how) {
            way w;
            memset(&w, 0, sizeof w);
            w.scale = 1.0f;
            w.o = desc_of(kinds[k], 0.02f, 0.1f);
            w.half = MS_DTYPE_BF16;
            w.no_masters = how & 1;
            w.lent_gradient = how & 2;
            w.has_still = true;
            follow(&w, ms_shape2(6, 10));
            follow(&w, ms_shape2(10, 6));
        }
    }
}

/* Adafactor's updates are in proportion to the params, but not below a size of 0.001. */
static void small_params_are_followed(void **state) {
    (void)state;
    for (int k = 0; k < 2; ++k) {
        way w;
        memset(&w, 0, sizeof w);
        w.scale = 1.0f;
        w.param_scale = 1e-4f;
        w.o = desc_of(kinds[k], 0.02f, 0.1f);
        each_shape(&w);
    }
}

/* Steps above skip_above_norm change nothing, and are not counted. */
static void skipped_steps_do_not_count(void **state) {
    (void)state;
    for (int k = 0; k < 2; ++k) {
        for (uint32_t step = 1; step <= 4; step += 3) {
            way w;
            memset(&w, 0, sizeof w);
            w.scale = 1.0f;
            w.o = desc_of(kinds[k], 0.9f, 0.1f);
            w.o.skip_above_norm = 1e4f;
            w.bad_step = step;
            each_shape(&w);
        }
    }
}

// ------------------------------------------------------------------------------------------------
// plans change no bit

enum { STEPS_OF_PLANS = 4, MOST_OF_ALL = 3 * PULLS * MOST };

typedef struct outcome {
    float all[MOST_OF_ALL]; // values and states
    uint64_t count;
} outcome;

static void shapes_for(ms_optimizer_kind kind, ms_shape *shapes) {
    shapes[0] = ms_shape2(12, 9);
    shapes[1] = ms_shape2(5, 20);
    shapes[2] = ms_shape3(3, 4, 5);
    shapes[3] = kind == MS_OPTIMIZER_ADAFACTOR ? ms_shape1(13) : ms_shape2(1, 40);
}

static void collect(const pull *z, outcome *o) {
    o->count = 0;
    for (int k = 0; k < z->count; ++k) {
        const ms_tensor tensors[] = {z->p[k], ms_optimizer_state(z->m, z->p[k], 0),
                                     ms_optimizer_state(z->m, z->p[k], 1)};
        for (int i = 0; i < 3 && tensors[i].id != 0; ++i) {
            t_ok(z->m, ms_expect_bytes(z->m, tensors[i], 4 * ms_tensor_count(z->m, tensors[i])));
            t_ok(z->m, ms_read(z->m, tensors[i], o->all + o->count));
            o->count += ms_tensor_count(z->m, tensors[i]);
        }
    }
}

static void write_x(pull *z, t_rng *rng) {
    static float x[PULLS][MOST];
    for (int k = 0; k < z->count; ++k) {
        draw(rng, x[k], z->elements[k], 1.0f);
        t_ok(z->m, ms_write(z->m, z->x[k], x[k]));
    }
}

static void some_steps(pull *z, t_rng *rng, int steps) {
    for (int i = 0; i < steps; ++i) {
        write_x(z, rng);
        t_ok(z->m, s_step(z->m, NULL));
    }
}

typedef enum plan_of {
    PLAN_PLAIN,
    PLAN_SMALLEST,
    PLAN_EARLY,
    PLAN_MOVED,
    PLAN_MOVED_EARLY,
    PLAN_SLICED,
    PLAN_SHORT, // instructions are to be short
    PLAN_SUSPENDED,
    PLAN_DETACHED,
    PLAN_DEBUG,
    PLAN_VERIFIED,
    PLAN_COUNTED, // the device of testing.h
    PLAN_VIRTUAL,
    PLAN_VIRTUAL_MOVED,
    PLAN_COUNT
} plan_of;

static void move_all(pull *z) {
    for (int k = 0; k < z->count; ++k) {
        const ms_tensor moved[] = {z->p[k], ms_gradient(z->m, z->p[k]),
                                   ms_optimizer_state(z->m, z->p[k], 0),
                                   ms_optimizer_state(z->m, z->p[k], 1)};
        for (int i = 0; i < 4; ++i) {
            if (moved[i].id != 0) {
                ms_set_tensor_technique(z->m, moved[i], MS_TECHNIQUE_OFFLOADING, MS_SWITCH_ON);
            }
        }
    }
}

/* On the device, state that is moved takes as many bytes as it has. */
static void check_state_size(const ms_lifetime *l, void *user) {
    const pull *z = (const pull *)user;
    if (l->category == MS_CATEGORY_OPTIMIZER && l->tensor.id != 0 && !l->is_outside) {
        assert_true(l->bytes <= msi_align(ms_tensor_bytes(z->m, l->tensor)));
    }
}

static void run_plan(plan_of plan, const ms_optimizer_desc *o, ms_dtype half, uint64_t seed,
                     outcome *to) {
    const bool late = plan == PLAN_VIRTUAL || plan == PLAN_VIRTUAL_MOVED;
    const bool moved = plan == PLAN_MOVED || plan == PLAN_MOVED_EARLY || plan == PLAN_VIRTUAL_MOVED;
    const bool clips = o->grad_clip_norm > 0.0f;
    ms_shape shapes[PULLS];
    ms_config config = t_config();
    ms_verify_report report;
    v_device device;
    t_device counted;
    pull z;
    t_heap heap;
    memset(&heap, 0, sizeof heap);
    v_open(&device, seed);
    shapes_for(o->kind, shapes);
    config.mixed_dtype = half;
    config.loss_scaling.initial = SCALE;
    config.force_optimize = plan == PLAN_SMALLEST || plan == PLAN_MOVED_EARLY;
    config.early_update =
        !clips && half != MS_DTYPE_F16 && (plan == PLAN_EARLY || plan == PLAN_MOVED_EARLY)
            ? MS_SWITCH_ON
            : MS_SWITCH_DEFAULT;
    config.offloading = moved ? MS_SWITCH_DEFAULT : config.offloading;
    config.debug = plan == PLAN_DEBUG;
    config.max_instruction_us = plan == PLAN_SHORT ? 1e-3 : 0.0;
    if (plan == PLAN_SLICED || plan == PLAN_SHORT) {
        s_slice(&config, seed + 1);
    }
    if (late) {
        config.backend = v_backend(&device);
        config.allocator = t_heap_allocator(&heap);
    } else if (plan == PLAN_COUNTED) {
        config.backend = t_device_backend(&counted);
    }
    t_debugging = config.debug;
    pull_create(&z, &config, shapes, PULLS, half != MS_DTYPE_F32);
    ms_set_optimizer(z.m, o);
    if (moved) {
        move_all(&z);
    }
    t_ok(z.m, ms_wrap(z.m));
    t_ok(z.m, ms_visit_lifetimes(z.m, MS_PROGRAM_TRAIN, check_state_size, &z));
    pull_write(&z, 9);
    t_rng rng = t_seed(31);
    for (int step = 0; step < STEPS_OF_PLANS; ++step) {
        some_steps(&z, &rng, 1);
        if (plan == PLAN_SUSPENDED) {
            t_ok(z.m, ms_suspend(z.m, NULL));
            t_ok(z.m, ms_resume(z.m));
        } else if (plan == PLAN_DETACHED) {
            t_ok(z.m, ms_detach(z.m));
            t_ok(z.m, ms_wrap(z.m));
        } else if (plan == PLAN_VERIFIED) {
            ms_nonfinite found;
            t_ok(z.m, ms_verify(z.m, NULL, NULL, &report));
            t_ok(z.m, ms_find_nonfinite(z.m, &found));
            assert_int_equal(found.count, 0);
        }
    }
    collect(&z, to);
    ms_destroy(z.m);
    v_close(&device);
    t_debugging = false;
}

static void plans_change_no_bit(void **state) {
    (void)state;
    static outcome plain, other;
    static const ms_dtype halves[] = {MS_DTYPE_F32, MS_DTYPE_BF16, MS_DTYPE_F16};
    for (int how = 0; how < 24; ++how) {
        ms_optimizer_desc o = desc_of(kinds[how & 1], 0.02f, 0.1f);
        o.grad_clip_norm = how & 2 ? 1.0f : 0.0f;
        o.state_format[0] =
            how % 8 > 3 && o.kind == MS_OPTIMIZER_MUON ? MS_STATE_FORMAT_BF16 : MS_STATE_FORMAT_F32;
        const ms_dtype half = halves[how / 8];
        run_plan(PLAN_PLAIN, &o, half, 0, &plain);
        for (int plan = PLAN_SMALLEST; plan < PLAN_COUNT; ++plan) {
#ifdef T_CUDA // products have other bits there
            if (plan >= PLAN_COUNTED) {
                continue;
            }
#endif
            for (uint64_t seed = 0; seed < (plan >= PLAN_VIRTUAL ? 4u : 1u); ++seed) {
                run_plan((plan_of)plan, &o, half, seed, &other);
                if (plain.count != other.count ||
                    memcmp(plain.all, other.all, plain.count * sizeof(float)) != 0) {
                    fail_msg("plan %d, case %d, seed %u: other bits", plan, how, (unsigned)seed);
                }
            }
        }
    }
}

// ------------------------------------------------------------------------------------------------
// memory

typedef struct found {
    uint64_t bytes, count;
    char name[32];
} found;

static void find_scratch(const ms_lifetime *l, void *user) {
    found *f = (found *)user;
    if (l->tensor.id == 0 && l->category == MS_CATEGORY_WORKSPACE &&
        strncmp(l->name, "p", 1) == 0 && strcmp(l->name, "pull") != 0) {
        f->bytes = l->bytes;
        f->count += 1;
        snprintf(f->name, sizeof f->name, "%s", l->name);
        assert_int_equal(l->first, l->last);
    }
}

static void find_operand(const ms_event *event, void *user) {
    const ms_event_operand *last = &event->operands[event->operand_count - 1];
    if (event->kind == MS_EVENT_UPDATE && last->tensor.id == 0 && last->is_new) {
        *(uint64_t *)user += last->bytes;
    }
}

/* A param of 4 x 6 has 24 elements, in 96 bytes that take 128; of 4 x 4 the squares, in 64 each. */
static void scratch_memory_is_planned(void **state) {
    (void)state;
    for (int how = 0; how < 6; ++how) {
        const bool muon = how < 3, lent = how % 3 == 1, half = how % 3 == 2;
        const uint64_t x = 128, y = 128, squares = 2 * 64, sums = 64, ones = 64, vectors = 2 * 64;
        const uint64_t expected =
            muon ? (lent || half ? x : 0) + y + squares + sums : x + vectors + ones + sums;
        const ms_shape shape = ms_shape2(4, 6);
        const ms_optimizer_desc o = t_optimizer(kinds[how / 3], 0.01f);
        float *memory = (float *)t_lend(24 * sizeof(float));
        found f = {0, 0, ""};
        uint64_t bytes = 0;
        ms_config config = t_config();
        ms_memory_report with, without;
        t_text text = {NULL, 0};
        pull z;
        config.mixed_dtype = half ? MS_DTYPE_BF16 : MS_DTYPE_F32;
        pull_create(&z, &config, &shape, 1, half);
        ms_set_optimizer(z.m, &o);
        if (lent) {
            memset(memory, 0, 24 * sizeof(float));
            t_ok(z.m, ms_borrow(z.m, ms_gradient(z.m, z.p[0]), memory));
        }
        t_ok(z.m, ms_wrap(z.m));
        t_report(z.m, &with);
        t_ok(z.m, ms_visit_lifetimes(z.m, MS_PROGRAM_TRAIN, find_scratch, &f));
        t_ok(z.m, ms_visit_events(z.m, MS_PROGRAM_TRAIN, find_operand, &bytes));
        t_ok(z.m, ms_print_plan_full(z.m, t_append, &text));
        assert_int_equal(f.count, 1);
        assert_int_equal(f.bytes, expected);
        assert_int_equal(bytes, expected);
        assert_string_equal(f.name, "p0");
        free(text.data);
        ms_destroy(z.m);
        /* SGD with momentum has the same state as Muon, and no scratch memory: at the update there are
           x, its norm if it has one, the value, the gradient and the state. */
        if (muon) {
            ms_optimizer_desc sgd = t_optimizer(MS_OPTIMIZER_SGD, 0.01f);
            sgd.momentum = 0.9f;
            pull_create(&z, &config, &shape, 1, half);
            ms_set_optimizer(z.m, &sgd);
            if (lent) {
                t_ok(z.m, ms_borrow(z.m, ms_gradient(z.m, z.p[0]), memory));
            }
            t_ok(z.m, ms_wrap(z.m));
            t_report(z.m, &without);
            assert_int_equal(with.peak_bytes[MS_CATEGORY_OPTIMIZER],
                             without.peak_bytes[MS_CATEGORY_OPTIMIZER]);
            assert_true(with.arena_bytes > without.arena_bytes &&
                        with.arena_bytes <= without.arena_bytes + expected);
            assert_true(with.peak_bytes[MS_CATEGORY_WORKSPACE] >= expected);
            ms_destroy(z.m);
        }
        t_take_back(memory);
    }
}

static void factored_state_has_its_own_shape(void **state) {
    (void)state;
    const ms_shape shapes[] = {ms_shape2(12, 9), ms_shape3(3, 4, 5), ms_shape2(1, 9), ms_shape1(7)};
    static const int64_t counts[4][2] = {{12, 9}, {12, 5}, {9, 0}, {7, 0}};
    const ms_optimizer_desc o = t_optimizer(MS_OPTIMIZER_ADAFACTOR, 0.01f);
    ms_memory_report report;
    for (int lends = 0; lends < 2; ++lends) {
        ms_config config = t_config();
        float *lent[PULLS][2];
        pull z;
        pull_create(&z, &config, shapes, PULLS, false);
        ms_set_optimizer(z.m, &o);
        for (int k = 0; k < PULLS; ++k) {
            for (int i = 0; i < 2; ++i) {
                const ms_tensor t = ms_optimizer_state(z.m, z.p[k], i);
                lent[k][i] = (float *)t_lend(24 * sizeof(float));
                for (int j = 0; j < 24; ++j) { // what is beyond the end stays
                    lent[k][i][j] = j < counts[k][i] ? 0.0f : 77.0f;
                }
                if (t.id != 0 && lends) {
                    t_ok(z.m, ms_borrow(z.m, t, lent[k][i]));
                }
            }
        }
        for (int wrapped = 0; wrapped < 2; ++wrapped) {
            for (int k = 0; k < PULLS; ++k) {
                for (int i = 0; i < 2; ++i) {
                    const ms_tensor t = ms_optimizer_state(z.m, z.p[k], i);
                    if (!wrapped && t.id == 0) {
                        continue;
                    }
                    assert_int_equal(t.id != 0, counts[k][i] != 0);
                    if (t.id == 0) {
                        continue;
                    }
                    const bool own = counts[k][1] != 0;
                    const ms_shape shape = ms_tensor_shape(z.m, t);
                    float data[24], back[24];
                    assert_int_equal(ms_tensor_count(z.m, t), counts[k][i]);
                    assert_int_equal(ms_tensor_bytes(z.m, t), 4 * counts[k][i]);
                    assert_int_equal(shape.rank, own ? 1 : shapes[k].rank);
                    assert_true(!own || shape.dim[0] == counts[k][i]);
                    t_ok(z.m, ms_expect_bytes(z.m, t, 4 * (uint64_t)counts[k][i]));
                    for (int j = 0; j < 24; ++j) {
                        data[j] = 0.5f + (float)j;
                        back[j] = 99.0f;
                    }
                    t_ok(z.m, ms_write(z.m, t, data));
                    t_ok(z.m, ms_read(z.m, t, back));
                    assert_memory_equal(back, data, 4 * (size_t)counts[k][i]);
                    for (int64_t j = counts[k][i]; j < 24; ++j) {
                        assert_true(back[j] == 99.0f);
                    }
                }
            }
            t_ok(z.m, wrapped ? MS_RESULT_OK : ms_wrap(z.m));
        }
        t_report(z.m, &report); // each takes 64 bytes
        assert_int_equal(report.peak_bytes[MS_CATEGORY_OPTIMIZER], lends ? 0 : 6 * 64);
        t_rng rng = t_seed(4);
        pull_write(&z, 3);
        some_steps(&z, &rng, 3);
        t_ok(z.m, ms_synchronize(z.m));
        for (int k = 0; k < PULLS; ++k) {
            for (int i = 0; i < 2; ++i) {
                for (int64_t j = counts[k][i]; j < 24; ++j) {
                    assert_true(lent[k][i][j] == 77.0f);
                }
            }
        }
        t_error(z.m, ms_expect_bytes(z.m, ms_optimizer_state(z.m, z.p[0], 0), 12 * 9 * 4),
                MS_RESULT_INVALID);
        ms_destroy(z.m);
        for (int k = 0; k < PULLS; ++k) {
            t_take_back(lent[k][0]);
            t_take_back(lent[k][1]);
        }
    }
}

/* A model that goes on from a file goes on with the same bits. */
static void files_keep_the_state(void **state) {
    (void)state;
    static outcome a, b;
    static t_file file;
    for (int how = 0; how < 4; ++how) {
        ms_optimizer_desc o = desc_of(kinds[how & 1], 0.02f, 0.1f);
        ms_shape shapes[PULLS];
        ms_config config = t_config();
        pull z[2];
        o.state_format[0] = how == 2 ? MS_STATE_FORMAT_BF16 : MS_STATE_FORMAT_F32;
        shapes_for(o.kind, shapes);
        t_file_clear(&file);
        for (int i = 0; i < 2; ++i) {
            t_rng rng = t_seed(8);
            pull_create(&z[i], &config, shapes, PULLS, false);
            ms_set_optimizer(z[i].m, &o);
            t_ok(z[i].m, ms_wrap(z[i].m));
            if (i == 0) {
                pull_write(&z[i], 2);
                some_steps(&z[i], &rng, 3);
                t_ok(z[i].m, t_save(z[i].m, &file));
            } else {
                t_ok(z[i].m, t_load(z[i].m, &file, NULL));
            }
            rng = t_seed(9);
            some_steps(&z[i], &rng, 2);
            collect(&z[i], i == 0 ? &a : &b);
        }
        assert_true(a.count == b.count);
        assert_memory_equal(a.all, b.all, a.count * sizeof(float));
        ms_destroy(z[0].m);
        ms_destroy(z[1].m);
        o = t_optimizer(o.kind == MS_OPTIMIZER_MUON ? MS_OPTIMIZER_ADAFACTOR : MS_OPTIMIZER_ADAMW,
                        0.01f);
        pull_create(&z[0], &config, shapes, PULLS, false);
        ms_set_optimizer(z[0].m, &o);
        t_ok(z[0].m, ms_wrap(z[0].m));
        assert_true(t_load(z[0].m, &file, NULL) != MS_RESULT_OK); // its state is another
        print_message("%s\n", ms_last_error(z[0].m));
        ms_destroy(z[0].m);
    }
}

// ------------------------------------------------------------------------------------------------
// failures

static void failures_are_told(void **state) {
    (void)state;
    for (int how = 0; how < 8; ++how) {
        const ms_optimizer_desc o = t_optimizer(kinds[how & 1], 0.01f);
        t_heap heap;
        t_device device;
        ms_shape shapes[PULLS];
        memset(&heap, 0, sizeof heap);
        const ms_backend backend = t_device_backend(&device);
        t_failing f = how & 2 ? t_failing_heap(&heap) : t_failing_device(&device);
        shapes_for(o.kind, shapes);
        while (t_next_failure(&f, 1)) {
            ms_config config = t_config();
            float before[MOST], after[MOST];
            pull z;
            config.allocator = t_heap_allocator(&heap);
            config.backend = backend;
            config.debug = how & 4;
            pull_create(&z, &config, shapes, 2, false);
            ms_set_optimizer(z.m, &o);
            if (how & 2) {
                t_arm(&f);
            }
            ms_result result = ms_wrap(z.m);
            if (result == MS_RESULT_OK) {
                pull_write(&z, 2);
                t_rng rng = t_seed(8);
                write_x(&z, &rng);
                t_ok(z.m, ms_read(z.m, z.p[0], before));
                if (!(how & 2)) {
                    t_arm(&f);
                }
                result = ms_step(z.m, NULL);
            }
            if (t_failed(&f, z.m, result) && !(how & 2)) {
                /* Nothing was updated: the next step is the first. Something was: the model is failed. */
                const ms_result next = ms_step(z.m, NULL);
                if (next == MS_RESULT_OK) {
                    ms_memory_report report;
                    t_report(z.m, &report);
                    assert_int_equal(report.step_count, 1);
                    t_ok(z.m, ms_read(z.m, z.p[0], after));
                    assert_true(memcmp(before, after, sizeof(float) * 108) != 0);
                } else {
                    assert_true(strlen(ms_last_error(z.m)) > 10);
                }
            } else if (how & 2 && result != MS_RESULT_OK) {
                t_ok(z.m, ms_wrap(z.m)); // now there is memory
            }
            ms_destroy(z.m);
        }
        assert_true(f.error_count > 3);
    }
}

// ------------------------------------------------------------------------------------------------
// updates of the trainer's own

typedef enum lie { HONEST, IGNORES_SCALE, READS_MORE_STATE, WRITES_MORE_STATE, WRITES_BEYOND } lie;

typedef struct own {
    lie tells;
    int calls, fails_at; // the call that returns 9, from 1
    int in_half, coded, rounded, masters;
    bool multiplies_wrongly;
} own;

/* AdamW of any formats. */
static int own_adamw(const ms_update_args *a) {
    own *w = (own *)a->user;
    ms_optimizer_desc o = ms_optimizer_defaults(MS_OPTIMIZER_ADAMW);
    o.learning_rate = a->learning_rate;
    ms_update_factors f = msi_factors_at(&o, a->t);
    f.decay = msi_decay_factor(&o, a->weight_decay);
    const float scale = a->gradient_scale && w->tells != IGNORES_SCALE ? *a->gradient_scale : 1.0f;
    const uint32_t keys[] = {msi_state_key(a, 0), msi_state_key(a, 1),
                             msi_state_key(a, MS_LIMIT_OPTIMIZER_STATE)};
    w->calls += 1;
    w->in_half += a->value_dtype != MS_DTYPE_F32;
    w->masters += a->master != NULL;
    for (int k = 0; k < 2; ++k) {
        w->coded += a->state_format[k] == MS_STATE_FORMAT_8BIT;
        w->rounded += a->state_format[k] == MS_STATE_FORMAT_BF16;
    }
    if (w->calls == w->fails_at) {
        return 9;
    }
    for (uint64_t at = 0; at < a->count; at += MSI_CODED_BLOCK) {
        const int some = (int)msi_smaller(a->count - at, MSI_CODED_BLOCK);
        float s[2][MSI_CODED_BLOCK];
        for (int k = 0; k < 2; ++k) {
            msi_load_state(a->state[k], msi_format_of_state(a->state_format[k]), k == 0, at, some,
                           a->count, s[k]);
        }
        for (int i = 0; i < some; ++i) {
            const uint64_t n = at + (uint64_t)i;
            const float g = scale * msi_load(a->gradient, a->gradient_dtype, n);
            const float p = a->master ? a->master[n] : msi_load(a->value, a->value_dtype, n);
            float x = msi_has_formats(a) ? msi_guarded_element(o.kind, &f, p, g, &s[0][i], &s[1][i])
                                         : msi_element(o.kind, &f, p, g, &s[0][i], &s[1][i]);
            x += w->tells == READS_MORE_STATE ? a->state[2][0] : 0.0f;
            if (a->master) {
                a->master[n] = x;
                msi_store_as(a->value, a->value_dtype, n, x);
            } else if (a->value_dtype == MS_DTYPE_F32) {
                a->value[n] = x;
            } else {
                msi_store_at_random(a->value, a->value_dtype, n, x, msi_random(keys[2], n));
            }
        }
        for (int k = 0; k < 2; ++k) {
            msi_store_state(a->state[k], msi_format_of_state(a->state_format[k]), k == 0, at, some,
                            a->count, &keys[k], 0, s[k]);
        }
    }
    if (w->tells == WRITES_MORE_STATE) {
        a->state[3][0] = 1.0f;
    }
    if (w->tells == WRITES_BEYOND) {
        msi_store_as(a->value, a->value_dtype, a->count, 3.0f);
    }
    return 0;
}

static ms_optimizer_desc own_desc(own *w) {
    ms_optimizer_desc o = desc_of(MS_OPTIMIZER_CUSTOM, 0.02f, 0.1f);
    o.update = own_adamw;
    o.user = w;
    o.state_count = 2;
    o.takes_formats = true;
    o.unsigned_state = 1u << 1;
    return o;
}

/* Values and states after some steps; with `bad`, one of them overflows. */
static void train_pulled(const ms_config *config, const ms_optimizer_desc *o, bool codes, bool bad,
                         outcome *to) {
    const ms_shape shapes[] = {ms_shape2(20, 30), ms_shape1(257)};
    pull z;
    pull_create(&z, config, shapes, 2, config->mixed_dtype != MS_DTYPE_F32);
    ms_set_optimizer(z.m, o);
    for (int k = 0; k < 2 && codes; ++k) {
        ms_set_tensor_technique(z.m, z.p[k], MS_TECHNIQUE_OPTIMIZER_8BIT, MS_SWITCH_ON);
    }
    t_ok(z.m, ms_wrap(z.m));
    pull_write(&z, 9);
    t_rng rng = t_seed(31);
    for (int step = 0; step < 5; ++step) {
        write_x(&z, &rng);
        if (bad && step == 2) {
            float x[MOST] = {INFINITY};
            t_ok(z.m, ms_write(z.m, z.x[1], x));
        }
        t_ok(z.m, ms_step(z.m, NULL));
    }
    collect(&z, to);
    ms_destroy(z.m);
}

static void an_own_adamw_has_the_bits_of_the_built_in_one(void **state) {
    (void)state;
    static outcome built_in, own_one;
    static const ms_dtype halves[] = {MS_DTYPE_F32, MS_DTYPE_BF16, MS_DTYPE_F16};
    for (int how = 0; how < 96; ++how) {
        const ms_dtype half = halves[how % 3];
        const bool codes = how / 3 & 1, alone = how / 6 & 1, clips = how / 12 & 1;
        own w;
        ms_config config = t_config();
        memset(&w, 0, sizeof w);
        ms_optimizer_desc mine = own_desc(&w), o = desc_of(MS_OPTIMIZER_ADAMW, 0.02f, 0.1f);
        config.mixed_dtype = half;
        config.loss_scaling.initial = SCALE;
        config.master_weights = alone ? MS_SWITCH_OFF : MS_SWITCH_DEFAULT;
        o.grad_clip_norm = mine.grad_clip_norm = clips ? 2.0f : 0.0f;
        for (int k = 0; k < 2; ++k) {
            o.state_format[k] = mine.state_format[k] =
                how / 24 >> k & 1 ? MS_STATE_FORMAT_BF16 : MS_STATE_FORMAT_F32;
        }
        train_pulled(&config, &o, codes, half == MS_DTYPE_F16, &built_in);
        train_pulled(&config, &mine, codes, half == MS_DTYPE_F16, &own_one);
        assert_int_equal(w.calls, 2 * (half == MS_DTYPE_F16 ? 4 : 5));
        assert_int_equal(w.in_half, half == MS_DTYPE_F32 ? 0 : w.calls);
        assert_int_equal(w.masters, half == MS_DTYPE_F32 || alone ? 0 : w.calls);
        assert_int_equal(w.coded, codes ? 2 * w.calls : 0);
        assert_true(codes || w.rounded == w.calls * ((how / 24 & 1) + (how / 48 & 1)));
        if (built_in.count != own_one.count ||
            memcmp(built_in.all, own_one.all, built_in.count * sizeof(float)) != 0) {
            fail_msg("case %d: other bits", how);
        }
    }
}

static bool asks_too_much;

static uint64_t muon_workspace(const ms_shape *shape, void *user) {
    const uint64_t count = ms_shape_count(shape), rows = (uint64_t)shape->dim[0];
    const uint64_t cols = count / rows, least = rows < cols ? rows : cols;
    (void)user;
    return asks_too_much ? UINT64_MAX / 2 : (2 * count + 2 * least * least) * sizeof(float);
}

static ms_matrix as_matrix(float *data, int64_t rows, int64_t cols) {
    ms_matrix m;
    memset(&m, 0, sizeof m);
    m.data = data;
    m.rows = rows;
    m.cols = m.stride = cols;
    m.dtype = MS_DTYPE_F32;
    return m;
}

static ms_result orthogonalize(const ms_call *call, ms_matrix x, ms_matrix y, ms_matrix a,
                               ms_matrix b, int64_t count) {
    const bool tall = x.rows > x.cols;
    ms_result result = MS_RESULT_OK;
    for (int k = 0; k < 5 && result == MS_RESULT_OK; ++k) {
        result = tall ? ms_gemm(call, 1.0f, ms_transpose(x), x, 0.0f, a)
                      : ms_gemm(call, 1.0f, x, ms_transpose(x), 0.0f, a);
        memcpy(b.data, a.data, (size_t)(a.rows * a.rows) * sizeof(float));
        result = result != MS_RESULT_OK ? result : ms_gemm(call, 2.0315f, a, a, -4.7750f, b);
        memcpy(y.data, x.data, (size_t)count * sizeof(float));
        result = result != MS_RESULT_OK ? result
                 : tall                 ? ms_gemm(call, 1.0f, x, b, 3.4445f, y)
                                        : ms_gemm(call, 1.0f, b, x, 3.4445f, y);
        memcpy(x.data, y.data, (size_t)count * sizeof(float));
    }
    return result;
}

static int own_muon(const ms_update_args *a) {
    own *w = (own *)a->user;
    const int64_t count = (int64_t)a->count, rows = a->shape.dim[0], cols = count / rows;
    const int64_t least = rows < cols ? rows : cols;
    const ms_backend cpu = ms_backend_cpu();
    float *x = (float *)a->call->workspace, *y = x + count, *square = y + count;
    double sum = 0.0;
    uint32_t nonfinite = 0;
    w->calls += 1;
    assert_true(a->call->workspace_bytes >= muon_workspace(&a->shape, w));
    assert_int_equal(ms_shape_count(&a->shape), a->count);
    assert_true(a->call->stream == a->stream);
    if (w->calls == w->fails_at) {
        return 9;
    }
    for (int64_t i = 0; i < count; ++i) {
        const float g = (a->gradient_scale ? *a->gradient_scale : 1.0f) * a->gradient[i];
        a->state[0][i] = fmaf(a->momentum, a->state[0][i], g);
        x[i] = fmaf(a->momentum, a->state[0][i], g);
    }
    assert_int_equal(cpu.add_squares(cpu.user, x, MS_DTYPE_F32, a->count, &sum, 1, &nonfinite), 0);
    const float size = (float)(1.0 / (sqrt(sum) + 1e-7));
    for (int64_t i = 0; i < count; ++i) {
        x[i] *= size;
    }
    const ms_result result = orthogonalize(
        a->call, as_matrix(x, rows, cols + w->multiplies_wrongly), as_matrix(y, rows, cols),
        as_matrix(square, least, least), as_matrix(square + least * least, least, least), count);
    const float unit = -a->learning_rate * (float)(0.2 * sqrt((double)(rows > cols ? rows : cols)));
    const float decay = (float)(1.0 - (double)a->learning_rate * (double)a->weight_decay);
    for (int64_t i = 0; i < count && result == MS_RESULT_OK; ++i) {
        a->value[i] = fmaf(unit, x[i], decay * a->value[i]);
    }
    return (int)result;
}

static ms_optimizer_desc own_muon_desc(own *w) {
    ms_optimizer_desc o = desc_of(MS_OPTIMIZER_CUSTOM, 0.02f, 0.1f);
    o.momentum = 0.95f;
    o.update = own_muon;
    o.user = w;
    o.state_count = 1;
    o.workspace = muon_workspace;
    return o;
}

static void an_own_muon_has_the_bits_of_the_built_in_one(void **state) {
    (void)state;
    static outcome built_in, own_one;
    for (int how = 0; how < 6; ++how) {
        own w;
        memset(&w, 0, sizeof w);
        ms_optimizer_desc mine = own_muon_desc(&w), o = desc_of(MS_OPTIMIZER_MUON, 0.02f, 0.1f);
        o.grad_clip_norm = mine.grad_clip_norm = how & 1 ? 1.0f : 0.0f;
        run_plan(how < 2   ? PLAN_PLAIN
                 : how < 4 ? PLAN_SMALLEST
                           : PLAN_DEBUG,
                 &o, MS_DTYPE_F32, 0, &built_in);
        run_plan(how < 2   ? PLAN_PLAIN
                 : how < 4 ? PLAN_SMALLEST
                           : PLAN_DEBUG,
                 &mine, MS_DTYPE_F32, 0, &own_one);
        assert_true(built_in.count == own_one.count && w.calls >= 4 * STEPS_OF_PLANS);
        for (uint64_t i = 0; i < built_in.count; ++i) {
#ifdef T_CUDA // sums of squares have other bits there
            const float error = 1e-5f;
#else
            const float error = 0.0f;
#endif
            if (!(fabsf(built_in.all[i] - own_one.all[i]) <= error)) {
                fail_msg("case %d, element %u: %g, built in %g", how, (unsigned)i,
                         (double)own_one.all[i], (double)built_in.all[i]);
            }
        }
    }
}

static void updates_of_ones_own_may_fail(void **state) {
    (void)state;
    const ms_shape shapes[] = {ms_shape2(6, 9), ms_shape2(3, 4)};
    for (int how = 0; how < 4; ++how) {
        own w;
        memset(&w, 0, sizeof w);
        ms_config config = t_config();
        const ms_optimizer_desc o = own_muon_desc(&w);
        t_rng rng = t_seed(2);
        pull z;
        pull_create(&z, &config, shapes, 2, false);
        ms_set_optimizer(z.m, &o);
        asks_too_much = how == 0;
        if (how == 0) {
            t_error(z.m, ms_wrap(z.m), MS_RESULT_INVALID);
            t_text_has(ms_last_error(z.m), "param \"p0\": ms_optimizer_desc.workspace asks for");
            ms_destroy(z.m);
            continue;
        }
        t_ok(z.m, ms_wrap(z.m));
        pull_write(&z, 1);
        write_x(&z, &rng);
        w.fails_at = how == 1 ? 1 : how == 2 ? 2 : 0;
        w.multiplies_wrongly = how == 3;
        t_error(z.m, ms_step(z.m, NULL), MS_RESULT_CALLBACK);
        t_text_has(ms_last_error(z.m), how == 2 ? "p1" : "p0");
        if (how == 3) {
            t_text_has(ms_last_error(z.m), "ms_gemm: the shapes do not match");
        }
        ms_destroy(z.m);
    }
}

/* Debug mode tries updates with formats on copies. */
static void lies_of_updates_with_formats_are_named(void **state) {
    (void)state;
    static const char *const texts[] = {NULL, "ignores *gradient_scale", "reads state",
                                        "writes to state", "beyond the end"};
    static const ms_dtype halves[] = {MS_DTYPE_F32, MS_DTYPE_BF16, MS_DTYPE_F16};
    const ms_shape shapes[] = {ms_shape2(20, 30), ms_shape1(257)};
    for (int how = 0; how < 60; ++how) {
        const lie tells = (lie)(how % 5);
        const ms_dtype half = halves[how / 5 % 3];
        const bool codes = how / 15 & 1, alone = how / 30 & 1;
        own w;
        memset(&w, 0, sizeof w);
        ms_config config = t_config();
        ms_optimizer_desc o = own_desc(&w);
        t_rng rng = t_seed(2);
        pull z;
        o.grad_clip_norm = 0.25f;
        o.state_format[0] = MS_STATE_FORMAT_BF16;
        config.debug = true;
        config.mixed_dtype = half;
        config.loss_scaling.initial = SCALE;
        config.master_weights = alone ? MS_SWITCH_OFF : MS_SWITCH_DEFAULT;
        t_debugging = true;
        pull_create(&z, &config, shapes, 2, half != MS_DTYPE_F32);
        ms_set_optimizer(z.m, &o);
        for (int k = 0; k < 2 && codes; ++k) {
            ms_set_tensor_technique(z.m, z.p[k], MS_TECHNIQUE_OPTIMIZER_8BIT, MS_SWITCH_ON);
        }
        t_ok(z.m, ms_wrap(z.m));
        pull_write(&z, 1);
        write_x(&z, &rng);
        w.tells = tells;
        const ms_result result = ms_step(z.m, NULL);
        if (result != (tells == HONEST ? MS_RESULT_OK : MS_RESULT_CONTRACT)) {
            fail_msg("case %d: %s, %s", how, ms_result_name(result), ms_last_error(z.m));
        }
        if (tells != HONEST) {
            t_text_has(ms_last_error(z.m), texts[tells]);
            w.tells = HONEST;
        }
        t_ok(z.m, ms_step(z.m, NULL));
        ms_destroy(z.m);
        t_debugging = false;
    }
}

/* A callback runs on the host, whatever was updated before it on the device: no step that was halted
   calls it, and its number does not count those that were skipped. */
typedef struct counter {
    uint64_t calls, last;
} counter;

static int count_updates(const ms_update_args *a) {
    counter *c = (counter *)a->user;
    c->calls += 1;
    c->last = a->t;
    return 0;
}

static void no_halted_step_calls_an_update(void **state) {
    (void)state;
    for (int how = 0; how < 64; ++how) {
        const bool skips = how & 1, late = how & 2, grouped = how & 4, clips = how & 8;
        const ms_shape shapes[] = {ms_shape2(3, 4), ms_shape2(2, 5), ms_shape1(7)};
        v_device device;
        t_heap heap;
        counter c = {0, 0};
        ms_config config = t_config();
        ms_optimizer_desc mine = desc_of(MS_OPTIMIZER_CUSTOM, 0.01f, 0.0f);
        ms_optimizer_desc usual =
            desc_of(grouped ? MS_OPTIMIZER_MUON : MS_OPTIMIZER_CUSTOM, 0.01f, 0.0f);
        ms_tensor last;
        pull z;
#ifdef T_CUDA
        if (late) {
            continue;
        }
#endif
        memset(&heap, 0, sizeof heap);
        v_open(&device, (uint64_t)how);
        if (late) {
            config.backend = v_backend(&device);
            config.allocator = t_heap_allocator(&heap);
        }
        mine.update = count_updates;
        mine.user = &c;
        usual.update = grouped ? NULL : count_updates;
        usual.user = &c;
        usual.skip_above_norm = skips ? 1e3f : 0.0f;
        usual.grad_clip_norm = clips || !skips ? 1e9f : 0.0f;
        pull_create(&z, &config, shapes, 3, false);
        last = z.p[2];
        ms_set_optimizer(z.m, &usual);
        ms_set_param_group(z.m, last, ms_optimizer_group(z.m, &mine));
        t_ok(z.m, ms_wrap(z.m));
        pull_write(&z, 1);
        t_rng rng = t_seed((uint64_t)how);
        uint64_t expected = 0, number = 0;
        for (int step = 0; step < 8; ++step) {
            const bool bad = t_chance(&rng, 0.4);
            float x[MOST] = {0.0f};
            write_x(&z, &rng);
            x[0] = skips ? 1e4f : INFINITY;
            t_ok(z.m, bad ? ms_write(z.m, z.x[1], x) : MS_RESULT_OK);
            const ms_result result = t_settled(z.m, ms_step(z.m, NULL));
            assert_int_equal(result, bad && !skips ? MS_RESULT_NONFINITE : MS_RESULT_OK);
            number += !bad;
            expected += bad ? 0 : grouped ? 1 : 3;
            if (c.calls != expected || c.last != number) {
                fail_msg("case %d, step %d: %u calls, expected %u, the last of update %u, "
                         "expected %u",
                         how, step, (unsigned)c.calls, (unsigned)expected, (unsigned)c.last,
                         (unsigned)number);
            }
        }
        ms_destroy(z.m);
        v_close(&device);
    }
}

// ------------------------------------------------------------------------------------------------
// what is refused

static uint64_t no_workspace(const ms_shape *shape, void *user) {
    (void)shape;
    (void)user;
    return 0;
}

static void what_does_not_fit_is_refused(void **state) {
    (void)state;
    static const struct {
        ms_optimizer_kind kind;
        int what;
        ms_result result;
        const char *says;
    } cases[] = {
        {MS_OPTIMIZER_MUON, 0, MS_RESULT_INVALID,
         "param \"p1\" has rank 1, and MS_OPTIMIZER_MUON updates matrices"},
        {MS_OPTIMIZER_ADAFACTOR, 1, MS_RESULT_INVALID,
         "state_format of MS_OPTIMIZER_ADAFACTOR is F32"},
        {MS_OPTIMIZER_CUSTOM, 1, MS_RESULT_INVALID,
         "as of MS_OPTIMIZER_CUSTOM unless it takes_formats"},
        {MS_OPTIMIZER_MUON, 2, MS_RESULT_INVALID, "state_format is F32 or BF16; 8 bits are"},
        {MS_OPTIMIZER_MUON, 3, MS_RESULT_INVALID, "only MS_OPTIMIZER_CUSTOM takes a workspace"},
        {MS_OPTIMIZER_ADAMW, 4, MS_RESULT_INVALID,
         "only MS_OPTIMIZER_CUSTOM takes a workspace, takes_formats"},
        {MS_OPTIMIZER_ADAFACTOR, 5, MS_RESULT_INVALID, "takes_formats and unsigned_state"},
        {MS_OPTIMIZER_MUON, 6, MS_RESULT_UNSUPPORTED, "(ms_backend.has_update_steps)"},
        {MS_OPTIMIZER_ADAFACTOR, 6, MS_RESULT_UNSUPPORTED,
         "backend counting does not compute the steps"},
        {MS_OPTIMIZER_ADAFACTOR, 7, MS_RESULT_INVALID, "epsilon is 0"},
        {MS_UPDATE_MOMENTUM, 8, MS_RESULT_INVALID, "ms_set_optimizer"},
        {MS_OPTIMIZER_COUNT, 8, MS_RESULT_INVALID, "ms_set_optimizer"},
        {MS_OPTIMIZER_MUON, 9, MS_RESULT_INVALID, "state_count"},
        {MS_OPTIMIZER_CUSTOM, 10, MS_RESULT_UNSUPPORTED, "or an update that takes_formats"},
    };
    const ms_shape shapes[] = {ms_shape2(3, 4), ms_shape1(9)};
    for (size_t k = 0; k < sizeof cases / sizeof cases[0]; ++k) {
        const int what = cases[k].what;
        const bool custom = cases[k].kind == MS_OPTIMIZER_CUSTOM;
        own w;
        t_device device;
        ms_config config = t_config();
        ms_optimizer_desc o = t_optimizer(cases[k].kind, 0.01f);
        pull z;
        memset(&w, 0, sizeof w);
        if (what == 6) {
            config.backend = t_device_backend(&device);
            config.backend.has_update_steps = false;
        }
        config.mixed_dtype = what == 10 ? MS_DTYPE_F16 : MS_DTYPE_F32;
        o = what == 7 ? ms_optimizer_defaults(cases[k].kind) : o;
        o.epsilon = 0.0f;
        o.update = custom ? own_adamw : NULL;
        o.user = &w;
        o.state_format[0] = what == 1   ? MS_STATE_FORMAT_BF16
                            : what == 2 ? MS_STATE_FORMAT_8BIT
                                        : MS_STATE_FORMAT_F32;
        o.workspace = what == 3 ? no_workspace : NULL;
        o.takes_formats = what == 4;
        o.unsigned_state = what == 5;
        o.state_count = what == 9 || what == 10 ? 1 : 0;
        pull_create(&z, &config, shapes, 2, what == 10);
        ms_set_optimizer(z.m, &o);
        ms_result result = ms_wrap(z.m);
        if (result != cases[k].result) {
            fail_msg("case %d: %s, %s", (int)k, ms_result_name(result), ms_last_error(z.m));
        }
        t_text_has(ms_last_error(z.m), cases[k].says);
        ms_destroy(z.m);
    }
    t_device device; // a table that lacks a function
    ms_config config = t_config();
    ms_model *m;
    config.backend = t_device_backend(&device);
    config.backend.factor = NULL;
    assert_int_equal(t_not_created(&m, ms_create(&config, &m)), MS_RESULT_INVALID);
    config.backend.has_update_steps = false;
    t_ok(NULL, ms_create(&config, &m));
    ms_destroy(m);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(updates_follow_the_papers),
        cmocka_unit_test(gradients_of_any_size_are_followed),
        cmocka_unit_test(what_is_lent_is_updated),
        cmocka_unit_test(formats_are_followed),
        cmocka_unit_test(gradients_that_are_too_large_are_left_out),
        cmocka_unit_test(small_params_are_followed),
        cmocka_unit_test(skipped_steps_do_not_count),
        cmocka_unit_test(plans_change_no_bit),
        cmocka_unit_test(scratch_memory_is_planned),
        cmocka_unit_test(factored_state_has_its_own_shape),
        cmocka_unit_test(files_keep_the_state),
        cmocka_unit_test(failures_are_told),
        cmocka_unit_test(an_own_adamw_has_the_bits_of_the_built_in_one),
        cmocka_unit_test(an_own_muon_has_the_bits_of_the_built_in_one),
        cmocka_unit_test(updates_of_ones_own_may_fail),
        cmocka_unit_test(lies_of_updates_with_formats_are_named),
        cmocka_unit_test(no_halted_step_calls_an_update),
        cmocka_unit_test(what_does_not_fit_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
