/*  test_evals.c - what is not a plain training step: models that only evaluate, evals of larger sizes
    than training has, and gradients of inputs and activations that are kept (ms_want_gradient). The
    reference is a loop in float64, and its gradient by differences. */
#include "private.h"
#include "testing.h"

enum { COLS = 24, DEPTH = 5, ROWS = 12, MOST_ROWS = 200, MOST = MOST_ROWS * COLS };

// ------------------------------------------------------------------------------------------------
// a deep net: h = tanh(h W), DEPTH times; the loss of a row is its mean of (h - y)^2

static int product_forward(const ms_call *c) {
    return (int)ms_gemm(c, 1.0f, ms_matrix_of(&c->in[0]), ms_matrix_of(&c->param[0]), 0.0f,
                        ms_matrix_of(&c->out[0]));
}

static int product_backward(const ms_call *c) {
    const ms_matrix given = ms_matrix_of(&c->grad_out[0]);
    const ms_view *in = &c->grad_in[0], *weight = &c->grad_param[0];
    ms_result result = MS_RESULT_OK;
    if (weight->data != NULL) {
        result = ms_gemm(c, 1.0f, ms_transpose(ms_matrix_of(&c->in[0])), given, weight->beta,
                         ms_matrix_of(weight));
    }
    if (in->data != NULL && result == MS_RESULT_OK) {
        result = ms_gemm(c, 1.0f, given, ms_transpose(ms_matrix_of(&c->param[0])), in->beta,
                         ms_matrix_of(in));
    }
    return (int)result;
}

static float get(const ms_view *v, uint64_t i) {
    return msi_load(v->data, v->dtype, i);
}

static void give(const ms_view *v, uint64_t i, float x) {
    if (v->data != NULL) {
        msi_store_as(v->data, v->dtype, i, v->beta == 0.0f ? x : get(v, i) + x);
    }
}

static int tanh_forward(const ms_call *c) {
    for (uint64_t i = 0; i < ms_shape_count(&c->in[0].shape); ++i) {
        msi_store_as(c->out[0].data, c->out[0].dtype, i, tanhf(get(&c->in[0], i)));
    }
    return 0;
}

static int tanh_backward(const ms_call *c) {
    for (uint64_t i = 0; i < ms_shape_count(&c->out[0].shape); ++i) {
        const float y = get(&c->out[0], i);
        give(&c->grad_in[0], i, get(&c->grad_out[0], i) * (1.0f - y * y));
    }
    return 0;
}

static int loss_forward(const ms_call *c) {
    for (int64_t r = 0; r < c->in[0].shape.dim[0]; ++r) {
        double sum = 0.0;
        for (int64_t k = 0; k < COLS; ++k) {
            const uint64_t i = (uint64_t)(r * COLS + k);
            const double e = (double)get(&c->in[0], i) - (double)get(&c->in[1], i);
            sum += e * e / COLS;
        }
        ((float *)c->out[0].data)[r] = (float)sum;
    }
    return 0;
}

static int loss_backward(const ms_call *c) {
    for (int64_t r = 0; r < c->in[0].shape.dim[0]; ++r) {
        for (int64_t k = 0; k < COLS; ++k) {
            const uint64_t i = (uint64_t)(r * COLS + k);
            const float e = get(&c->in[0], i) - get(&c->in[1], i);
            const float g = 2.0f / COLS * e * ((const float *)c->grad_out[0].data)[r];
            give(&c->grad_in[0], i, g);
            give(&c->grad_in[1], i, -g);
        }
    }
    return 0;
}

typedef struct net {
    ms_model *m;
    ms_axis batch;
    ms_tensor x, y, loss, weight[DEPTH], hidden[DEPTH];
    ms_layer layer[2 * DEPTH];
} net;

/* What a net is made of. */
typedef struct recipe {
    int64_t rows, largest, eval_largest;
    bool has_loss;
} recipe;

static const recipe usual = {ROWS, ROWS, 0, true}, lossless = {ROWS, ROWS, 0, false};

static void register_layer(net *n, int number, const char *name, ms_layer_fn forward,
                           ms_layer_fn backward, ms_tensor in, ms_tensor out, ms_tensor param) {
    ms_layer_desc d = t_new_layer(name, forward, backward, NULL);
    d.in[0] = in;
    d.out[0] = out;
    d.param[0] = param;
    d.backward_reads.in = d.backward_reads.param = param.id != 0;
    d.backward_reads.out = param.id == 0;
    d.tile.axes = 1;
    d.dtypes.accepts = 1u << MS_DTYPE_BF16 | 1u << MS_DTYPE_F16;
    n->layer[number] = ms_register_layer(n->m, &d);
}

static void register_net(net *n, const recipe *r) {
    const ms_tensor none = {0};
    n->batch = ms_add_axis(n->m, "batch", r->rows, r->largest);
    if (r->eval_largest > 0) {
        ms_set_eval_largest(n->m, n->batch, r->eval_largest);
    }
    const ms_shape shape = ms_along(ms_shape2(r->rows, COLS), 0, n->batch);
    n->x = ms_input(n->m, "x", MS_DTYPE_F32, shape);
    ms_tensor h = n->x;
    for (int i = 0; i < DEPTH; ++i) {
        n->weight[i] = ms_param(n->m, "weight", MS_DTYPE_F32, ms_shape2(COLS, COLS));
        const ms_tensor product = ms_activation(n->m, "product", MS_DTYPE_F32, shape);
        n->hidden[i] = ms_activation(n->m, "hidden", MS_DTYPE_F32, shape);
        register_layer(n, 2 * i, "product", product_forward, product_backward, h, product,
                       n->weight[i]);
        register_layer(n, 2 * i + 1, "tanh", tanh_forward, tanh_backward, product, n->hidden[i],
                       none);
        h = n->hidden[i];
    }
    if (!r->has_loss) {
        ms_add_eval_output(n->m, h);
        return;
    }
    n->y = ms_input(n->m, "y", MS_DTYPE_F32, shape);
    n->loss =
        ms_activation(n->m, "losses", MS_DTYPE_F32, ms_along(ms_shape1(r->rows), 0, n->batch));
    ms_layer_desc d = t_new_layer("loss", loss_forward, loss_backward, NULL);
    d.in[0] = h;
    d.in[1] = n->y;
    d.out[0] = n->loss;
    d.backward_reads.in = 3;
    d.tile.axes = 1;
    d.dtypes.accepts = 1u << MS_DTYPE_BF16 | 1u << MS_DTYPE_F16;
    d.dtypes.f32_in = 2;
    d.dtypes.f32_out = 1;
    ms_register_layer(n->m, &d);
    ms_set_loss(n->m, n->loss);
    ms_add_eval_output(n->m, h);
}

