/*  test_lies.c - mistakes of porting, each in many places: pointers and values that are kept from forward,
    statistics outside of state, a loss with unwritten elements, gradients that ignore grad_out or the
    loss factor or are no derivatives, params that are read elsewhere, state that changes in an eval,
    integers that backward reads undeclared, and updates of the trainer's own. Debug mode names each,
    and says nothing of the honest ones beside them. */
#include "private.h"
#include "toy_layers.h"

enum { WIDTH = 64, MOST_LAYERS = 8 };

/* What one of a chain of layers y = x * w does wrong. */
typedef enum lie {
    HONEST,
    KEEPS_POINTER,         // of its input, from its own forward
    SHARES_POINTER,        // the same, in a variable that all layers share
    IGNORES_GRADIENT,      // of its output
    IGNORES_IN_PARAM,      // only for the gradient of w
    KEEPS_LAST,            // of the inputs of the call before, by which it scales
    KEEPS_STATISTICS,      // of the inputs, which it reads in an eval
    USES_ONE_BETA,         // that of the gradient of its input, for that of w too
    WRITES_BEFORE,         // the gradient of its input
    CHANGES_STATE_IN_EVAL, // and in forward, as it should
    KEEPS_VALUES,          // of its input, from its last forward
    FORGETS_PARAM,         // adds nothing to the gradient of w
    READS_COPY,            // of w, taken in its first forward
    HALVES_GRADIENT,       // of w
    REVERSES_GRADIENT,     // of its input
    FORGETS_TERM           // adds to the first half of the gradient of its input alone
} lie;

typedef struct liar {
    lie tells;
    const float *kept;
    float copy[WIDTH], last, mean;
    bool has_copy;
} liar;

static const float *shared;

static int scale_forward(const ms_call *call) {
    liar *l = (liar *)call->user;
    const float *x = t_data(&call->in[0]), *w = t_data(&call->param[0]);
    float by = 1.0f;
    l->kept = shared = x;
    if (l->tells == READS_COPY ? !l->has_copy : l->tells == KEEPS_VALUES) {
        memcpy(l->copy, l->tells == READS_COPY ? w : x, sizeof l->copy);
        l->has_copy = true;
    }
    if (l->tells == KEEPS_STATISTICS && call->phase != MS_PHASE_EVAL) {
        l->mean = 0.5f * l->mean + 0.5f * x[0];
    }
    by = l->tells == KEEPS_LAST && l->has_copy ? l->last : l->tells == KEEPS_LAST ? x[0] : by;
    l->last = x[0];
    l->has_copy |= l->tells == KEEPS_LAST;
    by = l->tells == KEEPS_STATISTICS && call->phase == MS_PHASE_EVAL ? l->mean : by;
    w = l->tells == READS_COPY ? l->copy : w;
    for (int i = 0; i < WIDTH; ++i) {
        t_data(&call->out[0])[i] = by * x[i] * w[i];
    }
    const bool changes = call->phase == MS_PHASE_FORWARD || l->tells == CHANGES_STATE_IN_EVAL;
    for (int i = 0; i < WIDTH && call->state[0].data && changes; ++i) {
        t_data(&call->state[0])[i] += 0.125f * x[i];
    }
    return 0;
}

static int scale_backward(const ms_call *call) {
    const liar *l = (const liar *)call->user;
    const float *g = t_data(&call->grad_out[0]), *w = t_data(&call->param[0]);
    const float *x = l->tells == KEEPS_POINTER    ? l->kept
                     : l->tells == SHARES_POINTER ? shared
                     : l->tells == KEEPS_VALUES   ? l->copy
                                                  : t_data(&call->in[0]);
    for (int i = 0; i < WIDTH; ++i) {
        const float by = l->tells == IGNORES_GRADIENT ? 1.0f : g[i];
        const bool forgets = l->tells == FORGETS_TERM && i >= WIDTH / 2;
        if (l->tells == WRITES_BEFORE) {
            t_data(&call->grad_in[0])[-1] = by;
        }
        if (call->grad_in[0].data) {
            t_contribute(&call->grad_in[0], i,
                         forgets                         ? 0.0f
                         : l->tells == REVERSES_GRADIENT ? -by * w[i]
                                                         : by * w[i]);
        }
        ms_view of_param = call->grad_param[0];
        of_param.beta = l->tells == USES_ONE_BETA ? call->grad_in[0].beta : of_param.beta;
        t_contribute(&of_param, i,
                     l->tells == FORGETS_PARAM      ? 0.0f
                     : l->tells == IGNORES_IN_PARAM ? x[i]
                     : l->tells == HALVES_GRADIENT  ? 0.5f * by * x[i]
                                                    : by * x[i]);
    }
    return 0;
}

static int square_forward(const ms_call *call) {
    for (int i = 0; i < WIDTH; ++i) {
        t_data(&call->out[0])[i] = t_data(&call->in[0])[i] * t_data(&call->in[0])[i];
    }
    return 0;
}

static int square_backward(const ms_call *call) {
    for (int i = 0; i < WIDTH; ++i) {
        t_contribute(&call->grad_in[0], i,
                     2.0f * t_data(&call->grad_out[0])[i] * t_data(&call->in[0])[i]);
    }
    return 0;
}

typedef struct warnings {
    int count;
    char text[600], call[200]; // of a warning; of the last call that debug mode has announced
} warnings;

static void note_warning(ms_log_level level, const char *tag, const char *text, void *user) {
    warnings *w = (warnings *)user;
    if (level == MS_LOG_WARNING) {
        w->count += 1;
        (void)snprintf(w->text, sizeof w->text, "%s", text);
    } else if (level == MS_LOG_DEBUG && strcmp(tag, "debug") == 0) {
        (void)snprintf(w->call, sizeof w->call, "%s", text);
    }
}

typedef struct chain {
    ms_model *m;
    ms_tensor x, w[MOST_LAYERS];
    liar liars[MOST_LAYERS];
    int which; // of them lies
    bool surrogate;
    float *lent_gradient; // of the second param, or NULL
    warnings heard;
} chain;

static void write_chain(chain *c, int layers) {
    float x[WIDTH], w[WIDTH];
    for (int i = 0; i < WIDTH; ++i) {
        x[i] = 1.0f + 0.01f * (float)i;
    }
    t_ok(c->m, ms_write(c->m, c->x, x));
    for (int k = 0; k < layers; ++k) {
        for (int i = 0; i < WIDTH; ++i) {
            w[i] = 1.0f + 0.001f * (float)(i * (k + 1) % 7);
        }
        t_ok(c->m, ms_write(c->m, c->w[k], w));
    }
}

static void create(chain *c, bool debug, uint32_t micro_count) {
    ms_config config = t_config();
    config.debug = debug;
    config.log = note_warning;
    config.log_user = &c->heard;
    config.accumulation_steps = micro_count;
    assert_int_equal(ms_create(&config, &c->m), MS_RESULT_OK);
}

