/*  test_features.c - each feature of the interface alone, with small layers made for it and numbers
    known in closed form. The values are small whole numbers wherever they can be, so that float32
    is exact and sums may come in any order. Nearly every test runs twice, the second time with
    ms_config.debug: the layers are honest, so it has to pass and to give the same numbers. */
#define MEMSCALE_IMPLEMENTATION
#include "../memscale.h"
#include "testing.h"

enum { ROWS = 4, COLS = 16, COUNT = ROWS * COLS, MAX_OPS = 16, MAX_IN = 4 };

// ------------------------------------------------------------------------------------------------
// the layers: y = c0 a + c1 b + ... + a p + a q + ..., y = x x / 2, and row sums of x x / 2

static bool debugging; // callbacks are called several times, and some gradients hold NaN on trial

typedef enum style { STYLE_BETA, STYLE_ADD, STYLE_SET } style;

typedef struct op {
    int in_count, param_count;
    float c[MAX_IN];
    style in_style[MAX_IN], param_style[MAX_IN];
    uint32_t faults; // gradients that were not as their style wants them
    uint32_t calls[MS_PHASE_COUNT];
    uint32_t failing; // mask of phases
    bool poisons;     // backward makes a NaN
    /* of the last call of each phase */
    ms_call last[MS_PHASE_COUNT];
    uint16_t wanted_out[MS_PHASE_COUNT], wanted_saved[MS_PHASE_COUNT]; // of all calls together
} op;

static int enter(const ms_call *call) {
    op *o = (op *)call->user;
    o->calls[call->phase] += 1;
    o->last[call->phase] = *call;
    o->wanted_out[call->phase] |= call->wanted_out;
    o->wanted_saved[call->phase] |= call->wanted_saved;
    return (o->failing >> call->phase & 1u) != 0 ? T_CALLBACK_ERROR : 0;
}

static void contribute(op *o, style of, const ms_view *gradient, int64_t i, float value) {
    float *data = t_data(gradient);
    if (data == NULL) {
        return;
    }
    o->faults += of == STYLE_ADD && (gradient->beta != 1.0f || (t_is_nan(data[i]) && !debugging));
    o->faults += of == STYLE_SET && gradient->beta != 0.0f;
    if (of == STYLE_BETA) {
        t_contribute(gradient, i, value);
    } else {
        data[i] = of == STYLE_ADD ? data[i] + value : value;
    }
}

static int mix_forward(const ms_call *call) {
    const op *o = (const op *)call->user;
    int64_t cols = t_cols(&call->out[0]);
    int64_t count = t_rows(&call->out[0]) * cols;
    int error = enter(call);
    for (int64_t i = 0; i < count && error == 0; ++i) {
        float sum = 0.0f;
        for (int k = 0; k < o->in_count; ++k) {
            sum += o->c[k] * t_data(&call->in[k])[i];
        }
        for (int k = 0; k < o->param_count; ++k) {
            sum += t_data(&call->in[0])[i] * t_data(&call->param[k])[i % cols];
        }
        t_data(&call->out[0])[i] = sum;
    }
    return error;
}

static int mix_backward(const ms_call *call) {
    op *o = (op *)call->user;
    int64_t cols = t_cols(&call->out[0]);
    int64_t count = t_rows(&call->out[0]) * cols;
    int error = enter(call);
    for (int k = 0; k < o->in_count && error == 0; ++k) {
        for (int64_t i = 0; i < count; ++i) {
            float slope = o->c[k];
            for (int j = 0; j < o->param_count && k == 0; ++j) {
                slope += t_data(&call->param[j])[i % cols];
            }
            contribute(o, o->in_style[k], &call->grad_in[k], i, slope * t_grad_out(call, 0, i));
        }
    }
    for (int j = 0; j < o->param_count && error == 0; ++j) {
        for (int64_t c = 0; c < cols; ++c) {
            float sum = o->poisons ? NAN : 0.0f;
            for (int64_t i = c; i < count; i += cols) {
                sum += t_data(&call->in[0])[i] * t_grad_out(call, 0, i);
            }
            contribute(o, o->param_style[j], &call->grad_param[j], c, sum);
        }
    }
    return error;
}

static int square_forward(const ms_call *call) {
    int error = enter(call);
    int64_t count = t_rows(&call->out[0]) * t_cols(&call->out[0]);
    for (int64_t i = 0; i < count && error == 0; ++i) {
        float x = t_data(&call->in[0])[i];
        t_data(&call->out[0])[i] = 0.5f * x * x;
    }
    return error;
}

static int square_backward(const ms_call *call) {
    int error = enter(call);
    int64_t count = t_rows(&call->out[0]) * t_cols(&call->out[0]);
    for (int64_t i = 0; i < count && error == 0; ++i) {
        t_contribute(&call->grad_in[0], i, t_data(&call->in[0])[i] * t_grad_out(call, 0, i));
    }
    return error;
}

static int loss_forward(const ms_call *call) {
    int error = enter(call);
    int64_t cols = t_cols(&call->in[0]);
    for (int64_t r = 0; r < t_rows(&call->in[0]) && error == 0; ++r) {
        float sum = 0.0f;
        for (int64_t i = r * cols; i < (r + 1) * cols; ++i) {
            sum += 0.5f * t_data(&call->in[0])[i] * t_data(&call->in[0])[i];
        }
        t_data(&call->out[0])[r] = sum;
    }
    return error;
}

static int loss_backward(const ms_call *call) {
    int error = enter(call);
    int64_t cols = t_cols(&call->in[0]);
    for (int64_t i = 0; i < t_rows(&call->in[0]) * cols && error == 0; ++i) {
        t_contribute(&call->grad_in[0], i, t_data(&call->in[0])[i] * t_grad_out(call, 0, i / cols));
    }
    return error;
}

// ------------------------------------------------------------------------------------------------
// a net of such layers: a config, a model, and its layers in the order of their making

/* How often a callback has been called, in debug at least. */
static void expect_calls(uint32_t got, uint32_t expected) {
    if (debugging ? got < expected : got != expected) {
        fail_msg("%u calls, expected %u", (unsigned)got, (unsigned)expected);
    }
}

typedef struct net {
    ms_config config;
    t_heap heap;
    ms_model *m;
    int64_t rows, largest;
    ms_axis batch;
    ms_tensor x, loss;
    op ops[MAX_OPS];
    ms_layer layers[MAX_OPS];
    int count;
} net;

static void net_begin(net *n) {
    memset(n, 0, sizeof *n);
    n->rows = n->largest = ROWS;
    n->config = t_config();
    n->config.debug = debugging;
    n->config.allocator = t_heap_allocator(&n->heap);
}

/* Without an update, so that the gradients stay. */
static void net_create(net *n) {
    assert_int_equal(ms_create(&n->config, &n->m), MS_RESULT_OK);
    n->batch = ms_add_axis(n->m, "batch", n->rows, n->largest);
    n->x = ms_input(n->m, "x", MS_DTYPE_F32, ms_along(ms_shape2(n->rows, COLS), 0, n->batch));
    ms_optimizer_desc optimizer;
    memset(&optimizer, 0, sizeof optimizer);
    optimizer.kind = MS_OPTIMIZER_NONE;
    ms_set_optimizer(n->m, &optimizer);
}

static void net_sgd(net *n, float rate) {
    ms_optimizer_desc optimizer;
    memset(&optimizer, 0, sizeof optimizer);
    optimizer.kind = MS_OPTIMIZER_SGD;
    optimizer.learning_rate = rate;
    ms_set_optimizer(n->m, &optimizer);
}

static ms_tensor activation(net *n, const char *name) {
    return ms_activation(n->m, name, MS_DTYPE_F32, ms_along(ms_shape2(n->rows, COLS), 0, n->batch));
}

static ms_tensor saved(net *n, const char *name) {
    return ms_saved(n->m, name, MS_DTYPE_F32, ms_along(ms_shape2(n->rows, COLS), 0, n->batch));
}

static ms_tensor vector_param(net *n, const char *name) {
    return ms_param(n->m, name, MS_DTYPE_F32, ms_shape1(COLS));
}

/* The next op, and a desc that points to it. */
static op *next_op(net *n, ms_layer_desc *desc, const char *name, ms_layer_fn forward,
                   ms_layer_fn backward) {
    assert_true(n->count < MAX_OPS);
    memset(desc, 0, sizeof *desc);
    desc->name = name;
    desc->forward = forward;
    desc->backward = backward;
    desc->user = &n->ops[n->count];
    return &n->ops[n->count];
}

static int net_register(net *n, const ms_layer_desc *desc) {
    n->layers[n->count] = ms_register_layer(n->m, desc);
    return n->count++;
}

/* y = c a + a p; the number of the op. p may be none. */
static int add_scale(net *n, const char *name, ms_tensor a, float c, ms_tensor p, ms_tensor y) {
    ms_layer_desc desc;
    op *o = next_op(n, &desc, name, mix_forward, mix_backward);
    o->in_count = 1;
    o->c[0] = c;
    o->param_count = p.id != 0;
    desc.in[0] = a;
    desc.param[0] = p;
    desc.out[0] = y;
    desc.backward_reads.in = p.id != 0;
    desc.backward_reads.param = p.id != 0;
    desc.backward_reads.nothing = p.id == 0;
    return net_register(n, &desc);
}

/* y = a + b */
static int add_sum(net *n, const char *name, ms_tensor a, ms_tensor b, ms_tensor y) {
    ms_layer_desc desc;
    op *o = next_op(n, &desc, name, mix_forward, mix_backward);
    o->in_count = 2;
    o->c[0] = o->c[1] = 1.0f;
    desc.in[0] = a;
    desc.in[1] = b;
    desc.out[0] = y;
    desc.backward_reads.nothing = true;
    return net_register(n, &desc);
}

/* y = a a / 2: reads a in backward. */
static int add_square(net *n, const char *name, ms_tensor a, ms_tensor y) {
    ms_layer_desc desc;
    (void)next_op(n, &desc, name, square_forward, square_backward);
    desc.in[0] = a;
    desc.out[0] = y;
    desc.backward_reads.in = 1;
    return net_register(n, &desc);
}

/* The loss is the sum of y y / 2, times the factor. */
static int add_loss(net *n, ms_tensor y) {
    ms_layer_desc desc;
    (void)next_op(n, &desc, "loss", loss_forward, loss_backward);
    n->loss =
        ms_activation(n->m, "losses", MS_DTYPE_F32, ms_along(ms_shape1(n->rows), 0, n->batch));
    desc.in[0] = y;
    desc.out[0] = n->loss;
    desc.backward_reads.in = 1;
    int layer = net_register(n, &desc);
    ms_set_loss(n->m, n->loss);
    ms_set_loss_factor(n->m, 1.0f);
    return layer;
}

static float x_at(int i) {
    return (float)(i * 7 % 5 - 2);
}

static float p_at(int i) {
    return (float)(i % 3 - 1);
}

static void write_x(net *n) {
    float x[3 * COUNT];
    for (int i = 0; i < 3 * COUNT; ++i) {
        x[i] = x_at(i);
    }
    t_ok(n->m, ms_write(n->m, n->x, x));
}

/* Element i is p_at(i) + shift. */
static void write_param(net *n, ms_tensor p, float shift) {
    float data[COLS];
    for (int i = 0; i < COLS; ++i) {
        data[i] = p_at(i) + shift;
    }
    t_ok(n->m, ms_write(n->m, p, data));
}

static void net_start(net *n) {
    t_ok(n->m, ms_wrap(n->m));
    write_x(n);
}

static void net_end(net *n) {
    for (int i = 0; i < n->count; ++i) {
        assert_int_equal(n->ops[i].faults, 0);
    }
    ms_destroy(n->m);
    assert_true(n->heap.live_count == 0 && n->heap.wrong_releases == 0);
}

static void expect_values(const net *n, ms_tensor tensor, const double *expected, int count) {
    float data[4 * COUNT];
    t_ok(n->m, ms_read(n->m, tensor, data));
    for (int i = 0; i < count; ++i) {
        if ((double)data[i] != expected[i]) {
            fail_msg("element %d is %.9g, expected %.9g", i, (double)data[i], expected[i]);
        }
    }
}

static void same_tensor(const net *a, ms_tensor of_a, const net *b, ms_tensor of_b) {
    float left[4 * COUNT], right[4 * COUNT];
    t_ok(a->m, ms_read(a->m, of_a, left));
    t_ok(b->m, ms_read(b->m, of_b, right));
    assert_memory_equal(left, right, (size_t)ms_tensor_bytes(a->m, of_a));
}

// ------------------------------------------------------------------------------------------------
// events: what the program does, counted

typedef struct tally {
    const ms_model *m;
    uint32_t count[MS_EVENT_COUNT];
    uint32_t of_layer[MS_EVENT_COUNT][MAX_OPS];
    uint32_t moves; // copies between two places
    uint32_t last_backward, first_update, last_update;
    ms_tensor updated; // the first param that is
} tally;

static void count_event(const ms_event *event, void *user) {
    tally *t = (tally *)user;
    assert_int_equal(event->size, sizeof *event);
    t->count[event->kind] += 1;
    if (event->layer.id != 0 && event->layer.id <= MAX_OPS) {
        t->of_layer[event->kind][event->layer.id - 1] += 1;
    }
    if (event->kind == MS_EVENT_COPY) {
        const ms_event_operand *o = event->operands;
        assert_int_equal(event->operand_count, 2);
        t->moves += o[0].offset != o[1].offset || o[0].is_outside || o[1].is_outside;
    }
    if (event->kind == MS_EVENT_BACKWARD) {
        t->last_backward = event->index;
    }
    if (event->kind == MS_EVENT_UPDATE) {
        t->updated = t->count[MS_EVENT_UPDATE] == 1 ? event->tensor : t->updated;
        t->first_update = t->count[MS_EVENT_UPDATE] == 1 ? event->index : t->first_update;
        t->last_update = event->index;
    }
}

static tally tally_of(const net *n) {
    tally t;
    memset(&t, 0, sizeof t);
    t.m = n->m;
    t_ok(n->m, ms_visit_events(n->m, MS_PROGRAM_TRAIN, count_event, &t));
    return t;
}

// ------------------------------------------------------------------------------------------------
// gradients: three styles on one fan-out

enum { FAN = 4 };

/* h = x p; y_k = c_k h + h q; z = y_0 + ... + y_3; loss z z / 2. */
static void check_fan(const style *styles, bool smallest) {
    static const float c[FAN] = {1.0f, 2.0f, -1.0f, 3.0f};
    net n;
    ms_tensor y[FAN];
    ms_layer_desc desc;
    net_begin(&n);
    n.config.force_optimize = smallest;
    net_create(&n);
    ms_tensor p = vector_param(&n, "p"), q = vector_param(&n, "q");
    ms_tensor h = activation(&n, "h"), z = activation(&n, "z");
    add_scale(&n, "scale", n.x, 0.0f, p, h);
    for (int k = 0; k < FAN; ++k) {
        y[k] = activation(&n, "y");
        op *o = next_op(&n, &desc, "consumer", mix_forward, mix_backward);
        o->in_count = o->param_count = 1;
        o->c[0] = c[k];
        o->in_style[0] = styles[k];
        o->param_style[0] = styles[FAN - 1 - k];
        desc.in[0] = h;
        desc.param[0] = q;
        desc.out[0] = y[k];
        desc.accumulates.in = o->in_style[0] == STYLE_ADD;
        desc.overwrites.in = o->in_style[0] == STYLE_SET;
        desc.accumulates.param = o->param_style[0] == STYLE_ADD;
        desc.overwrites.param = o->param_style[0] == STYLE_SET;
        net_register(&n, &desc);
    }
    op *o = next_op(&n, &desc, "sum", mix_forward, mix_backward);
    o->in_count = FAN;
    for (int k = 0; k < FAN; ++k) {
        o->c[k] = 1.0f;
        o->in_style[k] = styles[k];
        desc.in[k] = y[k];
        desc.accumulates.in |= (uint16_t)((styles[k] == STYLE_ADD) << k);
        desc.overwrites.in |= (uint16_t)((styles[k] == STYLE_SET) << k);
    }
    desc.out[0] = z;
    net_register(&n, &desc);
    add_loss(&n, z);
    net_start(&n);
    write_param(&n, p, 2.0f);
    write_param(&n, q, 1.0f);
    double of_p[COLS] = {0}, of_q[COLS] = {0};
    for (int i = 0; i < COUNT; ++i) {
        double hi = (double)x_at(i) * ((double)p_at(i % COLS) + 2.0);
        double slope = 5.0 + (double)FAN * ((double)p_at(i % COLS) + 1.0);
        double zi = hi * slope;
        of_p[i % COLS] += zi * slope * (double)x_at(i);
        of_q[i % COLS] += zi * hi * (double)FAN;
    }
    for (int step = 0; step < 2; ++step) {
        t_ok(n.m, ms_step(n.m, NULL));
        expect_values(&n, ms_gradient(n.m, p), of_p, COLS);
        expect_values(&n, ms_gradient(n.m, q), of_q, COLS);
    }
    net_end(&n);
}

static void styles_mix_on_one_fan_out(void **state) {
    (void)state;
    for (int mix = 0; mix < 81; ++mix) {
        style styles[FAN];
        for (int k = 0, rest = mix; k < FAN; ++k, rest /= 3) {
            styles[k] = (style)(rest % 3);
        }
        check_fan(styles, false);
        check_fan(styles, true);
    }
}

/* h stands in two slots of one layer, y = 2 h + 3 h, and in another layer before or behind it. */
static void check_slots(style first, style second, bool behind) {
    net n;
    ms_layer_desc desc;
    net_begin(&n);
    net_create(&n);
    ms_tensor p = vector_param(&n, "p");
    ms_tensor h = activation(&n, "h"), y = activation(&n, "y"), other = activation(&n, "other");
    ms_tensor z = activation(&n, "z");
    add_scale(&n, "scale", n.x, 0.0f, p, h);
    for (int turn = 0; turn < 2; ++turn) {
        const ms_tensor none = {0};
        if ((turn == 1) == behind) {
            add_scale(&n, "other", h, 4.0f, none, other);
            continue;
        }
        op *o = next_op(&n, &desc, "twice", mix_forward, mix_backward);
        o->in_count = 2;
        o->c[0] = 2.0f;
        o->c[1] = 3.0f;
        o->in_style[0] = first;
        o->in_style[1] = second;
        desc.in[0] = desc.in[1] = h;
        desc.out[0] = y;
        desc.accumulates.in = (uint16_t)((first == STYLE_ADD) | (second == STYLE_ADD) << 1);
        desc.overwrites.in = (uint16_t)((first == STYLE_SET) | (second == STYLE_SET) << 1);
        net_register(&n, &desc);
    }
    add_sum(&n, "sum", y, other, z);
    add_loss(&n, z);
    net_start(&n);
    write_param(&n, p, 2.0f);
    double of_p[COLS] = {0};
    for (int i = 0; i < COUNT; ++i) {
        double x = (double)x_at(i);
        of_p[i % COLS] += 81.0 * x * x * ((double)p_at(i % COLS) + 2.0);
    }
    t_ok(n.m, ms_step(n.m, NULL));
    expect_values(&n, ms_gradient(n.m, p), of_p, COLS);
    net_end(&n);
}

static void styles_mix_on_the_slots_of_one_layer(void **state) {
    (void)state;
    for (int mix = 0; mix < 18; ++mix) {
        check_slots((style)(mix % 3), (style)(mix / 3 % 3), mix / 9 == 1);
    }
}

// ------------------------------------------------------------------------------------------------
// a layer with a recompute of its own: a = x + 1, b = 2 x, saved s = 3 x, t = x - 1

static int many_make(const ms_call *call) {
    op *o = (op *)call->user;
    int error = enter(call);
    const float factor[4] = {1.0f, 2.0f, 3.0f, 1.0f}, shift[4] = {1.0f, 0.0f, 0.0f, -1.0f};
    for (int k = 0; k < 4; ++k) {
        const ms_view *view = k < 2 ? &call->out[k] : &call->saved[k - 2];
        uint16_t wanted = k < 2 ? call->wanted_out : call->wanted_saved;
        o->faults += (wanted >> k % 2 & 1) != (view->data != NULL);
        for (int64_t i = 0; i < t_rows(view) * t_cols(view) && view->data != NULL; ++i) {
            t_data(view)[i] = factor[k] * t_data(&call->in[0])[i] + shift[k];
        }
    }
    return error;
}