static net new_net(const ms_config *config, const recipe *r) {
    net n;
    memset(&n, 0, sizeof n);
    t_ok(NULL, ms_create(config, &n.m));
    register_net(&n, r);
    return n;
}

static const float *weights(int layer) {
    static float w[DEPTH][COLS * COLS];
    t_rng rng = t_seed(77);
    for (int i = 0; i < DEPTH; ++i) {
        t_fill(&rng, w[i], COLS * COLS, 0.35f);
    }
    return w[layer];
}

static const float *batch(uint64_t seed) {
    static float data[MOST];
    t_rng rng = t_seed(seed);
    t_fill(&rng, data, MOST, 0.8f);
    return data;
}

static void write_weights(const net *n) {
    for (int i = 0; i < DEPTH; ++i) {
        t_ok(n->m, ms_write(n->m, n->weight[i], weights(i)));
    }
}

static void write_batch(const net *n, uint64_t seed) {
    t_ok(n->m, ms_write(n->m, n->x, batch(seed)));
    if (n->y.id != 0) {
        t_ok(n->m, ms_write(n->m, n->y, batch(seed + 1)));
    }
}

static net start_net(const ms_config *config, const recipe *r) {
    net n = new_net(config, r);
    t_ok(n.m, ms_wrap(n.m));
    write_weights(&n);
    write_batch(&n, 5);
    return n;
}

/* Products of other numbers of rows, as in other tiles, may be rounded otherwise. */
static void read_near(const net *n, ms_tensor tensor, const float *expected, float tolerance) {
    static float data[MOST];
    t_ok(n->m, ms_read(n->m, tensor, data));
    for (uint64_t i = 0; i < ms_tensor_count(n->m, tensor); ++i) {
        assert_true(fabsf(data[i] - expected[i]) <= tolerance);
    }
}

static void read_same(const net *n, ms_tensor tensor, const float *expected) {
    read_near(n, tensor, expected, 0.0f);
}

// ------------------------------------------------------------------------------------------------
// the reference: from a layer on, in float64

static double reference(int first, const double *from, const float *y, int64_t rows) {
    static double h[MOST], next[MOST];
    double loss = 0.0;
    memcpy(h, from, (size_t)(rows * COLS) * sizeof *h);
    for (int i = first; i < DEPTH; ++i) {
        const float *w = weights(i);
        for (int64_t r = 0; r < rows; ++r) {
            for (int k = 0; k < COLS; ++k) {
                double sum = 0.0;
                for (int j = 0; j < COLS; ++j) {
                    sum += h[r * COLS + j] * (double)w[j * COLS + k];
                }
                next[r * COLS + k] = tanh(sum);
            }
        }
        memcpy(h, next, (size_t)(rows * COLS) * sizeof *h);
    }
    for (int64_t i = 0; i < rows * COLS; ++i) {
        loss += (h[i] - (double)y[i]) * (h[i] - (double)y[i]) / (double)(rows * COLS);
    }
    return loss;
}

/* A gradient from layer `first` on against central differences, by an eighth of all elements. */
static void check_gradient(int first, const float *from, const float *y, int64_t rows,
                           const float *gradient, double scale, double tolerance) {
    static double h[MOST];
    double most = 0.0, worst = 0.0;
    for (int64_t i = 0; i < rows * COLS; ++i) {
        h[i] = (double)from[i];
    }
    for (int64_t i = 0; i < rows * COLS; i += 8) {
        const double was = h[i], step = 1e-5;
        h[i] = was + step;
        const double above = reference(first, h, y, rows);
        h[i] = was - step;
        const double slope = scale * (above - reference(first, h, y, rows)) / (2.0 * step);
        h[i] = was;
        most = fmax(most, fabs(slope));
        worst = fmax(worst, fabs(slope - (double)gradient[i]));
    }
    if (!(worst <= tolerance * most) || !(most > 0.0)) {
        print_error("gradients of %g are off by %g\n", most, worst);
        fail();
    }
}

// ------------------------------------------------------------------------------------------------
// models that only evaluate

static uint64_t plain_bytes(const ms_model *m) {
    ms_memory_report r;
    t_report(m, &r);
    for (int k = 0; k < MS_CATEGORY_COUNT; ++k) {
        const bool none = k == MS_CATEGORY_OPTIMIZER || k == MS_CATEGORY_GRADIENT ||
                          k == MS_CATEGORY_ACTIVATION_GRADIENT || k == MS_CATEGORY_SAVED;
        assert_true(!none || r.peak_bytes[k] == 0);
    }
    return r.arena_bytes;
}

/* Params that are not frozen are like those that are; the arena has the input, the params and what two
   layers hand to each other, and calls that need a step say what to do. */