/* Layers that scale, one of which may lie, and squares after them. Their params may be lent. */
static void build_chain(chain *c, lie tells, int layers, int squares, bool debug,
                        const ms_optimizer_desc *optimizer, float *lent) {
    create(c, debug, 1);
    ms_tensor at = c->x = ms_input(c->m, "x", MS_DTYPE_F32, ms_shape2(8, WIDTH / 8));
    for (int k = 0; k < layers + squares; ++k) {
        ms_layer_desc d = t_new_layer(k < layers ? "scale" : "square",
                                      k < layers ? scale_forward : square_forward,
                                      k < layers ? scale_backward : square_backward, NULL);
        d.in[0] = at;
        d.backward_reads.in = 1;
        if (k < layers) {
            c->liars[k].tells = k == c->which ? tells : HONEST;
            d.user = &c->liars[k];
            d.surrogate_gradient = c->surrogate;
            d.param[0] = c->w[k] = ms_param(c->m, "w", MS_DTYPE_F32, ms_shape1(WIDTH));
            d.backward_reads.param = 1;
        }
        if (k == 0 && (tells == CHANGES_STATE_IN_EVAL || tells == HONEST)) {
            d.state[0] = ms_buffer(c->m, "running", MS_DTYPE_F32, ms_shape1(WIDTH));
        }
        d.out[0] = at = ms_activation(c->m, "y", MS_DTYPE_F32, ms_shape1(WIDTH));
        ms_register_layer(c->m, &d);
    }
    ms_set_loss(c->m, at);
    if (optimizer) {
        ms_set_optimizer(c->m, optimizer);
    }
    for (int k = 0; k < layers && lent; ++k) {
        t_ok(c->m, ms_borrow(c->m, c->w[k], lent + k * WIDTH));
    }
    if (c->lent_gradient) {
        t_ok(c->m, ms_borrow(c->m, ms_gradient(c->m, c->w[1]), c->lent_gradient));
    }
    t_ok(c->m, ms_wrap(c->m));
    write_chain(c, layers);
}

static void start_lent_chain(chain *c, lie tells, int layers, int squares, bool debug,
                             const ms_optimizer_desc *optimizer, float *lent) {
    memset(c, 0, sizeof *c);
    build_chain(c, tells, layers, squares, debug, optimizer, lent);
}

static void start_chain(chain *c, lie tells, int layers, int squares, bool debug,
                        const ms_optimizer_desc *optimizer) {
    start_lent_chain(c, tells, layers, squares, debug, optimizer, NULL);
}

/* However many layers lie before and behind, and in later steps too. */
static void each_lie_of_a_layer_is_named(void **state) {
    (void)state;
    static const char *const texts[] = {
        NULL,
        "earlier call",
        "earlier call",
        "ignores grad_out",
        "ignores grad_out in grad_param[0]",
        "earlier call",
        "in MS_PHASE_EVAL, uses what an earlier call",
        "the beta of another gradient is another, for grad_param[0], the gradient of \"w\"",
        "writes before the beginning of grad_in[0], the gradient of \"y\""};
    for (int tells = HONEST; tells < CHANGES_STATE_IN_EVAL; ++tells) {
        const int which = tells == USES_ONE_BETA || tells == WRITES_BEFORE; // it needs a grad_in
        for (int layers = 1 + which; layers < 5; ++layers) {
            for (int squares = 0; squares < 4; ++squares) {
                chain c;
                memset(&c, 0, sizeof c);
                c.which = which;
                build_chain(&c, (lie)tells, layers, squares, true, NULL, NULL);
                for (int step = 0; step < 2; ++step) {
                    const ms_result result = ms_step(c.m, NULL);
                    if (result != (tells == HONEST ? MS_RESULT_OK : MS_RESULT_CONTRACT)) {
                        fail_msg("lie %d, %d layers and %d squares, step %d: %s", tells, layers,
                                 squares, step, ms_result_name(result));
                    }
                    if (tells != HONEST) {
                        t_text_has(ms_last_error(c.m), texts[tells]);
                        t_text_has(ms_last_error(c.m),
                                   which ? "layer 1 \"scale\": its " : "layer 0 \"scale\": its ");
                    }
                }
                assert_int_equal(c.heard.count, 0);
                ms_destroy(c.m);
            }
        }
    }
}

/* A warning, once, since an eval may be meant to go on with its state. */
static void state_that_changes_in_an_eval_is_warned_of(void **state) {
    (void)state;
    for (int how = 0; how < 4; ++how) {
        chain c;
        start_chain(&c, how & 1 ? CHANGES_STATE_IN_EVAL : HONEST, 2, 1, (how & 2) != 0, NULL);
        for (int step = 0; step < 3; ++step) {
            t_ok(c.m, ms_step(c.m, NULL));
            assert_int_equal(c.heard.count, how == 3 && step > 0);
            t_ok(c.m, ms_eval(c.m, NULL));
            assert_int_equal(c.heard.count, how == 3);
        }
        if (how == 3) {
            t_text_has(c.heard.text, "layer 0 \"scale\"");
            t_text_has(c.heard.text, "the value of \"running\"");
        }
        ms_destroy(c.m);
    }
}

/* A gradient that gets nothing, and settings that wait for ms_wrap. */
static void what_is_forgotten_is_warned_of(void **state) {
    (void)state;
    for (int how = 0; how < 4; ++how) {
        chain c;
        start_chain(&c, how & 1 ? FORGETS_PARAM : HONEST, 2, 1, true, NULL);
        for (int step = 0; step < 5; ++step) {
            if (how == 2 && step == 2) {
                ms_set_frozen(c.m, c.w[1], true);
            }
            t_ok(c.m, ms_step(c.m, NULL));
            assert_int_equal(c.heard.count, how & 1 || (how == 2 && step >= 2));
        }
        if (how == 2) {
            t_text_has(c.heard.text, "ms_set_frozen");
        } else if (how & 1) {
            t_text_has(c.heard.text, "nothing to grad_param[0], the gradient of \"w\"");
        }
        ms_destroy(c.m);
    }
}

/* A gradient that is not the derivative of forward, wherever the layer is and whatever is behind it,
   unless its desc says that this is meant; a param that forward reads elsewhere; and what forward hands
   on to backward outside of saved tensors. */
static void what_is_no_derivative_is_warned_of(void **state) {
    (void)state;
    static const struct {
        lie tells;
        const char *text;
        bool is_gradient; // which surrogate_gradient declares to be meant
    } cases[] = {
        {HONEST, NULL, false},
        {HALVES_GRADIENT, "grad_param[0], the gradient of \"w\", is not the deriv", true},
        {REVERSES_GRADIENT, "grad_in[0], the gradient of \"y\", is not the derivative", true},
        {FORGETS_TERM, "grad_in[0], the gradient of \"y\", is not the derivative", true},
        {FORGETS_PARAM, "nothing to grad_param[0], the gradient of \"w\"", true},
        {READS_COPY, "forward makes the same whatever is in \"w\"", true},
        {KEEPS_VALUES, "from variables in which forward has left something", false}};
    for (size_t n = 0; n < sizeof cases / sizeof cases[0]; ++n) {
        // the first has no gradient of its input
        const bool needs_gradient =
            cases[n].tells == REVERSES_GRADIENT || cases[n].tells == FORGETS_TERM;
        for (int at = needs_gradient; at < 5; ++at) {
            for (int squares = 0; squares < 3; ++squares) {
                for (int surrogate = 0; surrogate < 2; ++surrogate) {
                    chain c;
                    char label[32];
                    memset(&c, 0, sizeof c);
                    c.which = at;
                    c.surrogate = surrogate != 0;
                    build_chain(&c, cases[n].tells, 5, squares, true, NULL, NULL);
                    const bool told = cases[n].text && !(surrogate && cases[n].is_gradient);
                    snprintf(label, sizeof label, "layer %d \"scale\"", at);
                    for (int step = 0; step < 4; ++step) {
                        t_ok(c.m, ms_step(c.m, NULL));
                        assert_int_equal(c.heard.count, told);
                        if (told) {
                            t_text_has(c.heard.text, cases[n].text);
                            t_text_has(c.heard.text, label);
                        }
                    }
                    ms_destroy(c.m);
                }
            }
        }
    }
}