/* Not the true gradient: what matters is that all that is read takes part in it. */
static int many_backward(const ms_call *call) {
    int error = enter(call);
    for (int64_t i = 0; i < t_rows(&call->in[0]) * t_cols(&call->in[0]); ++i) {
        t_contribute(&call->grad_in[0], i,
                     t_grad_out(call, 0, i) * t_data(&call->saved[1])[i] +
                         t_grad_out(call, 1, i) * t_data(&call->saved[0])[i]);
    }
    return error;
}

enum { MANY_SCALE, MANY, MANY_A, MANY_B, MANY_SUM, MANY_LOSS };

typedef struct many {
    net n;
    ms_tensor p, value[4]; // a, b, s, t
} many;

/* x p -> many -> a a / 2 + b b / 2 -> loss. force: mask of a, b, s, t that are dropped. */
static void many_start(many *m, uint32_t force, uint16_t optional) {
    net *n = &m->n;
    ms_layer_desc desc;
    net_create(n);
    m->p = vector_param(n, "p");
    ms_tensor h = activation(n, "h"), aa = activation(n, "aa"), bb = activation(n, "bb");
    ms_tensor z = activation(n, "z");
    m->value[0] = activation(n, "a");
    m->value[1] = activation(n, "b");
    m->value[2] = saved(n, "s");
    m->value[3] = saved(n, "t");
    add_scale(n, "scale", n->x, 0.0f, m->p, h);
    (void)next_op(n, &desc, "many", many_make, many_backward);
    desc.recompute = many_make;
    desc.in[0] = h;
    desc.out[0] = m->value[0];
    desc.out[1] = m->value[1];
    desc.saved[0] = m->value[2];
    desc.saved[1] = m->value[3];
    desc.backward_reads.saved = 3;
    desc.optional_saved = optional;
    net_register(n, &desc);
    add_square(n, "of-a", m->value[0], aa);
    add_square(n, "of-b", m->value[1], bb);
    add_sum(n, "sum", aa, bb, z);
    add_loss(n, z);
    for (int k = 0; k < 4; ++k) {
        ms_set_tensor_technique(n->m, m->value[k], MS_TECHNIQUE_CHECKPOINTING,
                                force >> k & 1 ? MS_SWITCH_ON : MS_SWITCH_OFF);
    }
    net_start(n);
    write_param(n, m->p, 2.0f);
}

static void recompute_makes_what_is_wanted(void **state) {
    (void)state;
    many plain;
    net_begin(&plain.n);
    many_start(&plain, 0, 0);
    t_ok(plain.n.m, ms_step(plain.n.m, NULL));
    expect_calls(plain.n.ops[MANY].calls[MS_PHASE_RECOMPUTE], 0);
    assert_int_equal(plain.n.ops[MANY].wanted_out[MS_PHASE_FORWARD], 3);
    assert_int_equal(plain.n.ops[MANY].wanted_saved[MS_PHASE_FORWARD], 3);
    for (uint32_t force = 1; force < 16; ++force) {
        many m;
        net_begin(&m.n);
        many_start(&m, force, 0);
        t_ok(m.n.m, ms_step(m.n.m, NULL));
        const op *o = &m.n.ops[MANY];
        assert_int_equal(o->wanted_out[MS_PHASE_FORWARD], 3);
        assert_int_equal(o->wanted_saved[MS_PHASE_FORWARD], 3);
        if (!debugging) { // which tries a recomputation behind every forward
            assert_int_equal(o->wanted_out[MS_PHASE_RECOMPUTE], force & 3);
            assert_int_equal(o->wanted_saved[MS_PHASE_RECOMPUTE], force >> 2);
        }
        same_tensor(&plain.n, ms_gradient(plain.n.m, plain.p), &m.n, ms_gradient(m.n.m, m.p));
        net_end(&m.n);
    }
    net_end(&plain.n);
}

/* Saved tensors that nobody will read are not made: in eval, and in a forward that drops them. */
static void optional_saved_tensors(void **state) {
    (void)state;
    for (uint32_t force = 0; force < 16; force += 4) {
        for (uint16_t optional = 0; optional < 4; ++optional) {
            many m;
            net_begin(&m.n);
            many_start(&m, force, optional);
            t_ok(m.n.m, ms_step(m.n.m, NULL));
            t_ok(m.n.m, ms_eval(m.n.m, NULL));
            const op *o = &m.n.ops[MANY];
            assert_int_equal(o->wanted_saved[MS_PHASE_FORWARD], 3 & ~(optional & force >> 2));
            assert_int_equal(o->wanted_saved[MS_PHASE_EVAL], 3 & ~optional);
            assert_true(debugging || o->wanted_saved[MS_PHASE_RECOMPUTE] == force >> 2);
            net_end(&m.n);
        }
    }
}

/* Two layers of one kind and size, of which one is cheap to recompute: that one is. Both of their
   saved tensors wait while the layers behind them run. */
static void check_price(bool first_is_cheap) {
    net n;
    ms_layer_desc desc;
    ms_tensor y[4];
    net_begin(&n);
    net_create(&n);
    ms_tensor p = vector_param(&n, "p"), h = activation(&n, "h"), sum = activation(&n, "sum");
    add_scale(&n, "scale", n.x, 0.0f, p, h);
    for (int k = 0; k < 4; ++k) {
        bool twin = k < 2;
        (void)next_op(&n, &desc, twin ? "twin" : "tail", many_make, many_backward);
        y[k] = activation(&n, "y");
        desc.recompute = many_make;
        desc.in[0] = twin ? h : k == 2 ? sum : y[2];
        desc.out[0] = y[k];
        desc.out[1] = activation(&n, "aside");
        desc.saved[0] = ms_saved(n.m, "s", MS_DTYPE_F32, ms_shape2(ROWS, 4 * COLS));
        desc.backward_reads.saved = 1;
        desc.recompute_reads.in = 1;
        desc.flops = 1e9;
        desc.recompute_flops = (k == 0) == first_is_cheap ? 1.0 : 1e9;
        int layer = net_register(&n, &desc);
        if (!twin) {
            ms_set_layer_technique(n.m, n.layers[layer], MS_TECHNIQUE_CHECKPOINTING, MS_SWITCH_OFF);
        }
        if (k == 1) {
            add_sum(&n, "sum", y[0], y[1], sum);
        }
    }
    add_loss(&n, y[3]);
    ms_set_layer_technique(n.m, n.layers[0], MS_TECHNIQUE_CHECKPOINTING, MS_SWITCH_OFF);
    t_ok(n.m, ms_wrap(n.m));
    ms_memory_report report;
    t_report(n.m, &report);
    ms_set_budget(n.m, report.plain_bytes - 64);
    t_ok(n.m, ms_wrap(n.m));
    tally t = tally_of(&n);
    assert_int_equal(t.of_layer[MS_EVENT_RECOMPUTE][first_is_cheap ? 1 : 2] > 0, true);
    assert_int_equal(t.of_layer[MS_EVENT_RECOMPUTE][first_is_cheap ? 2 : 1], 0);
    t_report(n.m, &report);
    assert_true(report.recompute_count > 0 && report.arena_bytes <= report.budget_bytes);
    net_end(&n);
}

static void cheap_recomputations_come_first(void **state) {
    (void)state;
    check_price(true);
    check_price(false);
}

// ------------------------------------------------------------------------------------------------
// state: buffers that forward changes

/* y = x (1 + s), and then s += 1: a recomputation has to see the s that forward saw. */
static int counter_forward(const ms_call *call) {
    float *s = t_data(&call->state[0]);
    int error = enter(call);
    for (int64_t i = 0; i < t_rows(&call->out[0]) * t_cols(&call->out[0]) && error == 0; ++i) {
        t_data(&call->out[0])[i] = t_data(&call->in[0])[i] * (1.0f + s[0]);
    }
    s[0] += call->phase == MS_PHASE_EVAL ? 0.0f : 1.0f;
    return error;
}

/* As counter, and then s = 2 s. */
static int doubler_forward(const ms_call *call) {
    int error = counter_forward(call);
    float *s = t_data(&call->state[0]);
    s[0] = call->phase == MS_PHASE_EVAL ? s[0] : 2.0f * (s[0] - 1.0f);
    return error;
}

/* y = 2 x. Counts its forwards alone, as it promises. */
static int promising_forward(const ms_call *call) {
    int error = enter(call);
    for (int64_t i = 0; i < t_rows(&call->out[0]) * t_cols(&call->out[0]) && error == 0; ++i) {
        t_data(&call->out[0])[i] = 2.0f * t_data(&call->in[0])[i];
    }
    t_data(&call->state[0])[0] += call->phase == MS_PHASE_FORWARD ? 1.0f : 0.0f;
    return error;
}

static int constant_backward(const ms_call *call) {
    op *o = (op *)call->user;
    int error = enter(call);
    o->faults += call->state[0].data != NULL;
    for (int64_t i = 0; i < t_rows(&call->in[0]) * t_cols(&call->in[0]) && error == 0; ++i) {
        t_contribute(&call->grad_in[0], i, 0.0625f * t_grad_out(call, 0, i));
    }
    return error;
}

enum { ST_SCALE, ST_COUNTER, ST_DOUBLER, ST_PROMISING, ST_SUM = 7 };

typedef struct stateful {
    net n;
    ms_tensor p, shared, own;
    ms_tensor y[3];
} stateful;

/* h = x p; y0 = counter(h), y1 = doubler(y0) of one buffer, y2 = promising(y1) of another; the
   square of each is read in backward. dropped: the three are recomputed. */
static void stateful_start(stateful *t, bool dropped) {
    static const ms_layer_fn forwards[] = {counter_forward, doubler_forward, promising_forward};
    static const char *const names[] = {"counter", "doubler", "promising"};
    net *n = &t->n;
    ms_layer_desc desc;
    net_begin(n);
    n->config.checkpointing = dropped ? MS_SWITCH_DEFAULT : MS_SWITCH_OFF;
    n->config.early_update = MS_SWITCH_OFF;
    net_create(n);
    net_sgd(n, 0.0009765625f);
    t->p = vector_param(n, "p");
    t->shared = ms_buffer(n->m, "shared", MS_DTYPE_F32, ms_shape1(1));
    t->own = ms_buffer(n->m, "own", MS_DTYPE_F32, ms_shape1(1));
    ms_tensor last = activation(n, "h");
    add_scale(n, "scale", n->x, 0.0f, t->p, last);
    for (int k = 0; k < 3; ++k) {
        (void)next_op(n, &desc, names[k], forwards[k], constant_backward);
        t->y[k] = activation(n, names[k]);
        desc.in[0] = last;
        desc.out[0] = t->y[k];
        desc.state[0] = k < 2 ? t->shared : t->own;
        desc.keeps_state = k == 2;
        desc.backward_reads.nothing = true;
        last = t->y[k];
        int layer = net_register(n, &desc);
        if (dropped) {
            ms_set_layer_technique(n->m, n->layers[layer], MS_TECHNIQUE_CHECKPOINTING,
                                   MS_SWITCH_ON);
        }
    }
    ms_tensor z[3], sum = activation(n, "sum"), more = activation(n, "more");
    for (int k = 0; k < 3; ++k) {
        z[k] = activation(n, "square");
        add_square(n, "square", t->y[k], z[k]);
    }
    add_sum(n, "sum", z[0], z[1], sum);
    add_sum(n, "more", sum, z[2], more);
    add_loss(n, more);
    ms_set_loss_factor(n->m, 1.0f / 1099511627776.0f);
    net_start(n);
    write_param(n, t->p, 2.0f);
}

static void expect_state(const stateful *t, int steps) {
    double shared = 0.0, own = steps;
    for (int i = 0; i < steps; ++i) {
        shared = 2.0 * (shared + 1.0);
    }
    expect_values(&t->n, t->shared, &shared, 1);
    expect_values(&t->n, t->own, &own, 1);
}

static void state_is_changed_once_a_step(void **state) {
    (void)state;
    stateful plain, dropped;
    stateful_start(&plain, false);
    stateful_start(&dropped, true);
    for (int step = 1; step <= 5; ++step) {
        double losses[2];
        t_ok(plain.n.m, ms_step(plain.n.m, &losses[0]));
        t_ok(dropped.n.m, ms_step(dropped.n.m, &losses[1]));
        assert_true(losses[0] == losses[1]);
        same_tensor(&plain.n, plain.p, &dropped.n, dropped.p);
        expect_state(&plain, step);
        expect_state(&dropped, step);
        t_ok(dropped.n.m, ms_eval(dropped.n.m, NULL));
        expect_state(&dropped, step);
    }
    for (int k = ST_COUNTER; k <= ST_PROMISING; ++k) {
        expect_calls(plain.n.ops[k].calls[MS_PHASE_RECOMPUTE], 0);
        assert_true(dropped.n.ops[k].calls[MS_PHASE_RECOMPUTE] >= 5);
    }
    net_end(&plain.n);
    net_end(&dropped.n);
}

/* A failing recomputation leaves the state that forward left, whichever of the layers fails. */
static void state_survives_a_failing_recomputation(void **state) {
    (void)state;
    for (int k = ST_COUNTER; k <= ST_PROMISING; ++k) {
        stateful t, twin;
        stateful_start(&t, true);
        stateful_start(&twin, true);
        t_ok(t.n.m, ms_step(t.n.m, NULL));
        t_ok(twin.n.m, ms_step(twin.n.m, NULL));
        t.n.ops[k].failing = 1u << MS_PHASE_RECOMPUTE;
        t_error(t.n.m, ms_step(t.n.m, NULL), MS_RESULT_CALLBACK);
        t.n.ops[k].failing = 0;
        twin.n.ops[ST_SUM].failing = 1u << MS_PHASE_BACKWARD;
        t_error(twin.n.m, ms_step(twin.n.m, NULL), MS_RESULT_CALLBACK);
        twin.n.ops[ST_SUM].failing = 0;
        expect_state(&t, 2);
        expect_state(&twin, 2);
        t_ok(t.n.m, ms_step(t.n.m, NULL));
        t_ok(twin.n.m, ms_step(twin.n.m, NULL));
        expect_state(&t, 3);
        same_tensor(&t.n, t.p, &twin.n, twin.p);
        net_end(&t.n);
        net_end(&twin.n);
    }
}

// ------------------------------------------------------------------------------------------------
// layers that run once

enum { LONG = 12 };

static uint32_t recomputations_of(bool odd_ones_run_once, uint64_t *arena_bytes) {
    net n;
    t_op ops[LONG];
    ms_memory_report report;
    uint32_t sum = 0;
    net_begin(&n);
    n.config.force_optimize = true;
    net_create(&n);
    memset(ops, 0, sizeof ops);
    ms_tensor p = vector_param(&n, "p"), q = vector_param(&n, "q"), last = n.x;
    for (int i = 0; i < LONG; ++i) {
        ops[i].kind = i % 3 == 0 ? T_AFFINE : T_SQUASH;
        ms_layer_desc desc = t_describe(&ops[i]);
        desc.in[0] = last;
        desc.out[0] = last = activation(&n, "y");
        if (ops[i].kind == T_AFFINE) {
            desc.param[0] = p;
            desc.param[1] = q;
        }
        desc.no_recompute = odd_ones_run_once && i % 2 == 1;
        assert_true(ms_register_layer(n.m, &desc).id != 0);
    }
    add_loss(&n, last);
    net_start(&n);
    t_ok(n.m, ms_step(n.m, NULL));
    for (int i = 0; i < LONG; ++i) {
        expect_calls(ops[i].calls[MS_PHASE_FORWARD], 1);
        if (odd_ones_run_once && i % 2 == 1) { // once it is, even in debug
            assert_int_equal(ops[i].calls[MS_PHASE_FORWARD], 1);
            assert_int_equal(ops[i].calls[MS_PHASE_RECOMPUTE], 0);
        }
        sum += ops[i].calls[MS_PHASE_RECOMPUTE];
    }
    t_report(n.m, &report);
    *arena_bytes = report.arena_bytes;
    net_end(&n);
    return sum;
}

static void a_layer_that_runs_once_is_never_recomputed(void **state) {
    (void)state;
    uint64_t free_bytes = 0, bound_bytes = 0;
    assert_true(recomputations_of(false, &free_bytes) > 0);
    assert_true(recomputations_of(true, &bound_bytes) > 0);
    assert_true(free_bytes <= bound_bytes);
}

// ------------------------------------------------------------------------------------------------
// what backward destroys

/* backward of y = x x / 2 that fills all that it may with NaN when it is done. */
typedef struct eater {
    op base; // first, as enter() takes it
    bool eats_in, eats_out, eats_grad_out;
} eater;

static void eat(const ms_view *view) {
    int64_t count = (int64_t)ms_shape_count(&view->shape);
    for (int64_t i = 0; i < count && view->data != NULL; ++i) {
        t_data(view)[i] = NAN;
    }
}

/* Reads its output too: grad = g x + 0 y. */
static int eater_backward(const ms_call *call) {
    const eater *e = (const eater *)call->user;
    int error = enter(call);
    for (int64_t i = 0; i < t_rows(&call->in[0]) * t_cols(&call->in[0]); ++i) {
        float x = t_data(&call->in[0])[i], y = t_data(&call->out[0])[i];
        t_contribute(&call->grad_in[0], i, (x + (y - 0.5f * x * x)) * t_grad_out(call, 0, i));
    }
    if (e->eats_in) {
        eat(&call->in[0]);
    }
    if (e->eats_out) {
        eat(&call->out[0]);
    }
    if (e->eats_grad_out) {
        eat(&call->grad_out[0]);
    }
    return error;
}

typedef enum around { NOBODY, BEFORE, BEHIND, KEPT_IN, KEPT_OUT } around;

/* What comes behind the layer from h to y: another reader of h, and the loss of y, or of y + z. */
static void net_finish_around(net *n, around other, ms_tensor h, ms_tensor y, ms_tensor z) {
    ms_tensor last = y;
    if (other == BEHIND) {
        add_square(n, "behind", h, z);
    }
    if (other == BEFORE || other == BEHIND) {
        last = activation(n, "sum");
        add_sum(n, "sum", y, z, last);
    }
    add_loss(n, last);
    if (other == KEPT_IN || other == KEPT_OUT) {
        ms_add_output(n->m, other == KEPT_IN ? h : y);
    }
}

/* h = x p; y = eater(h), z = h h / 2 by another layer before or behind the eater. The number of
   real copies in a step. */
static uint32_t check_eater(around other, bool in, bool out, bool grad_out, bool smallest) {
    net n;
    eater e;
    ms_layer_desc desc;
    net_begin(&n);
    n.config.force_optimize = smallest;
    net_create(&n);
    memset(&e, 0, sizeof e);
    e.eats_in = in;
    e.eats_out = out;
    e.eats_grad_out = grad_out;
    ms_tensor p = vector_param(&n, "p"), h = activation(&n, "h"), y = activation(&n, "y");
    ms_tensor z = activation(&n, "z");
    bool has_other = other == BEFORE || other == BEHIND;
    add_scale(&n, "scale", n.x, 0.0f, p, h);
    if (other == BEFORE) {
        add_square(&n, "before", h, z);
    }
    (void)next_op(&n, &desc, "eater", square_forward, eater_backward);
    desc.user = &e;
    desc.in[0] = h;
    desc.out[0] = y;
    desc.backward_reads.in = desc.backward_reads.out = 1;
    desc.clobbers.in = in;
    desc.clobbers.out = out;
    desc.clobbers.grad_out = grad_out;
    net_register(&n, &desc);
    net_finish_around(&n, other, h, y, z);
    net_start(&n);
    write_param(&n, p, 2.0f);
    double of_p[COLS] = {0}, of_h[COUNT], of_y[COUNT];
    for (int i = 0; i < COUNT; ++i) {
        of_h[i] = (double)x_at(i) * ((double)p_at(i % COLS) + 2.0);
        of_y[i] = 0.5 * of_h[i] * of_h[i];
        double slope = has_other ? 2.0 : 1.0;
        of_p[i % COLS] += slope * of_y[i] * slope * of_h[i] * (double)x_at(i);
    }
    for (int step = 0; step < 2; ++step) {
        t_ok(n.m, ms_step(n.m, NULL));
        expect_values(&n, ms_gradient(n.m, p), of_p, COLS);
        if (other == KEPT_IN || other == KEPT_OUT) {
            expect_values(&n, other == KEPT_IN ? h : y, other == KEPT_IN ? of_h : of_y, COUNT);
        }
    }
    uint32_t moves = tally_of(&n).moves;
    net_end(&n);
    return moves;
}