static void a_model_without_a_loss_is_evaluated(void **state) {
    (void)state;
    const ms_config config = t_config();
    const uint64_t row_bytes = msi_align(ROWS * COLS * 4), param_bytes = msi_align(COLS * COLS * 4);
    for (int frozen = 0; frozen < 3; ++frozen) { // none, all, and all with a loss
        net n = new_net(&config, frozen == 2 ? &usual : &lossless);
        for (int i = 0; i < DEPTH && frozen > 0; ++i) {
            ms_set_frozen(n.m, n.weight[i], true);
        }
        t_ok(n.m, ms_wrap(n.m));
        write_weights(&n);
        write_batch(&n, 5);
        const uint64_t loss_bytes = frozen == 2 ? row_bytes : 0; // y
        const uint64_t needed = 3 * row_bytes + DEPTH * param_bytes + loss_bytes;
        assert_true(n.m->run.store->reserved_bytes > 0 || plain_bytes(n.m) == needed);
        double loss = 1.0;
        const struct {
            const char *name;
            ms_result result;
        } calls[] = {{"ms_step", ms_step(n.m, &loss)},
                     {"ms_forward", ms_forward(n.m, &loss)},
                     {"ms_backward", ms_backward(n.m)},
                     {"ms_update", ms_update(n.m)},
                     {"ms_step_slice", ms_step_slice(n.m, 1000, &loss)}};
        for (int k = 0; k < 5; ++k) {
            assert_int_equal(calls[k].result, MS_RESULT_ORDER);
        }
        ms_verify_report report;
        ms_nonfinite found;
        t_error(n.m, ms_find_nonfinite(n.m, &found), MS_RESULT_ORDER);
        t_error(n.m, ms_verify(n.m, NULL, NULL, &report), MS_RESULT_ORDER);
        t_text_has(ms_last_error(n.m), "ms_verify: this model evaluates alone");
        t_text_has(ms_last_error(n.m), frozen == 2 ? "ms_set_frozen" : "ms_set_loss");
        static double from[MOST];
        for (int i = 0; i < ROWS * COLS; ++i) {
            from[i] = (double)batch(5)[i];
        }
        t_ok(n.m, ms_eval(n.m, NULL));
        t_ok(n.m, ms_eval(n.m, &loss));
        assert_true(frozen == 2 ? fabs(loss - reference(0, from, batch(6), ROWS)) < 1e-6
                                : loss != loss);
        ms_destroy(n.m);
    }
}

/* Params may have their home on the host. */
static ms_config streaming(void) {
    ms_config config = t_config();
    config.offloading = MS_SWITCH_ON;
    config.mode = MS_MODE_AGGRESSIVE;
    config.mixed_precision = MS_SWITCH_OFF;
    return config;
}

static void count_letters(const char *text, size_t length, void *user) {
    (void)text;
    *(size_t *)user += length;
}

/* At every budget an eval has the same bits, and what lists a plan lists that of the eval. */
static void an_eval_fits_any_budget(void **state) {
    (void)state;
    ms_config config = streaming();
    static float expected[MOST];
    uint64_t smallest = 0, before = 0;
    double us = 0.0;
    net plain = start_net(&config, &lossless);
    t_ok(plain.m, ms_eval(plain.m, NULL));
    t_ok(plain.m, ms_read(plain.m, plain.hidden[DEPTH - 1], expected));
    t_ok(plain.m, ms_smallest_budget(plain.m, &smallest));
    const uint64_t largest = plain_bytes(plain.m);
    assert_true(smallest < largest * 3 / 4);
    config.debug = true;
    for (uint64_t k = 0; k <= 8; ++k) {
        config.memory_budget_bytes = smallest + k * (largest - smallest) / 8;
        net n = start_net(&config, &lossless);
        ms_memory_report r;
        t_report(n.m, &r);
        assert_true(r.arena_bytes <= config.memory_budget_bytes && r.arena_bytes >= before);
        assert_true(k == 0 || r.step_us <= us * 1.02);
        us = r.step_us;
        before = r.arena_bytes;
        for (int round = 0; round < 2; ++round) {
            t_ok(n.m, ms_eval(n.m, NULL));
            read_same(&n, n.hidden[DEPTH - 1], expected);
        }
        size_t letters[4] = {0, 0, 0, 0};
        t_ok(n.m, ms_print_plan_full(n.m, count_letters, &letters[0]));
        t_ok(n.m, ms_print_program(n.m, MS_PROGRAM_TRAIN, count_letters, &letters[1]));
        t_ok(n.m, ms_print_program(n.m, MS_PROGRAM_EVAL, count_letters, &letters[2]));
        t_ok(n.m, ms_print_trace(n.m, count_letters, &letters[3]));
        assert_true(letters[0] > 500 && letters[3] > 500);
        assert_true(letters[1] > 100 && letters[1] == letters[2]);
        ms_destroy(n.m);
    }
    ms_set_budget(plain.m, smallest - 1);
    t_error(plain.m, ms_wrap(plain.m), MS_RESULT_BUDGET);
    t_ok(plain.m, ms_eval(plain.m, NULL));
    read_same(&plain, plain.hidden[DEPTH - 1], expected);
    ms_destroy(plain.m);
}

typedef struct file {
    uint8_t *bytes;
    uint64_t size, room;
} file;

static int write_file(void *user, const void *data, size_t bytes) {
    file *f = (file *)user;
    if (f->size + bytes > f->room) {
        return 1;
    }
    memcpy(f->bytes + f->size, data, bytes);
    f->size += bytes;
    return 0;
}

static int read_file(void *user, uint64_t offset, void *data, size_t bytes) {
    const file *f = (const file *)user;
    memcpy(data, f->bytes + offset, bytes);
    return 0;
}

/* Values that a trainer saves are loaded by a model that only evaluates, and back; suspended, reshaped,
   in an arena that it shares with the trainer, between the trainer's steps. */