/* Of two or three values. */
static float product_without(const ms_call *call, int k, int i) {
    float product = 1.0f;
    for (int n = 0; n < 3 && call->in[n].data; ++n) {
        product *= n == k ? 1.0f : t_data(&call->in[n])[i];
    }
    return product;
}

static int product_forward(const ms_call *call) {
    for (int i = 0; i < WIDTH; ++i) {
        t_data(&call->out[0])[i] = product_without(call, -1, i);
    }
    return 0;
}

static int product_backward(const ms_call *call) {
    for (int k = 0; k < 3; ++k) {
        for (int i = 0; i < WIDTH && call->grad_in[k].data; ++i) {
            t_contribute(&call->grad_in[k], i,
                         t_data(&call->grad_out[0])[i] * product_without(call, k, i));
        }
    }
    return 0;
}

static int relu_forward(const ms_call *call) {
    for (int i = 0; i < WIDTH; ++i) {
        const float x = t_data(&call->in[0])[i];
        t_data(&call->out[0])[i] = x > 0.0f ? x : 0.0f;
    }
    return 0;
}

static int relu_backward(const ms_call *call) {
    for (int i = 0; i < WIDTH; ++i) {
        const float g = t_data(&call->grad_out[0])[i];
        t_contribute(&call->grad_in[0], i, t_data(&call->in[0])[i] > 0.0f ? g : 0.0f);
    }
    return 0;
}

/* One output with bends of both signs, which nearly cancel: 1 to the right, 1/2 to the left, and 0 by
   backward at 0. */
static int bends_forward(const ms_call *call) {
    float sum = 0.0f;
    for (int i = 0; i < WIDTH; ++i) {
        const float x = t_data(&call->in[0])[i];
        sum += (i % 2 ? -1.0f : 1.0f) * (x > 0.0f ? x : 0.5f * x);
        t_data(&call->out[0])[i] = 0.0f;
    }
    t_data(&call->out[0])[0] = sum;
    return 0;
}

static int bends_backward(const ms_call *call) {
    const float g = t_data(&call->grad_out[0])[0];
    for (int i = 0; i < WIDTH; ++i) {
        const float x = t_data(&call->in[0])[i], slope = x > 0.0f ? 1.0f : x < 0.0f ? 0.5f : 0.0f;
        t_contribute(&call->grad_in[0], i, (i % 2 ? -slope : slope) * g);
    }
    return 0;
}

/* Flat, except near 0: among large numbers. */
static int steep_forward(const ms_call *call) {
    for (int i = 0; i < WIDTH; ++i) {
        t_data(&call->out[0])[i] = tanhf(1000.0f * t_data(&call->in[0])[i]);
    }
    return 0;
}

static int steep_backward(const ms_call *call) {
    for (int i = 0; i < WIDTH; ++i) {
        const float y = tanhf(1000.0f * t_data(&call->in[0])[i]);
        t_contribute(&call->grad_in[0], i,
                     1000.0f * (1.0f - y * y) * t_data(&call->grad_out[0])[i]);
    }
    return 0;
}

/* A gradient of which much is lost when it is added to one that is a million times as large. */
static int tiny_forward(const ms_call *call) {
    for (int i = 0; i < WIDTH; ++i) {
        t_data(&call->out[0])[i] = 0.0005f * t_data(&call->in[0])[i] * t_data(&call->in[0])[i];
    }
    return 0;
}

static int tiny_backward(const ms_call *call) {
    for (int i = 0; i < WIDTH; ++i) {
        t_contribute(&call->grad_in[0], i,
                     0.001f * t_data(&call->in[0])[i] * t_data(&call->grad_out[0])[i]);
    }
    return 0;
}

static int sum_forward(const ms_call *call) {
    for (int i = 0; i < WIDTH; ++i) {
        t_data(&call->out[0])[i] = 1000.0f * t_data(&call->in[0])[i] + t_data(&call->in[1])[i];
    }
    return 0;
}

static int sum_backward(const ms_call *call) {
    for (int k = 0; k < 2; ++k) {
        for (int i = 0; i < WIDTH && call->grad_in[k].data; ++i) {
            const float g = t_data(&call->grad_out[0])[i];
            t_contribute(&call->grad_in[k], i, k == 0 ? 1000.0f * g : g);
        }
    }
    return 0;
}

typedef enum honest_net {
    BENDS,        // a ReLU, of which as many elements as asked for are exactly at the bend
    BENDS_CANCEL, // in one output
    SQUARES,      // one value in two slots of a layer, which others read too
    OVERWRITES,   // the same in two slots whose gradients are written apart
    STEEP,
    TINY,
    HONEST_NETS
} honest_net;

static void build_honest_net(chain *c, honest_net net) {
    create(c, true, net == SQUARES ? 2 : 1);
    ms_layer_desc d = t_new_layer("scale", scale_forward, scale_backward, &c->liars[0]);
    d.in[0] = c->x = ms_input(c->m, "x", MS_DTYPE_F32, ms_shape1(WIDTH));
    d.param[0] = c->w[0] = ms_param(c->m, "w", MS_DTYPE_F32, ms_shape1(WIDTH));
    d.out[0] = ms_activation(c->m, "h", MS_DTYPE_F32, ms_shape1(WIDTH));
    ms_register_layer(c->m, &d);
    const ms_tensor h = d.out[0];
    d = net == BENDS_CANCEL ? t_new_layer("bends", bends_forward, bends_backward, NULL)
        : net == STEEP      ? t_new_layer("steep", steep_forward, steep_backward, NULL)
        : net == TINY       ? t_new_layer("tiny", tiny_forward, tiny_backward, NULL)
                            : t_new_layer("relu", relu_forward, relu_backward, NULL);
    d.in[0] = h;
    d.out[0] = ms_activation(c->m, "r", MS_DTYPE_F32, ms_shape1(WIDTH));
    ms_register_layer(c->m, &d);
    const ms_tensor r = d.out[0];
    const bool twice = net == SQUARES || net == OVERWRITES;
    d = net == TINY ? t_new_layer("sum", sum_forward, sum_backward, NULL)
                    : t_new_layer("product", product_forward, product_backward, NULL);
    d.in[0] = twice || net == TINY ? h : c->x;
    d.in[1] = r;
    d.in[2].id = twice ? r.id : 0;
    d.overwrites.in = net == OVERWRITES ? 7 : 0;
    d.out[0] = ms_activation(c->m, "y", MS_DTYPE_F32, ms_shape1(WIDTH));
    ms_register_layer(c->m, &d);
    ms_set_loss(c->m, d.out[0]);
    t_ok(c->m, ms_wrap(c->m));
    write_chain(c, 1);
}