static void clobbered_values_are_copied_where_others_need_them(void **state) {
    (void)state;
    for (int smallest = 0; smallest < 2; ++smallest) {
        for (int mask = 0; mask < 8; ++mask) {
            for (int other = NOBODY; other <= KEPT_OUT; ++other) {
                uint32_t moves = check_eater((around)other, (mask & 1) != 0, (mask & 2) != 0,
                                             (mask & 4) != 0, smallest != 0);
                /* h is read later by "before" alone (its backward comes after that of the eater),
                   or kept; y is read by the loss, before the eater. */
                uint32_t needed =
                    (uint32_t)((mask & 1) != 0 && (other == BEFORE || other == KEPT_IN)) +
                    (uint32_t)((mask & 2) != 0 && other == KEPT_OUT);
                if (smallest == 0 && moves != needed) {
                    fail_msg("mask %d, around %d: %u copies, expected %u", mask, other,
                             (unsigned)moves, (unsigned)needed);
                }
                assert_true(moves <= needed);
            }
        }
    }
}

/* An input of the model keeps its value until it is written again. */
static void a_clobbered_input_is_copied(void **state) {
    (void)state;
    net n;
    eater e;
    ms_layer_desc desc;
    double x[COUNT];
    net_begin(&n);
    net_create(&n);
    memset(&e, 0, sizeof e);
    e.eats_in = true;
    ms_tensor p = vector_param(&n, "p"), y = activation(&n, "y"), z = activation(&n, "z");
    op *o = next_op(&n, &desc, "eater", mix_forward, mix_backward);
    o->in_count = o->param_count = 1;
    desc.in[0] = n.x;
    desc.param[0] = p;
    desc.out[0] = y;
    desc.clobbers.in = 1;
    net_register(&n, &desc);
    add_square(&n, "square", y, z);
    add_loss(&n, z);
    net_start(&n);
    for (int i = 0; i < COUNT; ++i) {
        x[i] = (double)x_at(i);
    }
    for (int step = 0; step < 2; ++step) {
        t_ok(n.m, ms_step(n.m, NULL));
        expect_values(&n, n.x, x, COUNT);
    }
    assert_int_equal(tally_of(&n).moves, 1);
    net_end(&n);
}

// ------------------------------------------------------------------------------------------------
// what can only be computed in place

/* y = x + 1, gradient times 3. */
static int place_forward(const ms_call *call) {
    op *o = (op *)call->user;
    int error = enter(call);
    o->faults += call->in[0].data != call->out[0].data;
    for (int64_t i = 0; i < t_rows(&call->out[0]) * t_cols(&call->out[0]) && error == 0; ++i) {
        t_data(&call->out[0])[i] += 1.0f;
    }
    return error;
}

static int place_backward(const ms_call *call) {
    op *o = (op *)call->user;
    int error = enter(call);
    o->faults += call->grad_in[0].data != call->grad_out[0].data || call->grad_in[0].beta != 0.0f;
    for (int64_t i = 0; i < t_rows(&call->in[0]) * t_cols(&call->in[0]) && error == 0; ++i) {
        t_data(&call->grad_in[0])[i] *= 3.0f;
    }
    return error;
}

/* h = x p; y = place(h); another layer, z = h h / 2, before or behind; loss of y + z. */
static uint32_t check_place(around other, bool smallest, int depth) {
    net n;
    ms_layer_desc desc;
    net_begin(&n);
    n.config.force_optimize = smallest;
    net_create(&n);
    ms_tensor p = vector_param(&n, "p"), h = activation(&n, "h"), y = h;
    ms_tensor z = activation(&n, "z");
    bool has_other = other == BEFORE || other == BEHIND;
    add_scale(&n, "scale", n.x, 0.0f, p, h);
    if (other == BEFORE) {
        add_square(&n, "before", h, z);
    }
    for (int k = 0; k < depth; ++k) {
        (void)next_op(&n, &desc, "place", place_forward, place_backward);
        desc.in[0] = y;
        desc.out[0] = y = activation(&n, "y");
        desc.backward_reads.nothing = true;
        desc.in_place[0] = 1;
        desc.grad_in_place[0].grad_out = 1;
        desc.must_in_place = desc.must_grad_in_place = 1;
        net_register(&n, &desc);
    }
    net_finish_around(&n, other, h, y, z);
    net_start(&n);
    write_param(&n, p, 2.0f);
    double of_p[COLS] = {0}, of_h[COUNT], of_y[COUNT];
    for (int i = 0; i < COUNT; ++i) {
        of_h[i] = (double)x_at(i) * ((double)p_at(i % COLS) + 2.0);
        of_y[i] = of_h[i] + depth;
        double g = of_y[i] + (has_other ? 0.5 * of_h[i] * of_h[i] : 0.0);
        double slope = (depth == 1 ? 3.0 : 9.0) + (has_other ? of_h[i] : 0.0);
        of_p[i % COLS] += g * slope * (double)x_at(i);
    }
    for (int step = 0; step < 2; ++step) {
        t_ok(n.m, ms_step(n.m, NULL));
        expect_values(&n, ms_gradient(n.m, p), of_p, COLS);
        if (other == KEPT_IN || other == KEPT_OUT) {
            expect_values(&n, other == KEPT_IN ? h : y, other == KEPT_IN ? of_h : of_y, COUNT);
        }
        t_ok(n.m, ms_eval(n.m, NULL));
    }
    uint32_t moves = tally_of(&n).moves;
    net_end(&n);
    return moves;
}

static void what_must_be_in_place_is(void **state) {
    (void)state;
    for (int depth = 1; depth < 3; ++depth) {
        for (int other = NOBODY; other <= KEPT_OUT; ++other) {
            uint32_t moves = check_place((around)other, false, depth);
            bool needed = other == BEFORE || other == BEHIND || other == KEPT_IN;
            /* "before" and "behind" also share the gradients of the sum. */
            assert_true(needed ? moves >= 1 && moves <= 2 : moves == 0);
            (void)check_place((around)other, true, depth);
        }
    }
}

// ------------------------------------------------------------------------------------------------
// workspace

typedef struct scratch_op {
    op base;
    ms_workspace expected[MS_PHASE_COUNT];
    int64_t rows;
    uint32_t checked;
} scratch_op;

static void check_workspace(const ms_call *call) {
    scratch_op *s = (scratch_op *)call->user;
    const ms_workspace *w = &s->expected[call->phase];
    uint64_t bytes = w->bytes + w->row_bytes * (uint64_t)s->rows;
    s->base.faults += call->workspace_bytes != bytes;
    s->base.faults += bytes != 0 && call->workspace == NULL;
    s->base.faults += ((uintptr_t)call->workspace & 63u) != 0;
    if (call->workspace == NULL) {
        return;
    }
    unsigned char *memory = (unsigned char *)call->workspace;
    for (uint64_t i = 0; i < bytes && w->contents == MS_CONTENTS_ZERO; ++i) {
        s->base.faults += memory[i] != 0;
    }
    for (uint64_t i = 0; i + 4 <= bytes && w->contents == MS_CONTENTS_FINITE; i += 4) {
        float value;
        memcpy(&value, memory + i, sizeof value);
        s->base.faults += isfinite(value) ? 0u : 1u;
    }
    memset(memory, 0xff, (size_t)bytes); // NaN, for the next who finds it
    s->checked += 1;
}

static int scratch_forward(const ms_call *call) {
    check_workspace(call);
    return square_forward(call);
}

static int scratch_backward(const ms_call *call) {
    check_workspace(call);
    return square_backward(call);
}

static void check_contents(ms_contents contents, bool own_recompute) {
    net n;
    scratch_op s[3];
    ms_layer_desc desc;
    net_begin(&n);
    n.largest = 3 * ROWS;
    net_create(&n);
    memset(s, 0, sizeof s);
    ms_tensor p = vector_param(&n, "p"), last = activation(&n, "h");
    add_scale(&n, "scale", n.x, 0.0f, p, last);
    for (int k = 0; k < 3; ++k) {
        (void)next_op(&n, &desc, "scratch", scratch_forward, scratch_backward);
        desc.user = &s[k];
        desc.recompute = own_recompute ? scratch_forward : NULL;
        desc.in[0] = last;
        desc.out[0] = last = activation(&n, "y");
        desc.backward_reads.in = 1;
        desc.forward_workspace.bytes = 100;
        desc.forward_workspace.row_bytes = 28;
        desc.forward_workspace.contents = contents;
        desc.backward_workspace.bytes = k == 1 ? 0 : 4096;
        desc.backward_workspace.contents = (ms_contents)((contents + 1) % 3);
        if (own_recompute) {
            desc.recompute_workspace.row_bytes = 12;
            desc.recompute_workspace.contents = (ms_contents)((contents + 2) % 3);
        }
        s[k].rows = ROWS;
        s[k].expected[MS_PHASE_FORWARD] = s[k].expected[MS_PHASE_EVAL] = desc.forward_workspace;
        s[k].expected[MS_PHASE_BACKWARD] = desc.backward_workspace;
        s[k].expected[MS_PHASE_RECOMPUTE] =
            own_recompute ? desc.recompute_workspace : desc.forward_workspace;
        int layer = net_register(&n, &desc);
        if (k < 2) {
            ms_set_layer_technique(n.m, n.layers[layer], MS_TECHNIQUE_CHECKPOINTING, MS_SWITCH_ON);
        }
    }
    add_loss(&n, last);
    net_start(&n);
    for (int step = 0; step < 3; ++step) {
        int64_t rows = step == 2 ? ROWS : ROWS * (step + 2);
        s[0].rows = s[1].rows = s[2].rows = rows;
        t_ok(n.m, ms_reshape(n.m, &rows));
        write_x(&n);
        t_ok(n.m, ms_step(n.m, NULL));
        t_ok(n.m, ms_eval(n.m, NULL));
    }
    for (int k = 0; k < 3; ++k) {
        assert_int_equal(s[k].base.faults, 0);
        assert_true(s[k].checked >= (k == 1 ? 6u : 9u));
        assert_true(s[k].base.calls[MS_PHASE_RECOMPUTE] >= (k < 2 ? 3u : 0u));
    }
    net_end(&n);
}

static void workspace_has_its_size_and_contents(void **state) {
    (void)state;
    for (int contents = MS_CONTENTS_ANY; contents <= MS_CONTENTS_ZERO; ++contents) {
        check_contents((ms_contents)contents, false);
        check_contents((ms_contents)contents, true);
    }
}

// ------------------------------------------------------------------------------------------------
// gradients that forward writes

/* The loss of loss_forward, and its gradient at once. */
static int fused_forward(const ms_call *call) {
    op *o = (op *)call->user;
    int error = loss_forward(call);
    bool trains = call->phase == MS_PHASE_FORWARD;
    o->faults += trains && call->grad_in == NULL;
    o->faults += !trains && call->grad_in != NULL && call->grad_in[0].data != NULL;
    int64_t count = t_rows(&call->in[0]) * t_cols(&call->in[0]);
    for (int64_t i = 0; i < count && trains && error == 0; ++i) {
        t_contribute(&call->grad_in[0], i, t_data(&call->in[0])[i] * call->loss_factor);
    }
    return error;
}

typedef struct fused {
    net n;
    ms_tensor p;
    int last;
} fused;

static void fused_start(fused *f, bool is_fused, bool smallest, uint32_t micro_count) {
    net *n = &f->n;
    ms_layer_desc desc;
    net_begin(n);
    n->config.force_optimize = smallest;
    n->config.accumulation_steps = micro_count;
    net_create(n);
    net_sgd(n, 0.015625f);
    f->p = vector_param(n, "p");
    ms_tensor h = activation(n, "h"), y = activation(n, "y");
    add_scale(n, "scale", n->x, 0.0f, f->p, h);
    add_scale(n, "again", h, 0.0f, f->p, y);
    if (!is_fused) {
        f->last = add_loss(n, y);
    } else {
        (void)next_op(n, &desc, "fused", fused_forward, NULL);
        n->loss =
            ms_activation(n->m, "losses", MS_DTYPE_F32, ms_along(ms_shape1(n->rows), 0, n->batch));
        desc.in[0] = y;
        desc.out[0] = n->loss;
        desc.grads_in_forward = 1;
        f->last = net_register(n, &desc);
        ms_set_loss(n->m, n->loss);
    }
    net_start(n);
    write_param(n, f->p, 2.0f);
}

static void check_fused(bool smallest, uint32_t micro_count) {
    fused of[2];
    for (int i = 0; i < 2; ++i) {
        fused_start(&of[i], i == 1, smallest, micro_count);
    }
    static const float factors[] = {0.0f, 0.25f, 0.0f, -0.5f};
    for (int step = 0; step < 4; ++step) {
        double losses[2];
        for (int i = 0; i < 2; ++i) {
            ms_set_loss_factor(of[i].n.m, factors[step]);
            for (uint32_t k = 0; k < micro_count; ++k) {
                t_ok(of[i].n.m, ms_step(of[i].n.m, &losses[i]));
            }
            t_ok(of[i].n.m, ms_eval(of[i].n.m, NULL));
        }
        assert_true(losses[0] == losses[1]);
        same_tensor(&of[0].n, of[0].p, &of[1].n, of[1].p);
        const op *o = &of[1].n.ops[of[1].last];
        float mean = 1.0f / (float)(ROWS * (int)micro_count);
        assert_true(o->last[MS_PHASE_FORWARD].loss_factor ==
                    (factors[step] == 0.0f ? mean : factors[step]));
        assert_int_equal(o->calls[MS_PHASE_FORWARD], (step + 1) * (int)micro_count);
        assert_int_equal(o->calls[MS_PHASE_RECOMPUTE] + o->calls[MS_PHASE_BACKWARD], 0);
    }
    net_end(&of[0].n);
    net_end(&of[1].n);
}

static void a_loss_may_write_gradients_in_forward(void **state) {
    (void)state;
    for (uint32_t micro_count = 1; micro_count < 5; micro_count *= 2) {
        check_fused(false, micro_count);
        check_fused(true, micro_count);
    }
}

// ------------------------------------------------------------------------------------------------
// tensors that are not floats, tensors on the host

/* best[r] = column of the largest h; mask = h > 0; count (i64, saved) = how many are. */
static int choose_forward(const ms_call *call) {
    int error = enter(call);
    int64_t cols = t_cols(&call->in[0]);
    for (int64_t r = 0; r < t_rows(&call->in[0]); ++r) {
        const float *h = t_data(&call->in[0]) + r * cols;
        int64_t count = 0;
        int32_t best = 0;
        for (int64_t c = 0; c < cols; ++c) {
            best = h[c] > h[best] ? (int32_t)c : best;
            ((int8_t *)call->out[1].data)[r * cols + c] = h[c] > 0.0f;
            count += h[c] > 0.0f;
        }
        ((int32_t *)call->out[0].data)[r] = best;
        ((int64_t *)call->saved[0].data)[r] = count;
        for (int64_t c = 0; c < cols; ++c) {
            t_data(&call->out[2])[r * cols + c] = h[c] * (float)count;
        }
    }
    return error;
}

static int choose_backward(const ms_call *call) {
    op *o = (op *)call->user;
    int error = enter(call);
    int64_t cols = t_cols(&call->in[0]);
    o->faults += call->grad_out[0].data != NULL || call->grad_out[1].data != NULL;
    for (int64_t i = 0; i < t_rows(&call->in[0]) * cols; ++i) {
        float count = (float)((const int64_t *)call->saved[0].data)[i / cols];
        t_contribute(&call->grad_in[0], i, count * t_grad_out(call, 2, i));
    }
    return error;
}

/* y = mask h + scale[r] table[best[r]], with a scale of u8 that lies on the host. */
static int gather_forward(const ms_call *call) {
    int error = enter(call);
    int64_t cols = t_cols(&call->out[0]);
    const uint8_t *scale = (const uint8_t *)call->in[3].data;
    for (int64_t i = 0; i < t_rows(&call->out[0]) * cols; ++i) {
        int32_t best = ((const int32_t *)call->in[1].data)[i / cols];
        float mask = (float)((const int8_t *)call->in[2].data)[i];
        float row = t_data(&call->param[0])[best * cols + i % cols];
        t_data(&call->out[0])[i] = mask * t_data(&call->in[0])[i] + (float)scale[i / cols] * row;
    }
    return error;
}

static int gather_backward(const ms_call *call) {
    op *o = (op *)call->user;
    int error = enter(call);
    int64_t cols = t_cols(&call->out[0]);
    o->faults += call->grad_in[1].data != NULL || call->grad_in[3].data != NULL;
    if (call->grad_param[0].beta == 0.0f) {
        memset(call->grad_param[0].data, 0,
               (size_t)ms_shape_count(&call->grad_param[0].shape) * sizeof(float));
    }
    for (int64_t i = 0; i < t_rows(&call->out[0]) * cols; ++i) {
        int32_t best = ((const int32_t *)call->in[1].data)[i / cols];
        float scale = (float)((const uint8_t *)call->in[3].data)[i / cols];
        float mask = (float)((const int8_t *)call->in[2].data)[i];
        float g = t_grad_out(call, 0, i);
        t_contribute(&call->grad_in[0], i, mask * g);
        t_data(&call->grad_param[0])[best * cols + i % cols] += scale * g;
    }
    return error;
}

static void expect_gathered(const net *n, ms_tensor p, ms_tensor table, const uint8_t *scale) {
    double of_p[COLS] = {0}, of_table[COLS * COLS] = {0};
    for (int r = 0; r < ROWS; ++r) {
        int best = 0, count = 0;
        double h[COLS];
        for (int c = 0; c < COLS; ++c) {
            h[c] = (double)x_at(r * COLS + c) * ((double)p_at(c) + 2.0);
            best = h[c] > h[best] ? c : best;
            count += h[c] > 0.0;
        }
        for (int c = 0; c < COLS; ++c) {
            double mask = h[c] > 0.0 ? 1.0 : 0.0;
            double row = (double)p_at((best * COLS + c) % 7);
            double y = mask * h[c] * count + (double)scale[r] * row;
            of_p[c] += y * mask * count * (double)x_at(r * COLS + c);
            of_table[best * COLS + c] += y * (double)scale[r];
        }
    }
    expect_values(n, ms_gradient(n->m, p), of_p, COLS);
    expect_values(n, ms_gradient(n->m, table), of_table, COLS * COLS);
}

static void integers_and_host_tensors(void **state) {
    (void)state;
    for (int smallest = 0; smallest < 2; ++smallest) {
        net n;
        ms_layer_desc desc;
        ms_memory_report report;
        net_begin(&n);
        n.config.force_optimize = smallest != 0;
        net_create(&n);
        ms_tensor p = vector_param(&n, "p"), h = activation(&n, "h");
        ms_tensor table = ms_param(n.m, "table", MS_DTYPE_F32, ms_shape2(COLS, COLS));
        ms_tensor best = ms_activation(n.m, "best", MS_DTYPE_I32, ms_shape1(ROWS));
        ms_tensor mask = ms_activation(n.m, "mask", MS_DTYPE_I8, ms_shape2(ROWS, COLS));
        ms_tensor z = activation(&n, "z"), y = activation(&n, "y");
        ms_tensor counts = ms_saved(n.m, "counts", MS_DTYPE_I64, ms_shape1(ROWS));
        ms_tensor scale = ms_input(n.m, "scale", MS_DTYPE_U8, ms_shape1(ROWS));
        ms_set_on_host(n.m, scale);
        add_scale(&n, "scale", n.x, 0.0f, p, h);
        (void)next_op(&n, &desc, "choose", choose_forward, choose_backward);
        desc.in[0] = h;
        desc.out[0] = best;
        desc.out[1] = mask;
        desc.out[2] = z;
        desc.saved[0] = counts;
        desc.backward_reads.saved = 1;
        net_register(&n, &desc);
        (void)next_op(&n, &desc, "gather", gather_forward, gather_backward);
        desc.in[0] = z;
        desc.in[1] = best;
        desc.in[2] = mask;
        desc.in[3] = scale;
        desc.out[0] = y;
        desc.param[0] = table;
        desc.backward_reads.in = 2 | 4 | 8;
        int gather = net_register(&n, &desc);
        add_loss(&n, y);
        assert_int_equal(ms_gradient(n.m, best).id, 0);
        net_start(&n);
        write_param(&n, p, 2.0f);
        float rows[COLS * COLS];
        const uint8_t scales[ROWS] = {1, 2, 0, 3};
        for (int i = 0; i < COLS * COLS; ++i) {
            rows[i] = p_at(i % 7);
        }
        t_ok(n.m, ms_write(n.m, table, rows));
        t_ok(n.m, ms_write(n.m, scale, scales));
        t_ok(n.m, ms_step(n.m, NULL));
        expect_gathered(&n, p, table, scales);
        assert_true(n.ops[gather].last[MS_PHASE_FORWARD].user != NULL);
        uint8_t *in_place = (uint8_t *)ms_data(n.m, scale); // fed where it lies
        assert_non_null(in_place);
        const uint8_t others[ROWS] = {5, 0, 1, 1};
        memcpy(in_place, others, sizeof others);
        t_ok(n.m, ms_step(n.m, NULL));
        expect_gathered(&n, p, table, others);
        t_report(n.m, &report);
        assert_true(report.host_bytes >= ROWS && report.host_bytes <= 64);
        assert_true(report.peak_bytes[MS_CATEGORY_INPUT] == COUNT * sizeof(float));
        net_end(&n);
    }
}