static void a_teacher_takes_values_and_turns(void **state) {
    (void)state;
    ms_config config = t_config();
    static uint8_t room[1 << 18];
    file saved = {room, 0, sizeof room};
    static float expected[MOST];
    const recipe wide = {ROWS, 2 * ROWS, 0, true}, wide_teacher = {ROWS, 2 * ROWS, 0, false};
    double loss = 0.0, alone = 0.0;
    assert_int_equal(ms_arena_create(NULL, NULL, &config.arena), MS_RESULT_OK);
    net n = start_net(&config, &wide), teacher = new_net(&config, &wide_teacher);
    t_ok(teacher.m, ms_wrap(teacher.m));
    for (int round = 0; round < 3; ++round) {
        t_ok(n.m, ms_step(n.m, &loss));
        t_ok(n.m, ms_eval(n.m, &loss));
        t_ok(n.m, ms_read(n.m, n.hidden[DEPTH - 1], expected));
        saved.size = 0;
        const ms_sink sink = {write_file, &saved};
        t_ok(n.m, ms_save(n.m, &sink));
        const ms_source source = {read_file, &saved, saved.size};
        ms_load_options options;
        memset(&options, 0, sizeof options);
        options.values_only = options.partial = true;
        t_ok(teacher.m, ms_load(teacher.m, &source, &options));
        write_batch(&teacher, 5);
        t_ok(teacher.m, ms_suspend(teacher.m, NULL));
        t_error(teacher.m, ms_eval(teacher.m, &alone), MS_RESULT_ORDER);
        t_ok(teacher.m, ms_resume(teacher.m));
        t_ok(teacher.m, ms_eval(teacher.m, &alone));
        read_same(&teacher, teacher.hidden[DEPTH - 1], expected);
        const int64_t sizes[] = {2 * ROWS, ROWS};
        for (int k = 0; k < 2; ++k) {
            t_ok(teacher.m, ms_reshape(teacher.m, &sizes[k]));
            write_batch(&teacher, 5);
            t_ok(teacher.m, ms_eval(teacher.m, NULL));
        }
        read_same(&teacher, teacher.hidden[DEPTH - 1], expected);
        t_ok(teacher.m, round == 1 ? ms_detach(teacher.m) : ms_wrap(teacher.m));
    }
    ms_arena_destroy(config.arena);
    ms_destroy(n.m);
    ms_destroy(teacher.m);
}

/* Between the micro-batches of a step a model cannot stop training: their gradients would be lost. */
static void no_micro_batch_is_lost(void **state) {
    (void)state;
    ms_config config = t_config();
    config.accumulation_steps = 3;
    net n = start_net(&config, &usual);
    double loss = 0.0;
    t_ok(n.m, ms_step(n.m, &loss));
    for (int frozen = 1; frozen >= 0; --frozen) {
        for (int i = 0; i < DEPTH; ++i) {
            ms_set_frozen(n.m, n.weight[i], frozen == 1);
        }
        t_error(n.m, ms_wrap(n.m), frozen == 1 ? MS_RESULT_ORDER : MS_RESULT_OK);
        t_ok(n.m, ms_eval(n.m, &loss));
    }
    t_ok(n.m, ms_step(n.m, &loss));
    t_ok(n.m, ms_step(n.m, &loss));
    ms_memory_report r;
    t_report(n.m, &r);
    assert_int_equal(r.step_count, 1);
    ms_destroy(n.m);
}

/* All params are frozen for a while: the model evaluates; then it trains on as if nothing had been. */
static void a_model_can_stop_training(void **state) {
    (void)state;
    const ms_config config = t_config();
    net a = new_net(&config, &usual), b = new_net(&config, &usual);
    const ms_optimizer_desc sgd = t_optimizer(MS_OPTIMIZER_SGD, 0.1f);
    net *const both[] = {&a, &b};
    double loss[2] = {0.0, 0.0};
    for (int k = 0; k < 2; ++k) {
        ms_set_optimizer(both[k]->m, &sgd);
        t_ok(both[k]->m, ms_wrap(both[k]->m));
        write_weights(both[k]);
    }
    for (uint64_t step = 0; step < 4; ++step) {
        for (int k = 0; k < 2; ++k) {
            write_batch(both[k], step);
            t_ok(both[k]->m, ms_step(both[k]->m, &loss[k]));
        }
        assert_true(loss[0] >= loss[1] && loss[0] <= loss[1]);
        for (int frozen = 1; frozen >= 0 && step % 2 == 0; --frozen) {
            for (int i = 0; i < DEPTH; ++i) {
                ms_set_frozen(b.m, b.weight[i], frozen == 1);
            }
            t_ok(b.m, ms_wrap(b.m));
            t_ok(b.m, ms_eval(b.m, &loss[1]));
            t_ok(a.m, ms_eval(a.m, &loss[0]));
            assert_true(loss[0] >= loss[1] && loss[0] <= loss[1]);
            assert_int_equal(b.m->run.plan->evals, frozen == 1);
        }
    }
    ms_destroy(a.m);
    ms_destroy(b.m);
}

// ------------------------------------------------------------------------------------------------
// evals of larger sizes than training has

static void evals_may_be_larger(void **state) {
    (void)state;
    const recipe larger = {4, 8, MOST_ROWS, true}, all = {4, MOST_ROWS, MOST_ROWS, true};
    const recipe usual_8 = {4, 8, 0, true};
    for (int way = 0; way < 5; ++way) {
        ms_config config = way < 2 ? t_config() : streaming();
        config.force_optimize = way == 1 || way == 3 || way == 4;
        config.tiling = way == 4 ? MS_SWITCH_OFF : MS_SWITCH_DEFAULT;
        net n = start_net(&config, &larger), other = start_net(&config, &all);
        net small = start_net(&config, &usual_8);
        ms_memory_report r, of_other, of_small;
        t_report(n.m, &r);
        t_report(other.m, &of_other);
        t_report(small.m, &of_small);
        assert_true(r.arena_bytes < of_other.arena_bytes && r.arena_bytes > of_small.arena_bytes);
        double loss = 0.0, expected = 0.0, trained = 0.0;
        const int64_t sizes[] = {MOST_ROWS, 9, 8, 37, 3};
        for (int k = 0; k < 5; ++k) {
            static float out[MOST];
            t_ok(n.m, ms_reshape(n.m, &sizes[k]));
            t_ok(other.m, ms_reshape(other.m, &sizes[k]));
            write_batch(&n, 9);
            write_batch(&other, 9);
            if (way == 1 && k == 1) { // with values elsewhere for a while
                t_ok(n.m, ms_suspend(n.m, NULL));
                t_ok(n.m, ms_resume(n.m));
            }
            if (way == 0 && k == 3) {
                t_ok(n.m, ms_detach(n.m));
                t_ok(n.m, ms_wrap(n.m));
            }
            t_ok(n.m, ms_eval(n.m, &loss));
            t_ok(other.m, ms_eval(other.m, &expected));
            t_ok(other.m, ms_read(other.m, other.hidden[DEPTH - 1], out));
            const bool same = way < 2 || way == 4; // otherwise groups differ
            read_near(&n, n.hidden[DEPTH - 1], out, same ? 0.0f : 1e-5f);
            assert_true(fabs(loss - expected) <= (same ? 0.0 : 1e-5));
            if (sizes[k] > 8) {
                t_error(n.m, ms_step(n.m, &loss), MS_RESULT_ORDER);
                t_text_has(ms_last_error(n.m), "ms_reshape");
                t_error(n.m, ms_backward(n.m), MS_RESULT_ORDER);
            } else if (way == 0) {
                t_ok(n.m, ms_step(n.m, &loss));
                t_ok(other.m, ms_step(other.m, &trained));
                assert_true(loss >= trained && loss <= trained);
            }
        }
        const int64_t beyond = MOST_ROWS + 1;
        t_error(n.m, ms_reshape(n.m, &beyond), MS_RESULT_INVALID);
        ms_destroy(n.m);
        ms_destroy(other.m);
        ms_destroy(small.m);
    }
}