/* Of an honest net nothing is said. */
static void of_bends_and_sums_nothing_is_said(void **state) {
    (void)state;
    for (int net = 0; net < HONEST_NETS; ++net) {
        for (int zeros = 0; zeros <= WIDTH; zeros += 8) {
            float w[WIDTH];
            chain c;
            memset(&c, 0, sizeof c);
            build_honest_net(&c, (honest_net)net);
            for (int i = 0; i < WIDTH; ++i) {
                w[i] = (net == STEEP ? 0.001f : 1.0f) * 0.125f * (float)(i % 11 - 5);
                w[i] = i >= zeros ? w[i] : net == STEEP ? 1e4f : 0.0f;
            }
            t_ok(c.m, ms_write(c.m, c.w[0], w));
            for (int step = 0; step < 4; ++step) {
                t_ok(c.m, ms_step(c.m, NULL));
            }
            assert_string_equal(c.heard.text, "");
            ms_destroy(c.m);
        }
    }
}

/* Of elements that are left out, and handed on by others, the first layer is named too. */
static int copy_forward(const ms_call *call) {
    const int count = WIDTH / *(const int *)call->user;
    memcpy(call->out[0].data, call->in[0].data, (size_t)count * sizeof(float));
    return 0;
}

static int copy_backward(const ms_call *call) {
    for (int i = 0; i < WIDTH; ++i) {
        t_contribute(&call->grad_in[0], i, t_data(&call->grad_out[0])[i]);
    }
    return 0;
}

static void what_was_left_out_first_is_named(void **state) {
    (void)state;
    for (int copies = 1; copies < 5; ++copies) {
        for (int first = 1; first <= copies; ++first) {
            static int shares[] = {1, 2}; // of the elements that are copied: all, half
            char label[64];
            chain c;
            memset(&c, 0, sizeof c);
            create(&c, true, 1);
            ms_tensor at = c.x = ms_input(c.m, "x", MS_DTYPE_F32, ms_shape1(WIDTH));
            for (int k = 0; k < copies + 2; ++k) {
                const bool is_copy = k > 0 && k <= copies;
                ms_layer_desc d =
                    t_new_layer(is_copy ? "copy" : "scale", is_copy ? copy_forward : scale_forward,
                                is_copy ? copy_backward : scale_backward,
                                is_copy ? (void *)&shares[k == first] : (void *)&c.liars[k > 0]);
                d.in[0] = at;
                if (!is_copy) {
                    d.param[0] = c.w[k > 0] = ms_param(c.m, "w", MS_DTYPE_F32, ms_shape1(WIDTH));
                }
                d.out[0] = at = ms_activation(c.m, "y", MS_DTYPE_F32, ms_shape1(WIDTH));
                ms_register_layer(c.m, &d);
            }
            ms_set_loss(c.m, at);
            t_ok(c.m, ms_wrap(c.m));
            write_chain(&c, 2);
            assert_int_equal(ms_step(c.m, NULL), MS_RESULT_CONTRACT);
            snprintf(label, sizeof label, "layer %d \"copy\" has left it out", copies);
            t_text_has(ms_last_error(c.m), label);
            snprintf(label, sizeof label, "was left out by layer %d \"copy\"", first);
            if (first < copies) {
                t_text_has(ms_last_error(c.m), label);
            } else {
                assert_null(strstr(ms_last_error(c.m), "was left out by"));
            }
            ms_destroy(c.m);
        }
    }
}

/* Who brings a NaN into a step: a param that an update or the trainer has made so. */
static void a_param_that_is_not_finite_is_found(void **state) {
    (void)state;
    for (int k = 0; k < 3; ++k) {
        char text[96];
        float w[WIDTH];
        chain c;
        start_chain(&c, HONEST, 3, 1, true, NULL);
        t_ok(c.m, ms_read(c.m, c.w[k], w));
        w[5] = NAN;
        t_ok(c.m, ms_write(c.m, c.w[k], w));
        assert_int_equal(ms_step(c.m, NULL), MS_RESULT_NONFINITE);
        snprintf(text, sizeof text, "layer %d \"scale\": its forward callback finds element 5", k);
        t_text_has(ms_last_error(c.m), text);
        ms_destroy(c.m);
    }
}

/* A factor of 0 is legal, and what an integer division makes of 1 / 4. */
static void a_loss_factor_of_nothing_is_warned_of(void **state) {
    (void)state;
    for (int how = 0; how < 4; ++how) {
        chain c;
        start_chain(&c, HONEST, 2, 1, how < 2, NULL);
        ms_set_loss_factor(c.m, how % 2 ? 0.0f : 0.25f);
        for (int step = 0; step < 3; ++step) {
            t_ok(c.m, ms_step(c.m, NULL));
            assert_int_equal(c.heard.count, how == 1);
        }
        ms_destroy(c.m);
    }
}

/* What has no data in a call stands in the log before it: if the callback crashes there, that is the last
   line. */
static void what_has_no_data_is_announced(void **state) {
    (void)state;
    chain c;
    ms_optimizer_desc o = t_optimizer(MS_OPTIMIZER_NONE, 0.0f);
    start_chain(&c, HONEST, 2, 0, true, &o);
    ms_set_frozen(c.m, c.w[0], true);
    t_ok(c.m, ms_wrap(c.m));
    t_ok(c.m, ms_step(c.m, NULL));
    t_text_has(c.heard.call, "layer 1 \"scale\": backward, without data in grad_in[0]");
    ms_set_frozen(c.m, c.w[0], false);
    ms_set_frozen(c.m, c.w[1], true);
    t_ok(c.m, ms_wrap(c.m));
    t_ok(c.m, ms_forward(c.m, NULL));
    t_ok(c.m, ms_backward(c.m));
    t_text_has(c.heard.call, "layer 0 \"scale\": backward, without data in grad_in[0]");
    ms_destroy(c.m);
}

static void a_forward_without_backward_is_warned_of(void **state) {
    (void)state;
    for (int how = 0; how < 4; ++how) { // forward follows itself; evals follow; not in debug mode
        chain c;
        start_chain(&c, HONEST, 2, 1, how != 3, NULL);
        for (int step = 0; step < 3; ++step) {
            t_ok(c.m, ms_forward(c.m, NULL));
            t_ok(c.m, how == 1   ? ms_backward(c.m)
                      : how == 2 ? ms_eval(c.m, NULL)
                                 : ms_forward(c.m, NULL));
            t_ok(c.m, how == 1 ? ms_update(c.m) : MS_RESULT_OK);
        }
        assert_int_equal(c.heard.count, how == 0 || how == 2);
        if (c.heard.count > 0) {
            t_text_has(c.heard.text, "ms_forward was not followed by ms_backward");
        }
        ms_destroy(c.m);
    }
}

/* A loss that writes its gradients in forward, by the factor that it is given or without. */
typedef enum fused_lie {
    FUSES_HONESTLY,
    FUSES_WITHOUT_FACTOR,
    FUSES_WRONGLY,
    FUSED_LIES
} fused_lie;