/* State on the host: a counter that the callback keeps there. */
static int host_forward(const ms_call *call) {
    int error = square_forward(call);
    ((int64_t *)call->state[0].data)[0] += call->phase == MS_PHASE_FORWARD ? 3 : 0;
    return error;
}

static void find_outside(const ms_event *event, void *user) {
    uint32_t *found = (uint32_t *)user;
    for (uint32_t i = 0; i < event->operand_count; ++i) {
        *found += event->operands[i].kind == MS_OPERAND_STATE && event->operands[i].is_outside;
    }
}

static void state_on_the_host(void **state) {
    (void)state;
    net n;
    ms_layer_desc desc;
    uint32_t found = 0;
    int64_t count = 40;
    net_begin(&n);
    n.config.force_optimize = true;
    net_create(&n);
    ms_tensor p = vector_param(&n, "p"), h = activation(&n, "h"), y = activation(&n, "y");
    ms_tensor counter = ms_buffer(n.m, "counter", MS_DTYPE_I64, ms_shape1(1));
    ms_set_on_host(n.m, counter);
    t_ok(n.m, ms_write(n.m, counter, &count)); // before ms_wrap
    add_scale(&n, "scale", n.x, 0.0f, p, h);
    (void)next_op(&n, &desc, "host", host_forward, square_backward);
    desc.in[0] = h;
    desc.out[0] = y;
    desc.state[0] = counter;
    desc.keeps_state = true;
    net_register(&n, &desc);
    add_loss(&n, y);
    net_start(&n);
    for (int step = 1; step < 4; ++step) {
        t_ok(n.m, ms_step(n.m, NULL));
        t_ok(n.m, ms_eval(n.m, NULL));
        t_ok(n.m, ms_read(n.m, counter, &count));
        assert_int_equal((int)count, 40 + 3 * step);
        t_ok(n.m, ms_wrap(n.m)); // keeps it
    }
    t_ok(n.m, ms_visit_events(n.m, MS_PROGRAM_TRAIN, find_outside, &found));
    assert_true(found > 0);
    net_end(&n);
}

// ------------------------------------------------------------------------------------------------
// gradients that nobody wants

/* h = x p; a = h h / 2, stopped; y = a + h + x q: the loss y y / 2 counts a as a constant. */
static void a_stopped_gradient_goes_nowhere(void **state) {
    (void)state;
    for (int stopped = 0; stopped < 2; ++stopped) {
        net n;
        net_begin(&n);
        net_create(&n);
        ms_tensor p = vector_param(&n, "p"), q = vector_param(&n, "q");
        ms_tensor h = activation(&n, "h"), a = activation(&n, "a"), b = activation(&n, "b");
        ms_tensor sum = activation(&n, "sum"), y = activation(&n, "y");
        add_scale(&n, "scale", n.x, 0.0f, p, h);
        int square = add_square(&n, "square", h, a);
        add_scale(&n, "other", n.x, 0.0f, q, b);
        add_sum(&n, "sum", a, h, sum);
        add_sum(&n, "sum", sum, b, y);
        add_loss(&n, y);
        if (stopped != 0) {
            ms_stop_gradient(n.m, a);
        }
        net_start(&n);
        write_param(&n, p, 2.0f);
        write_param(&n, q, 1.0f);
        t_ok(n.m, ms_step(n.m, NULL));
        double of_p[COLS] = {0}, of_q[COLS] = {0};
        for (int i = 0; i < COUNT; ++i) {
            double x = (double)x_at(i), hi = x * ((double)p_at(i % COLS) + 2.0);
            double yi = 0.5 * hi * hi + hi + x * ((double)p_at(i % COLS) + 1.0);
            of_p[i % COLS] += yi * (stopped != 0 ? 1.0 : 1.0 + hi) * x;
            of_q[i % COLS] += yi * x;
        }
        expect_values(&n, ms_gradient(n.m, p), of_p, COLS);
        expect_values(&n, ms_gradient(n.m, q), of_q, COLS);
        assert_int_equal(n.ops[square].calls[MS_PHASE_BACKWARD] > 0, stopped == 0);
        net_end(&n);
    }
}

enum { CHAIN = 8 };

/* h_0 = x p_0, and then a scale and a square in turn; a param for each scale. */
static void chain_create(net *n, ms_tensor *h, ms_tensor *p) {
    net_create(n);
    ms_tensor last = n->x;
    for (int i = 0; i < CHAIN; ++i) {
        h[i] = activation(n, "h");
        if (i % 2 == 0) {
            p[i / 2] = vector_param(n, "p");
            add_scale(n, "scale", last, 0.0f, p[i / 2], h[i]);
        } else {
            add_square(n, "square", last, h[i]);
        }
        last = h[i];
    }
    add_loss(n, last);
    ms_set_loss_factor(n->m, 1.0f / 1048576.0f);
}

static void chain_start(net *n, const ms_tensor *p) {
    net_start(n);
    for (int i = 0; i < CHAIN / 2; ++i) {
        write_param(n, p[i], 1.5f);
    }
}

/* Params below the first that is trained: no backward there, and nothing kept for it. */
static void a_frozen_prefix_costs_nothing(void **state) {
    (void)state;
    for (int frozen = 0; frozen < CHAIN / 2; ++frozen) {
        net n, twin;
        ms_tensor h[CHAIN], p[CHAIN / 2], twin_h[CHAIN], twin_p[CHAIN / 2];
        ms_memory_report report, whole;
        net_begin(&n);
        net_begin(&twin);
        chain_create(&n, h, p);
        chain_create(&twin, twin_h, twin_p);
        for (int i = 0; i < frozen; ++i) {
            ms_set_frozen(n.m, p[i], true);
        }
        chain_start(&n, p);
        chain_start(&twin, twin_p);
        t_ok(n.m, ms_step(n.m, NULL));
        t_ok(twin.m, ms_step(twin.m, NULL));
        for (int i = 0; i < CHAIN; ++i) {
            assert_int_equal(n.ops[i].calls[MS_PHASE_BACKWARD] > 0, i >= 2 * frozen);
        }
        for (int i = frozen; i < CHAIN / 2; ++i) {
            same_tensor(&n, ms_gradient(n.m, p[i]), &twin, ms_gradient(twin.m, twin_p[i]));
        }
        t_report(n.m, &report);
        t_report(twin.m, &whole);
        /* A frozen pair of layers drops its scale, which the square reads in backward, and its
           square, which the next scale reads for the gradient of its param: all but the last. */
        uint64_t bytes = COUNT * sizeof(float), kept = whole.activation_peak_bytes;
        assert_true(report.activation_peak_bytes + (uint64_t)frozen * bytes <= kept);
        net_end(&n);
        net_end(&twin);
    }
}

// ------------------------------------------------------------------------------------------------
// techniques by force

static void forced_techniques_change_the_plan(void **state) {
    (void)state;
    net n, plain;
    ms_tensor h[CHAIN], p[CHAIN / 2], of_plain[CHAIN], plain_p[CHAIN / 2];
    net_begin(&plain);
    chain_create(&plain, of_plain, plain_p);
    chain_start(&plain, plain_p);
    t_ok(plain.m, ms_step(plain.m, NULL));
    net_begin(&n);
    chain_create(&n, h, p);
    chain_start(&n, p);
    assert_int_equal(tally_of(&n).count[MS_EVENT_RECOMPUTE], 0);
    for (int i = 0; i < CHAIN - 1; ++i) { // one at a time; the last is read at once
        ms_set_tensor_technique(n.m, h[i], MS_TECHNIQUE_CHECKPOINTING, MS_SWITCH_ON);
        assert_int_equal(tally_of(&n).count[MS_EVENT_RECOMPUTE], 0); // not before ms_wrap
        t_ok(n.m, ms_wrap(n.m));
        tally t = tally_of(&n);
        assert_true(t.of_layer[MS_EVENT_RECOMPUTE][i] == 1 && t.count[MS_EVENT_RECOMPUTE] == 1);
        t_ok(n.m, ms_step(n.m, NULL));
        for (int k = 0; k < CHAIN / 2; ++k) {
            same_tensor(&n, ms_gradient(n.m, p[k]), &plain, ms_gradient(plain.m, plain_p[k]));
        }
        t_ok(n.m, ms_detach(n.m)); // heeds none of it
        assert_int_equal(tally_of(&n).count[MS_EVENT_RECOMPUTE], 0);
        ms_set_tensor_technique(n.m, h[i], MS_TECHNIQUE_CHECKPOINTING, MS_SWITCH_DEFAULT);
    }
    net_end(&n);
    net_begin(&n);
    n.config.force_optimize = true;
    chain_create(&n, h, p);
    chain_start(&n, p);
    uint32_t before = tally_of(&n).count[MS_EVENT_RECOMPUTE];
    assert_true(before > 0);
    for (int i = 0; i < CHAIN; ++i) {
        ms_set_layer_technique(n.m, n.layers[i], MS_TECHNIQUE_CHECKPOINTING, MS_SWITCH_OFF);
        t_ok(n.m, ms_wrap(n.m));
        tally t = tally_of(&n);
        for (int k = 0; k <= i; ++k) {
            assert_int_equal(t.of_layer[MS_EVENT_RECOMPUTE][k], 0);
        }
    }
    assert_int_equal(tally_of(&n).count[MS_EVENT_RECOMPUTE], 0);
    net_end(&n);
    net_end(&plain);
}

static void forced_early_updates(void **state) {
    (void)state;
    net n;
    ms_tensor h[CHAIN], p[CHAIN / 2];
    ms_memory_report report;
    net_begin(&n);
    chain_create(&n, h, p);
    net_sgd(&n, 0.01f);
    ms_set_tensor_technique(n.m, p[2], MS_TECHNIQUE_EARLY_UPDATE, MS_SWITCH_ON);
    chain_start(&n, p);
    tally t = tally_of(&n);
    assert_true(t.first_update < t.last_backward && t.last_update > t.last_backward);
    assert_int_equal(t.updated.id, p[2].id);
    t_report(n.m, &report);
    assert_true(report.early_update);
    ms_set_layer_technique(n.m, n.layers[4], MS_TECHNIQUE_EARLY_UPDATE, MS_SWITCH_OFF);
    t_ok(n.m, ms_wrap(n.m));
    t = tally_of(&n);
    assert_true(t.first_update > t.last_backward);
    net_end(&n);
    net_begin(&n);
    n.config.early_update = MS_SWITCH_ON;
    chain_create(&n, h, p);
    net_sgd(&n, 0.01f);
    ms_set_tensor_technique(n.m, p[3], MS_TECHNIQUE_EARLY_UPDATE, MS_SWITCH_OFF);
    chain_start(&n, p);
    t = tally_of(&n);
    assert_int_equal(t.count[MS_EVENT_UPDATE], CHAIN / 2);
    assert_true(t.first_update < t.last_backward && t.updated.id == p[2].id);
    t_ok(n.m, ms_detach(n.m));
    t = tally_of(&n);
    assert_true(t.first_update > t.last_backward);
    net_end(&n);
}

// ------------------------------------------------------------------------------------------------
// borrowed memory

typedef struct lent {
    float x[COUNT], p[COLS], gradient[COLS], velocity[COLS], buffer[COLS];
} lent;

/* y = x p, SGD with momentum: all that lives is the trainer's own. */
static void borrowed_create(net *n, lent *memory, ms_tensor *p) {
    ms_optimizer_desc optimizer;
    net_create(n);
    memset(&optimizer, 0, sizeof optimizer);
    optimizer.kind = MS_OPTIMIZER_SGD;
    optimizer.momentum = 0.5f;
    optimizer.learning_rate = 0.0078125f;
    ms_set_optimizer(n->m, &optimizer);
    *p = vector_param(n, "p");
    ms_tensor y = activation(n, "y"), z = activation(n, "z");
    ms_tensor frozen = vector_param(n, "frozen");
    add_scale(n, "scale", n->x, 0.0f, *p, y);
    add_scale(n, "frozen", y, 1.0f, frozen, z);
    add_loss(n, z);
    ms_set_frozen(n->m, frozen, true);
    if (memory != NULL) {
        t_ok(n->m, ms_borrow(n->m, n->x, memory->x));
        t_ok(n->m, ms_borrow(n->m, *p, memory->p));
        t_ok(n->m, ms_borrow(n->m, ms_gradient(n->m, *p), memory->gradient));
        t_ok(n->m, ms_borrow(n->m, ms_optimizer_state(n->m, *p, 0), memory->velocity));
        t_ok(n->m, ms_borrow(n->m, frozen, memory->buffer));
    }
}

static void lent_fill(lent *memory) {
    memset(memory, 0, sizeof *memory);
    for (int i = 0; i < COUNT; ++i) {
        memory->x[i] = x_at(i);
    }
    for (int i = 0; i < COLS; ++i) {
        memory->p[i] = p_at(i) + 2.0f;
    }
}

static void borrowed_memory_is_used_where_it_lies(void **state) {
    (void)state;
    static lent memory, moved;
    net own, borrowed;
    ms_tensor of_own, of_borrowed;
    ms_memory_report of[2];
    lent_fill(&memory);
    net_begin(&own);
    net_begin(&borrowed);
    borrowed_create(&own, NULL, &of_own);
    borrowed_create(&borrowed, &memory, &of_borrowed);
    net_start(&own);
    write_param(&own, of_own, 2.0f);
    t_ok(borrowed.m, ms_wrap(borrowed.m));
    assert_true(memory.x[1] == x_at(1) && memory.p[0] == p_at(0) + 2.0f); // not filled
    assert_ptr_equal(ms_data(borrowed.m, of_borrowed), memory.p);
    t_report(own.m, &of[0]);
    t_report(borrowed.m, &of[1]);
    assert_true(of[0].borrowed_bytes == 0);
    assert_true(of[1].borrowed_bytes == sizeof(float) * (COUNT + 4 * COLS));
    assert_true(of[1].arena_bytes + COUNT * sizeof(float) + 3 * 64 <= of[0].arena_bytes);
    assert_true(of[1].peak_bytes[MS_CATEGORY_PARAM] == 0);
    for (int step = 0; step < 3; ++step) {
        memset(memory.gradient, 0, sizeof memory.gradient); // the trainer's own zeroing
        t_ok(own.m, ms_step(own.m, NULL));
        t_ok(borrowed.m, ms_step(borrowed.m, NULL));
        same_tensor(&own, of_own, &borrowed, of_borrowed);
        float value[COLS];
        t_ok(own.m, ms_read(own.m, of_own, value));
        assert_memory_equal(value, memory.p, sizeof value);
        if (step == 1) { // to other memory, between steps
            moved = memory;
            t_ok(borrowed.m, ms_borrow(borrowed.m, borrowed.x, moved.x));
            t_ok(borrowed.m, ms_borrow(borrowed.m, of_borrowed, moved.p));
            memset(memory.x, 0xff, sizeof memory.x);
            memset(memory.p, 0xff, sizeof memory.p);
            moved.p[0] = memory.p[0];
            t_ok(own.m, ms_read(own.m, of_own, moved.p));
            same_tensor(&own, of_own, &borrowed, of_borrowed);
            memcpy(memory.p, moved.p, sizeof memory.p);
            t_ok(borrowed.m, ms_borrow(borrowed.m, of_borrowed, memory.p));
        }
    }
    t_ok(borrowed.m, ms_detach(borrowed.m));
    t_ok(borrowed.m, ms_wrap(borrowed.m));
    same_tensor(&own, of_own, &borrowed, of_borrowed);
    net_end(&own);
    net_end(&borrowed);
}

/* Every step adds to a borrowed gradient; with no optimizer it is the trainer's to use. */
static void a_borrowed_gradient_is_never_zeroed(void **state) {
    (void)state;
    for (int early = 0; early < 2; ++early) {
        net n;
        float gradient[COLS];
        double expected[COLS] = {0}, once[COLS] = {0};
        net_begin(&n);
        n.config.force_optimize = early != 0;
        net_create(&n);
        ms_tensor p = vector_param(&n, "p"), y = activation(&n, "y");
        add_scale(&n, "scale", n.x, 0.0f, p, y);
        add_loss(&n, y);
        t_ok(n.m, ms_borrow(n.m, ms_gradient(n.m, p), gradient));
        for (int c = 0; c < COLS; ++c) {
            gradient[c] = (float)c;
            expected[c] = c;
        }
        net_start(&n);
        write_param(&n, p, 2.0f);
        for (int i = 0; i < COUNT; ++i) {
            once[i % COLS] += (double)x_at(i) * (double)x_at(i) * ((double)p_at(i % COLS) + 2.0);
        }
        for (int step = 0; step < 3; ++step) {
            t_ok(n.m, ms_step(n.m, NULL));
            for (int c = 0; c < COLS; ++c) {
                expected[c] += once[c];
                assert_true((double)gradient[c] == expected[c]);
            }
            expect_values(&n, ms_gradient(n.m, p), expected, COLS);
        }
        net_end(&n);
    }
}

// ------------------------------------------------------------------------------------------------
// the trainer's own update

typedef struct own_update {
    const ms_model *m;
    ms_tensor p;
    uint32_t calls, faults;
    uint32_t fail_at;
} own_update;

/* state0 += g; state1 = t; p -= rate * state0. Then the gradient is spent. */
static int update_own(const ms_update_args *args) {
    own_update *own = (own_update *)args->user;
    own->calls += 1;
    if (own->calls == own->fail_at) {
        return 23;
    }
    own->faults += args->param.id != own->p.id || args->count != COLS ||
                   args->kind != MS_OPTIMIZER_CUSTOM || args->state[0] == NULL ||
                   args->state[1] == NULL || args->state[0] == args->state[1];
    float scale = args->gradient_scale != NULL ? *args->gradient_scale : 1.0f;
    for (uint64_t i = 0; i < args->count; ++i) {
        args->state[0][i] += scale * args->gradient[i];
        args->state[1][i] = (float)args->t;
        args->value[i] -= args->learning_rate * args->state[0][i];
        args->gradient[i] = NAN;
    }
    return 0;
}