/* The smallest budget has room for the largest eval; what is refused names one. */
static void budgets_count_larger_evals(void **state) {
    (void)state;
    ms_config config = streaming();
    const recipe larger = {4, 8, MOST_ROWS, true};
    uint64_t smallest = 0;
    net n = new_net(&config, &larger);
    t_ok(n.m, ms_smallest_budget(n.m, &smallest));
    ms_set_budget(n.m, smallest);
    t_ok(n.m, ms_wrap(n.m));
    write_weights(&n);
    const int64_t sizes[] = {MOST_ROWS, 8};
    for (int k = 0; k < 2; ++k) {
        t_ok(n.m, ms_reshape(n.m, &sizes[k]));
        write_batch(&n, 3);
        t_ok(n.m, k == 0 ? ms_eval(n.m, NULL) : ms_step(n.m, NULL));
    }
    ms_set_budget(n.m, smallest - 1);
    t_error(n.m, ms_wrap(n.m), MS_RESULT_BUDGET);
    ms_destroy(n.m);
}

static void wrong_sizes_of_evals(void **state) {
    (void)state;
    const ms_config config = t_config();
    for (int way = 0; way < 4; ++way) {
        ms_model *m, *other;
        t_ok(NULL, ms_create(&config, &m));
        t_ok(NULL, ms_create(&config, &other));
        const ms_axis axis = ms_add_axis(m, "batch", 4, 8), foreign = ms_add_axis(other, "x", 4, 8);
        const ms_axis none = {0};
        if (way == 3) {
            (void)ms_input(m, "x", MS_DTYPE_F32, ms_along(ms_shape1(4), 0, axis));
        }
        ms_set_eval_largest(m, way == 0 ? none : way == 1 ? foreign : axis, way == 2 ? 7 : 16);
        t_error(m, ms_wrap(m), way == 3 ? MS_RESULT_ORDER : MS_RESULT_INVALID);
        t_text_has(ms_last_error(m), "ms_set_eval_largest");
        ms_destroy(m);
        ms_destroy(other);
    }
}

// ------------------------------------------------------------------------------------------------
// gradients that are wanted

typedef struct technique {
    const char *name;
    void (*set)(ms_config *config);
    double tolerance;
    uint32_t micros;
    bool moves, tiles, alone; // without a trained param
} technique;

static void set_nothing(ms_config *c) {
    (void)c;
}

static void set_smallest(ms_config *c) {
    c->force_optimize = true;
}

static void set_debug(ms_config *c) {
    c->force_optimize = c->debug = true;
}

static void set_bf16(ms_config *c) {
    c->mixed_precision = MS_SWITCH_ON;
    c->mixed_dtype = MS_DTYPE_BF16;
    c->force_optimize = true;
}

static void set_f16(ms_config *c) {
    set_bf16(c);
    c->mixed_dtype = MS_DTYPE_F16;
    c->loss_scaling.growth_steps = 1; // each step is by another scale
    c->loss_scaling.initial = 256.0f;
}

static const technique techniques[] = {
    {"plain", set_nothing, 1e-4, 1, false, false, false},
    {"plain, alone", set_nothing, 1e-4, 1, false, false, true},
    {"smallest", set_smallest, 1e-4, 1, false, false, false},
    {"debug", set_debug, 1e-4, 1, false, false, false},
    {"moved", set_smallest, 1e-4, 1, true, false, false},
    {"tiles", set_nothing, 1e-4, 1, false, true, false},
    {"tiles, moved, alone", set_smallest, 1e-4, 1, true, true, true},
    {"micro-batches", set_smallest, 1e-4, 3, false, false, false},
    {"micro-batches in tiles, debug", set_debug, 1e-4, 2, false, true, true},
    {"bf16", set_bf16, 0.1, 1, false, false, false},
    {"bf16, alone, tiles", set_bf16, 0.1, 1, false, true, true},
    {"f16", set_f16, 0.02, 1, false, false, false},
    {"f16, alone", set_f16, 0.02, 1, false, true, true},
    {"f16, micro-batches", set_f16, 0.02, 2, true, false, false},
};

enum { WANTED_HIDDEN = 2 };