static int fused_forward(const ms_call *call) {
    const fused_lie tells = *(const fused_lie *)call->user;
    for (int i = 0; i < WIDTH; ++i) {
        const float x = t_data(&call->in[0])[i];
        const float by = tells == FUSES_WITHOUT_FACTOR ? 0.125f : call->loss_factor;
        t_data(&call->out[0])[i] = x * x;
        if (call->grad_in[0].data) {
            t_contribute(&call->grad_in[0], i,
                         by * *call->loss_scale * (x + (tells == FUSES_WRONGLY ? 0.0f : x)));
        }
    }
    return 0;
}

/* A warning, once, unless the desc says that the gradient is meant to be another one. */
static void each_lie_of_a_fused_loss_is_named(void **state) {
    (void)state;
#ifdef T_CUDA
    skip(); // the callback reads the loss scale, which is in device memory
#endif
    for (int how = 0; how < 4 * FUSED_LIES; ++how) {
        fused_lie tells = (fused_lie)(how / 4);
        const bool surrogate = how % 4 >= 2;
        chain c;
        memset(&c, 0, sizeof c);
        create(&c, true, how % 2 ? 3 : 1);
        ms_layer_desc d = t_new_layer("scale", scale_forward, scale_backward, &c.liars[0]);
        d.in[0] = c.x = ms_input(c.m, "x", MS_DTYPE_F32, ms_shape1(WIDTH));
        d.param[0] = c.w[0] = ms_param(c.m, "w", MS_DTYPE_F32, ms_shape1(WIDTH));
        d.out[0] = ms_activation(c.m, "y", MS_DTYPE_F32, ms_shape1(WIDTH));
        ms_register_layer(c.m, &d);
        const ms_tensor y = d.out[0];
        d = t_new_layer("fused", fused_forward, NULL, &tells);
        d.in[0] = y;
        d.grads_in_forward = 1;
        d.surrogate_gradient = surrogate;
        d.out[0] = ms_activation(c.m, "losses", MS_DTYPE_F32, ms_shape1(WIDTH));
        ms_register_layer(c.m, &d);
        ms_set_loss(c.m, d.out[0]);
        t_ok(c.m, ms_wrap(c.m));
        write_chain(&c, 1);
        for (int step = 0; step < 6; ++step) {
            t_ok(c.m, ms_step(c.m, NULL));
            assert_int_equal(c.heard.count, tells != FUSES_HONESTLY && !surrogate);
        }
        if (c.heard.count > 0) {
            t_text_has(c.heard.text, tells == FUSES_WRONGLY ? "is not the derivative"
                                                            : "ignores loss_factor in grad_in[0]");
            t_text_has(c.heard.text, "layer 1 \"fused\"");
        }
        ms_destroy(c.m);
    }
}

/* Elements of the loss that a layer leaves out, from `first` on. */
typedef struct left_out {
    int first, count;
} left_out;

static int loss_forward(const ms_call *call) {
    const left_out *l = (const left_out *)call->user;
    for (int i = 0; i < WIDTH; ++i) {
        if (i < l->first || i >= l->first + l->count) {
            t_data(&call->out[0])[i] = t_data(&call->in[0])[i] * t_data(&call->param[0])[i];
        }
    }
    return 0;
}

static int loss_backward(const ms_call *call) {
    for (int i = 0; i < WIDTH; ++i) {
        t_contribute(&call->grad_param[0], i,
                     t_data(&call->grad_out[0])[i] * t_data(&call->in[0])[i]);
    }
    return 0;
}

static void a_loss_has_all_its_elements(void **state) {
    (void)state;
    for (int first = 0; first < WIDTH; first += 7) {
        for (int count = 0; count <= WIDTH - first; count += 19) {
            for (int evals = 0; evals < 2; ++evals) {
                left_out l = {first, count};
                chain c;
                char text[64];
                memset(&c, 0, sizeof c);
                create(&c, true, 1);
                ms_layer_desc d = t_new_layer("error", loss_forward, loss_backward, &l);
                d.in[0] = c.x = ms_input(c.m, "x", MS_DTYPE_F32, ms_shape1(WIDTH));
                d.param[0] = c.w[0] = ms_param(c.m, "w", MS_DTYPE_F32, ms_shape1(WIDTH));
                d.out[0] = ms_activation(c.m, "losses", MS_DTYPE_F32, ms_shape1(WIDTH));
                ms_register_layer(c.m, &d);
                ms_set_loss(c.m, d.out[0]);
                t_ok(c.m, ms_wrap(c.m));
                write_chain(&c, 1);
                const ms_result result = evals ? ms_eval(c.m, NULL) : ms_step(c.m, NULL);
                assert_int_equal(result, count > 0 ? MS_RESULT_CONTRACT : MS_RESULT_OK);
                if (count > 0) {
                    snprintf(text, sizeof text, "element %d, and %d more", first, count - 1);
                    t_text_has(ms_last_error(c.m), text);
                    t_text_has(ms_last_error(c.m), "\"losses\"");
                }
                ms_destroy(c.m);
            }
        }
    }
}

// ------------------------------------------------------------------------------------------------
// integers

enum { ROWS = 12, CHANNELS = 4, MOST_TOKENS = 9 };

typedef struct lookup {
    int tokens;   // rows of the table
    bool outside; // reads the trainer's own array in backward, not the operand
    bool keeps;   // or what forward was given
    const int32_t *own;
} lookup;

/* Classes in floats, as of images with boxes, are indices too. */
static int pick_forward(const ms_call *call) {
    const lookup *l = (const lookup *)call->user;
    for (int i = 0; i < ROWS * CHANNELS; ++i) {
        const int row = (int)t_data(&call->in[0])[i / CHANNELS];
        assert_true(row >= 0 && row < l->tokens);
        t_data(&call->out[0])[i] = t_data(&call->param[0])[row * CHANNELS + i % CHANNELS];
    }
    return 0;
}

static int pick_backward(const ms_call *call) {
    for (int i = 0; i < ROWS * CHANNELS; ++i) {
        const int row = (int)t_data(&call->in[0])[i / CHANNELS];
        t_contribute(&call->grad_param[0], row * CHANNELS + i % CHANNELS,
                     t_data(&call->grad_out[0])[i]);
    }
    return 0;
}

static void indices_in_floats_stay_indices(void **state) {
    (void)state;
    static const int shapes[] = {1, 2, 3, 4, 6, 12};
    for (size_t n = 0; n < sizeof shapes / sizeof *shapes; ++n) {
        float classes[ROWS], table[MOST_TOKENS * CHANNELS];
        lookup l = {MOST_TOKENS, false, false, NULL};
        chain c;
        memset(&c, 0, sizeof c);
        create(&c, true, 1);
        ms_layer_desc d = t_new_layer("pick", pick_forward, pick_backward, &l);
        d.accumulates.param = 1;
        d.in[0] = ms_input(c.m, "classes", MS_DTYPE_F32, ms_shape2(shapes[n], ROWS / shapes[n]));
        d.param[0] = ms_param(c.m, "table", MS_DTYPE_F32, ms_shape2(MOST_TOKENS, CHANNELS));
        d.out[0] = ms_activation(c.m, "rows", MS_DTYPE_F32, ms_shape2(ROWS, CHANNELS));
        ms_register_layer(c.m, &d);
        ms_set_loss(c.m, d.out[0]);
        t_ok(c.m, ms_wrap(c.m));
        for (int i = 0; i < MOST_TOKENS * CHANNELS; ++i) {
            classes[i % ROWS] = (float)(i % MOST_TOKENS);
            table[i] = 0.5f + (float)i;
        }
        t_ok(c.m, ms_write(c.m, d.in[0], classes));
        t_ok(c.m, ms_write(c.m, d.param[0], table));
        for (int step = 0; step < 2; ++step) {
            t_ok(c.m, ms_step(c.m, NULL));
        }
        assert_string_equal(c.heard.text, "");
        ms_destroy(c.m);
    }
}