static void custom_updates(void **state) {
    (void)state;
    for (int early = 0; early < 2; ++early) {
        net n;
        own_update own;
        ms_optimizer_desc optimizer;
        net_begin(&n);
        n.config.early_update = early != 0 ? MS_SWITCH_ON : MS_SWITCH_OFF;
        net_create(&n);
        memset(&own, 0, sizeof own);
        memset(&optimizer, 0, sizeof optimizer);
        optimizer.kind = MS_OPTIMIZER_CUSTOM;
        optimizer.update = update_own;
        optimizer.user = &own;
        optimizer.state_count = 2;
        optimizer.learning_rate = 0.0078125f;
        ms_set_optimizer(n.m, &optimizer);
        ms_tensor p = own.p = vector_param(&n, "p"), y = activation(&n, "y");
        add_scale(&n, "scale", n.x, 0.0f, p, y);
        add_loss(&n, y);
        net_start(&n);
        write_param(&n, p, 2.0f);
        assert_true(ms_optimizer_state(n.m, p, 1).id != 0);
        assert_true(ms_optimizer_state(n.m, p, 2).id == 0);
        double value[COLS], sum[COLS] = {0}, t[COLS];
        for (int c = 0; c < COLS; ++c) {
            value[c] = (double)p_at(c) + 2.0;
        }
        for (int step = 1; step < 4; ++step) {
            for (int c = 0; c < COLS; ++c) {
                double g = 0.0;
                for (int r = 0; r < ROWS; ++r) {
                    g += (double)x_at(r * COLS + c) * (double)x_at(r * COLS + c) * value[c];
                }
                sum[c] += g;
                value[c] -= 0.0078125 * sum[c];
                t[c] = step;
            }
            t_ok(n.m, ms_step(n.m, NULL));
            expect_values(&n, p, value, COLS);
            expect_values(&n, ms_optimizer_state(n.m, p, 0), sum, COLS);
            expect_values(&n, ms_optimizer_state(n.m, p, 1), t, COLS);
        }
        assert_true(own.calls == 3 && own.faults == 0);
        own.fail_at = 4;
        ms_result result = ms_step(n.m, NULL);
        assert_true(result == MS_RESULT_CALLBACK);
        t_text_has(ms_last_error(n.m), "23");
        t_text_has(ms_last_error(n.m), "\"p\"");
        net_end(&n);
    }
}

// ------------------------------------------------------------------------------------------------
// accumulation: n micro-batches are one batch of n times the rows

enum { MICRO_MAX = 4, MICRO_STEPS = 3 };

typedef struct micro_seen {
    uint64_t seed[MICRO_STEPS * MICRO_MAX];
    uint32_t count, faults, micro_count;
} micro_seen;

static micro_seen seen; // by the layer "target"

static void note_micro(const ms_call *call) {
    uint32_t at = (uint32_t)call->step * seen.micro_count + call->micro;
    seen.faults += call->micro >= seen.micro_count || call->micro_count != seen.micro_count ||
                   call->last_micro != (call->micro + 1 == seen.micro_count);
    if (at < MICRO_STEPS * MICRO_MAX) {
        seen.faults += at + 1 != seen.count && at != seen.count; // in order; in debug, again
        seen.faults += at + 1 == seen.count && seen.seed[at] != call->seed;
        seen.seed[at] = call->seed;
        seen.count = at + 1;
    }
}

/* y - t, with the target x + 1; notes what the call says of the micro-batch. */
static int target_forward(const ms_call *call) {
    int error = enter(call);
    for (int64_t i = 0; i < t_rows(&call->in[0]) * t_cols(&call->in[0]); ++i) {
        t_data(&call->out[0])[i] = t_data(&call->in[0])[i] - t_data(&call->in[1])[i] - 1.0f;
    }
    if (call->phase == MS_PHASE_FORWARD) {
        note_micro(call);
    }
    return error;
}

static int target_backward(const ms_call *call) {
    int error = enter(call);
    for (int64_t i = 0; i < t_rows(&call->in[0]) * t_cols(&call->in[0]); ++i) {
        t_contribute(&call->grad_in[0], i, t_grad_out(call, 0, i));
    }
    return error;
}

static ms_tensor linear_create(net *n, uint32_t micro_count, bool by_call) {
    ms_layer_desc desc;
    n->config.accumulation_steps = by_call ? 0 : micro_count;
    net_create(n);
    net_sgd(n, 0.05f);
    if (by_call) {
        ms_set_accumulation(n->m, micro_count);
    }
    ms_tensor p = vector_param(n, "p"), y = activation(n, "y"), d = activation(n, "d");
    add_scale(n, "scale", n->x, 0.0f, p, y);
    (void)next_op(n, &desc, "target", target_forward, target_backward);
    desc.in[0] = y;
    desc.in[1] = n->x;
    desc.out[0] = d;
    desc.backward_reads.nothing = true;
    net_register(n, &desc);
    add_loss(n, d);
    ms_set_loss_factor(n->m, 0.0f); // the mean
    return p;
}

/* p after one step over `rows` rows of x, in float64; returns the loss before. */
static double linear_step(double *p, int rows, double factor) {
    double loss = 0.0;
    for (int c = 0; c < COLS; ++c) {
        double g = 0.0;
        for (int r = 0; r < rows; ++r) {
            double x = (double)x_at(r * COLS + c), d = x * p[c] - x - 1.0;
            loss += 0.5 * d * d * factor;
            g += d * x * factor;
        }
        p[c] -= (double)0.05f * g;
    }
    return loss;
}

static void expect_near(const net *n, ms_tensor tensor, const double *expected, int count) {
    float data[COUNT];
    t_ok(n->m, ms_read(n->m, tensor, data));
    for (int i = 0; i < count; ++i) {
        if (!(fabs((double)data[i] - expected[i]) <= 1e-5 * (1.0 + fabs(expected[i])))) {
            fail_msg("element %d is %.9g, expected %.9g", i, (double)data[i], expected[i]);
        }
    }
}

static ms_result micro_step(net *n, bool three_calls, bool last, double *loss) {
    if (!three_calls) {
        return ms_step(n->m, loss);
    }
    ms_result result = ms_forward(n->m, loss);
    result = result == MS_RESULT_OK ? ms_backward(n->m) : result;
    return result == MS_RESULT_OK && last ? ms_update(n->m) : result;
}

static void check_accumulation(uint32_t micro_count, bool three_calls, bool smallest,
                               bool own_factor) {
    net n;
    double p[COLS];
    float x[MICRO_MAX * COUNT];
    memset(&seen, 0, sizeof seen);
    seen.micro_count = micro_count;
    net_begin(&n);
    n.config.force_optimize = smallest;
    ms_tensor param = linear_create(&n, micro_count, three_calls);
    net_start(&n);
    write_param(&n, param, 2.0f);
    for (int i = 0; i < MICRO_MAX * COUNT; ++i) {
        x[i] = x_at(i);
    }
    for (int c = 0; c < COLS; ++c) {
        p[c] = (double)p_at(c) + 2.0;
    }
    int rows = ROWS * (int)micro_count;
    double factor = own_factor ? 0.0625 : 1.0 / rows;
    if (own_factor) {
        ms_set_loss_factor(n.m, 0.0625f);
    }
    for (int step = 0; step < MICRO_STEPS; ++step) {
        double sum = 0.0;
        for (uint32_t k = 0; k < micro_count; ++k) {
            double loss = 0.0;
            t_ok(n.m, ms_write(n.m, n.x, x + k * COUNT));
            t_ok(n.m, micro_step(&n, three_calls, k + 1 == micro_count, &loss));
            sum += loss;
        }
        double expected = linear_step(p, rows, factor);
        double scale = sum / expected;
        /* A micro-batch reports its part of the loss, or its own mean. */
        assert_true(fabs(scale - 1.0) < 1e-5 ||
                    (!own_factor && fabs(scale - (double)micro_count) < 1e-4));
        expect_near(&n, param, p, COLS);
    }
    assert_true(seen.count == MICRO_STEPS * micro_count && seen.faults == 0);
    for (uint32_t i = 0; i < seen.count; ++i) {
        for (uint32_t k = 0; k < i; ++k) {
            assert_true(seen.seed[i] != seen.seed[k]);
        }
    }
    net_end(&n);
}

static void micro_batches_are_one_batch(void **state) {
    (void)state;
    for (uint32_t micro_count = 1; micro_count <= MICRO_MAX; ++micro_count) {
        for (int mix = 0; mix < 8; ++mix) {
            check_accumulation(micro_count, (mix & 1) != 0, (mix & 2) != 0, (mix & 4) != 0);
        }
    }
}

/* A failure gives up the micro-batches before it too. */
static void a_failing_micro_batch_starts_the_step_again(void **state) {
    (void)state;
    static const ms_phase phases[] = {MS_PHASE_FORWARD, MS_PHASE_BACKWARD};
    for (int i = 0; i < 2; ++i) {
        net n, twin;
        net_begin(&n);
        net_begin(&twin);
        ms_tensor p = linear_create(&n, 3, false), twin_p = linear_create(&twin, 3, false);
        memset(&seen, 0, sizeof seen);
        seen.micro_count = 3;
        net_start(&n);
        net_start(&twin);
        write_param(&n, p, 2.0f);
        write_param(&twin, twin_p, 2.0f);
        t_ok(n.m, ms_step(n.m, NULL));
        t_ok(n.m, ms_step(n.m, NULL));
        n.ops[0].failing = 1u << phases[i];
        t_error(n.m, ms_step(n.m, NULL), MS_RESULT_CALLBACK);
        n.ops[0].failing = 0;
        same_tensor(&n, p, &twin, twin_p);
        for (int k = 0; k < 6; ++k) {
            t_ok(n.m, ms_step(n.m, NULL));
            t_ok(twin.m, ms_step(twin.m, NULL));
            same_tensor(&n, p, &twin, twin_p);
        }
        net_end(&n);
        net_end(&twin);
    }
}

/* Ways to drop a step that lacks only its update. */
typedef enum dropped_by {
    BY_EVAL,
    BY_FORWARD,
    BY_STEP,
    BY_WRAP,
    BY_DETACH,
    BY_RESHAPE,
    DROPPED_BY_COUNT
} dropped_by;

/* Returns how many micro-batches of the new step it has done. */
static uint32_t drop_step(net *n, dropped_by by) {
    int64_t rows = ROWS;
    switch (by) {
    case BY_EVAL:
        t_ok(n->m, ms_eval(n->m, NULL));
        return 0;
    case BY_FORWARD:
        t_ok(n->m, ms_forward(n->m, NULL));
        t_ok(n->m, ms_backward(n->m));
        return 1;
    case BY_STEP:
        t_ok(n->m, ms_step(n->m, NULL));
        return 1;
    case BY_WRAP:
        t_ok(n->m, ms_wrap(n->m));
        return 0;
    case BY_DETACH:
        t_ok(n->m, ms_detach(n->m));
        return 0;
    default:
        t_ok(n->m, ms_reshape(n->m, &rows));
        return 0;
    }
}

/* All micro-batches are done, but not the update: none of them is counted in the next step. */
static void check_dropped_update(uint32_t micro_count, dropped_by by, bool smallest) {
    net n;
    double p[COLS];
    net_begin(&n);
    n.config.force_optimize = smallest;
    ms_tensor param = linear_create(&n, micro_count, false);
    memset(&seen, 0, sizeof seen);
    seen.micro_count = micro_count;
    net_start(&n);
    write_param(&n, param, 2.0f);
    for (int c = 0; c < COLS; ++c) {
        p[c] = (double)p_at(c) + 2.0;
    }
    for (int step = 0; step < 2; ++step) {
        for (uint32_t k = 0; k < micro_count; ++k) {
            t_ok(n.m, ms_forward(n.m, NULL));
            t_ok(n.m, ms_backward(n.m));
        }
        uint32_t done = drop_step(&n, by);
        if (micro_count > 1) {
            expect_near(&n, param, p, COLS); // no update yet
            t_error(n.m, ms_update(n.m), MS_RESULT_ORDER);
        } else if (by == BY_FORWARD) {
            t_ok(n.m, ms_update(n.m));
        }
        for (uint32_t k = done; k < micro_count; ++k) {
            t_ok(n.m, ms_step(n.m, NULL));
        }
        (void)linear_step(p, ROWS, 1.0 / ROWS); // equal micro-batches: the mean of one
        expect_near(&n, param, p, COLS);
    }
    net_end(&n);
}

static void a_step_without_its_update_starts_again(void **state) {
    (void)state;
    for (uint32_t micro_count = 1; micro_count < 4; ++micro_count) {
        for (int by = 0; by < DROPPED_BY_COUNT; ++by) {
            check_dropped_update(micro_count, (dropped_by)by, false);
            check_dropped_update(micro_count, (dropped_by)by, true);
        }
    }
}

/* A param that begins to learn between two micro-batches has missed the first: the step starts
   again. A re-wrap that changes no gradient counts on. */
static void a_rewrap_between_micro_batches(void **state) {
    (void)state;
    for (int thaws = 0; thaws < 2; ++thaws) {
        net n;
        float before[COLS], after[COLS];
        ms_optimizer_desc optimizer;
        net_begin(&n);
        n.config.accumulation_steps = 2;
        net_create(&n);
        memset(&optimizer, 0, sizeof optimizer);
        optimizer.kind = MS_OPTIMIZER_SGD;
        ms_set_optimizer(n.m, &optimizer);
        ms_tensor of_p = vector_param(&n, "p"), of_q = vector_param(&n, "q");
        ms_tensor a = activation(&n, "a"), b = activation(&n, "b"), y = activation(&n, "y");
        add_scale(&n, "p", n.x, 0.0f, of_p, a);
        add_scale(&n, "q", n.x, 0.0f, of_q, b);
        add_sum(&n, "sum", a, b, y);
        add_loss(&n, y);
        ms_set_frozen(n.m, of_q, true);
        net_start(&n);
        write_param(&n, of_p, 2.0f);
        write_param(&n, of_q, 1.0f);
        t_ok(n.m, ms_read(n.m, of_p, before));
        t_ok(n.m, ms_step(n.m, NULL));
        ms_set_frozen(n.m, of_q, thaws == 0);
        t_ok(n.m, ms_wrap(n.m));
        t_ok(n.m, ms_step(n.m, NULL));
        t_ok(n.m, ms_read(n.m, of_p, after));
        assert_int_equal(memcmp(before, after, sizeof before) != 0, thaws == 0);
        t_ok(n.m, ms_step(n.m, NULL));
        t_ok(n.m, ms_read(n.m, of_p, after));
        assert_true(memcmp(before, after, sizeof before) != 0);
        net_end(&n);
    }
}

// ------------------------------------------------------------------------------------------------
// clipping

/* Two params, y = x p + x q: clipped SGD against float64. */
static void check_clipping(float limit, uint32_t micro_count, bool custom) {
    net n;
    own_update own;
    ms_optimizer_desc optimizer;
    double p[COLS], q[COLS], state[COLS] = {0}, norm = 0.0;
    net_begin(&n);
    n.config.accumulation_steps = micro_count;
    net_create(&n);
    memset(&own, 0, sizeof own);
    memset(&optimizer, 0, sizeof optimizer);
    optimizer.kind = custom ? MS_OPTIMIZER_CUSTOM : MS_OPTIMIZER_SGD;
    optimizer.update = custom ? update_own : NULL;
    optimizer.user = &own;
    optimizer.state_count = custom ? 2 : 0;
    optimizer.learning_rate = 0.05f;
    optimizer.grad_clip_norm = limit;
    ms_set_optimizer(n.m, &optimizer);
    ms_tensor of_p = own.p = vector_param(&n, "p"), of_q = vector_param(&n, "q");
    ms_tensor a = activation(&n, "a"), b = activation(&n, "b"), y = activation(&n, "y");
    add_scale(&n, "p", n.x, 0.0f, of_p, a);
    add_scale(&n, "q", n.x, 0.0f, of_q, b);
    add_sum(&n, "sum", a, b, y);
    add_loss(&n, y);
    ms_set_frozen(n.m, of_q, custom);
    net_start(&n);
    write_param(&n, of_p, 2.0f);
    write_param(&n, of_q, 1.0f);
    assert_int_equal(ms_gradient_norm(n.m, &norm), MS_RESULT_ORDER); // no update yet
    for (int c = 0; c < COLS; ++c) {
        p[c] = (double)p_at(c) + 2.0;
        q[c] = (double)p_at(c) + 1.0;
    }
    for (int step = 0; step < 4; ++step) {
        double g[COLS], squares = 0.0;
        for (int c = 0; c < COLS; ++c) {
            g[c] = 0.0;
            for (int r = 0; r < ROWS; ++r) {
                double x = (double)x_at(r * COLS + c);
                g[c] += x * x * (p[c] + q[c]) * micro_count;
            }
            squares += (custom ? 1.0 : 2.0) * g[c] * g[c];
        }
        double scale = fmin(1.0, (double)limit / sqrt(squares));
        for (int c = 0; c < COLS; ++c) {
            state[c] = (custom ? state[c] : 0.0) + scale * g[c];
            p[c] -= (double)0.05f * state[c];
            q[c] -= custom ? 0.0 : (double)0.05f * state[c];
        }
        for (uint32_t k = 0; k < micro_count; ++k) {
            t_ok(n.m, ms_step(n.m, NULL));
        }
        expect_near(&n, of_p, p, COLS);
        expect_near(&n, of_q, q, COLS);
        t_ok(n.m, ms_gradient_norm(n.m, &norm));
        assert_true(fabs(norm - sqrt(squares)) <= 1e-5 * sqrt(squares));
    }
    tally t = tally_of(&n);
    assert_int_equal(t.count[MS_EVENT_NORM], custom ? 1 : 2);
    assert_int_equal(t.count[MS_EVENT_CLIP], 1);
    assert_int_equal(own.faults, 0);
    net_end(&n);
}

static void gradients_are_clipped_by_their_common_norm(void **state) {
    (void)state;
    static const float limits[] = {0.5f, 7.0f, 1e6f};
    for (int i = 0; i < 3; ++i) {
        for (uint32_t micro_count = 1; micro_count < 4; micro_count += 2) {
            check_clipping(limits[i], micro_count, false);
            check_clipping(limits[i], micro_count, true);
        }
    }
}

/* The sums of the CPU backend, of any length. */
static void sums_of_squares(void **state) {
    (void)state;
    ms_backend cpu = ms_backend_cpu();
    float a[40], b[40];
    for (uint64_t count = 1; count <= 40; ++count) {
        double sum = 100.0, expected = 100.0;
        float scale = 0.0f;
        ms_step_state step;
        for (uint64_t i = 0; i < 40; ++i) {
            a[i] = b[i] = (float)(i % 7) - 2.5f;
            expected += i < count ? (double)a[i] * (double)a[i] : 0.0;
        }
        assert_int_equal(cpu.add_squares_f32(cpu.user, a, count, &sum), 0);
        assert_true(sum == expected);
        memset(&step, 0, sizeof step);
        assert_int_equal(cpu.clip_scale(cpu.user, &sum, 5.0f, &scale, &step), 0);
        assert_true(step.norm == sqrt(expected) && step.halted == (uint32_t)MS_HALT_NONE);
        assert_true(fabs((double)scale - 5.0 / sqrt(expected)) < 1e-6);
        assert_int_equal(cpu.clip_scale(cpu.user, &sum, 50.0f, &scale, &step), 0);
        assert_true(scale == 1.0f);
        assert_int_equal(cpu.add_f32(cpu.user, a, b, count), 0);
        for (uint64_t i = 0; i < 40; ++i) {
            assert_true(a[i] == (i < count ? 2.0f * b[i] : b[i]));
        }
    }
}

/* A gradient that is no number: nothing is updated, and the next step is an ordinary one. */
static void a_norm_that_is_not_finite(void **state) {
    (void)state;
    net n, twin;
    ms_tensor p[2];
    net *const nets[] = {&n, &twin};
    for (int i = 0; i < 2; ++i) {
        ms_optimizer_desc optimizer;
        memset(&optimizer, 0, sizeof optimizer);
        optimizer.grad_clip_norm = 1.0f; // AdamW: has t, and two moments
        net_begin(nets[i]);
        net_create(nets[i]);
        ms_set_optimizer(nets[i]->m, &optimizer);
        p[i] = vector_param(nets[i], "p");
        ms_tensor y = activation(nets[i], "y");
        add_scale(nets[i], "scale", nets[i]->x, 0.0f, p[i], y);
        add_loss(nets[i], y);
        net_start(nets[i]);
        write_param(nets[i], p[i], 2.0f);
        t_ok(nets[i]->m, ms_step(nets[i]->m, NULL));
    }
    for (int k = 0; k < 2; ++k) {
        n.ops[0].poisons = true;
        t_error(n.m, t_settled(n.m, ms_step(n.m, NULL)), MS_RESULT_NONFINITE);
        t_text_has(ms_last_error(n.m), "norm");
        n.ops[0].poisons = false;
        for (int of = -1; of < 2; ++of) {
            same_tensor(&n, of < 0 ? p[0] : ms_optimizer_state(n.m, p[0], of), &twin,
                        of < 0 ? p[1] : ms_optimizer_state(twin.m, p[1], of));
        }
        t_ok(n.m, ms_step(n.m, NULL));
        t_ok(twin.m, ms_step(twin.m, NULL));
        same_tensor(&n, p[0], &twin, p[1]);
    }
    net_end(&n);
    net_end(&twin);
}

