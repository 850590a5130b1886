/*  test_lies.c - mistakes of porting, each in many places: pointers that are kept from forward, a loss with
    unwritten elements, gradients that ignore grad_out, state that changes in an eval, integers that
    backward reads undeclared, and updates of the trainer's own. Debug mode names each, and says
    nothing of the honest ones beside them. */
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
    CHANGES_STATE_IN_EVAL, // and in forward, as it should
    FORGETS_PARAM          // adds nothing to the gradient of w
} lie;

typedef struct liar {
    lie tells;
    const float *kept;
} liar;

static const float *shared;

static int scale_forward(const ms_call *call) {
    liar *l = (liar *)call->user;
    const float *x = t_data(&call->in[0]), *w = t_data(&call->param[0]);
    l->kept = shared = x;
    for (int i = 0; i < WIDTH; ++i) {
        t_data(&call->out[0])[i] = x[i] * w[i];
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
                                                  : t_data(&call->in[0]);
    for (int i = 0; i < WIDTH; ++i) {
        const float by = l->tells == IGNORES_GRADIENT ? 1.0f : g[i];
        if (call->grad_in[0].data) {
            t_contribute(&call->grad_in[0], i, by * w[i]);
        }
        t_contribute(&call->grad_param[0], i,
                     l->tells == FORGETS_PARAM      ? 0.0f
                     : l->tells == IGNORES_IN_PARAM ? x[i]
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
    char text[400];
} warnings;

static void note_warning(ms_log_level level, const char *tag, const char *text, void *user) {
    warnings *w = (warnings *)user;
    (void)tag;
    if (level == MS_LOG_WARNING) {
        w->count += 1;
        (void)snprintf(w->text, sizeof w->text, "%s", text);
    }
}

typedef struct chain {
    ms_model *m;
    ms_tensor x, w[MOST_LAYERS];
    liar liars[MOST_LAYERS];
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

/* Layers that scale, the first of which may lie, and squares after them. Their params may be lent. */
static void start_lent_chain(chain *c, lie tells, int layers, int squares, bool debug,
                             const ms_optimizer_desc *optimizer, float *lent) {
    ms_config config = t_config();
    memset(c, 0, sizeof *c);
    config.debug = debug;
    config.log = note_warning;
    config.log_user = &c->heard;
    assert_int_equal(ms_create(&config, &c->m), MS_RESULT_OK);
    ms_tensor at = c->x = ms_input(c->m, "x", MS_DTYPE_F32, ms_shape1(WIDTH));
    for (int k = 0; k < layers + squares; ++k) {
        ms_layer_desc d;
        memset(&d, 0, sizeof d);
        d.name = k < layers ? "scale" : "square";
        d.forward = k < layers ? scale_forward : square_forward;
        d.backward = k < layers ? scale_backward : square_backward;
        d.in[0] = at;
        d.backward_reads.in = 1;
        if (k < layers) {
            c->liars[k].tells = k == 0 ? tells : HONEST;
            d.user = &c->liars[k];
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
    t_ok(c->m, ms_wrap(c->m));
    write_chain(c, layers);
}

static void start_chain(chain *c, lie tells, int layers, int squares, bool debug,
                        const ms_optimizer_desc *optimizer) {
    start_lent_chain(c, tells, layers, squares, debug, optimizer, NULL);
}

/* However many layers lie before and behind, and in later steps too. */
static void each_lie_of_a_layer_is_named(void **state) {
    (void)state;
    static const char *const texts[] = {NULL, "earlier call", "earlier call", "ignores grad_out",
                                        "ignores grad_out in grad_param[0]"};
    for (int tells = HONEST; tells < CHANGES_STATE_IN_EVAL; ++tells) {
        for (int layers = 1; layers < 5; ++layers) {
            for (int squares = 0; squares < 4; ++squares) {
                chain c;
                start_chain(&c, (lie)tells, layers, squares, true, NULL);
                for (int step = 0; step < 2; ++step) {
                    const ms_result result = ms_step(c.m, NULL);
                    assert_int_equal(result, tells == HONEST ? MS_RESULT_OK : MS_RESULT_CONTRACT);
                    if (tells != HONEST) {
                        t_text_has(ms_last_error(c.m), texts[tells]);
                        t_text_has(ms_last_error(c.m), "layer 0 \"scale\": its backward");
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

/* A gradient that gets nothing for three steps, and settings that wait for ms_wrap. */
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
            assert_int_equal(c.heard.count, (how & 1 || how == 2) && step >= 2);
        }
        if (how == 2) {
            t_text_has(c.heard.text, "ms_set_frozen");
        } else if (how & 1) {
            t_text_has(c.heard.text, "nothing to grad_param[0], the gradient of \"w\"");
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
                ms_layer_desc d;
                ms_config config = t_config();
                memset(&c, 0, sizeof c);
                config.debug = true;
                assert_int_equal(ms_create(&config, &c.m), MS_RESULT_OK);
                memset(&d, 0, sizeof d);
                d.name = "error";
                d.forward = loss_forward;
                d.backward = loss_backward;
                d.user = &l;
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
    const int32_t *own;
} lookup;

static int lookup_forward(const ms_call *call) {
    const int32_t *token = (const int32_t *)call->in[0].data;
    for (int i = 0; i < ROWS * CHANNELS; ++i) {
        t_data(&call->out[0])[i] =
            t_data(&call->param[0])[token[i / CHANNELS] * CHANNELS + i % CHANNELS];
    }
    return 0;
}

static int lookup_backward(const ms_call *call) {
    const lookup *l = (const lookup *)call->user;
    const int32_t *token = l->outside ? l->own : (const int32_t *)call->in[0].data;
    for (int i = 0; i < ROWS * CHANNELS; ++i) {
        const int32_t row = token[i / CHANNELS];
        assert_true(row >= 0 && row < l->tokens);
        t_contribute(&call->grad_param[0], row * CHANNELS + i % CHANNELS,
                     t_data(&call->grad_out[0])[i]);
    }
    return 0;
}

/* Backward uses tokens that it did not declare, or the trainer's array that was lent for them: what debug
   mode puts there is a row of the table as well, but another one. */
static void undeclared_integers_are_indices(void **state) {
    (void)state;
    t_rng rng = t_seed(3);
    for (int how = 0; how < 120; ++how) {
        int32_t *token = (int32_t *)t_lend(ROWS * sizeof *token);
        float table[MOST_TOKENS * CHANNELS];
        const bool declares = how % 3 == 0, same = how % 4 == 1;
        lookup l = {2 + how % (MOST_TOKENS - 1), how % 3 == 2, token};
        const ms_dtype dtype = MS_DTYPE_I32;
        ms_layer_desc d;
        ms_model *m;
        ms_config config = t_config();
        config.debug = true;
        for (int i = 0; i < ROWS; ++i) {
            token[i] = same ? how / 3 % l.tokens : (int32_t)t_below(&rng, (uint32_t)l.tokens);
        }
        token[0] = same || token[0] != token[1] ? token[0] : (token[1] + 1) % l.tokens;
        assert_int_equal(ms_create(&config, &m), MS_RESULT_OK);
        memset(&d, 0, sizeof d);
        d.name = "lookup";
        d.forward = lookup_forward;
        d.backward = lookup_backward;
        d.accumulates.param = 1;
        d.user = &l;
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
            t_text_has(ms_last_error(m), "\"tokens\"");
            t_text_has(ms_last_error(m), l.outside ? "where it lies" : "backward_reads");
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
    UPDATE_LIES
} update_lie;

typedef struct updater {
    update_lie tells;
    float momentum;
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
        args->value[i] -= args->learning_rate * args->state[0][i];
    }
    return 0;
}

static void each_lie_of_an_update_is_named(void **state) {
    (void)state;
    static const char *const texts[UPDATE_LIES] = {
        NULL,          "ignores *gradient_scale", "the second time",
        "reads state", "writes to state",         "beyond the end"};
    for (int how = 0; how < 2 * UPDATE_LIES; ++how) {
        updater u = {(update_lie)(how / 2), 0.0f};
        ms_optimizer_desc o = t_optimizer(MS_OPTIMIZER_CUSTOM, 0.001f);
        chain c;
        o.update = update;
        o.user = &u;
        o.state_count = 1;
        o.grad_clip_norm = how % 2 ? 0.25f : 0.0f;
        start_chain(&c, HONEST, 2, 1, true, &o);
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
        ms_layer_desc d;
        ms_config config = t_config();
        memset(&c, 0, sizeof c);
        config.log = note_warning;
        config.log_user = &c.heard;
        assert_int_equal(ms_create(&config, &c.m), MS_RESULT_OK);
        memset(&d, 0, sizeof d);
        d.name = "error";
        d.forward = loss_forward;
        d.backward = loss_backward;
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

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_lie_of_a_layer_is_named),
        cmocka_unit_test(state_that_changes_in_an_eval_is_warned_of),
        cmocka_unit_test(what_is_forgotten_is_warned_of),
        cmocka_unit_test(a_loss_has_all_its_elements),
        cmocka_unit_test(undeclared_integers_are_indices),
        cmocka_unit_test(each_lie_of_an_update_is_named),
        cmocka_unit_test(moments_of_ones_own_are_left_alone),
        cmocka_unit_test(what_has_no_effect_is_warned_of),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