static int lookup_forward(const ms_call *call) {
    lookup *l = (lookup *)call->user;
    const int32_t *token = (const int32_t *)call->in[0].data;
    l->own = l->keeps ? token : l->own;
    for (int i = 0; i < ROWS * CHANNELS; ++i) {
        t_data(&call->out[0])[i] =
            t_data(&call->param[0])[token[i / CHANNELS] * CHANNELS + i % CHANNELS];
    }
    return 0;
}

static int lookup_backward(const ms_call *call) {
    const lookup *l = (const lookup *)call->user;
    const int32_t *token = l->outside || l->keeps ? l->own : (const int32_t *)call->in[0].data;
    for (int i = 0; i < ROWS * CHANNELS; ++i) {
        const int32_t row = token[i / CHANNELS];
        assert_true(row >= (l->keeps ? -1 : 0) && row < l->tokens);
        t_contribute(&call->grad_param[0], row * CHANNELS + i % CHANNELS,
                     t_data(&call->grad_out[0])[i]);
    }
    return 0;
}

static int head_forward(const ms_call *call) {
    for (int i = 0; i < ROWS * CHANNELS; ++i) {
        t_data(&call->out[0])[i] = t_data(&call->in[0])[i] * t_data(&call->param[0])[i];
    }
    return 0;
}

static int head_backward(const ms_call *call) {
    for (int i = 0; i < ROWS * CHANNELS; ++i) {
        const float g = t_data(&call->grad_out[0])[i];
        if (call->grad_in[0].data) {
            t_contribute(&call->grad_in[0], i, g * t_data(&call->param[0])[i]);
        }
        if (call->grad_param[0].data) {
            t_contribute(&call->grad_param[0], i, g * t_data(&call->in[0])[i]);
        }
    }
    return 0;
}

/* Backward uses tokens that it did not declare, the trainer's array that was lent for them, or a pointer
   that forward has kept: what debug mode puts there is a row of the table as well, but another one, or
   the one before the first. */
static void undeclared_integers_are_indices(void **state) {
    (void)state;
    t_rng rng = t_seed(3);
    for (int how = 0; how < 120; ++how) {
        int32_t *token = (int32_t *)t_lend(ROWS * sizeof *token);
        float table[MOST_TOKENS * CHANNELS];
        const bool declares = how % 3 == 0, same = how % 4 == 1;
        const bool keeps = how % 6 == 4;
        lookup l = {2 + how % (MOST_TOKENS - 1), how % 3 == 2, keeps, token};
        const ms_dtype dtype = MS_DTYPE_I32;
        ms_model *m;
        ms_config config = t_config();
        config.debug = true;
        for (int i = 0; i < ROWS; ++i) {
            token[i] = same ? how / 3 % l.tokens : (int32_t)t_below(&rng, (uint32_t)l.tokens);
        }
        token[0] = same || token[0] != token[1] ? token[0] : (token[1] + 1) % l.tokens;
        assert_int_equal(ms_create(&config, &m), MS_RESULT_OK);
        ms_layer_desc d = t_new_layer("lookup", lookup_forward, lookup_backward, &l);
        d.accumulates.param = 1;
        d.in[0] = ms_input(m, "tokens", dtype, ms_shape1(ROWS));
        d.param[0] = ms_param(m, "table", MS_DTYPE_F32, ms_shape2(l.tokens, CHANNELS));
        d.out[0] = ms_activation(m, "rows", MS_DTYPE_F32, ms_shape2(ROWS, CHANNELS));
        d.backward_reads.in = declares;
        d.backward_reads.nothing = !declares;
        ms_register_layer(m, &d);
        ms_set_loss(m, d.out[0]);
        t_ok(m, ms_borrow(m, d.in[0], token));
        t_ok(m, ms_wrap(m));
        for (int i = 0; i < MOST_TOKENS * CHANNELS; ++i) {
            table[i] = 0.5f + (float)i;
        }
        t_ok(m, ms_write(m, d.param[0], table));
        const ms_result result = ms_step(m, NULL);
        assert_int_equal(result, declares ? MS_RESULT_OK : MS_RESULT_CONTRACT);
        if (!declares) {
            t_text_has(ms_last_error(m), keeps       ? "an earlier call"
                                         : l.outside ? "where it lies"
                                                     : "backward_reads");
            t_text_has(ms_last_error(m), keeps ? "\"lookup\"" : "\"tokens\"");
        }
        ms_destroy(m);
        t_take_back(token);
    }
}

// ------------------------------------------------------------------------------------------------
// updates

typedef enum update_lie {
    UPDATES_HONESTLY,
    UPDATES_WITHOUT_SCALE,
    UPDATES_BY_OWN_STATE,
    READS_UNDECLARED_STATE,
    WRITES_UNDECLARED_STATE,
    WRITES_BEYOND_VALUE,
    WRITES_TO_PARAM,
    UPDATE_LIES
} update_lie;

typedef struct updater {
    update_lie tells;
    float momentum;
    const chain *of;
} updater;

static int update(const ms_update_args *args) {
    updater *u = (updater *)args->user;
    const bool scales = args->gradient_scale && u->tells != UPDATES_WITHOUT_SCALE;
    const float scale = scales ? *args->gradient_scale : 1.0f;
    const uint64_t count = args->count + (u->tells == WRITES_BEYOND_VALUE ? 1 : 0);
    u->momentum = 0.5f * u->momentum + 1.0f;
    for (uint64_t i = 0; i < count; ++i) {
        float g = scale * args->gradient[i < args->count ? i : 0];
        g *= u->tells == UPDATES_BY_OWN_STATE ? u->momentum : 1.0f;
        g += u->tells == READS_UNDECLARED_STATE ? args->state[1][i] : 0.0f;
        if (u->tells == WRITES_UNDECLARED_STATE) {
            args->state[1][i] = g;
        }
        args->state[0][i] = 0.5f * args->state[0][i] + g;
        if (u->tells == WRITES_TO_PARAM) {
            const bool second = args->param.id == u->of->w[1].id;
            ((float *)ms_data(u->of->m, u->of->w[second]))[i] -= args->state[0][i];
        }
        args->value[i] -= args->learning_rate * args->state[0][i];
    }
    return 0;
}