static void check_wanted(const net *n, const technique *t, uint64_t seed) {
    static float from[MOST], y[MOST], gradient[MOST];
    const double scale = 1.0 / t->micros;
    memcpy(from, batch(seed), sizeof from);
    memcpy(y, batch(seed + 1), sizeof y);
    t_ok(n->m, ms_read(n->m, ms_gradient(n->m, n->x), gradient));
    check_gradient(0, from, y, ROWS, gradient, scale, t->tolerance);
    for (int i = 0; i <= WANTED_HIDDEN; ++i) { // forward up to the hidden value
        static float next[MOST];
        for (int r = 0; r < ROWS; ++r) {
            for (int k = 0; k < COLS; ++k) {
                double sum = 0.0;
                for (int j = 0; j < COLS; ++j) {
                    sum += (double)from[r * COLS + j] * (double)weights(i)[j * COLS + k];
                }
                next[r * COLS + k] = (float)tanh(sum);
            }
        }
        memcpy(from, next, sizeof from);
    }
    t_ok(n->m, ms_read(n->m, ms_gradient(n->m, n->hidden[WANTED_HIDDEN]), gradient));
    check_gradient(WANTED_HIDDEN + 1, from, y, ROWS, gradient, scale, t->tolerance);
}

/* Gradients of an input and of a hidden value are those of the loss, whatever the plan does, after a
   step and after ms_backward, and again in the next step; they end with the next eval. */
static void wanted_gradients_are_those_of_the_loss(void **state) {
    (void)state;
    for (size_t k = 0; k < sizeof techniques / sizeof techniques[0]; ++k) {
        const technique *t = &techniques[k];
        ms_config config = t_config();
        config.accumulation_steps = t->micros;
        t->set(&config);
        config.early_update =
            config.mixed_precision == MS_SWITCH_ON ? MS_SWITCH_OFF : MS_SWITCH_DEFAULT;
        net n = new_net(&config, &usual);
        const ms_optimizer_desc sgd = t_optimizer(MS_OPTIMIZER_SGD, 1e-12f); // weights stay
        ms_set_optimizer(n.m, &sgd);
        ms_want_gradient(n.m, n.x);
        ms_want_gradient(n.m, n.hidden[WANTED_HIDDEN]);
        for (int i = 0; i < DEPTH; ++i) {
            ms_set_frozen(n.m, n.weight[i], t->alone);
        }
        for (int i = 0; i < 2 * DEPTH; ++i) {
            if (t->moves && i % 3 == 0) {
                ms_set_layer_technique(n.m, n.layer[i], MS_TECHNIQUE_OFFLOADING, MS_SWITCH_ON);
            }
            if (t->tiles && i >= 3 && i < 8) { // the wanted hidden value is between them
                ms_set_layer_technique(n.m, n.layer[i], MS_TECHNIQUE_TILING, MS_SWITCH_ON);
            }
        }
        t_ok(n.m, ms_wrap(n.m));
        write_weights(&n);
        double loss = 0.0;
        for (uint64_t step = 0; step < 3; ++step) {
            for (uint32_t micro = 0; micro < t->micros; ++micro) {
                const uint64_t seed = 10 * step + 2 * micro;
                write_batch(&n, seed);
                if (step == 1) {
                    t_ok(n.m, ms_forward(n.m, &loss));
                    t_ok(n.m, ms_backward(n.m));
                    check_wanted(&n, t, seed);
                } else {
                    t_ok(n.m, ms_step(n.m, &loss));
                }
                check_wanted(&n, t, seed);
            }
            if (step == 1) {
                t_ok(n.m, ms_update(n.m));
                check_wanted(&n, t, 10 * step + 2 * (t->micros - 1));
            }
        }
        float gone[ROWS * COLS];
        t_ok(n.m, ms_eval(n.m, &loss));
        t_error(n.m, ms_read(n.m, ms_gradient(n.m, n.x), gone), MS_RESULT_ORDER);
        t_text_has(ms_last_error(n.m), "to the next step");
        ms_verify_report report;
        t_ok(n.m, ms_verify(n.m, NULL, NULL, &report));
        assert_int_equal(report.tensor_count, t->alone ? 2 : 2 + DEPTH);
        assert_true(t->tolerance > 1e-3 || t->tiles || report.differ_count == 0);
        ms_destroy(n.m);
    }
}

/* Without a param that is trained nothing is updated, whatever the optimizer, and the arena has no
   state and no gradients of params. */
static void a_gradient_alone_updates_nothing(void **state) {
    (void)state;
    static const ms_optimizer_kind kinds[] = {MS_OPTIMIZER_ADAMW, MS_OPTIMIZER_NONE,
                                              MS_OPTIMIZER_LION};
    for (int k = 0; k < 3; ++k) {
        ms_config config = t_config();
        net n = new_net(&config, &usual);
        ms_optimizer_desc o = t_optimizer(kinds[k], 0.1f);
        o.grad_clip_norm = kinds[k] == MS_OPTIMIZER_LION ? 1.0f : 0.0f;
        ms_set_optimizer(n.m, &o);
        ms_want_gradient(n.m, n.x);
        for (int i = 0; i < DEPTH; ++i) {
            ms_set_frozen(n.m, n.weight[i], true);
        }
        t_ok(n.m, ms_wrap(n.m));
        write_weights(&n);
        write_batch(&n, 5);
        ms_memory_report r;
        t_report(n.m, &r);
        assert_true(r.peak_bytes[MS_CATEGORY_OPTIMIZER] == 0 &&
                    r.peak_bytes[MS_CATEGORY_GRADIENT] == 0);
        double first = 0.0, loss = 0.0;
        t_ok(n.m, ms_step(n.m, &first));
        float x[ROWS * COLS], g[ROWS * COLS];
        memcpy(x, batch(5), sizeof x);
        for (int step = 0; step < 50; ++step) { // an adversary: it lowers the loss by the input
            t_ok(n.m, ms_read(n.m, ms_gradient(n.m, n.x), g));
            for (int i = 0; i < ROWS * COLS; ++i) {
                x[i] -= 20.0f * g[i];
            }
            t_ok(n.m, ms_write(n.m, n.x, x));
            t_ok(n.m, ms_step(n.m, &loss));
        }
        assert_true(loss < 0.7 * first);
        for (int i = 0; i < DEPTH; ++i) {
            read_same(&n, n.weight[i], weights(i));
        }
        ms_destroy(n.m);
    }
}