// ------------------------------------------------------------------------------------------------
// several models, one arena

/* A chain of squares and scales; deeper ones need more. */
static void alternating_create(net *n, ms_arena *arena, int depth, ms_switch early, ms_tensor *p) {
    net_begin(n);
    n->config.arena = arena;
    n->config.early_update = early;
    net_create(n);
    net_sgd(n, 0.001f);
    *p = vector_param(n, "p");
    ms_tensor last = n->x;
    for (int i = 0; i < depth; ++i) { // |y| is at most 2
        ms_tensor h = activation(n, "h"), y = activation(n, "y");
        add_scale(n, "scale", last, 0.0f, *p, h);
        add_square(n, "square", h, y);
        last = y;
    }
    add_loss(n, last);
    ms_set_loss_factor(n->m, 0.125f);
    net_start(n);
    write_param(n, *p, 0.0f);
}

static uint64_t arena_of_one(int depth) {
    net n;
    ms_tensor p;
    ms_arena *arena = NULL;
    assert_int_equal(ms_arena_create(NULL, NULL, &arena), MS_RESULT_OK);
    alternating_create(&n, arena, depth, MS_SWITCH_DEFAULT, &p);
    uint64_t bytes = ms_arena_bytes(arena);
    net_end(&n);
    ms_arena_destroy(arena);
    return bytes;
}

static void models_take_turns_in_one_arena(void **state) {
    (void)state;
    static const int depths[] = {1, 3};
    for (int order = 0; order < 2; ++order) {
        net shared[2], apart[2];
        ms_tensor p[2], twin[2];
        ms_arena *arena = NULL;
        assert_int_equal(ms_arena_create(NULL, NULL, &arena), MS_RESULT_OK);
        for (int i = 0; i < 2; ++i) {
            alternating_create(&shared[i], arena, depths[i ^ order], MS_SWITCH_DEFAULT, &p[i]);
            alternating_create(&apart[i], NULL, depths[i ^ order], MS_SWITCH_DEFAULT, &twin[i]);
        }
        uint64_t small = arena_of_one(depths[0]), large = arena_of_one(depths[1]);
        assert_true(0 < small && small < large && ms_arena_bytes(arena) == large);
        for (int step = 0; step < 4; ++step) {
            for (int i = 0; i < 2; ++i) {
                double losses[2];
                t_ok(shared[i].m, ms_step(shared[i].m, &losses[0]));
                t_ok(apart[i].m, ms_step(apart[i].m, &losses[1]));
                assert_true(losses[0] == losses[1]);
                t_ok(shared[1 - i].m, ms_eval(shared[1 - i].m, &losses[0]));
                t_ok(apart[1 - i].m, ms_eval(apart[1 - i].m, &losses[1]));
                assert_true(losses[0] == losses[1]);
                same_tensor(&shared[i], p[i], &apart[i], twin[i]);
            }
        }
        ms_arena_destroy(arena); // its memory goes with the last model
        for (int i = 0; i < 2; ++i) {
            t_ok(shared[i].m, ms_step(shared[i].m, NULL));
            t_ok(apart[i].m, ms_step(apart[i].m, NULL));
            same_tensor(&shared[i], p[i], &apart[i], twin[i]);
            net_end(&shared[i]);
            net_end(&apart[i]);
        }
    }
}

static void expect_waiting(const net *n, ms_result result) {
    assert_int_equal(result, MS_RESULT_ORDER);
    t_text_has(ms_last_error(n->m), "arena");
    t_text_has(ms_last_error(n->m), "ms_update");
}

/* What has updated half of its params keeps the arena until it is done. */
static void an_early_update_keeps_the_arena(void **state) {
    (void)state;
    net shared[2], apart[2];
    ms_tensor p[2], twin[2];
    ms_arena *arena = NULL;
    uint64_t bytes;
    int64_t rows = ROWS;
    assert_int_equal(ms_arena_create(NULL, NULL, &arena), MS_RESULT_OK);
    for (int i = 0; i < 2; ++i) {
        alternating_create(&shared[i], arena, 2 + i, MS_SWITCH_ON, &p[i]);
        alternating_create(&apart[i], NULL, 2 + i, MS_SWITCH_ON, &twin[i]);
    }
    for (int step = 0; step < 3; ++step) {
        net *first = &shared[step & 1], *other = &shared[1 - (step & 1)];
        t_ok(first->m, ms_forward(first->m, NULL));
        t_ok(other->m, ms_eval(other->m, NULL)); // nothing is updated yet
        t_ok(first->m, ms_forward(first->m, NULL));
        t_ok(first->m, ms_backward(first->m));
        expect_waiting(other, ms_step(other->m, NULL));
        expect_waiting(other, ms_forward(other->m, NULL));
        expect_waiting(other, ms_eval(other->m, NULL));
        expect_waiting(other, ms_wrap(other->m));
        expect_waiting(other, ms_detach(other->m));
        expect_waiting(other, ms_reshape(other->m, &rows));
        expect_waiting(other, ms_smallest_budget(other->m, &bytes));
        t_ok(first->m, ms_update(first->m));
        t_ok(other->m, ms_step(other->m, NULL));
        for (int i = 0; i < 2; ++i) {
            t_ok(apart[i].m, ms_step(apart[i].m, NULL));
            same_tensor(&shared[i], p[i], &apart[i], twin[i]);
        }
    }
    t_ok(shared[0].m, ms_forward(shared[0].m, NULL));
    t_ok(shared[0].m, ms_backward(shared[0].m));
    expect_waiting(&shared[1], ms_step(shared[1].m, NULL));
    net_end(&shared[0]); // waits no longer
    t_ok(shared[1].m, ms_step(shared[1].m, NULL));
    t_ok(apart[1].m, ms_step(apart[1].m, NULL));
    same_tensor(&shared[1], p[1], &apart[1], twin[1]);
    net_end(&shared[1]);
    net_end(&apart[0]);
    net_end(&apart[1]);
    ms_arena_destroy(arena);
}

// ------------------------------------------------------------------------------------------------
// other shapes

typedef struct shaped {
    net n;
    t_device device;
    ms_tensor p, buffer;
} shaped;

static void shaped_create(shaped *s, int64_t rows, bool tight) {
    net_begin(&s->n);
    s->n.rows = rows;
    s->n.largest = 3 * ROWS;
    s->n.config.backend = t_device_backend(&s->device);
    s->n.config.force_optimize = tight;
    net_create(&s->n);
    net_sgd(&s->n, 0.001f);
    s->p = vector_param(&s->n, "p");
    s->buffer = ms_buffer(s->n.m, "buffer", MS_DTYPE_F32, ms_shape1(3));
    ms_tensor last = s->n.x;
    for (int i = 0; i < 3; ++i) {
        ms_tensor h = activation(&s->n, "h"), y = activation(&s->n, "y");
        add_scale(&s->n, "scale", last, 0.0f, s->p, h);
        add_square(&s->n, "square", h, y);
        last = y;
    }
    add_loss(&s->n, last);
    ms_set_loss_factor(s->n.m, 0.125f);
}

static void check_reshape(bool tight) {
    static const int64_t sizes[] = {1, 2 * ROWS, 3 * ROWS, ROWS, 5, 3 * ROWS, 1, ROWS};
    static const float kept[3] = {1.0f, 2.0f, 3.0f};
    shaped s;
    float data[3];
    shaped_create(&s, ROWS, tight);
    net_start(&s.n);
    write_param(&s.n, s.p, 0.0f);
    t_ok(s.n.m, ms_write(s.n.m, s.buffer, kept));
    uint64_t allocations = s.device.allocations, live = s.device.live_bytes;
    for (int turn = 0; turn < 2; ++turn) {
        for (int i = 0; i < 8; ++i) {
            uint64_t calls = s.n.heap.calls;
            float before[COLS];
            double losses[2];
            ms_memory_report report;
            t_ok(s.n.m, ms_read(s.n.m, s.p, before));
            t_ok(s.n.m, ms_reshape(s.n.m, &sizes[i]));
            assert_int_equal((int)ms_tensor_shape(s.n.m, s.n.x).dim[0], (int)sizes[i]);
            assert_true(ms_tensor_count(s.n.m, s.n.x) == (uint64_t)sizes[i] * COLS);
            write_x(&s.n);
            t_ok(s.n.m, ms_step(s.n.m, &losses[0]));
            if (turn == 1 || i > 4) { // a shape that has been before
                assert_true(s.n.heap.calls == calls);
            }
            shaped fresh;
            shaped_create(&fresh, sizes[i], tight);
            net_start(&fresh.n);
            t_ok(fresh.n.m, ms_write(fresh.n.m, fresh.p, before));
            t_ok(fresh.n.m, ms_step(fresh.n.m, &losses[1]));
            assert_true(losses[0] == losses[1]);
            same_tensor(&s.n, s.p, &fresh.n, fresh.p);
            t_report(s.n.m, &report);
            assert_true(report.arena_bytes <= live);
            net_end(&fresh.n);
        }
    }
    assert_true(s.device.allocations == allocations && s.device.live_bytes == live);
    t_ok(s.n.m, ms_read(s.n.m, s.buffer, data));
    assert_memory_equal(data, kept, sizeof kept);
    net_end(&s.n);
    assert_true(s.device.live_count == 0 && s.device.wrong_releases == 0);
}

static void shapes_change_between_steps(void **state) {
    (void)state;
    check_reshape(false);
    check_reshape(true);
}

enum { GUARD = 8192 };

/* t_heap, with a strip behind each block that nobody may write. */
typedef struct guarded {
    t_heap heap;
    uint64_t spoiled;
} guarded;

static void *guarded_alloc(uint64_t bytes, void *user) {
    return t_heap_alloc(bytes + GUARD, &((guarded *)user)->heap); // filled with 0xa5
}

static void guarded_release(void *memory, uint64_t bytes, void *user) {
    guarded *g = (guarded *)user;
    for (uint64_t i = 0; memory != NULL && i < GUARD; ++i) {
        g->spoiled += ((const uint8_t *)memory)[bytes + i] != 0xa5;
    }
    t_heap_release(memory, memory != NULL ? bytes + GUARD : 0, &g->heap);
}

static uint32_t fits_in_place;

/* z = y / 2 as far as y goes, and 1 behind: right in place of y where both have one size. */
static int fit_forward(const ms_call *call) {
    int error = enter(call);
    int64_t from = t_rows(&call->in[0]) * t_cols(&call->in[0]);
    fits_in_place += call->in[0].data == call->out[0].data;
    for (int64_t i = 0; i < t_rows(&call->out[0]) * t_cols(&call->out[0]) && error == 0; ++i) {
        t_data(&call->out[0])[i] = i < from ? 0.5f * t_data(&call->in[0])[i] : 1.0f;
    }
    return error;
}

static int fit_backward(const ms_call *call) {
    int error = enter(call);
    int64_t to = t_rows(&call->grad_out[0]) * t_cols(&call->grad_out[0]);
    for (int64_t i = 0; i < t_rows(&call->in[0]) * t_cols(&call->in[0]) && error == 0; ++i) {
        t_contribute(&call->grad_in[0], i, i < to ? 0.5f * t_grad_out(call, 0, i) : 0.0f);
    }
    return error;
}

typedef struct two_axes {
    net n;
    guarded memory;
    ms_tensor p[MAX_OPS];
    ms_axis first;
    bool bulges;
    ms_shape shape[2];
} two_axes;

static ms_tensor add_fit(net *n, ms_tensor y, ms_shape shape) {
    ms_layer_desc desc;
    (void)next_op(n, &desc, "fit", fit_forward, fit_backward);
    desc.in[0] = y;
    desc.out[0] = ms_activation(n->m, "z", MS_DTYPE_F32, shape);
    desc.backward_reads.nothing = true;
    desc.in_place[0] = 1;
    desc.grad_in_place[0].grad_out = 1;
    net_register(n, &desc);
    return desc.out[0];
}

/* x -> [scale, square, fit to the other shape] twice. */
static ms_tensor two_axes_deep(two_axes *t) {
    net *n = &t->n;
    ms_tensor last = n->x;
    for (int i = 0; i < 2; ++i) {
        const ms_shape from = t->shape[i];
        ms_tensor h = ms_activation(n->m, "h", MS_DTYPE_F32, from);
        ms_tensor y = ms_activation(n->m, "y", MS_DTYPE_F32, from);
        t->p[i] = ms_param(n->m, "p", MS_DTYPE_F32, ms_shape1(from.dim[1]));
        add_scale(n, "scale", last, 0.0f, t->p[i], h);
        add_square(n, "square", h, y);
        last = add_fit(n, y, t->shape[1 - i]);
    }
    return last;
}

/* x -> fit to one shape, to the other, and to a row -> scale twice: the peak is where one of the
   shapes is in place of the other, or both stand there. */
static ms_tensor two_axes_bulge(two_axes *t) {
    net *n = &t->n;
    const ms_shape row = ms_shape2(1, COLS);
    ms_tensor last = add_fit(n, add_fit(n, n->x, t->shape[0]), t->shape[1]);
    last = add_fit(n, last, row);
    for (int i = 0; i < 2; ++i) {
        ms_tensor h = ms_activation(n->m, "h", MS_DTYPE_F32, row);
        t->p[i] = vector_param(n, "p");
        add_scale(n, "scale", last, 0.0f, t->p[i], h);
        last = h;
    }
    return last;
}

static void two_axes_layers(two_axes *t) {
    net *n = &t->n;
    ms_layer_desc desc;
    ms_tensor last = t->bulges ? two_axes_bulge(t) : two_axes_deep(t);
    (void)next_op(n, &desc, "loss", loss_forward, loss_backward);
    int64_t rows = t->shape[0].dim[0];
    ms_shape along = ms_along(ms_shape1(rows), 0, t->first);
    n->loss = ms_activation(n->m, "losses", MS_DTYPE_F32, t->bulges ? ms_shape1(1) : along);
    desc.in[0] = last;
    desc.out[0] = n->loss;
    desc.backward_reads.in = 1;
    net_register(n, &desc);
    ms_set_loss(n->m, n->loss);
    ms_set_loss_factor(n->m, 0.125f);
}

static void two_axes_create(two_axes *t, const int64_t *sizes, const int64_t *largest,
                            const int64_t *cols, bool smallest, bool bulges) {
    memset(t, 0, sizeof *t);
    t->bulges = bulges;
    net *n = &t->n;
    net_begin(n);
    n->config.force_optimize = smallest;
    n->config.allocator.alloc = guarded_alloc;
    n->config.allocator.release = guarded_release;
    n->config.allocator.user = &t->memory;
    assert_int_equal(ms_create(&n->config, &n->m), MS_RESULT_OK);
    ms_axis axes[2];
    axes[0] = ms_add_axis(n->m, "a", sizes[0], largest[0]);
    axes[1] = largest[1] != 0 ? ms_add_axis(n->m, "b", sizes[1], largest[1]) : axes[0];
    t->first = axes[0];
    for (int i = 0; i < 2; ++i) {
        const int64_t rows = largest[1] != 0 ? sizes[i] : sizes[0];
        t->shape[i] = ms_along(ms_shape2(rows, cols[i]), 0, axes[i]);
    }
    n->x = ms_input(n->m, "x", MS_DTYPE_F32, bulges ? ms_shape2(1, COLS) : t->shape[0]);
    net_sgd(n, 0.001f);
    two_axes_layers(t);
    net_start(n);
    for (int i = 0; i < 2; ++i) {
        write_param(n, t->p[i], 0.0f);
    }
}

static void two_axes_end(two_axes *t) {
    net_end(&t->n);
    assert_true(t->memory.heap.live_count == 0 && t->memory.heap.wrong_releases == 0);
    assert_true(t->memory.spoiled == 0);
}

/* Reshaped again and again, with the numbers of a fresh model, inside of what was allocated. */
static void check_two_axes(const int64_t *largest, const int64_t *cols, bool smallest,
                           bool bulges) {
    two_axes t;
    two_axes_create(&t, largest, largest, cols, smallest, bulges);
    ms_memory_report report;
    t_report(t.n.m, &report);
    const uint64_t room = report.arena_bytes;
    for (int64_t i = 2 * largest[0] * (largest[1] != 0 ? largest[1] : 1); i-- > 0;) {
        const int64_t sizes[2] = {1 + i % largest[0],
                                  1 + i / largest[0] % (largest[1] != 0 ? largest[1] : 1)};
        two_axes fresh;
        double losses[2];
        t_ok(t.n.m, ms_reshape(t.n.m, sizes));
        t_report(t.n.m, &report);
        assert_true(report.arena_bytes >= report.lower_bound_bytes && report.arena_bytes <= room);
        two_axes_create(&fresh, sizes, largest, cols, smallest, bulges);
        write_x(&t.n);
        for (int k = 0; k < 2; ++k) {
            write_param(&t.n, t.p[k], 0.0f);
        }
        for (int step = 0; step < 2; ++step) {
            t_ok(t.n.m, ms_step(t.n.m, &losses[0]));
            t_ok(fresh.n.m, ms_step(fresh.n.m, &losses[1]));
            assert_true(losses[0] == losses[1]);
            t_ok(t.n.m, ms_eval(t.n.m, &losses[0]));
            t_ok(fresh.n.m, ms_eval(fresh.n.m, &losses[1]));
            assert_true(losses[0] == losses[1]);
        }
        for (int k = 0; k < 2; ++k) {
            same_tensor(&t.n, t.p[k], &fresh.n, fresh.p[k]);
        }
        two_axes_end(&fresh);
    }
    two_axes_end(&t);
}

/* Two shapes that are equal at some sizes of their axes only, by chance or by rounding. */
static void takeovers_hold_at_all_sizes(void **state) {
    (void)state;
    static const int64_t squares[] = {4, 4}, uneven[] = {2, 4}, one[] = {3, 0};
    static const int64_t equal[] = {16, 16}, twice[] = {16, 8};
    static const int64_t longer[] = {8, 9}, shorter[] = {9, 8}; // 96 and 108 bytes of 128
    static const int64_t wide[] = {512, 512}, wide_twice[] = {512, 256};
    static const int64_t wide_longer[] = {504, 505}, wide_shorter[] = {505, 504};
    for (int smallest = 0; smallest < 2; ++smallest) {
        check_two_axes(squares, equal, smallest != 0, false);
        check_two_axes(uneven, twice, smallest != 0, false);
        check_two_axes(one, longer, smallest != 0, false);
        check_two_axes(one, shorter, smallest != 0, false);
        check_two_axes(one, equal, smallest != 0, false);
        check_two_axes(squares, wide, smallest != 0, true);
        check_two_axes(uneven, wide_twice, smallest != 0, true);
        check_two_axes(one, wide_longer, smallest != 0, true);
        check_two_axes(one, wide_shorter, smallest != 0, true);
        check_two_axes(one, wide, smallest != 0, true);
    }
}

/* Along one axis both have one size always: then it is done in place, whatever the size. */
static void takeovers_along_one_axis(void **state) {
    (void)state;
    static const int64_t largest[] = {4, 0}, cols[] = {16, 16};
    for (int smallest = 0; smallest < 2; ++smallest) {
        two_axes t;
        two_axes_create(&t, largest, largest, cols, smallest != 0, false);
        for (int64_t rows = 1; rows <= 4; ++rows) {
            t_ok(t.n.m, ms_reshape(t.n.m, &rows));
            fits_in_place = 0;
            t_ok(t.n.m, ms_forward(t.n.m, NULL));
            assert_int_equal(fits_in_place, 2);
            t_ok(t.n.m, ms_eval(t.n.m, NULL));
            assert_int_equal(fits_in_place, 4);
        }
        two_axes_end(&t);
    }
}

enum { MANY_SHAPES = 70 };

typedef struct many_shapes {
    net n;
    ms_tensor p;
} many_shapes;