static void each_lie_of_an_update_is_named(void **state) {
    (void)state;
    static const char *const texts[UPDATE_LIES] = {
        NULL,           "ignores *gradient_scale", "the second time",
        "reads state",  "writes to state",         "beyond the end",
        "where it lies"};
    for (int how = 0; how < 2 * UPDATE_LIES; ++how) {
        updater u = {(update_lie)(how / 2), 0.0f, NULL};
        ms_optimizer_desc o = t_optimizer(MS_OPTIMIZER_CUSTOM, 0.001f);
        chain c;
        o.update = update;
        o.user = &u;
        o.state_count = 1;
        o.grad_clip_norm = how % 2 ? 0.25f : 0.0f;
        start_chain(&c, HONEST, 2, 1, true, &o);
        u.of = &c;
        const bool lies = u.tells != UPDATES_HONESTLY &&
                          (u.tells != UPDATES_WITHOUT_SCALE || o.grad_clip_norm > 0.0f);
        assert_int_equal(ms_step(c.m, NULL), lies ? MS_RESULT_CONTRACT : MS_RESULT_OK);
        if (lies) {
            t_text_has(ms_last_error(c.m), texts[u.tells]);
            t_text_has(ms_last_error(c.m), "param \"w\": the update callback");
            u.tells = UPDATES_HONESTLY; // nothing was updated
        }
        t_ok(c.m, ms_step(c.m, NULL));
        ms_destroy(c.m);
    }
}

/* Without declared state an update runs once, where it is, and not on copies. */
typedef enum plain_lie { UPDATES, WRITES_STATE, LEAVES_VALUE, PLAIN_LIES } plain_lie;

static int update_plainly(const ms_update_args *args) {
    const plain_lie tells = *(const plain_lie *)args->user;
    for (uint64_t i = 0; i < args->count; ++i) {
        if (tells == WRITES_STATE) {
            args->state[0][i] = args->gradient[i];
        }
        args->value[i] -= tells == LEAVES_VALUE ? 0.0f : args->learning_rate * args->gradient[i];
    }
    return 0;
}

static void each_lie_of_an_update_without_state_is_named(void **state) {
    (void)state;
    for (int how = 0; how < 2 * PLAIN_LIES; ++how) {
        plain_lie tells = (plain_lie)(how / 2);
        ms_optimizer_desc o = ms_optimizer_defaults(MS_OPTIMIZER_CUSTOM);
        float before[WIDTH], after[WIDTH];
        chain c;
        o.learning_rate = how % 2 ? 0.0f : 0.001f;
        o.update = update_plainly;
        o.user = &tells;
        start_chain(&c, HONEST, 2, 1, true, &o);
        t_ok(c.m, ms_read(c.m, c.w[1], before));
        if (tells == WRITES_STATE) {
            assert_int_equal(ms_step(c.m, NULL), MS_RESULT_CONTRACT);
            t_text_has(ms_last_error(c.m), "writes to state that it did not declare");
            t_ok(c.m, ms_read(c.m, c.w[1], after));
            assert_memory_equal(before, after, sizeof after);
            tells = UPDATES;
        }
        for (int step = 0; step < 4; ++step) {
            t_ok(c.m, ms_step(c.m, NULL));
        }
        const bool idle = tells == LEAVES_VALUE && o.learning_rate > 0.0f;
        assert_int_equal(c.heard.count, idle ? 2 : 0); // one for each param
        if (idle) {
            t_text_has(c.heard.text, "has left its value as it was in 3 steps");
        }
        ms_destroy(c.m);
    }
}

/* Gradients that are lent and that the trainer does not clear add up: without an optimizer, or with an
   update of the trainer's own, that may be meant. */
static void lent_gradients_that_add_up_are_warned_of(void **state) {
    (void)state;
    static const ms_optimizer_kind kinds[] = {MS_OPTIMIZER_ADAMW, MS_OPTIMIZER_NONE,
                                              MS_OPTIMIZER_CUSTOM};
    for (int how = 0; how < 6; ++how) {
        const bool clears = how & 1, updates = kinds[how / 2] == MS_OPTIMIZER_ADAMW;
        plain_lie honest = UPDATES;
        ms_optimizer_desc o = t_optimizer(kinds[how / 2], 0.001f);
        o.update = kinds[how / 2] == MS_OPTIMIZER_CUSTOM ? update_plainly : NULL;
        o.user = &honest;
        float *lent = (float *)t_lend(WIDTH * sizeof *lent);
        chain c;
        memset(lent, 0, WIDTH * sizeof *lent);
        memset(&c, 0, sizeof c);
        c.lent_gradient = lent;
        build_chain(&c, HONEST, 2, 1, true, &o, NULL);
        for (int step = 0; step < 3; ++step) {
            if (clears) {
                memset(lent, 0, WIDTH * sizeof *lent);
            }
            t_ok(c.m, ms_step(c.m, NULL));
            assert_int_equal(c.heard.count, !clears && updates && step > 0);
        }
        if (c.heard.count > 0) {
            t_text_has(c.heard.text, "the borrowed gradient of \"w\" was not cleared");
        }
        ms_destroy(c.m);
        t_take_back(lent);
    }
}

/* Moments of the trainer's own, which an update without state finds by the address of a value that was
   lent, or by the param: it runs once, where it is, and debug mode changes no number. */
typedef struct own_moments {
    float value[2][WIDTH], moment[2][WIDTH];
    ms_tensor w[2];
    bool by_address;
    uint32_t calls;
} own_moments;

static int update_own(const ms_update_args *args) {
    own_moments *own = (own_moments *)args->user;
    const ptrdiff_t at =
        own->by_address ? args->value - own->value[0] : (args->param.id == own->w[1].id) * WIDTH;
    assert_true(at == 0 || at == WIDTH);
    for (uint64_t i = 0; i < args->count; ++i) {
        float *m = own->moment[0] + at + i;
        *m = 0.5f * *m + args->gradient[i];
        args->value[i] -= args->learning_rate * *m;
    }
    own->calls += 1;
    return 0;
}

static void moments_of_ones_own_are_left_alone(void **state) {
    (void)state;
    for (int how = 0; how < 2; ++how) {
        float values[2][2][WIDTH];
        for (int debug = 0; debug < 2; ++debug) {
            static own_moments own;
            ms_optimizer_desc o = t_optimizer(MS_OPTIMIZER_CUSTOM, 0.001f);
            chain c;
            memset(&own, 0, sizeof own);
            own.by_address = how == 1;
            o.update = update_own;
            o.user = &own;
            start_lent_chain(&c, HONEST, 2, 1, debug != 0, &o,
                             own.by_address ? own.value[0] : NULL);
            memcpy(own.w, c.w, sizeof own.w);
            for (int step = 0; step < 3; ++step) {
                t_ok(c.m, ms_step(c.m, NULL));
            }
            for (int k = 0; k < 2; ++k) {
                t_ok(c.m, ms_read(c.m, c.w[k], values[debug][k]));
            }
            assert_int_equal(own.calls, 6);
            ms_destroy(c.m);
        }
        assert_memory_equal(values[0], values[1], sizeof values[0]);
    }
}

// ------------------------------------------------------------------------------------------------
// what ms_wrap warns of