/* In F16, without params, the gradients that are wanted tell whether a step has overflowed. */
static void overflows_are_found_without_params(void **state) {
    (void)state;
    ms_config config = t_config();
    set_f16(&config);
    config.early_update = MS_SWITCH_OFF;
    config.loss_scaling.initial = 1e9f;
    config.loss_scaling.growth_steps = 1000;
    net n = new_net(&config, &usual);
    ms_want_gradient(n.m, n.hidden[WANTED_HIDDEN]);
    for (int i = 0; i < DEPTH; ++i) {
        ms_set_frozen(n.m, n.weight[i], true);
    }
    t_ok(n.m, ms_wrap(n.m));
    write_weights(&n);
    write_batch(&n, 5);
    double loss = 0.0;
    ms_memory_report r;
    for (int step = 0; step < 30; ++step) {
        t_ok(n.m, ms_step(n.m, &loss));
    }
    t_ok(n.m, ms_synchronize(n.m));
    t_report(n.m, &r);
    assert_true(r.skipped_steps > 3 && r.skipped_steps < 30 && r.loss_scale < 1e8);
    ms_destroy(n.m);
}

// ------------------------------------------------------------------------------------------------
// gradients of another dtype than their value has

static uint32_t wrong_dtypes;

/* y = tanh(a) + tanh(b), of values in F16 or F32; the gradients of values in F16 are F32. */
static int sum_forward(const ms_call *c) {
    for (uint64_t i = 0; i < ms_shape_count(&c->out[0].shape); ++i) {
        const float a = get(&c->in[0], i), b = c->in[1].data != NULL ? get(&c->in[1], i) : 0.0f;
        msi_store_as(c->out[0].data, c->out[0].dtype, i, tanhf(a) + tanhf(b));
    }
    return 0;
}

static int sum_backward(const ms_call *c) {
    wrong_dtypes += c->grad_out[0].dtype != MS_DTYPE_F32;
    for (int k = 0; k < 2; ++k) {
        wrong_dtypes += c->in[k].shape.rank > 0 && c->grad_in[k].dtype != MS_DTYPE_F32;
        for (uint64_t i = 0; i < ms_shape_count(&c->out[0].shape) && c->grad_in[k].data; ++i) {
            const float y = tanhf(get(&c->in[k], i));
            give(&c->grad_in[k], i, get(&c->grad_out[0], i) * (1.0f - y * y));
        }
    }
    return 0;
}

enum { LINKS = 5 };

/* h[k] = tanh(h[k - 1]) + tanh(h[k - 2]) in F16: each value has two readers, whose gradients add up. The
   gradient of x against the formula in float64, from the values as they were rounded. */
static void gradients_have_a_dtype_of_their_own(void **state) {
    (void)state;
    for (int way = 0; way < 6; ++way) { // plain; smallest; moved; in tiles; overwriting; debug
        ms_config config = t_config();
        config.force_optimize = way > 0;
        config.debug = way == 5;
        ms_model *m;
        t_ok(NULL, ms_create(&config, &m));
        const ms_shape shape = ms_shape2(ROWS, COLS);
        ms_tensor h[LINKS + 1];
        h[0] = ms_input(m, "x", MS_DTYPE_F32, shape);
        for (int k = 1; k <= LINKS; ++k) {
            const ms_dtype dtype = k < LINKS ? MS_DTYPE_F16 : MS_DTYPE_F32;
            h[k] = ms_activation(m, "h", dtype, shape);
            ms_set_gradient_dtype(m, h[k], MS_DTYPE_F32);
            ms_layer_desc d = t_new_layer("sum", sum_forward, sum_backward, NULL);
            d.in[0] = h[k - 1];
            d.in[1] = k > 1 ? h[k - 2] : d.in[1];
            d.out[0] = h[k];
            d.backward_reads.in = k > 1 ? 3 : 1;
            d.overwrites.in = way == 4 && k > 2 ? 1 : 0;
            d.tile.axes = 1;
            const ms_layer layer = ms_register_layer(m, &d);
            ms_add_output(m, h[k]);
            if (way == 2 && k == 3) {
                ms_set_layer_technique(m, layer, MS_TECHNIQUE_OFFLOADING, MS_SWITCH_ON);
            } else if (way == 3) {
                ms_set_layer_technique(m, layer, MS_TECHNIQUE_TILING, MS_SWITCH_ON);
            }
        }
        ms_set_loss(m, h[LINKS]);
        ms_want_gradient(m, h[0]);
        ms_want_gradient(m, h[2]);
        t_ok(m, ms_wrap(m));
        assert_int_equal(ms_tensor_dtype(m, h[2]), MS_DTYPE_F16);
        assert_int_equal(ms_tensor_dtype(m, ms_gradient(m, h[2])), MS_DTYPE_F32);
        assert_int_equal(ms_tensor_bytes(m, ms_gradient(m, h[2])), ROWS * COLS * 4);
        t_ok(m, ms_write(m, h[0], batch(3)));
        wrong_dtypes = 0;
        t_ok(m, ms_step(m, NULL));
        t_ok(m, ms_synchronize(m));
        assert_int_equal(wrong_dtypes, 0);
        static float values[LINKS + 1][ROWS * COLS], gradient[2][ROWS * COLS];
        static uint16_t halves[ROWS * COLS];
        memcpy(values[0], batch(3), sizeof values[0]);
        for (int k = 1; k < LINKS; ++k) {
            t_ok(m, ms_read(m, h[k], halves));
            for (int i = 0; i < ROWS * COLS; ++i) {
                values[k][i] = msi_load(halves, MS_DTYPE_F16, (uint64_t)i);
            }
        }
        t_ok(m, ms_read(m, ms_gradient(m, h[0]), gradient[0]));
        t_ok(m, ms_read(m, ms_gradient(m, h[2]), gradient[1]));
        for (int i = 0; i < ROWS * COLS; ++i) {
            double g[LINKS + 1];
            g[LINKS] = 1.0 / (ROWS * COLS);
            for (int k = LINKS - 1; k >= 0; --k) {
                const double y = tanh((double)values[k][i]);
                g[k] = (1.0 - y * y) * (g[k + 1] + (k + 2 <= LINKS ? g[k + 2] : 0.0));
            }
            assert_true(fabs(g[0] - (double)gradient[0][i]) < 1e-6 * fabs(g[0]));
            assert_true(fabs(g[2] - (double)gradient[1][i]) < 1e-6 * fabs(g[2]));
        }
        ms_verify_report report;
        t_ok(m, ms_verify(m, NULL, NULL, &report));
        assert_int_equal(report.tensor_count, 2);
        assert_int_equal(report.differ_count, 0);
        ms_destroy(m);
    }
}