static void many_shapes_create(many_shapes *s, int64_t rows) {
    static float x[MANY_SHAPES * COLS];
    net_begin(&s->n);
    s->n.rows = rows;
    s->n.largest = MANY_SHAPES;
    net_create(&s->n);
    net_sgd(&s->n, 0.0078125f);
    s->p = vector_param(&s->n, "p");
    ms_tensor h = activation(&s->n, "h"), y = activation(&s->n, "y");
    add_scale(&s->n, "scale", s->n.x, 0.0f, s->p, h);
    add_square(&s->n, "square", h, y);
    add_loss(&s->n, y);
    ms_set_loss_factor(s->n.m, 0.015625f);
    for (int i = 0; i < MANY_SHAPES * COLS; ++i) {
        x[i] = x_at(i);
    }
    t_ok(s->n.m, ms_wrap(s->n.m));
    t_ok(s->n.m, ms_write(s->n.m, s->n.x, x));
    write_param(&s->n, s->p, 0.0f);
}

/* There and back through more shapes than plans are kept; their number stays bounded. */
static void more_shapes_than_plans_are_kept(void **state) {
    (void)state;
    many_shapes s;
    double losses[MANY_SHAPES];
    uint64_t live = 0;
    many_shapes_create(&s, MANY_SHAPES);
    for (int turn = 0; turn < 4; ++turn) {
        for (int i = 0; i < MANY_SHAPES; ++i) {
            int64_t rows = turn % 2 != 0 ? MANY_SHAPES - i : i + 1;
            double loss;
            t_ok(s.n.m, ms_reshape(s.n.m, &rows));
            t_ok(s.n.m, ms_eval(s.n.m, &loss));
            if (turn == 0) {
                many_shapes fresh;
                many_shapes_create(&fresh, rows);
                t_ok(fresh.n.m, ms_eval(fresh.n.m, &losses[rows - 1]));
                net_end(&fresh.n);
            }
            assert_true(loss == losses[rows - 1]);
            t_ok(s.n.m, ms_forward(s.n.m, &loss)); // by the other program
            assert_true(loss == losses[rows - 1]);
            t_ok(s.n.m, ms_backward(s.n.m));
            live = turn == 0 && i < 64 ? s.n.heap.live_count : live;
            assert_true(s.n.heap.live_count <= live); // 64 plans, or what they took
        }
    }
    int64_t largest = MANY_SHAPES, other = 1;
    t_ok(s.n.m, ms_reshape(s.n.m, &other));
    uint64_t calls = s.n.heap.calls;
    t_ok(s.n.m, ms_reshape(s.n.m, &largest)); // is never forgotten
    assert_true(s.n.heap.calls == calls);
    t_ok(s.n.m, ms_step(s.n.m, NULL));
    net_end(&s.n);
}

/* A new shape after a change that asks for a new plan: refused until ms_wrap. */
static void a_reshape_behind_a_change_waits_for_a_wrap(void **state) {
    (void)state;
    shaped s, fresh;
    int64_t more = ROWS + 1, first = ROWS;
    double losses[2];
    shaped_create(&s, ROWS, false);
    net_start(&s.n);
    write_param(&s.n, s.p, 0.0f);
    ms_set_frozen(s.n.m, s.p, true); // takes effect at ms_wrap
    t_error(s.n.m, ms_reshape(s.n.m, &more), MS_RESULT_ORDER);
    t_text_has(ms_last_error(s.n.m), "ms_reshape");
    t_text_has(ms_last_error(s.n.m), "ms_wrap");
    assert_int_equal((int)ms_tensor_shape(s.n.m, s.n.x).dim[0], ROWS);
    t_ok(s.n.m, ms_reshape(s.n.m, &first)); // a plan that is there
    shaped_create(&fresh, ROWS, false);
    net_start(&fresh.n);
    write_param(&fresh.n, fresh.p, 0.0f);
    for (int turn = 0; turn < 2; ++turn) {
        t_ok(s.n.m, ms_step(s.n.m, &losses[0]));
        t_ok(fresh.n.m, ms_step(fresh.n.m, &losses[1]));
        assert_true(losses[0] == losses[1]);
        same_tensor(&s.n, s.p, &fresh.n, fresh.p);
        if (turn == 0) {
            ms_set_frozen(s.n.m, s.p, false);
            t_ok(s.n.m, ms_wrap(s.n.m));
            t_ok(s.n.m, ms_reshape(s.n.m, &more));
            t_ok(fresh.n.m, ms_reshape(fresh.n.m, &more));
            write_x(&s.n);
            write_x(&fresh.n);
        }
    }
    net_end(&s.n);
    net_end(&fresh.n);
}

/* An impossible budget or a lack of memory between steps: plan, sizes and values stay, and what can
   be done with them. */
static void a_failing_wrap_leaves_the_model_as_it_was(void **state) {
    (void)state;
    static const int64_t sizes[] = {ROWS, 1, 3 * ROWS, 5, ROWS};
    for (int tight = 0; tight < 2; ++tight) {
        shaped s, twin;
        shaped *const both[] = {&s, &twin};
        for (int i = 0; i < 2; ++i) {
            shaped_create(both[i], ROWS, tight != 0);
            net_start(&both[i]->n);
            write_param(&both[i]->n, both[i]->p, 0.0f);
        }
        for (int k = 0; k < 5; ++k) {
            ms_memory_report before, after;
            double losses[2];
            for (int i = 0; i < 2; ++i) {
                t_ok(both[i]->n.m, ms_reshape(both[i]->n.m, &sizes[k]));
                write_x(&both[i]->n);
            }
            t_report(s.n.m, &before);
            uint64_t live = s.n.heap.live_bytes, allocations = s.device.allocations;
            void *const of_p = ms_data(s.n.m, s.p);
            ms_set_budget(s.n.m, 1);
            s.n.heap.fail_at = tight != 0 ? s.n.heap.calls + 5 : 0;
            t_error(s.n.m, ms_wrap(s.n.m), tight != 0 ? MS_RESULT_OUT_OF_MEMORY : MS_RESULT_BUDGET);
            t_report(s.n.m, &after);
            assert_memory_equal(&before, &after, sizeof before);
            assert_true(s.n.heap.live_bytes == live && s.device.allocations == allocations);
            assert_ptr_equal(ms_data(s.n.m, s.p), of_p);
            assert_int_equal((int)ms_tensor_shape(s.n.m, s.n.x).dim[0], (int)sizes[k]);
            t_ok(s.n.m, ms_step(s.n.m, &losses[0]));
            t_ok(twin.n.m, ms_step(twin.n.m, &losses[1]));
            assert_true(losses[0] == losses[1]);
            same_tensor(&s.n, s.p, &twin.n, twin.p);
        }
        ms_set_budget(s.n.m, s.n.config.memory_budget_bytes);
        t_ok(s.n.m, ms_wrap(s.n.m));
        net_end(&s.n);
        net_end(&twin.n);
    }
}

// ------------------------------------------------------------------------------------------------
// two params: failures between their updates, techniques that they cannot have, state that is lent

typedef struct two_params {
    net n;
    ms_tensor p[2];
    uint32_t updates, fail_at;
} two_params;

static int update_counted(const ms_update_args *args) {
    two_params *t = (two_params *)args->user;
    if (++t->updates == t->fail_at) {
        return 29;
    }
    for (uint64_t i = 0; i < args->count; ++i) {
        args->value[i] -= args->learning_rate * args->gradient[i];
    }
    return 0;
}

/* The moments of both params, if they are the trainer's own. */
typedef float moments[2][2][COLS];

/* y = (x p) q */
static void two_params_create(two_params *t, moments *lent_state, ms_optimizer_kind kind) {
    memset(t, 0, sizeof *t);
    net_begin(&t->n);
    net_create(&t->n);
    ms_optimizer_desc optimizer;
    memset(&optimizer, 0, sizeof optimizer);
    optimizer.kind = kind;
    optimizer.update = kind == MS_OPTIMIZER_CUSTOM ? update_counted : NULL;
    optimizer.user = t;
    optimizer.learning_rate = 0.0078125f;
    ms_set_optimizer(t->n.m, &optimizer);
    t->p[0] = vector_param(&t->n, "p");
    t->p[1] = vector_param(&t->n, "q");
    ms_tensor y = activation(&t->n, "y"), z = activation(&t->n, "z");
    add_scale(&t->n, "scale", t->n.x, 0.0f, t->p[0], y);
    add_scale(&t->n, "again", y, 0.0f, t->p[1], z);
    add_loss(&t->n, z);
    ms_set_loss_factor(t->n.m, 0.015625f);
    for (int k = 0; k < 2 && lent_state != NULL; ++k) {
        for (int of = 0; of < 2; ++of) {
            t_ok(t->n.m,
                 ms_borrow(t->n.m, ms_optimizer_state(t->n.m, t->p[k], of), (*lent_state)[k][of]));
        }
    }
}

static void two_params_write(two_params *t) {
    write_x(&t->n);
    write_param(&t->n, t->p[0], 2.0f);
    write_param(&t->n, t->p[1], 1.5f);
}

/* A step that was cut between two updates: FAILED until ms_wrap, whatever comes in between. */
static void a_failed_model_stays_failed_until_it_is_wrapped(void **state) {
    (void)state;
    for (int in_block = 0; in_block < 2; ++in_block) {
        two_params t;
        two_params_create(&t, NULL, MS_OPTIMIZER_CUSTOM);
        t_ok(t.n.m, ms_wrap(t.n.m));
        two_params_write(&t);
        t_ok(t.n.m, ms_step(t.n.m, NULL));
        t.fail_at = t.updates + 2;
        if (in_block) {
            MS_OPTIMIZE(t.n.m) {
                t_error(t.n.m, ms_step(t.n.m, NULL), MS_RESULT_CALLBACK);
                t_error(t.n.m, ms_step(t.n.m, NULL), MS_RESULT_FAILED);
            }
        } else {
            t_error(t.n.m, ms_step(t.n.m, NULL), MS_RESULT_CALLBACK);
        }
        int64_t rows = ROWS - 1;
        t_error(t.n.m, ms_step(t.n.m, NULL), MS_RESULT_FAILED);
        t_ok(t.n.m, ms_detach(t.n.m));
        t_error(t.n.m, ms_step(t.n.m, NULL), MS_RESULT_FAILED);
        t_ok(t.n.m, ms_detach(t.n.m));
        t_error(t.n.m, ms_eval(t.n.m, NULL), MS_RESULT_FAILED);
        ms_set_budget(t.n.m, 1);
        t_error(t.n.m, ms_wrap(t.n.m), MS_RESULT_BUDGET);
        t_error(t.n.m, ms_forward(t.n.m, NULL), MS_RESULT_FAILED);
        ms_set_budget(t.n.m, t.n.config.memory_budget_bytes);
        two_params_write(&t);
        t_error(t.n.m, ms_step(t.n.m, NULL), MS_RESULT_FAILED);
        t_ok(t.n.m, ms_reshape(t.n.m, &rows));
        t_error(t.n.m, ms_step(t.n.m, NULL), MS_RESULT_FAILED);
        t_text_has(ms_last_error(t.n.m), "ms_wrap");
        t_ok(t.n.m, ms_wrap(t.n.m));
        uint32_t updates = t.updates;
        t_ok(t.n.m, ms_step(t.n.m, NULL));
        assert_int_equal(t.updates, updates + 2);
        t_ok(t.n.m, ms_detach(t.n.m));
        t_ok(t.n.m, ms_step(t.n.m, NULL));
        net_end(&t.n);
    }
}

/* What ms_wrap must refuse, because it was forced, is nothing to ms_detach. */
static void the_plain_plan_heeds_no_force(void **state) {
    (void)state;
    for (int by_config = 0; by_config < 2; ++by_config) {
        net n;
        ms_memory_report report;
        double p[COLS];
        net_begin(&n);
        n.config.early_update = by_config != 0 ? MS_SWITCH_ON : MS_SWITCH_DEFAULT;
        ms_tensor param = linear_create(&n, 1, false);
        if (by_config == 0) {
            ms_set_tensor_technique(n.m, param, MS_TECHNIQUE_EARLY_UPDATE, MS_SWITCH_ON);
        }
        memset(&seen, 0, sizeof seen);
        seen.micro_count = 2;
        net_start(&n);
        write_param(&n, param, 2.0f);
        for (int c = 0; c < COLS; ++c) {
            p[c] = (double)p_at(c) + 2.0;
        }
        t_ok(n.m, ms_step(n.m, NULL));
        (void)linear_step(p, ROWS, 1.0 / ROWS);
        expect_near(&n, param, p, COLS);
        ms_set_accumulation(n.m, 2);
        t_error(n.m, ms_wrap(n.m), MS_RESULT_INVALID);
        t_text_has(ms_last_error(n.m), "early");
        t_ok(n.m, ms_detach(n.m));
        t_report(n.m, &report);
        assert_false(report.early_update);
        t_ok(n.m, ms_step(n.m, NULL));
        expect_near(&n, param, p, COLS); // now the first of two micro-batches
        t_error(n.m, ms_wrap(n.m), MS_RESULT_INVALID);
        t_ok(n.m, ms_step(n.m, NULL));
        (void)linear_step(p, ROWS, 1.0 / ROWS);
        expect_near(&n, param, p, COLS);
        net_end(&n);
    }
}

/* The same for a param that is frozen though its early update is forced. */
static void a_frozen_param_with_a_forced_update(void **state) {
    (void)state;
    two_params t;
    float before[COLS], after[COLS];
    two_params_create(&t, NULL, MS_OPTIMIZER_SGD);
    ms_set_tensor_technique(t.n.m, t.p[0], MS_TECHNIQUE_EARLY_UPDATE, MS_SWITCH_ON);
    t_ok(t.n.m, ms_wrap(t.n.m));
    two_params_write(&t);
    t_ok(t.n.m, ms_step(t.n.m, NULL));
    ms_set_frozen(t.n.m, t.p[0], true);
    t_error(t.n.m, ms_wrap(t.n.m), MS_RESULT_INVALID);
    t_text_has(ms_last_error(t.n.m), "\"p\"");
    t_text_has(ms_last_error(t.n.m), "frozen");
    t_ok(t.n.m, ms_detach(t.n.m));
    for (int k = 0; k < 2; ++k) {
        t_ok(t.n.m, ms_read(t.n.m, t.p[k], before));
        t_ok(t.n.m, ms_step(t.n.m, NULL));
        t_ok(t.n.m, ms_read(t.n.m, t.p[k], after));
        assert_true((memcmp(before, after, sizeof after) == 0) == (k == 0));
    }
    net_end(&t.n);
}

static void two_params_same(const two_params *a, const two_params *b) {
    for (int k = 0; k < 2; ++k) {
        same_tensor(&a->n, a->p[k], &b->n, b->p[k]);
        for (int of = 0; of < 2; ++of) {
            same_tensor(&a->n, ms_optimizer_state(a->n.m, a->p[k], of), &b->n,
                        ms_optimizer_state(b->n.m, b->p[k], of));
        }
    }
}

static void freeze(two_params *t, bool frozen) {
    ms_set_frozen(t->n.m, t->p[0], frozen);
    t_ok(t->n.m, ms_wrap(t->n.m));
}

/* AdamW, whose bias correction counts updates: a param that was frozen for a while goes on with
   borrowed moments where it was, as one that never was; with moments of the model's own it starts
   again, as one whose moments are zero. */
static void moments_of_a_param_that_is_thawed(void **state) {
    (void)state;
    for (int is_lent = 0; is_lent < 2; ++is_lent) {
        static moments memory[2];
        two_params t, twin;
        float value[COLS], zero[COLS] = {0};
        memset(memory, 0, sizeof memory);
        two_params_create(&t, is_lent ? &memory[0] : NULL, MS_OPTIMIZER_ADAMW);
        two_params_create(&twin, is_lent ? &memory[1] : NULL, MS_OPTIMIZER_ADAMW);
        two_params *const both[] = {&t, &twin};
        for (int i = 0; i < 2; ++i) {
            t_ok(both[i]->n.m, ms_wrap(both[i]->n.m));
            two_params_write(both[i]);
            for (int step = 0; step < 3; ++step) {
                t_ok(both[i]->n.m, ms_step(both[i]->n.m, NULL));
            }
        }
        two_params_same(&t, &twin);
        freeze(&t, true);
        freeze(&t, false);
        if (is_lent) {
            two_params_same(&t, &twin);
        }
        for (int of = 0; of < 2 && !is_lent; ++of) {
            t_ok(t.n.m, ms_read(t.n.m, ms_optimizer_state(t.n.m, t.p[0], of), value));
            assert_memory_equal(value, zero, sizeof value);
        }
        for (int step = 0; step < 3; ++step) {
            float old[COLS];
            t_ok(t.n.m, ms_read(t.n.m, t.p[0], old));
            t_ok(t.n.m, ms_step(t.n.m, NULL));
            t_ok(t.n.m, ms_read(t.n.m, t.p[0], value));
            for (int c = 0; c < COLS && step == 0 && !is_lent; ++c) { // at t = 1: by the rate
                assert_true(fabs(fabs((double)value[c] - (double)old[c]) - 0.0078125) < 1e-5);
            }
            t_ok(twin.n.m, ms_step(twin.n.m, NULL));
            if (is_lent) {
                two_params_same(&t, &twin);
            }
        }
        net_end(&t.n);
        net_end(&twin.n);
    }
}

// ------------------------------------------------------------------------------------------------
// plans for others: the events of a dry run, carried out here, train as the library does

enum { PLAN_LAYERS = MAX_OPS, PLAN_PARAMS = 3 };
enum { PLAN_RATE_SHIFT = 27 };

typedef struct plan_net {
    net n;
    ms_layer_desc desc[PLAN_LAYERS];
    ms_tensor p[PLAN_PARAMS];
    eater eats;
    unsigned char *arena;
    uint64_t arena_bytes;
    bool placing; // the first walk: where do the fixed values lie?
    uint32_t index, faults;
    uint32_t callbacks[MS_PHASE_COUNT];
} plan_net;

static float plan_rate(void) {
    return 1.0f / (float)(1 << PLAN_RATE_SHIFT);
}

/* Registers the desc, without its callbacks if the model is to plan alone. */
static void plan_layer(plan_net *p, const ms_layer_desc *desc) {
    ms_layer_desc bare = *desc;
    p->desc[p->n.count] = *desc;
    if (p->n.config.dry_run) {
        bare.forward = bare.backward = NULL;
        bare.user = NULL;
        bare.no_backward = desc->backward == NULL;
    }
    net_register(&p->n, &bare);
}

static void plan_scale(plan_net *p, ms_tensor a, ms_tensor param, bool sets, ms_tensor y) {
    ms_layer_desc desc;
    op *o = next_op(&p->n, &desc, "scale", mix_forward, mix_backward);
    o->in_count = o->param_count = 1;
    o->c[0] = 0.5f;
    o->in_style[0] = sets ? STYLE_SET : STYLE_ADD;
    desc.in[0] = a;
    desc.param[0] = param;
    desc.out[0] = y;
    desc.accumulates.in = !sets;
    desc.overwrites.in = sets;
    desc.backward_reads.in = desc.backward_reads.param = 1;
    desc.forward_workspace.bytes = 256;
    plan_layer(p, &desc);
}

/* scale, many, squares of both outputs, their sum in place, scale and scale of one value, sum, an
   eater of its input, the loss. */