static void what_has_no_effect_is_warned_of(void **state) {
    (void)state;
    for (int how = 0; how < 3; ++how) { // nothing, a layer for nobody, an in_place
        chain c;
        memset(&c, 0, sizeof c);
        create(&c, false, 1);
        ms_layer_desc d = t_new_layer("error", loss_forward, loss_backward, NULL);
        d.in[0] = ms_input(c.m, "x", MS_DTYPE_F32, ms_shape1(how == 2 ? WIDTH / 2 : WIDTH));
        d.param[0] = ms_param(c.m, "w", MS_DTYPE_F32, ms_shape1(WIDTH));
        d.out[0] = ms_activation(c.m, "losses", MS_DTYPE_F32, ms_shape1(WIDTH));
        d.in_place[0] = 1;
        ms_register_layer(c.m, &d);
        ms_set_loss(c.m, d.out[0]);
        if (how == 1) {
            d.name = "idle";
            d.in_place[0] = 0;
            d.out[0] = ms_activation(c.m, "unread", MS_DTYPE_F32, ms_shape1(WIDTH));
            ms_register_layer(c.m, &d);
        }
        t_ok(c.m, ms_wrap(c.m));
        assert_int_equal(c.heard.count, how > 0);
        if (how > 0) {
            t_text_has(c.heard.text,
                       how == 1 ? "layer 1 \"idle\"" : "in_place[0] names in[0] \"x\"");
        }
        ms_destroy(c.m);
    }
}

/* State that two layers share, which have params of their own or the same. */
static void state_of_two_layers_is_warned_of(void **state) {
    (void)state;
    for (int how = 0; how < 4; ++how) {
        const bool shares_state = how & 1, shares_param = how & 2;
        liar liars[2];
        chain c;
        memset(&c, 0, sizeof c);
        memset(liars, 0, sizeof liars);
        create(&c, false, 1);
        ms_tensor at = ms_input(c.m, "x", MS_DTYPE_F32, ms_shape1(WIDTH)), running = {0};
        for (int k = 0; k < 2; ++k) {
            ms_layer_desc d = t_new_layer("scale", scale_forward, scale_backward, &liars[k]);
            d.in[0] = at;
            c.w[k] =
                k > 0 && shares_param ? c.w[0] : ms_param(c.m, "w", MS_DTYPE_F32, ms_shape1(WIDTH));
            running = k > 0 && shares_state
                          ? running
                          : ms_buffer(c.m, "running", MS_DTYPE_F32, ms_shape1(WIDTH));
            d.param[0] = c.w[k];
            d.state[0] = running;
            d.out[0] = at = ms_activation(c.m, "y", MS_DTYPE_F32, ms_shape1(WIDTH));
            ms_register_layer(c.m, &d);
        }
        ms_set_loss(c.m, at);
        t_ok(c.m, ms_wrap(c.m));
        assert_int_equal(c.heard.count, shares_state && !shares_param);
        if (c.heard.count > 0) {
            t_text_has(c.heard.text, "share their state \"running\"");
        }
        ms_destroy(c.m);
    }
}

/* A table that is looked up, and a head with the same numbers: tied weights that are registered twice. Two
   heads may begin alike. */
static void tied_weights_are_one_param(void **state) {
    (void)state;
    for (int how = 0; how < 8; ++how) {
        const bool differs = how & 1, is_frozen = how & 2, is_looked_up = !(how & 4);
        float numbers[ROWS * CHANNELS];
        int32_t tokens[ROWS];
        liar honest;
        lookup l = {ROWS, false, false, NULL};
        chain c;
        memset(&c, 0, sizeof c);
        memset(&honest, 0, sizeof honest);
        create(&c, true, 1);
        ms_layer_desc d = t_new_layer(is_looked_up ? "lookup" : "twin",
                                      is_looked_up ? lookup_forward : head_forward,
                                      is_looked_up ? lookup_backward : head_backward, &l);
        d.accumulates.param = is_looked_up;
        d.in[0] = c.x = is_looked_up ? ms_input(c.m, "tokens", MS_DTYPE_I32, ms_shape1(ROWS))
                                     : ms_input(c.m, "x", MS_DTYPE_F32, ms_shape2(ROWS, CHANNELS));
        d.param[0] = c.w[0] = ms_param(c.m, "table", MS_DTYPE_F32, ms_shape2(ROWS, CHANNELS));
        d.out[0] = ms_activation(c.m, "rows", MS_DTYPE_F32, ms_shape2(ROWS, CHANNELS));
        ms_register_layer(c.m, &d);
        const ms_tensor rows = d.out[0];
        d = t_new_layer("head", head_forward, head_backward, NULL);
        d.in[0] = rows;
        d.param[0] = c.w[1] = ms_param(c.m, "head", MS_DTYPE_F32, ms_shape2(ROWS, CHANNELS));
        d.out[0] = ms_activation(c.m, "y", MS_DTYPE_F32, ms_shape2(ROWS, CHANNELS));
        ms_register_layer(c.m, &d);
        ms_set_loss(c.m, d.out[0]);
        ms_set_frozen(c.m, c.w[1], is_frozen);
        t_ok(c.m, ms_wrap(c.m));
        for (int i = 0; i < ROWS * CHANNELS; ++i) {
            numbers[i] = 1.0f + 0.01f * (float)i;
            tokens[i % ROWS] = i % ROWS;
        }
        t_ok(c.m, ms_write(c.m, c.x, is_looked_up ? (const void *)tokens : numbers));
        t_ok(c.m, ms_write(c.m, c.w[0], numbers));
        numbers[7] += differs ? 0.5f : 0.0f;
        t_ok(c.m, ms_write(c.m, c.w[1], numbers));
        for (int step = 0; step < 2; ++step) {
            t_ok(c.m, ms_step(c.m, NULL));
            assert_int_equal(c.heard.count, !differs && !is_frozen && is_looked_up);
        }
        if (c.heard.count > 0) {
            t_text_has(c.heard.text, "params \"table\" and \"head\" begin with the same");
        }
        ms_destroy(c.m);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_lie_of_a_layer_is_named),
        cmocka_unit_test(state_that_changes_in_an_eval_is_warned_of),
        cmocka_unit_test(what_is_forgotten_is_warned_of),
        cmocka_unit_test(what_is_no_derivative_is_warned_of),
        cmocka_unit_test(of_bends_and_sums_nothing_is_said),
        cmocka_unit_test(what_was_left_out_first_is_named),
        cmocka_unit_test(a_param_that_is_not_finite_is_found),
        cmocka_unit_test(a_loss_factor_of_nothing_is_warned_of),
        cmocka_unit_test(what_has_no_data_is_announced),
        cmocka_unit_test(a_forward_without_backward_is_warned_of),
        cmocka_unit_test(each_lie_of_a_fused_loss_is_named),
        cmocka_unit_test(a_loss_has_all_its_elements),
        cmocka_unit_test(indices_in_floats_stay_indices),
        cmocka_unit_test(undeclared_integers_are_indices),
        cmocka_unit_test(each_lie_of_an_update_is_named),
        cmocka_unit_test(each_lie_of_an_update_without_state_is_named),
        cmocka_unit_test(lent_gradients_that_add_up_are_warned_of),
        cmocka_unit_test(moments_of_ones_own_are_left_alone),
        cmocka_unit_test(what_has_no_effect_is_warned_of),
        cmocka_unit_test(state_of_two_layers_is_warned_of),
        cmocka_unit_test(tied_weights_are_one_param),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