static void wrong_dtypes_of_gradients(void **state) {
    (void)state;
    const ms_config config = t_config();
    for (int way = 0; way < 5; ++way) {
        ms_model *m;
        t_ok(NULL, ms_create(&config, &m));
        const ms_shape shape = ms_shape2(ROWS, COLS);
        const ms_tensor x = ms_input(m, "x", MS_DTYPE_F32, shape);
        const ms_tensor h = ms_activation(m, "h", way == 2 ? MS_DTYPE_I32 : MS_DTYPE_F32, shape);
        ms_layer_desc d = t_new_layer("sum", sum_forward, sum_backward, NULL);
        d.in[0] = x;
        d.out[0] = h;
        if (way == 3) {
            ms_register_layer(m, &d);
        }
        ms_set_gradient_dtype(m, way == 0 ? x : h, way == 1 ? MS_DTYPE_F64 : MS_DTYPE_BF16);
        if (way == 4) { // a loss has one in F32
            ms_register_layer(m, &d);
            ms_set_loss(m, h);
        }
        t_error(m, ms_wrap(m), way == 3 ? MS_RESULT_ORDER : MS_RESULT_INVALID);
        t_text_has(ms_last_error(m), way == 4 ? "loss \"h\"" : "ms_set_gradient_dtype");
        ms_destroy(m);
    }
}

// ------------------------------------------------------------------------------------------------
// what a framework that runs a plan itself reads of it

typedef struct listed {
    ms_model *m;
    uint64_t ends[2]; // of the arena, of the host
    uint32_t seeds, lifetimes, matches;
    float seed;
    ms_lifetime all[256];
} listed;

static void list_lifetime(const ms_lifetime *l, void *user) {
    listed *to = (listed *)user;
    const bool lent = l->is_outside && !l->is_on_host;
    assert_true(!lent || l->offset == 0);
    if (!lent && l->tensor.id != 0) {
        to->ends[l->is_on_host] = msi_larger(to->ends[l->is_on_host], l->offset + l->bytes);
    }
    assert_true(to->lifetimes < 256);
    to->all[to->lifetimes++] = *l;
}

/* Operands of events are where the lifetimes of their values are. */
static void match_event(const ms_event *e, void *user) {
    listed *to = (listed *)user;
    assert_true(e->kind == MS_EVENT_SEED || !(e->value < 0.0f || e->value > 0.0f));
    to->seeds += e->kind == MS_EVENT_SEED;
    to->seed = e->kind == MS_EVENT_SEED ? e->value : to->seed;
    for (uint32_t k = 0; k < e->operand_count && e->index != UINT32_MAX; ++k) {
        const ms_event_operand *o = &e->operands[k];
        bool found = false;
        for (uint32_t i = 0; i < to->lifetimes && !found; ++i) {
            const ms_lifetime *l = &to->all[i];
            found = l->tensor.id == o->tensor.id && l->offset == o->offset &&
                    l->is_on_host == o->is_on_host && l->first <= e->index && e->index <= l->last;
        }
        const bool settled = o->tensor.id != 0 && !o->is_part && e->kind != MS_EVENT_DROP &&
                             e->kind != MS_EVENT_COPY && e->kind != MS_EVENT_WAIT;
        to->matches += settled && found;
        assert_true(!settled || found || o->is_new); // a result may lie in an operand that ends
    }
}

static void plans_say_where_and_what(void **state) {
    (void)state;
    ms_config config = t_config();
    config.dry_run = config.force_optimize = true;
    config.offloading = MS_SWITCH_ON;
    config.accumulation_steps = 2;
    net n = new_net(&config, &usual);
    t_ok(n.m, ms_wrap(n.m));
    static listed seen;
    memset(&seen, 0, sizeof seen);
    t_ok(n.m, ms_visit_lifetimes(n.m, MS_PROGRAM_TRAIN, list_lifetime, &seen));
    ms_memory_report r;
    t_report(n.m, &r);
    assert_true(seen.ends[0] > 0 && seen.ends[0] <= r.arena_bytes);
    assert_true(seen.ends[1] > 0 && seen.ends[1] <= r.host_bytes);
    for (int k = 0; k < 2; ++k) {
        seen.seeds = 0;
        t_ok(n.m, ms_visit_events(n.m, MS_PROGRAM_TRAIN, match_event, &seen));
        assert_int_equal(seen.seeds, 1);
        assert_true(fabsf(seen.seed - (k == 0 ? 0.5f / ROWS : 0.25f)) < 1e-9f);
        ms_set_loss_factor(n.m, 0.25f);
    }
    assert_true(seen.matches > 50);
    ms_destroy(n.m);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_model_without_a_loss_is_evaluated),
        cmocka_unit_test(an_eval_fits_any_budget),
        cmocka_unit_test(a_teacher_takes_values_and_turns),
        cmocka_unit_test(no_micro_batch_is_lost),
        cmocka_unit_test(a_model_can_stop_training),
        cmocka_unit_test(evals_may_be_larger),
        cmocka_unit_test(budgets_count_larger_evals),
        cmocka_unit_test(wrong_sizes_of_evals),
        cmocka_unit_test(wanted_gradients_are_those_of_the_loss),
        cmocka_unit_test(a_gradient_alone_updates_nothing),
        cmocka_unit_test(overflows_are_found_without_params),
        cmocka_unit_test(gradients_have_a_dtype_of_their_own),
        cmocka_unit_test(wrong_dtypes_of_gradients),
        cmocka_unit_test(plans_say_where_and_what),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