static void plan_create(plan_net *p, bool dry, bool smallest) {
    net *n = &p->n;
    ms_layer_desc desc;
    ms_tensor t[12];
    memset(p, 0, sizeof *p);
    net_begin(n);
    n->config.dry_run = dry;
    n->config.force_optimize = smallest;
    net_create(n);
    net_sgd(n, plan_rate());
    for (int i = 0; i < PLAN_PARAMS; ++i) {
        p->p[i] = vector_param(n, "p");
    }
    for (int i = 0; i < 12; ++i) {
        t[i] = activation(n, "t");
    }
    plan_scale(p, n->x, p->p[0], true, t[0]);
    (void)next_op(n, &desc, "many", many_make, many_backward);
    desc.in[0] = t[0];
    desc.out[0] = t[1];
    desc.out[1] = t[2];
    desc.saved[0] = saved(n, "s");
    desc.saved[1] = saved(n, "t");
    desc.backward_reads.saved = 3;
    plan_layer(p, &desc);
    for (int k = 0; k < 2; ++k) {
        (void)next_op(n, &desc, "square", square_forward, square_backward);
        desc.in[0] = t[1 + k];
        desc.out[0] = t[3 + k];
        desc.backward_reads.in = 1;
        plan_layer(p, &desc);
    }
    op *o = next_op(n, &desc, "sum", mix_forward, mix_backward);
    o->in_count = 2;
    o->c[0] = o->c[1] = 0.25f;
    desc.in[0] = t[3];
    desc.in[1] = t[4];
    desc.out[0] = t[5];
    desc.backward_reads.nothing = true;
    desc.in_place[0] = 3;
    plan_layer(p, &desc);
    plan_scale(p, t[5], p->p[1], true, t[6]);
    plan_scale(p, t[5], p->p[2], false, t[7]);
    o = next_op(n, &desc, "sum", mix_forward, mix_backward);
    o->in_count = 3;
    o->c[0] = o->c[1] = o->c[2] = 0.25f;
    desc.in[0] = t[6];
    desc.in[1] = t[7];
    desc.in[2] = t[5];
    desc.out[0] = t[8];
    desc.backward_reads.nothing = true;
    plan_layer(p, &desc);
    (void)next_op(n, &desc, "place", place_forward, place_backward);
    desc.in[0] = t[8];
    desc.out[0] = t[9];
    desc.backward_reads.nothing = true;
    desc.in_place[0] = desc.grad_in_place[0].grad_out = 1;
    desc.must_in_place = desc.must_grad_in_place = 1;
    plan_layer(p, &desc);
    (void)next_op(n, &desc, "eater", square_forward, eater_backward);
    p->eats.eats_in = p->eats.eats_out = p->eats.eats_grad_out = true;
    desc.user = &p->eats;
    desc.in[0] = t[9];
    desc.out[0] = t[10];
    desc.clobbers.in = desc.clobbers.out = desc.clobbers.grad_out = 1;
    plan_layer(p, &desc);
    n->loss = ms_activation(n->m, "losses", MS_DTYPE_F32, ms_along(ms_shape1(ROWS), 0, n->batch));
    (void)next_op(n, &desc, "loss", loss_forward, loss_backward);
    desc.in[0] = t[10];
    desc.out[0] = n->loss;
    desc.backward_reads.in = 1;
    plan_layer(p, &desc);
    ms_set_loss(n->m, n->loss);
    t_ok(n->m, ms_wrap(n->m));
}

static float *plan_memory(plan_net *p, const ms_event_operand *o) {
    p->faults += o->is_outside || o->bytes == 0 || (o->offset & 63u) != 0 ||
                 o->offset + o->bytes > p->arena_bytes;
    return (float *)(void *)(p->arena + o->offset);
}

/* The fixed values are found at the first operand that names them. */
static void plan_place(plan_net *p, const ms_event_operand *o) {
    float *memory = plan_memory(p, o);
    if (o->tensor.id == p->n.x.id) {
        for (int i = 0; i < COUNT; ++i) {
            memory[i] = x_at(i);
        }
    }
    for (int k = 0; k < PLAN_PARAMS; ++k) {
        for (int i = 0; i < COLS && o->tensor.id == p->p[k].id; ++i) {
            memory[i] = p_at(i) + 1.5f + (float)k;
        }
    }
}

typedef struct plan_views {
    ms_view of[MS_OPERAND_GRAD_PARAM + 1][MS_LIMIT_IN];
} plan_views;

static void plan_shapes(const plan_net *p, plan_views *v, ms_operand_kind kind,
                        ms_operand_kind gradient, const ms_tensor *slots, int limit) {
    for (int i = 0; i < limit; ++i) {
        if (slots[i].id != 0) {
            v->of[kind][i].shape = ms_tensor_shape(p->n.m, slots[i]);
            v->of[gradient][i].shape = v->of[kind][i].shape;
        }
    }
}

/* The call that the event describes. */
static void plan_call(plan_net *p, const ms_event *event, ms_phase phase) {
    static plan_views v;
    ms_call call;
    const ms_layer_desc *desc = &p->desc[event->layer.id - 1];
    memset(&v, 0, sizeof v);
    memset(&call, 0, sizeof call);
    plan_shapes(p, &v, MS_OPERAND_IN, MS_OPERAND_GRAD_IN, desc->in, MS_LIMIT_IN);
    plan_shapes(p, &v, MS_OPERAND_OUT, MS_OPERAND_GRAD_OUT, desc->out, MS_LIMIT_OUT);
    plan_shapes(p, &v, MS_OPERAND_SAVED, MS_OPERAND_SAVED, desc->saved, MS_LIMIT_SAVED);
    plan_shapes(p, &v, MS_OPERAND_PARAM, MS_OPERAND_GRAD_PARAM, desc->param, MS_LIMIT_PARAM);
    for (uint32_t i = 0; i < event->operand_count; ++i) {
        const ms_event_operand *o = &event->operands[i];
        float *memory = plan_memory(p, o);
        if (o->kind == MS_OPERAND_WORKSPACE) {
            call.workspace = memory;
            call.workspace_bytes = o->bytes;
            continue;
        }
        if (o->kind > MS_OPERAND_GRAD_PARAM || o->slot >= MS_LIMIT_IN) {
            p->faults += 1;
            continue;
        }
        v.of[o->kind][o->slot].data = memory;
        v.of[o->kind][o->slot].beta = o->accumulate ? 1.0f : 0.0f;
        if (phase != MS_PHASE_BACKWARD) {
            call.wanted_out |= (uint16_t)((o->kind == MS_OPERAND_OUT) << o->slot);
            call.wanted_saved |= (uint16_t)((o->kind == MS_OPERAND_SAVED) << o->slot);
        }
    }
    call.user = desc->user;
    call.phase = phase;
    call.in = v.of[MS_OPERAND_IN];
    call.out = v.of[MS_OPERAND_OUT];
    call.saved = v.of[MS_OPERAND_SAVED];
    call.param = v.of[MS_OPERAND_PARAM];
    call.grad_out = v.of[MS_OPERAND_GRAD_OUT];
    call.grad_in = v.of[MS_OPERAND_GRAD_IN];
    call.grad_param = v.of[MS_OPERAND_GRAD_PARAM];
    p->callbacks[phase] += 1;
    p->faults +=
        (uint32_t)(phase == MS_PHASE_BACKWARD ? desc->backward(&call) : desc->forward(&call));
}

static void plan_update(plan_net *p, const ms_event *event) {
    float *value = NULL;
    const float *gradient = NULL;
    for (uint32_t i = 0; i < event->operand_count; ++i) {
        const ms_event_operand *o = &event->operands[i];
        if (o->tensor.id == event->tensor.id) {
            value = plan_memory(p, o);
        } else if (o->tensor.id == ms_gradient(p->n.m, event->tensor).id) {
            gradient = plan_memory(p, o);
        }
    }
    if (value == NULL || gradient == NULL) {
        p->faults += 1;
        return;
    }
    for (int i = 0; i < COLS; ++i) {
        value[i] -= plan_rate() * (gradient[i] + 0.0f * value[i]);
    }
}

static void plan_fill(plan_net *p, const ms_event_operand *o, float value) {
    float *memory = plan_memory(p, o);
    for (uint64_t i = 0; i < o->bytes / sizeof(float); ++i) {
        memory[i] = value;
    }
}

static void plan_event(const ms_event *event, void *user) {
    static const ms_phase phases[] = {MS_PHASE_FORWARD, MS_PHASE_RECOMPUTE, MS_PHASE_BACKWARD,
                                      MS_PHASE_EVAL};
    plan_net *p = (plan_net *)user;
    const ms_event_operand *o = event->operands;
    bool drops = event->kind == MS_EVENT_DROP; // behind the instruction after which they are dead
    p->faults += event->index != p->index - drops || event->size != sizeof *event ||
                 event->name == NULL || event->live_bytes > p->arena_bytes ||
                 (event->kind <= MS_EVENT_EVAL && event->layer.id == 0);
    p->index += !drops;
    for (uint32_t i = 0; i < event->operand_count && p->placing; ++i) {
        plan_place(p, &o[i]);
    }
    if (p->placing) {
        return;
    }
    switch (event->kind) {
    case MS_EVENT_FORWARD:
    case MS_EVENT_RECOMPUTE:
    case MS_EVENT_BACKWARD:
    case MS_EVENT_EVAL:
        plan_call(p, event, phases[event->kind]);
        break;
    case MS_EVENT_SEED:
        plan_fill(p, &o[0], 1.0f / (float)ROWS);
        break;
    case MS_EVENT_ZERO:
        plan_fill(p, &o[0], 0.0f);
        break;
    case MS_EVENT_COPY:
        memmove(plan_memory(p, &o[0]), plan_memory(p, &o[1]), (size_t)o[1].bytes);
        break;
    case MS_EVENT_ADD:
        for (uint64_t i = 0; i < o[0].bytes / sizeof(float); ++i) {
            plan_memory(p, &o[0])[i] += plan_memory(p, &o[1])[i];
        }
        break;
    case MS_EVENT_UPDATE:
        plan_update(p, event);
        break;
    case MS_EVENT_DROP:
        for (uint32_t i = 0; i < event->operand_count; ++i) {
            plan_fill(p, &o[i], NAN);
        }
        break;
    default:
        p->faults += 1;
        break;
    }
}

static void plan_find(const ms_event *event, void *user) {
    plan_net *p = (plan_net *)user;
    for (uint32_t i = 0; i < event->operand_count; ++i) {
        for (int k = 0; k < PLAN_PARAMS; ++k) {
            if (event->operands[i].tensor.id == p->p[k].id) {
                p->callbacks[k] = (uint32_t)event->operands[i].offset;
            }
        }
    }
}

static void check_plan(bool smallest) {
    static plan_net real, dry;
    ms_memory_report report;
    int learned = 0;
    plan_create(&real, false, smallest);
    plan_create(&dry, true, smallest);
    write_x(&real.n);
    for (int k = 0; k < PLAN_PARAMS; ++k) {
        write_param(&real.n, real.p[k], 1.5f + (float)k);
    }
    t_report(dry.n.m, &report);
    dry.arena_bytes = report.arena_bytes;
    dry.arena = (unsigned char *)malloc((size_t)report.arena_bytes);
    assert_non_null(dry.arena);
    memset(dry.arena, 0xff, (size_t)report.arena_bytes); // NaN
    dry.placing = true;
    t_ok(dry.n.m, ms_visit_events(dry.n.m, MS_PROGRAM_TRAIN, plan_event, &dry));
    dry.placing = false;
    assert_int_equal(dry.index, report.instruction_count);
    for (int step = 0; step < 4; ++step) {
        dry.index = 0;
        memset(dry.callbacks, 0, sizeof dry.callbacks);
        t_ok(dry.n.m, ms_visit_events(dry.n.m, MS_PROGRAM_TRAIN, plan_event, &dry));
        assert_int_equal(dry.faults, 0);
        assert_int_equal(dry.callbacks[MS_PHASE_RECOMPUTE], report.recompute_count);
        assert_int_equal(dry.callbacks[MS_PHASE_FORWARD], dry.n.count);
        assert_int_equal(dry.callbacks[MS_PHASE_BACKWARD], dry.n.count);
        if (step == 2) { // an eval in between changes nothing
            dry.index = 0;
            t_ok(dry.n.m, ms_visit_events(dry.n.m, MS_PROGRAM_EVAL, plan_event, &dry));
            assert_int_equal(dry.callbacks[MS_PHASE_EVAL], dry.n.count);
        }
        t_ok(real.n.m, ms_step(real.n.m, NULL));
        t_ok(dry.n.m, ms_visit_events(dry.n.m, MS_PROGRAM_TRAIN, plan_find, &dry));
        for (int k = 0; k < PLAN_PARAMS; ++k) {
            float data[COLS];
            t_ok(real.n.m, ms_read(real.n.m, real.p[k], data));
            assert_memory_equal(dry.arena + dry.callbacks[k], data, sizeof data);
            learned += data[5] != p_at(5) + 1.5f + (float)k;
        }
    }
    assert_int_equal(smallest, report.recompute_count > 0);
    assert_true(learned > 0);
    free(dry.arena);
    net_end(&real.n);
    net_end(&dry.n);
}

static void a_plan_can_be_carried_out_elsewhere(void **state) {
    (void)state;
    check_plan(false);
    check_plan(true);
}

// ------------------------------------------------------------------------------------------------
// callbacks that read fields; addresses

typedef struct fields {
    op base;
    const float *x, *g;
    float *y, *gx;
    uint32_t binds;
} fields;

static int fields_bind(const ms_call *call) {
    fields *f = (fields *)call->user;
    bool backward = call->phase == MS_PHASE_BACKWARD;
    f->x = t_data(&call->in[0]);
    f->y = backward ? NULL : t_data(&call->out[0]);
    f->g = backward ? t_data(&call->grad_out[0]) : NULL;
    f->gx = backward ? t_data(&call->grad_in[0]) : NULL;
    f->binds += 1;
    return (f->base.failing >> call->phase & 1u) != 0 ? T_CALLBACK_ERROR : 0;
}

static int fields_forward(const ms_call *call) {
    fields *f = (fields *)call->user;
    f->base.calls[call->phase] += 1;
    for (int i = 0; i < COUNT; ++i) {
        f->y[i] = 0.5f * f->x[i] * f->x[i];
    }
    return 0;
}

static int fields_backward(const ms_call *call) {
    fields *f = (fields *)call->user;
    f->base.calls[call->phase] += 1;
    for (int i = 0; i < COUNT && f->gx != NULL; ++i) {
        f->gx[i] = f->x[i] * f->g[i];
    }
    return 0;
}

static void callbacks_may_be_bound(void **state) {
    (void)state;
    net n, twin;
    fields f[2];
    ms_layer_desc desc;
    ms_tensor p[2];
    net *const nets[] = {&n, &twin};
    memset(f, 0, sizeof f);
    for (int i = 0; i < 2; ++i) {
        net_begin(nets[i]);
        net_create(nets[i]);
        p[i] = vector_param(nets[i], "p");
        ms_tensor last = activation(nets[i], "h");
        add_scale(nets[i], "scale", nets[i]->x, 0.0f, p[i], last);
        for (int k = 0; k < 2; ++k) {
            ms_tensor y = activation(nets[i], "y");
            if (i == 1) {
                add_square(nets[i], "square", last, y);
            } else {
                (void)next_op(nets[i], &desc, "bound", fields_forward, fields_backward);
                desc.user = &f[k];
                desc.bind = fields_bind;
                desc.in[0] = last;
                desc.out[0] = y;
                desc.backward_reads.in = 1;
                desc.overwrites.in = 1;
                int layer = net_register(nets[i], &desc);
                ms_set_layer_technique(nets[i]->m, nets[i]->layers[layer],
                                       MS_TECHNIQUE_CHECKPOINTING,
                                       k == 0 ? MS_SWITCH_ON : MS_SWITCH_DEFAULT);
            }
            last = y;
        }
        add_loss(nets[i], last);
        net_start(nets[i]);
        write_param(nets[i], p[i], 2.0f);
        t_ok(nets[i]->m, ms_eval(nets[i]->m, NULL));
        t_ok(nets[i]->m, ms_step(nets[i]->m, NULL));
    }
    same_tensor(&n, ms_gradient(n.m, p[0]), &twin, ms_gradient(twin.m, p[1]));
    for (int k = 0; k < 2; ++k) {
        uint32_t calls = 0;
        for (int phase = 0; phase < MS_PHASE_COUNT; ++phase) {
            calls += f[k].base.calls[phase];
        }
        assert_int_equal(f[k].binds, calls);
        expect_calls(f[k].base.calls[MS_PHASE_RECOMPUTE], k == 0);
    }
    f[0].base.failing = 1u << MS_PHASE_FORWARD;
    t_error(n.m, ms_step(n.m, NULL), MS_RESULT_CALLBACK);
    t_text_has(ms_last_error(n.m), "bound");
    t_text_has(ms_last_error(n.m), "bind");
    net_end(&n);
    net_end(&twin);
}

static void addresses(void **state) {
    (void)state;
    net n;
    ms_tensor h[CHAIN], p[CHAIN / 2];
    float value[COLS];
    net_begin(&n);
    chain_create(&n, h, p);
    ms_add_output(n.m, h[3]);
    chain_start(&n, p);
    float *x = (float *)ms_data(n.m, n.x);
    float *of_p = (float *)ms_data(n.m, p[1]);
    assert_non_null(x);
    assert_true(((uintptr_t)x & 63u) == 0 && ((uintptr_t)of_p & 63u) == 0);
    assert_null(ms_data(n.m, h[3]));
    assert_null(ms_data(n.m, ms_gradient(n.m, p[1])));
    t_open_device(true);
    assert_true(x[1] == x_at(1) && of_p[0] == p_at(0) + 1.5f);
    x[1] = 7.0f;
    t_open_device(false);
    t_ok(n.m, ms_step(n.m, NULL));
    assert_true(ms_data(n.m, n.x) == x && ms_data(n.m, p[1]) == of_p);
    assert_true(n.ops[0].last[MS_PHASE_FORWARD].user == &n.ops[0]);
    const float *kept = (const float *)ms_data(n.m, h[3]);
    const float *gradient = (const float *)ms_data(n.m, ms_gradient(n.m, p[1]));
    assert_true(kept != NULL && gradient != NULL);
    t_ok(n.m, ms_read(n.m, ms_gradient(n.m, p[1]), value));
    double h1 = 7.0 * (p_at(1) + 1.5), h3 = 0.5 * h1 * h1 * (p_at(1) + 1.5);
    t_open_device(true);
    assert_memory_equal(value, gradient, sizeof value);
    assert_true((double)kept[1] == 0.5 * h3 * h3);
    t_open_device(false);
    assert_null(ms_data(n.m, h[2]));
    ms_tensor wrong = {4711};
    assert_null(ms_data(n.m, wrong));
    net_end(&n);
}

static int debug_on(void **state) {
    (void)state;
    debugging = true;
    return 0;
}

static int debug_off(void **state) {
    (void)state;
    debugging = false;
    return 0;
}

#define TWICE(test)                                                                                \
    cmocka_unit_test(test), cmocka_unit_test_setup_teardown(test, debug_on, debug_off)

int main(void) {
    const struct CMUnitTest tests[] = {
        TWICE(styles_mix_on_one_fan_out),
        TWICE(styles_mix_on_the_slots_of_one_layer),
        TWICE(recompute_makes_what_is_wanted),
        TWICE(optional_saved_tensors),
        TWICE(cheap_recomputations_come_first),
        TWICE(state_is_changed_once_a_step),
        cmocka_unit_test(state_survives_a_failing_recomputation),
        TWICE(a_layer_that_runs_once_is_never_recomputed),
        TWICE(clobbered_values_are_copied_where_others_need_them),
        TWICE(a_clobbered_input_is_copied),
        TWICE(what_must_be_in_place_is),
        TWICE(workspace_has_its_size_and_contents),
        TWICE(a_loss_may_write_gradients_in_forward),
        TWICE(integers_and_host_tensors),
        TWICE(state_on_the_host),
        TWICE(a_stopped_gradient_goes_nowhere),
        TWICE(a_frozen_prefix_costs_nothing),
        TWICE(forced_techniques_change_the_plan),
        TWICE(forced_early_updates),
        TWICE(borrowed_memory_is_used_where_it_lies),
        TWICE(a_borrowed_gradient_is_never_zeroed),
        TWICE(custom_updates),
        TWICE(micro_batches_are_one_batch),
        TWICE(a_rewrap_between_micro_batches),
        TWICE(a_failing_micro_batch_starts_the_step_again),
        TWICE(a_step_without_its_update_starts_again),
        TWICE(gradients_are_clipped_by_their_common_norm),
        cmocka_unit_test(sums_of_squares),
        TWICE(a_norm_that_is_not_finite),
        TWICE(models_take_turns_in_one_arena),
        TWICE(an_early_update_keeps_the_arena),
        TWICE(shapes_change_between_steps),
        TWICE(takeovers_hold_at_all_sizes),
        cmocka_unit_test(takeovers_along_one_axis),
        TWICE(more_shapes_than_plans_are_kept),
        TWICE(a_reshape_behind_a_change_waits_for_a_wrap),
        TWICE(a_failing_wrap_leaves_the_model_as_it_was),
        TWICE(a_failed_model_stays_failed_until_it_is_wrapped),
        TWICE(the_plain_plan_heeds_no_force),
        TWICE(a_frozen_param_with_a_forced_update),
        TWICE(moments_of_a_param_that_is_thawed),
        TWICE(a_plan_can_be_carried_out_elsewhere),
        TWICE(callbacks_may_be_bound),
        TWICE(addresses),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
