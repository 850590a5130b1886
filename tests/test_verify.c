/*  test_verify.c - ms_verify: deterministic layers give equal bits, whatever they declare; a layer
    that breaks a promise is found, with the tensor that shows it; the differences that are reported
    are those of cases made by hand; and nothing of a model is changed, nor by a failure. */
#include "private.h"
#include "toy_layers.h"
#include "random_dag.h"

/* The emulated device is some ten times slower. */
#ifdef T_CUDA
enum { QUICK_GRAPHS = 60, GRAPHS = 150, QUICK_FAULTY_GRAPHS = 40, FAULTY_GRAPHS = 60 };
#else
enum { QUICK_GRAPHS = 150, GRAPHS = 600, QUICK_FAULTY_GRAPHS = 60, FAULTY_GRAPHS = 150 };
#endif

// ------------------------------------------------------------------------------------------------
// what ms_verify has told

enum { SEEN = 128 };

typedef struct seen {
    const ms_model *model;
    uint32_t count, differ_count;
    double absolute, relative;
    ms_difference items[SEEN];
    char names[SEEN][32];
} seen;

static void see(const ms_difference *d, void *user) {
    seen *s = (seen *)user;
    assert_true(s->count < SEEN);
    s->items[s->count] = *d;
    snprintf(s->names[s->count], sizeof s->names[0], "%s", d->name);
    s->differ_count += d->differ_count > 0;
    s->absolute = d->absolute > s->absolute ? d->absolute : s->absolute;
    s->relative = d->relative > s->relative ? d->relative : s->relative;
    assert_int_equal(d->count, ms_tensor_count(s->model, d->tensor));
    s->count += 1;
}

/* Verifies; the report must sum up what was seen. */
static ms_result verify(ms_model *model, seen *s, ms_verify_report *report) {
    memset(s, 0, sizeof *s);
    s->model = model;
    const ms_result result = ms_verify(model, see, s, report);
    if (result == MS_RESULT_OK) {
        assert_int_equal(report->tensor_count, s->count);
        assert_int_equal(report->differ_count, s->differ_count);
        assert_true(report->absolute == s->absolute && report->relative == s->relative);
    } else {
        ms_verify_report nothing;
        memset(&nothing, 0, sizeof nothing);
        assert_int_equal(s->count, 0);
        assert_memory_equal(report, &nothing, sizeof nothing);
    }
    return result;
}

/* The difference of a tensor by its name. */
static const ms_difference *difference_of(const seen *s, const char *name) {
    for (uint32_t i = 0; i < s->count; ++i) {
        if (strcmp(s->names[i], name) == 0) {
            return &s->items[i];
        }
    }
    fail_msg("\"%s\" was not compared", name);
    return NULL;
}

/* Only this tensor differs. */
static void only(const seen *s, const char *name) {
    for (uint32_t i = 0; i < s->count; ++i) {
        if ((s->items[i].differ_count > 0) != (strcmp(s->names[i], name) == 0)) {
            fail_msg("%u elements of \"%s\" differ, where only \"%s\" should",
                     (unsigned)s->items[i].differ_count, s->names[i], name);
        }
    }
    assert_int_equal(s->differ_count, 1);
}

// ------------------------------------------------------------------------------------------------
// random graphs: a model that verifies, and its twin that does not

enum { TWINS = 2, STEPS = 3 };

typedef struct pair {
    rd_graph *graph;
    rd_net *net[TWINS];
    ms_arena *arena[TWINS];
    char failure[RD_TEXT];
} pair;

static bool pair_begin(pair *p, uint64_t seed) {
    t_rng rng = t_seed(seed ^ 0x7e57);
    memset(p, 0, sizeof *p);
    p->graph = rd_generate(seed);
    ms_config config = t_config();
    config.force_optimize = t_chance(&rng, 0.7);
    config.debug = t_chance(&rng, 0.05);
    const bool shares = t_chance(&rng, 0.1);
    for (int k = 0; k < TWINS; ++k) {
        if (shares) {
            assert_int_equal(ms_arena_create(NULL, NULL, &p->arena[k]), MS_RESULT_OK);
            config.arena = p->arena[k];
        }
        p->net[k] =
            rd_net_create(p->graph, &config, k == 0 ? "verified" : "twin", p->failure, false);
        if (ms_wrap(p->net[k]->model) != MS_RESULT_OK || !rd_net_write(p->net[k], 0, false)) {
            return rd_fail(&p->net[k]->run, "%s", ms_last_error(p->net[k]->model));
        }
    }
    return p->failure[0] == 0;
}

static void pair_end(pair *p) {
    for (int k = 0; k < TWINS; ++k) {
        rd_net_destroy(p->net[k]);
        ms_arena_destroy(p->arena[k]);
    }
    free(p->graph);
}

/* Counts of calls begin anew: those of a verification are not those of a step. */
static void forget_calls(rd_net *n) {
    for (uint32_t i = 0; i < n->run.graph->layer_count; ++i) {
        n->run.op[i].forwards = n->run.op[i].recomputes = n->run.op[i].backwards = 0;
    }
}

/* Verifies; callbacks may run twice. */
static bool verify_net(pair *p, uint32_t micro, seen *s, ms_verify_report *report) {
    rd_net *n = p->net[0];
    const bool debug = n->run.debug;
    n->run.micro = micro;
    n->run.debug = true;
    forget_calls(n);
    const ms_result result = verify(n->model, s, report);
    forget_calls(n);
    n->run.debug = debug;
    return result == MS_RESULT_OK || rd_fail(&n->run, "ms_verify: %s", ms_last_error(n->model));
}

static bool same_tensor(pair *p, const char *what, ms_tensor of_first, ms_tensor of_twin) {
    uint64_t a[RD_ELEMENTS], b[RD_ELEMENTS];
    memset(a, 0, sizeof a);
    memset(b, 0, sizeof b);
    const ms_result first = ms_read(p->net[0]->model, of_first, a);
    const ms_result other = ms_read(p->net[1]->model, of_twin, b);
    return (first == other && memcmp(a, b, sizeof a) == 0) ||
           rd_fail(&p->net[0]->run, "%s of %u is not that of the twin: %s, %s", what,
                   (unsigned)of_first.id, ms_result_name(first), ms_result_name(other));
}

/* All that can be read of both: values, gradients and state, where there are any. */
static bool same_values(pair *p) {
    const rd_graph *g = p->graph;
    const ms_model *a = p->net[0]->model, *b = p->net[1]->model;
    bool same = true;
    for (uint32_t i = 0; i < g->value_count && same; ++i) {
        const ms_tensor x = p->net[0]->handle[i], y = p->net[1]->handle[i];
        same = same_tensor(p, "the value", x, y);
        if (g->value[i].role == RD_PARAM) {
            same = same && same_tensor(p, "a gradient", ms_gradient(a, x), ms_gradient(b, y));
        }
        for (int k = 0; k < MS_LIMIT_OPTIMIZER_STATE && g->value[i].role == RD_PARAM; ++k) {
            const ms_tensor state = ms_optimizer_state(a, x, k);
            same = same &&
                   (state.id == 0 || same_tensor(p, "a state", state, ms_optimizer_state(b, y, k)));
        }
    }
    return same;
}

/* A micro-batch of both, and a verification before and after that of the first. */
static bool step_pair(pair *p, uint64_t round, uint32_t micro) {
    seen s;
    ms_verify_report report;
    double loss[TWINS] = {0.0, 0.0};
    for (int k = 0; k < TWINS; ++k) {
        rd_net *n = p->net[k];
        n->run.micro = micro;
        forget_calls(n);
        if (!rd_net_write(n, round, false) || (k == 0 && !verify_net(p, micro, &s, &report)) ||
            ms_step(n->model, &loss[k]) != MS_RESULT_OK) {
            return rd_fail(&n->run, "%s", ms_last_error(n->model));
        }
    }
    const bool same = report.differ_count == 0 && report.plain_loss == report.wrapped_loss &&
                      report.plain_loss == loss[0] && loss[0] == loss[1];
    if (!same) {
        return rd_fail(&p->net[0]->run, "%u of %u differ, losses %.17g %.17g %.17g %.17g",
                       (unsigned)report.differ_count, (unsigned)report.tensor_count,
                       report.plain_loss, report.wrapped_loss, loss[0], loss[1]);
    }
    return same_values(p);
}

static bool run_pair(pair *p, uint64_t seed) {
    uint64_t round = 0;
    bool fine = pair_begin(p, seed);
    for (uint32_t step = 0; step < STEPS && fine; ++step) {
        for (uint32_t micro = 0; micro < p->graph->accumulation && fine; ++micro) {
            fine = step_pair(p, ++round, micro);
            seen s;
            ms_verify_report report;
            const bool last = micro + 1 == p->graph->accumulation;
            for (int k = 0; k < TWINS; ++k) {
                p->net[k]->run.step += last;
            }
            fine = fine && verify_net(p, last ? 0 : micro + 1, &s, &report) && same_values(p);
        }
    }
    return fine;
}

static void nothing_differs_and_nothing_changes(void **state) {
    (void)state;
    uint8_t features[RD_FEATURE_COUNT];
    memset(features, 0, sizeof features);
    const uint64_t first = t_environment("MEMSCALE_TEST_SEED", 1);
    const uint64_t count = t_environment("MEMSCALE_TEST_DAGS", t_sweep(QUICK_GRAPHS, GRAPHS));
    for (uint64_t seed = first; seed < first + count; ++seed) {
        pair p;
        if (!run_pair(&p, seed)) {
            rd_print(p.graph);
            fail_msg("seed %u: %s", (unsigned)seed, p.failure);
        }
        for (int i = 0; i < RD_FEATURE_COUNT; ++i) {
            features[i] |= p.graph->seen[i];
        }
        pair_end(&p);
    }
    assert_true(features[RD_DID_RECOMPUTE] && features[RD_DID_RESTORE_STATE] &&
                features[RD_BORROWED_GRADIENT] && features[RD_MICRO_BATCHES] &&
                features[RD_LOSS_WRITES_GRADIENTS] && features[RD_ON_HOST] && features[RD_AXES] &&
                features[RD_CUSTOM] && features[RD_CLIPPING] && features[RD_FROZEN_PARAM]);
}

/* Random graphs whose layers all break one promise: where nothing differs, the plan gave no
   occasion to. */
static void broken_promises_show(void **state) {
    (void)state;
    static const struct {
        rd_fault fault;
        uint32_t at_least; // of 100 graphs
    } cases[] = {{RD_FAULT_REDRAW, 4},  {RD_FAULT_STATE, 1},   {RD_FAULT_DESTROY, 20},
                 {RD_FAULT_SCRATCH, 8}, {RD_FAULT_RECOUNT, 2}, {RD_FAULT_NONE, 0}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; ++i) {
        uint32_t found = 0, tried = 0;
        for (uint64_t seed = 1; seed <= t_sweep(QUICK_FAULTY_GRAPHS, FAULTY_GRAPHS); ++seed) {
            pair p;
            seen s;
            ms_verify_report report;
            assert_true(pair_begin(&p, seed));
            p.net[0]->run.fault = cases[i].fault;
            if (!p.net[0]->run.debug) { // there a broken promise is an error
                assert_true(verify_net(&p, 0, &s, &report));
                found += report.differ_count > 0;
                tried += 1;
            }
            pair_end(&p);
        }
        if (found * 100 < cases[i].at_least * tried) {
            fail_msg("fault %u: %u of %u", (unsigned)cases[i].fault, (unsigned)found,
                     (unsigned)tried);
        }
        assert_true(cases[i].fault != RD_FAULT_NONE || found == 0);
    }
}

// ------------------------------------------------------------------------------------------------
// one layer that breaks a promise, between two that do not: x -> p, q -> flawed -> r, s -> losses

enum { FLAW_ROWS = 6, FLAW_COLS = 4, FLAW_COUNT = FLAW_ROWS * FLAW_COLS };

typedef enum flaw {
    FLAW_NONE,
    FLAW_REDRAWS,   // another mask in a recomputation
    FLAW_ADVANCES,  // its state, in a recomputation too, though it promises to keep it
    FLAW_READS_OLD, // what is in its workspace, which nobody has written
    FLAW_SKIPS      // a part of a gradient
} flaw;

typedef struct flawed_net {
    flaw how;
    ms_model *model;
    ms_tensor x, p, q, r, s, factor, moves, out, loss;
    t_op first, last, loss_op;
    bool is_inside;   // ms_verify is to be called from a callback
    void *address;    // of p
    bool fails;       // backward
    float not_finite; // added to the output
    float spoils;     // added to element 1 of the gradient of the factor
} flawed_net;

static int flawed_forward(const ms_call *call) {
    flawed_net *n = (flawed_net *)call->user;
    const bool again = call->phase == MS_PHASE_RECOMPUTE;
    const uint64_t seed = call->seed + (again && n->how == FLAW_REDRAWS);
    for (int64_t i = 0; i < FLAW_COUNT; ++i) {
        t_data(&call->out[0])[i] =
            t_mask(seed, i) * t_data(&call->in[0])[i] * t_data(&call->param[0])[0] + n->not_finite;
    }
    if (!again || n->how == FLAW_ADVANCES) {
        t_data(&call->state[0])[0] += 0.25f;
    }
    if (n->is_inside && call->phase == MS_PHASE_FORWARD) {
        ms_verify_report report;
        t_error(n->model, ms_verify(n->model, NULL, NULL, &report), MS_RESULT_ORDER);
        ms_memory_report sizes;
        t_report(n->model, &sizes);
        assert_ptr_equal(ms_data(n->model, n->p), n->address); // values are where they were
    }
    return 0;
}

static int flawed_backward(const ms_call *call) {
    const flawed_net *n = (const flawed_net *)call->user;
    const float factor = t_data(&call->param[0])[0];
    float sum = 0.0f;
    for (int64_t i = 0; i < FLAW_COUNT; ++i) {
        const float slope = t_mask(call->seed, i) * t_grad_out(call, 0, i);
        t_contribute(&call->grad_in[0], i, slope * factor);
        sum += slope * t_data(&call->in[0])[i];
    }
    if (n->how == FLAW_READS_OLD) {
        sum += ((const float *)call->workspace)[0];
    }
    t_contribute(&call->grad_param[0], 0, sum);
    if (n->how != FLAW_SKIPS) {
        t_contribute(&call->grad_param[0], 1, -sum + n->spoils);
    }
    return n->fails ? T_CALLBACK_ERROR : 0;
}

static void flawed_register(flawed_net *n) {
    ms_model *m = n->model;
    const ms_shape matrix = ms_shape2(FLAW_ROWS, FLAW_COLS), row = ms_shape1(FLAW_COLS);
    n->x = ms_input(m, "x", MS_DTYPE_F32, matrix);
    n->p = ms_param(m, "p", MS_DTYPE_F32, row);
    n->q = ms_param(m, "q", MS_DTYPE_F32, row);
    n->factor = ms_param(m, "factor", MS_DTYPE_F32, ms_shape1(2));
    n->r = ms_param(m, "r", MS_DTYPE_F32, row);
    n->s = ms_param(m, "s", MS_DTYPE_F32, row);
    n->moves = ms_buffer(m, "moves", MS_DTYPE_F32, ms_shape1(1));
    const ms_tensor a = ms_activation(m, "a", MS_DTYPE_F32, matrix);
    ms_layer_desc d = t_layer(&n->first, T_AFFINE, "first", n->x, a);
    d.param[0] = n->p;
    d.param[1] = n->q;
    ms_register_layer(m, &d);
    ms_layer_desc flawed;
    memset(&flawed, 0, sizeof flawed);
    flawed.name = "flawed";
    flawed.forward = flawed_forward;
    flawed.backward = flawed_backward;
    flawed.user = n;
    flawed.in[0] = a;
    flawed.param[0] = n->factor;
    flawed.state[0] = n->moves;
    flawed.recompute_keeps_state = true;
    flawed.backward_workspace.bytes = sizeof(float);
    flawed.out[0] = n->out = ms_activation(m, "b", MS_DTYPE_F32, matrix);
    ms_register_layer(m, &flawed);
    const ms_tensor c = ms_activation(m, "c", MS_DTYPE_F32, matrix);
    d = t_layer(&n->last, T_AFFINE, "last", n->out, c);
    d.param[0] = n->r;
    d.param[1] = n->s;
    d.in_place[0] = 0;
    memset(d.grad_in_place, 0, sizeof d.grad_in_place);
    ms_register_layer(m, &d);
    n->loss = t_set_loss(m, &n->loss_op, T_LOSS, c);
}

static void flawed_write(flawed_net *n) {
    const ms_tensor all[] = {n->x, n->p, n->q, n->factor, n->r, n->s, n->moves};
    float data[FLAW_COUNT];
    t_rng rng = t_seed(5);
    for (size_t i = 0; i < sizeof all / sizeof all[0]; ++i) {
        t_fill(&rng, data, FLAW_COUNT, 1.0f);
        t_ok(n->model, ms_write(n->model, all[i], data));
    }
}

/* The output of the flawed layer is recomputed, if anything is. */
static void flawed_start(flawed_net *n, const ms_config *config, flaw how,
                         const ms_optimizer_desc *optimizer) {
    memset(n, 0, sizeof *n);
    n->how = how;
    assert_int_equal(ms_create(config, &n->model), MS_RESULT_OK);
    flawed_register(n);
    if (optimizer != NULL) {
        ms_set_optimizer(n->model, optimizer);
    }
    ms_set_tensor_technique(n->model, n->out, MS_TECHNIQUE_CHECKPOINTING,
                            config->checkpointing == MS_SWITCH_OFF ? MS_SWITCH_DEFAULT
                                                                   : MS_SWITCH_ON);
    t_ok(n->model, ms_wrap(n->model));
    flawed_write(n);
}

/* What reads memory that nobody has written may read the same by luck: debug mode is for that. */
static void the_tensor_at_fault_is_named(void **state) {
    (void)state;
    static const struct {
        flaw how;
        const char *name; // NULL: none
    } cases[] = {{FLAW_NONE, NULL},
                 {FLAW_REDRAWS, "r"}, // whose gradient is made of what the flawed layer gave
                 {FLAW_ADVANCES, "moves"},
                 {FLAW_SKIPS, "factor"}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; ++i) {
        flawed_net n;
        seen s;
        ms_verify_report report;
        const ms_config config = t_config();
        flawed_start(&n, &config, cases[i].how, NULL);
        t_ok(n.model, verify(n.model, &s, &report));
        assert_int_equal(s.count, 6);
        for (uint32_t k = 0; k < 6; ++k) { // in the order of registration
            static const char *const names[] = {"p", "q", "factor", "r", "s", "moves"};
            assert_string_equal(s.names[k], names[k]);
        }
        assert_int_equal(s.items[0].tensor.id, ms_gradient(n.model, n.p).id);
        assert_int_equal(s.items[5].tensor.id, n.moves.id);
        if (cases[i].name != NULL) {
            only(&s, cases[i].name);
        } else {
            assert_int_equal(report.differ_count, 0);
            assert_true(report.absolute == 0.0 && report.relative == 0.0);
        }
        if (cases[i].how == FLAW_ADVANCES) { // by 0.25 once more
            assert_true(fabs(report.absolute - 0.25) < 1e-6);
        }
        if (cases[i].how == FLAW_SKIPS) { // the second element
            assert_int_equal(difference_of(&s, "factor")->differ_count, 1);
        }
        ms_destroy(n.model);
    }
}

/* A plan that recomputes nothing gives a layer no occasion to break that promise. */
static void the_plan_in_force_is_what_is_verified(void **state) {
    (void)state;
    flawed_net n;
    ms_verify_report report;
    ms_config config = t_config();
    flawed_start(&n, &config, FLAW_REDRAWS, NULL);
    t_ok(n.model, ms_verify(n.model, NULL, NULL, &report));
    assert_int_equal(report.differ_count, 1);
    t_ok(n.model, ms_detach(n.model));
    t_ok(n.model, ms_verify(n.model, NULL, NULL, &report));
    assert_int_equal(report.differ_count, 0);
    t_ok(n.model, ms_wrap(n.model));
    t_ok(n.model, ms_verify(n.model, NULL, NULL, &report));
    assert_int_equal(report.differ_count, 1);
    ms_destroy(n.model);
}

static void debug_mode_names_the_layer(void **state) {
    (void)state;
    for (int how = FLAW_NONE; how <= FLAW_READS_OLD; ++how) {
        flawed_net n;
        ms_verify_report report;
        ms_config config = t_config();
        config.debug = true;
        flawed_start(&n, &config, (flaw)how, NULL);
        const ms_result expected = how == FLAW_NONE ? MS_RESULT_OK : MS_RESULT_CONTRACT;
        t_error(n.model, ms_verify(n.model, NULL, NULL, &report), expected);
        if (how != FLAW_NONE) {
            t_text_has(ms_last_error(n.model), "\"flawed\"");
        }
        assert_int_equal(report.differ_count, 0);
        ms_destroy(n.model);
    }
}

// ------------------------------------------------------------------------------------------------
// numbers: a layer that gives in each pass what a table says

enum { TOLD = 4, TOLD_BYTES = 8 * TOLD };

typedef struct told {
    ms_dtype dtype;
    uint8_t values[2][TOLD_BYTES]; // plain, wrapped
    uint32_t differ_count;
    double absolute, relative;
} told;

typedef struct teller {
    ms_model *model;
    ms_tensor w, buffer, loss;
    const told *gradient, *state;
    uint32_t forwards, backwards;
    float losses[2];
} teller;

static int tell_forward(const ms_call *call) {
    teller *t = (teller *)call->user;
    const uint32_t pass = t->forwards++ % 2;
    t_data(&call->out[0])[0] = t->losses[pass];
    memcpy(call->state[0].data, t->state->values[pass],
           (size_t)(TOLD * ms_dtype_bytes(t->state->dtype)));
    return 0;
}

static int tell_backward(const ms_call *call) {
    teller *t = (teller *)call->user;
    const uint32_t pass = t->backwards++ % 2;
    assert_true(call->grad_param[0].beta == 0.0f);
    memcpy(call->grad_param[0].data, t->gradient->values[pass], TOLD * sizeof(float));
    return 0;
}

static void tell(teller *t, const told *gradient, const told *state, float plain, float wrapped) {
    const ms_config config = t_config();
    memset(t, 0, sizeof *t);
    t->gradient = gradient;
    t->state = state;
    t->losses[0] = plain;
    t->losses[1] = wrapped;
    assert_int_equal(ms_create(&config, &t->model), MS_RESULT_OK);
    t->w = ms_param(t->model, "w", MS_DTYPE_F32, ms_shape1(TOLD));
    t->buffer = ms_buffer(t->model, "buffer", state->dtype, ms_shape1(TOLD));
    t->loss = ms_activation(t->model, "loss", MS_DTYPE_F32, ms_shape1(1));
    ms_layer_desc d;
    memset(&d, 0, sizeof d);
    d.forward = tell_forward;
    d.backward = tell_backward;
    d.user = t;
    d.param[0] = t->w;
    d.state[0] = t->buffer;
    d.out[0] = t->loss;
    ms_register_layer(t->model, &d);
    ms_set_loss(t->model, t->loss);
    t_ok(t->model, ms_wrap(t->model));
    t_write_zeros(t->model);
}

static told told_floats(const float *plain, const float *wrapped, uint32_t differ_count,
                        double absolute, double relative) {
    told t;
    memset(&t, 0, sizeof t);
    memcpy(t.values[0], plain, TOLD * sizeof(float));
    memcpy(t.values[1], wrapped, TOLD * sizeof(float));
    t.differ_count = differ_count;
    t.absolute = absolute;
    t.relative = relative;
    return t;
}

static told told_as(ms_dtype dtype, const void *plain, const void *wrapped, uint32_t differ_count,
                    double absolute, double relative) {
    const size_t bytes = (size_t)(TOLD * ms_dtype_bytes(dtype));
    told t;
    memset(&t, 0, sizeof t);
    t.dtype = dtype;
    memcpy(t.values[0], plain, bytes);
    memcpy(t.values[1], wrapped, bytes);
    t.differ_count = differ_count;
    t.absolute = absolute;
    t.relative = relative;
    return t;
}

static void check_told(const ms_difference *d, const told *t) {
    assert_int_equal(d->count, TOLD);
    assert_int_equal(d->differ_count, t->differ_count);
    assert_true(d->absolute == t->absolute);
    assert_true(d->relative == t->relative);
}

/* The gradient differs as `gradient` says, the buffer as `state` does. */
static void check_case(const told *gradient, const told *state) {
    teller t;
    seen s;
    ms_verify_report report;
    tell(&t, gradient, state, 3.0f, 4.5f);
    for (int again = 0; again < 2; ++again) {
        t_ok(t.model, verify(t.model, &s, &report));
        assert_int_equal(s.count, 2);
        check_told(difference_of(&s, "w"), gradient);
        check_told(difference_of(&s, "buffer"), state);
        assert_true(report.plain_loss == 3.0 && report.wrapped_loss == 4.5);
    }
    ms_destroy(t.model);
}

static void differences_of_floats(void **state) {
    (void)state;
    const float inf = INFINITY, nan = NAN;
    volatile uint32_t sign = 0x80000000u; // a compiler may take a constant -0.0f for 0
    float other_nan = nan, minus;
    uint32_t bits = sign;
    memcpy(&minus, &bits, sizeof bits);
    memcpy(&bits, &nan, sizeof bits);
    bits ^= 5;
    memcpy(&other_nan, &bits, sizeof bits);
    const struct {
        float plain[TOLD], wrapped[TOLD];
        uint32_t differ_count;
        double absolute, relative;
    } cases[] = {{{1, 2, -4, 0}, {1, 2, -4, 0}, 0, 0.0, 0.0},
                 {{1, 2, -4, 0}, {1, 2.5f, -6, 0}, 2, 2.0, 2.0 / 6.0},
                 {{1, 2, -4, 0}, {-1, 2, -4, 0}, 1, 2.0, 2.0},
                 {{0, 0, 1e-30f, 1}, {minus, 0, 0, 1}, 2, (double)1e-30f, 1.0},
                 {{0, 0, 0, 0}, {minus, minus, minus, minus}, 4, 0.0, 0.0},
                 {{nan, inf, -inf, 1}, {nan, inf, -inf, 1}, 0, 0.0, 0.0},
                 {{nan, 1, 2, 3}, {other_nan, 1, 2, 3}, 1, 0.0, 0.0},
                 {{nan, 1, 2, 3}, {7, 1, 2, 3}, 1, (double)inf, (double)inf},
                 {{1, 1, 2, 3}, {1, 1, 2, nan}, 1, (double)inf, (double)inf},
                 {{1, inf, 2, 3}, {1, -inf, 2, 3}, 1, (double)inf, (double)inf},
                 {{1, inf, 2, 3}, {1, 5, 2, 3}, 1, (double)inf, (double)inf},
                 {{1, 3e38f, 2, 3}, {1, -3e38f, 2, 3}, 1, 2.0 * (double)3e38f, 2.0}};
    const uint8_t bytes[TOLD] = {1, 2, 3, 4};
    const told same = told_as(MS_DTYPE_U8, bytes, bytes, 0, 0.0, 0.0);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; ++i) {
        const told t = told_floats(cases[i].plain, cases[i].wrapped, cases[i].differ_count,
                                   cases[i].absolute, cases[i].relative);
        check_case(&t, &same);
    }
}

static void differences_of_every_dtype(void **state) {
    (void)state;
    const double tiny = ldexp(1.0, -40);
    const float floats[][TOLD] = {{1, 2, 3, 4}, {1, 2, 3, 5}};
    const double doubles[][TOLD] = {{1, 2, -1e300, 0}, {1.0 + tiny, 2, -1e300, 0}};
    const uint16_t halves[][TOLD] = {{0x3c00, 0, 0xbc00, 0x7c00}, {0x4000, 0, 0xbc00, 0x7c00}};
    const uint16_t brains[][TOLD] = {{0x3f80, 0, 0xbf80, 0x7f80}, {0x4000, 0, 0xbf80, 0x7f80}};
    const int64_t longs[][TOLD] = {{1, -2, (int64_t)1 << 40, 0},
                                   {1, -2, ((int64_t)1 << 40) + 8, 0}};
    const int32_t ints[][TOLD] = {{5, -7, 0, 1 << 30}, {5, -9, 0, 1 << 30}};
    const int16_t shorts[][TOLD] = {{-30000, 1, 2, 3}, {30000, 1, 2, 3}};
    const int8_t chars[][TOLD] = {{-128, 1, 2, 3}, {127, 1, 2, 3}};
    const uint8_t bytes[][TOLD] = {{200, 1, 2, 255}, {100, 1, 2, 255}};
    const told cases[] = {
        told_as(MS_DTYPE_F32, floats[0], floats[1], 1, 1.0, 0.2),
        told_as(MS_DTYPE_F64, doubles[0], doubles[1], 1, tiny, tiny / (1.0 + tiny)),
        told_as(MS_DTYPE_F16, halves[0], halves[1], 1, 1.0, 0.5),
        told_as(MS_DTYPE_BF16, brains[0], brains[1], 1, 1.0, 0.5),
        told_as(MS_DTYPE_I64, longs[0], longs[1], 1, 8.0, 8.0 / (double)longs[1][2]),
        told_as(MS_DTYPE_I32, ints[0], ints[1], 1, 2.0, 2.0 / 9.0),
        told_as(MS_DTYPE_I16, shorts[0], shorts[1], 1, 60000.0, 2.0),
        told_as(MS_DTYPE_I8, chars[0], chars[1], 1, 255.0, 255.0 / 128.0),
        told_as(MS_DTYPE_U8, bytes[0], bytes[1], 1, 100.0, 0.5)};
    const told gradient = told_floats(floats[0], floats[1], 1, 1.0, 0.2);
    assert_int_equal(sizeof cases / sizeof cases[0], MS_DTYPE_COUNT);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; ++i) {
        assert_int_equal(cases[i].dtype, i);
        check_case(&gradient, &cases[i]);
    }
}

/* Losses that are no numbers are results here, not errors; and the model is none the worse. */
static void a_loss_that_is_not_finite_is_compared(void **state) {
    (void)state;
    const float values[TOLD] = {1, 2, 3, 4};
    const uint8_t bytes[TOLD] = {1, 2, 3, 4};
    const told gradient = told_floats(values, values, 0, 0.0, 0.0);
    const told buffer = told_as(MS_DTYPE_U8, bytes, bytes, 0, 0.0, 0.0);
    teller t;
    ms_verify_report report;
    double loss;
    tell(&t, &gradient, &buffer, NAN, INFINITY);
    t_ok(t.model, ms_verify(t.model, NULL, NULL, &report));
    assert_true(msi_is_nan(report.plain_loss) && !msi_is_finite(report.wrapped_loss));
    assert_int_equal(report.differ_count, 0);
    t_error(t.model, t_settled(t.model, ms_step(t.model, &loss)), MS_RESULT_NONFINITE);
    t.losses[0] = t.losses[1] = 0.5f;
    t_ok(t.model, ms_verify(t.model, NULL, NULL, &report));
    assert_true(report.plain_loss == 0.5 && report.wrapped_loss == 0.5);
    t_ok(t.model, ms_step(t.model, &loss));
    assert_true(loss == 0.5);
    ms_destroy(t.model);
}

/* A tensor that is compared in several pieces, of which the last one is short. */
enum { LARGE = 3 * (1 << 18) + 5 };

typedef struct large {
    uint32_t backwards, at[3];
    bool spoils; // the last two of these
} large;

static int large_forward(const ms_call *call) {
    t_data(&call->out[0])[0] = 1.0f;
    return 0;
}

static int large_backward(const ms_call *call) {
    large *l = (large *)call->user;
    float *gradient = t_data(&call->grad_param[0]);
    const bool wrapped = l->backwards++ % 2 == 1;
    for (uint32_t i = 0; i < LARGE; ++i) {
        const bool differs = i == l->at[0] || i == l->at[1] || i == l->at[2];
        gradient[i] = (float)(i % 1000 + 1) + (wrapped && differs ? 1.0f + (float)(i % 7) : 0.0f);
        gradient[i] = l->spoils && differs && i > 0 ? (float)INFINITY : gradient[i];
    }
    return 0;
}

static void large_tensors_are_compared_in_pieces(void **state) {
    (void)state;
    large l = {0, {0, 1 << 18, LARGE - 1}, false};
    const ms_config config = t_config();
    ms_model *m;
    ms_verify_report report;
    seen s;
    assert_int_equal(ms_create(&config, &m), MS_RESULT_OK);
    ms_layer_desc d;
    memset(&d, 0, sizeof d);
    d.forward = large_forward;
    d.backward = large_backward;
    d.user = &l;
    d.param[0] = ms_param(m, "large", MS_DTYPE_F32, ms_shape1(LARGE));
    d.out[0] = ms_activation(m, "loss", MS_DTYPE_F32, ms_shape1(1));
    ms_register_layer(m, &d);
    ms_set_loss(m, d.out[0]);
    t_ok(m, ms_wrap(m));
    t_write_zeros(m);
    t_ok(m, verify(m, &s, &report));
    double largest = 0.0;
    for (int i = 0; i < 3; ++i) {
        const double difference = 1.0 + l.at[i] % 7;
        largest = difference > largest ? difference : largest;
    }
    assert_int_equal(s.items[0].differ_count, 3);
    assert_int_equal(s.items[0].count, LARGE);
    assert_true(report.absolute == largest);
    ms_nonfinite found;
    l.spoils = true;
    t_ok(m, ms_find_nonfinite(m, &found));
    assert_int_equal(found.tensor.id, ms_gradient(m, d.param[0]).id);
    assert_true(found.element == l.at[1] && found.count == 2 && !found.is_nan);
    ms_destroy(m);
}

// ------------------------------------------------------------------------------------------------
// what stays as it was

/* All that can be read behind a step stands as it did: outputs, the norm, and gradients where there
   is no optimizer. */
static void what_can_be_read_stays(void **state) {
    (void)state;
    for (int kind = MS_OPTIMIZER_ADAMW; kind <= MS_OPTIMIZER_NONE; ++kind) {
        flawed_net n;
        ms_verify_report report;
        float losses[2][FLAW_ROWS], gradient[2][FLAW_COLS];
        double norm[2] = {0.0, 0.0};
        const ms_config config = t_config();
        if (kind == MS_OPTIMIZER_CUSTOM) {
            continue;
        }
        ms_optimizer_desc optimizer = t_optimizer((ms_optimizer_kind)kind, 0.0f);
        optimizer.grad_clip_norm = kind == MS_OPTIMIZER_NONE ? 0.0f : 0.01f;
        flawed_start(&n, &config, FLAW_NONE, &optimizer);
        t_ok(n.model, ms_step(n.model, NULL));
        const void *address = ms_data(n.model, n.loss);
        for (int i = 0; i < 2; ++i) {
            t_ok(n.model, ms_read(n.model, n.loss, losses[i]));
            const ms_tensor g = ms_gradient(n.model, n.r);
            if (kind == MS_OPTIMIZER_NONE) {
                t_ok(n.model, ms_read(n.model, g, gradient[i]));
            } else {
                t_ok(n.model, ms_gradient_norm(n.model, &norm[i]));
            }
            t_ok(n.model, ms_verify(n.model, NULL, NULL, &report));
            assert_int_equal(report.tensor_count, 6);
        }
        assert_ptr_equal(ms_data(n.model, n.loss), address);
        assert_memory_equal(losses[0], losses[1], sizeof losses[0]);
        assert_true(norm[0] == norm[1]);
        if (kind == MS_OPTIMIZER_NONE) {
            assert_memory_equal(gradient[0], gradient[1], sizeof gradient[0]);
        }
        ms_destroy(n.model);
    }
}

/* A step of the plain plan gives the loss that verification has given, and, without an optimizer,
   its gradients: so they are the real ones that are compared. */
static void a_gradient_that_is_off_by_so_much(void **state) {
    (void)state;
    flawed_net n;
    seen s;
    ms_verify_report report;
    float plain[FLAW_COLS], wrapped[FLAW_COLS];
    double loss, largest = 0.0;
    const ms_config config = t_config();
    const ms_optimizer_desc optimizer = t_optimizer(MS_OPTIMIZER_NONE, 0.0f);
    flawed_start(&n, &config, FLAW_REDRAWS, &optimizer);
    t_ok(n.model, verify(n.model, &s, &report));
    const ms_tensor g = ms_gradient(n.model, n.r);
    flawed_write(&n);
    t_ok(n.model, ms_forward(n.model, &loss));
    t_ok(n.model, ms_backward(n.model));
    t_ok(n.model, ms_read(n.model, g, wrapped));
    assert_true(loss == report.wrapped_loss);
    flawed_net twin; // of the same first step
    ms_config off = t_config();
    off.checkpointing = MS_SWITCH_OFF;
    flawed_start(&twin, &off, FLAW_REDRAWS, &optimizer);
    t_ok(twin.model, ms_forward(twin.model, &loss));
    t_ok(twin.model, ms_backward(twin.model));
    t_ok(twin.model, ms_read(twin.model, ms_gradient(twin.model, twin.r), plain));
    assert_true(loss == report.plain_loss);
    for (int i = 0; i < FLAW_COLS; ++i) {
        const double difference = fabs((double)plain[i] - (double)wrapped[i]);
        largest = difference > largest ? difference : largest;
    }
    assert_true(largest > 0.0 && report.absolute == largest);
    ms_destroy(twin.model);
    ms_destroy(n.model);
}

/* Nor is a verification a step that is timed: the plan that comes of the first steps does not know
   of it. */
static void a_verification_is_not_timed(void **state) {
    (void)state;
    flawed_net n;
    ms_verify_report report;
    ms_config config = t_config();
    config.empirical_profiling = MS_SWITCH_ON;
    config.warmup_steps = 2;
    flawed_start(&n, &config, FLAW_NONE, NULL);
    for (uint32_t step = 0; step < 5; ++step) {
        const uint32_t taken = n.model->run.timing->sample_count;
        const msi_warmup stage = n.model->run.timing->warmup;
        t_ok(n.model, ms_verify(n.model, NULL, NULL, &report));
        assert_int_equal(report.differ_count, 0);
        assert_int_equal(n.model->run.timing->sample_count, taken);
        assert_int_equal(n.model->run.timing->warmup, stage);
        t_ok(n.model, t_settled(n.model, ms_step(n.model, NULL)));
    }
    assert_int_equal(n.model->run.timing->sample_count, 2);
    ms_destroy(n.model);
}

/* Another model's passing values in a shared arena stay too. */
static void a_shared_arena_is_left_alone(void **state) {
    (void)state;
    ms_arena *arena;
    flawed_net a, b;
    ms_verify_report report;
    float losses[2][FLAW_ROWS];
    ms_config config = t_config();
    assert_int_equal(ms_arena_create(NULL, NULL, &arena), MS_RESULT_OK);
    config.arena = arena;
    flawed_start(&a, &config, FLAW_NONE, NULL);
    flawed_start(&b, &config, FLAW_NONE, NULL);
    t_ok(b.model, ms_forward(b.model, NULL));
    t_ok(b.model, ms_read(b.model, b.loss, losses[0]));
    const uint64_t bytes = ms_arena_bytes(arena);
    t_ok(a.model, ms_verify(a.model, NULL, NULL, &report));
    assert_int_equal(report.differ_count, 0);
    assert_int_equal(ms_arena_bytes(arena), bytes);
    t_ok(b.model, ms_read(b.model, b.loss, losses[1]));
    assert_memory_equal(losses[0], losses[1], sizeof losses[0]);
    t_ok(b.model, ms_backward(b.model)); // of a step that was under way
    t_ok(b.model, ms_update(b.model));
    ms_destroy(a.model);
    ms_destroy(b.model);
    ms_arena_destroy(arena);
}

#ifndef T_CUDA

static uint64_t last_bytes;

static int note_alloc(void *user, const ms_allocator *host, uint64_t bytes, void **memory) {
    last_bytes = bytes;
    return t_device_memory_alloc(user, host, bytes, memory);
}

/* Memory is what the documentation says: on the device one allocation, of passing values and
   gradients as a plain plan has them without updates. */
static void memory_is_given_back(void **state) {
    (void)state;
    enum { DEPTH = 12, WEIGHT_BYTES = DEPTH * T_CHAIN_COLS * T_CHAIN_COLS * 4 };
    t_chain chain, plain;
    t_heap heap;
    t_device device;
    ms_memory_report sizes;
    ms_verify_report report;
    ms_nonfinite found;
    ms_optimizer_desc none;
    memset(&none, 0, sizeof none);
    none.kind = MS_OPTIMIZER_NONE;
    ms_config config = t_config();
    assert_int_equal(t_chain_create(&plain, &config, DEPTH, T_CHAIN_ROWS, T_CHAIN_COLS),
                     MS_RESULT_OK);
    ms_set_optimizer(plain.model, &none);
    t_ok(plain.model, ms_wrap(plain.model));
    t_report(plain.model, &sizes);
    ms_destroy(plain.model);
    memset(&heap, 0, sizeof heap);
    config.force_optimize = true;
    config.backend = t_device_backend(&device);
    config.backend.memory_alloc = note_alloc;
    config.allocator = t_heap_allocator(&heap);
    t_chain_start(&chain, &config, DEPTH);
    const t_heap before = heap;
    const uint64_t allocations = device.allocations;
    heap.largest_bytes = 0;
    t_ok(chain.model, ms_verify(chain.model, NULL, NULL, &report));
    assert_int_equal(report.tensor_count, DEPTH);
    assert_int_equal(device.allocations, allocations + 1);
    assert_int_equal(last_bytes, sizes.arena_bytes - WEIGHT_BYTES - T_CHAIN_INPUT * 4);
    assert_int_equal(heap.largest_bytes, WEIGHT_BYTES + (1 << 20));
    heap.largest_bytes = 0;
    t_ok(chain.model, ms_find_nonfinite(chain.model, &found)); // which compares no gradients
    assert_int_equal(heap.largest_bytes, 1 << 20);
    assert_int_equal(device.live_count, 1);
    assert_true(heap.live_bytes == before.live_bytes && heap.live_count == before.live_count);
    assert_true(heap.wrong_releases == 0 && device.wrong_releases == 0);
    ms_destroy(chain.model);
}

/* What is missing is named, and the function that needs it. */
static void too_little_memory_is_told(void **state) {
    (void)state;
    for (int which = 0; which < 2; ++which) {
        t_chain chain;
        t_heap heap;
        t_device device;
        ms_verify_report report;
        ms_nonfinite found;
        const char *function = which == 0 ? "ms_verify: " : "ms_find_nonfinite: ";
        ms_config config = t_config();
        memset(&heap, 0, sizeof heap);
        config.backend = t_device_backend(&device);
        config.allocator = t_heap_allocator(&heap);
        t_chain_start(&chain, &config, 3);
        ms_model *m = chain.model;
        device.fail_at = device.calls + 1;
        for (uint64_t at = 1;; ++at) { // of the device, then each of the host
            const ms_result result =
                which == 0 ? ms_verify(m, NULL, NULL, &report) : ms_find_nonfinite(m, &found);
            if (result == MS_RESULT_OK) {
                break;
            }
            assert_int_equal(result, MS_RESULT_OUT_OF_MEMORY);
            t_text_has(ms_last_error(m), at == 1 ? function : "");
            t_text_has(ms_last_error(m), at == 1 ? "smaller batch" : "");
            assert_true(which == 0 || strstr(ms_last_error(m), "ms_verify") == NULL);
            heap.fail_at = heap.calls + at;
            assert_true(at < 1000);
        }
        ms_destroy(m);
    }
}

#endif

// ------------------------------------------------------------------------------------------------
// a trainer that keeps its own pointers to what it lends: a gradient that holds the momentum, and a
// buffer that forward changes

enum { LENT = 8 };

typedef struct lender {
    ms_model *model;
    t_heap heap;
    float gradient[LENT], buffer[LENT], value[LENT]; // lent, and used by these names alone
    uint32_t backwards;
    bool fails, differs;
} lender;

static int lent_forward(const ms_call *call) {
    lender *l = (lender *)call->user;
    float sum = 0.0f;
    for (int i = 0; i < LENT; ++i) {
        sum += l->value[i] * l->value[i] + l->buffer[i];
        l->buffer[i] = 0.75f * l->buffer[i] + 0.125f * l->value[i];
    }
    t_data(&call->out[0])[0] = sum;
    return 0;
}

static int lent_backward(const ms_call *call) {
    lender *l = (lender *)call->user;
    l->backwards += 1;
    for (int i = 0; i < LENT; ++i) {
        l->gradient[i] += l->value[i] + l->buffer[i];
    }
    l->gradient[3] += l->differs && l->backwards % 2 == 0 ? 0.5f : 0.0f;
    const bool lost = t_grad_out(call, 0, 0) == 0.0f;
    return l->fails && l->backwards % 2 == 0 ? (int)T_CALLBACK_ERROR : (int)lost;
}

static void lender_start(lender *l) {
    ms_config config = t_config();
    memset(l, 0, sizeof *l);
    config.allocator = t_heap_allocator(&l->heap);
    assert_int_equal(ms_create(&config, &l->model), MS_RESULT_OK);
    ms_model *m = l->model;
    ms_layer_desc d;
    memset(&d, 0, sizeof d);
    d.name = "lender";
    d.forward = lent_forward;
    d.backward = lent_backward;
    d.user = l;
    d.param[0] = ms_param(m, "value", MS_DTYPE_F32, ms_shape1(LENT));
    d.state[0] = ms_buffer(m, "buffer", MS_DTYPE_F32, ms_shape1(LENT));
    d.out[0] = ms_activation(m, "loss", MS_DTYPE_F32, ms_shape1(1));
    d.accumulates.param = 1;
    ms_register_layer(m, &d);
    ms_set_loss(m, d.out[0]);
    t_ok(m, ms_borrow(m, d.param[0], l->value));
    t_ok(m, ms_borrow(m, ms_gradient(m, d.param[0]), l->gradient));
    t_ok(m, ms_borrow(m, d.state[0], l->buffer));
    for (int i = 0; i < LENT; ++i) {
        l->gradient[i] = 0.25f * (float)i;
        l->buffer[i] = 1.0f - (float)i;
        l->value[i] = 0.5f + (float)i;
    }
    t_ok(m, ms_wrap(m));
}

/* The passes run where the callbacks look, so that what they report is what was computed; and all
   of it is put back, bit for bit, whatever happens. */
static void lent_memory_is_used_and_put_back(void **state) {
    (void)state;
    lender l;
    seen s;
    ms_verify_report report;
    lender_start(&l);
    const lender before = l;
    for (int what = 0; what < 3; ++what) { // equal, different, failing
        l.differs = what == 1;
        l.fails = what == 2;
        l.backwards = 0;
        const ms_result result = verify(l.model, &s, &report);
        assert_int_equal(result, what == 2 ? MS_RESULT_CALLBACK : MS_RESULT_OK);
        assert_int_equal(report.differ_count, what == 1);
        if (what == 1) {
            assert_true(difference_of(&s, "value")->absolute == 0.5);
        }
        assert_memory_equal(l.gradient, before.gradient, sizeof l.gradient);
        assert_memory_equal(l.buffer, before.buffer, sizeof l.buffer);
        assert_memory_equal(l.value, before.value, sizeof l.value);
    }
    const uint64_t calls = l.heap.calls;
    l.fails = l.differs = false;
    for (uint64_t at = 1; l.heap.calls < calls + 1000; ++at) { // no memory, each time elsewhere
        l.backwards = 0;
        l.heap.fail_at = l.heap.calls + at;
        const ms_result result = ms_verify(l.model, NULL, NULL, &report);
        l.heap.fail_at = 0;
        assert_memory_equal(l.gradient, before.gradient, sizeof l.gradient);
        assert_memory_equal(l.buffer, before.buffer, sizeof l.buffer);
        if (result == MS_RESULT_OK) {
            break;
        }
        assert_int_equal(result, MS_RESULT_OUT_OF_MEMORY);
        assert_int_equal(l.backwards, 0); // nothing has run
    }
    ms_destroy(l.model);
}

// ------------------------------------------------------------------------------------------------
// errors

static void what_is_refused(void **state) {
    (void)state;
    flawed_net n;
    ms_verify_report report;
    ms_config config = t_config();
    assert_int_equal(ms_verify(NULL, NULL, NULL, &report), MS_RESULT_INVALID);
    memset(&n, 0, sizeof n);
    assert_int_equal(ms_create(&config, &n.model), MS_RESULT_OK);
    t_error(n.model, ms_verify(n.model, NULL, NULL, NULL), MS_RESULT_INVALID);
    flawed_register(&n);
    t_error(n.model, ms_verify(n.model, NULL, NULL, &report), MS_RESULT_ORDER);
    t_text_has(ms_last_error(n.model), "ms_wrap");
    t_ok(n.model, ms_wrap(n.model));
    flawed_write(&n);
    t_ok(n.model, ms_forward(n.model, NULL));
    t_error(n.model, ms_verify(n.model, NULL, NULL, &report), MS_RESULT_ORDER);
    t_text_has(ms_last_error(n.model), "ms_backward");
    t_ok(n.model, ms_backward(n.model)); // the step goes on
    t_error(n.model, ms_verify(n.model, NULL, NULL, &report), MS_RESULT_ORDER);
    t_ok(n.model, ms_update(n.model));
    t_ok(n.model, ms_verify(n.model, NULL, NULL, &report));
    ms_set_frozen(n.model, n.q, true);
    t_error(n.model, ms_verify(n.model, NULL, NULL, &report), MS_RESULT_ORDER);
    t_text_has(ms_last_error(n.model), "ms_wrap");
    t_ok(n.model, ms_wrap(n.model));
    t_ok(n.model, ms_verify(n.model, NULL, NULL, &report));
    assert_int_equal(report.tensor_count, 5); // q has no gradient any more
    n.is_inside = true;
    n.address = ms_data(n.model, n.p);
    t_ok(n.model, ms_verify(n.model, NULL, NULL, &report));
    n.is_inside = false;
    n.fails = true;
    t_error(n.model, ms_verify(n.model, NULL, NULL, &report), MS_RESULT_CALLBACK);
    t_text_has(ms_last_error(n.model), "\"flawed\"");
    n.fails = false;
    t_ok(n.model, ms_step(n.model, NULL));
    ms_destroy(n.model);
    config.dry_run = true;
    flawed_net dry;
    memset(&dry, 0, sizeof dry);
    assert_int_equal(ms_create(&config, &dry.model), MS_RESULT_OK);
    flawed_register(&dry);
    t_ok(dry.model, ms_wrap(dry.model));
    t_error(dry.model, ms_verify(dry.model, NULL, NULL, &report), MS_RESULT_DRY_RUN);
    ms_destroy(dry.model);
}

/* The first layer and operand that is not finite: nothing, an output, a gradient, a param; and the
   model is as before. */
static void what_is_not_finite_is_found(void **state) {
    (void)state;
    for (int debug = 0; debug < 2; ++debug) {
        flawed_net n;
        ms_nonfinite found;
        float factor[2] = {1.0f, 2.0f};
        ms_config config = t_config();
        config.debug = debug != 0;
        flawed_start(&n, &config, FLAW_NONE, NULL);
        assert_int_equal(ms_find_nonfinite(NULL, &found), MS_RESULT_INVALID);
        t_ok(n.model, ms_find_nonfinite(n.model, &found));
        assert_int_equal(found.layer.id, 0);
        n.spoils = INFINITY;
        t_ok(n.model, ms_find_nonfinite(n.model, &found));
        t_text_has(ms_last_error(n.model), "layer 1 \"flawed\": its backward callback makes");
        assert_int_equal(found.tensor.id, ms_gradient(n.model, n.factor).id);
        assert_true(found.phase == MS_PHASE_BACKWARD && !found.is_nan && !found.is_read);
        assert_true(found.element == 1 && found.count == 1);
        n.not_finite = NAN;
        t_ok(n.model, ms_find_nonfinite(n.model, &found));
        t_text_has(ms_last_error(n.model), "layer 1 \"flawed\": its forward callback makes");
        assert_int_equal(found.tensor.id, n.out.id);
        assert_true(found.phase == MS_PHASE_FORWARD && found.is_nan && found.count == FLAW_COUNT);
        t_error(n.model, t_settled(n.model, ms_step(n.model, NULL)), MS_RESULT_NONFINITE);
        t_text_has(ms_last_error(n.model), debug ? "layer 1 \"flawed\"" : "ms_find_nonfinite");
        n.not_finite = n.spoils = 0.0f;
        factor[1] = NAN;
        t_ok(n.model, ms_write(n.model, n.factor, factor));
        t_ok(n.model, ms_find_nonfinite(n.model, &found));
        t_text_has(ms_last_error(n.model), "layer 1 \"flawed\": its forward callback finds");
        assert_true(found.tensor.id == n.factor.id && found.is_read && found.element == 1);
        factor[1] = 2.0f;
        t_ok(n.model, ms_write(n.model, n.factor, factor));
        t_ok(n.model, t_settled(n.model, ms_step(n.model, NULL)));
        ms_destroy(n.model);
    }
}

/* Scores, of which some are masked by an infinity, and their exponentials; the loss is what the last
   layer makes of these. */
enum { SCORES = 8, MASKED = 5 };

typedef struct masked {
    float lost, spoiled; // of element 0: in the value of the loss; in the gradient of w
    uint32_t warnings;
} masked;

static int mask_forward(const ms_call *call) {
    for (int i = 0; i < SCORES; ++i) {
        t_data(&call->out[0])[i] = i >= MASKED ? -INFINITY : t_data(&call->param[0])[i];
    }
    return 0;
}

static int mask_backward(const ms_call *call) {
    const masked *k = (const masked *)call->user;
    for (int i = 0; i < SCORES; ++i) {
        t_contribute(&call->grad_param[0], i,
                     i >= MASKED ? 0.0f : t_data(&call->grad_out[0])[i] + (i ? 0.0f : k->spoiled));
    }
    return 0;
}

static int exponential_forward(const ms_call *call) {
    const masked *k = (const masked *)call->user;
    for (int i = 0; i < SCORES; ++i) {
        t_data(&call->out[0])[i] = expf(t_data(&call->in[0])[i]) + (i ? 0.0f : k->lost);
    }
    return 0;
}

static int exponential_backward(const ms_call *call) {
    for (int i = 0; i < SCORES; ++i) {
        t_contribute(&call->grad_in[0], i,
                     t_data(&call->grad_out[0])[i] * expf(t_data(&call->in[0])[i]));
    }
    return 0;
}

static void count_finds(ms_log_level level, const char *tag, const char *text, void *user) {
    ((masked *)user)->warnings += level == MS_LOG_WARNING && strcmp(tag, "debug") == 0;
    (void)text;
}

/* Infinities of a value whose loss is finite are meant: they are no find, and no warning. A NaN is found
   behind them, and an infinite gradient; and they are, if the loss is infinite too. */
static void an_infinite_mask_is_no_find(void **state) {
    (void)state;
    static const struct {
        float lost, spoiled;
        const char *text;
    } cases[] = {{0.0f, 0.0f, NULL},
                 {NAN, 0.0f, "layer 1 \"exponential\": its forward callback makes element 0"},
                 {0.0f, INFINITY, "layer 0 \"mask\": its backward callback makes element 0"},
                 {0.0f, NAN, "layer 0 \"mask\": its backward callback makes element 0"},
                 {INFINITY, 0.0f, "layer 0 \"mask\": its forward callback makes element 5"}};
    for (int how = 0; how < 10; ++how) {
        ms_model *m;
        ms_nonfinite found;
        ms_layer_desc d;
        masked k = {cases[how / 2].lost, cases[how / 2].spoiled, 0};
        ms_config config = t_config();
        config.debug = how % 2;
        config.log = count_finds;
        config.log_user = &k;
        assert_int_equal(ms_create(&config, &m), MS_RESULT_OK);
        memset(&d, 0, sizeof d);
        d.name = "mask";
        d.forward = mask_forward;
        d.backward = mask_backward;
        d.user = &k;
        d.param[0] = ms_param(m, "w", MS_DTYPE_F32, ms_shape1(SCORES));
        const ms_tensor scores = d.out[0] =
            ms_activation(m, "scores", MS_DTYPE_F32, ms_shape1(SCORES));
        ms_register_layer(m, &d);
        memset(&d, 0, sizeof d);
        d.name = "exponential";
        d.forward = exponential_forward;
        d.backward = exponential_backward;
        d.user = &k;
        d.in[0] = scores;
        d.out[0] = ms_activation(m, "loss", MS_DTYPE_F32, ms_shape1(SCORES));
        ms_register_layer(m, &d);
        ms_set_loss(m, d.out[0]);
        t_ok(m, ms_wrap(m));
        t_write_zeros(m);
        t_ok(m, ms_find_nonfinite(m, &found));
        assert_int_equal(found.count > 0, cases[how / 2].text != NULL);
        if (cases[how / 2].text) {
            t_text_has(ms_last_error(m), cases[how / 2].text);
        }
        const ms_result result = t_settled(m, ms_step(m, NULL));
        assert_int_equal(result == MS_RESULT_NONFINITE, how / 2 == 1 || how / 2 == 4);
        assert_int_equal(k.warnings > 0, how % 2 == 1 && how / 2 > 0 && how / 2 < 4);
        if (config.debug && result == MS_RESULT_NONFINITE) {
            t_text_has(ms_last_error(m), cases[how / 2].text);
        }
        ms_destroy(m);
    }
}

/* Debug mode's own poison, where nobody writes, is none of a layer's results, in any dtype; a NaN
   that the layer does write is. */
typedef struct padded {
    ms_dtype dtype;
    bool spoils;
} padded;

enum { PADDED = 8 };

static int padded_forward(const ms_call *call) {
    static const uint16_t nan16 = 0x7fff;
    static const uint32_t nan32 = 0x7fc00000u;
    static const uint64_t nan64 = (uint64_t)0x7ff8 << 48;
    const padded *p = (const padded *)call->user;
    const size_t size = (size_t)ms_dtype_bytes(p->dtype);
    t_data(&call->out[0])[0] = 1.0f;
    if (call->saved[0].data != NULL) {
        uint8_t *to = (uint8_t *)call->saved[0].data;
        memset(to, 0, 5 * size); // three elements are padding
        if (p->spoils) {
            memcpy(to + 3 * size,
                   size == 2   ? (const void *)&nan16
                   : size == 4 ? (const void *)&nan32
                               : (const void *)&nan64,
                   size);
        }
    }
    return 0;
}

static int padded_backward(const ms_call *call) {
    for (int i = 0; i < PADDED; ++i) {
        t_contribute(&call->grad_param[0], i, t_data(&call->grad_out[0])[0]);
    }
    return 0;
}

static void padding_is_not_found(void **state) {
    (void)state;
    static const ms_dtype dtypes[] = {MS_DTYPE_F32, MS_DTYPE_F64, MS_DTYPE_F16, MS_DTYPE_BF16};
    for (size_t k = 0; k < sizeof dtypes / sizeof dtypes[0]; ++k) {
        ms_model *m;
        ms_nonfinite found;
        ms_layer_desc d;
        padded p = {dtypes[k], false};
        ms_config config = t_config();
        config.debug = true;
        assert_int_equal(ms_create(&config, &m), MS_RESULT_OK);
        memset(&d, 0, sizeof d);
        d.name = "padded";
        d.forward = padded_forward;
        d.backward = padded_backward;
        d.backward_reads.saved = 1;
        d.user = &p;
        d.param[0] = ms_param(m, "w", MS_DTYPE_F32, ms_shape1(PADDED));
        d.saved[0] = ms_saved(m, "padding", p.dtype, ms_shape1(PADDED));
        d.out[0] = ms_activation(m, "loss", MS_DTYPE_F32, ms_shape1(1));
        ms_register_layer(m, &d);
        ms_set_loss(m, d.out[0]);
        t_ok(m, ms_wrap(m));
        t_write_zeros(m);
        t_ok(m, ms_find_nonfinite(m, &found));
        assert_int_equal(found.layer.id, 0);
        t_ok(m, ms_step(m, NULL));
        assert_int_equal(m->run.nonfinite.count, 0);
        p.spoils = true;
        t_ok(m, ms_find_nonfinite(m, &found));
        assert_int_equal(found.tensor.id, d.saved[0].id);
        assert_true(found.is_nan && found.element == 3 && found.count == 1);
        t_ok(m, ms_step(m, NULL));
        assert_true(m->run.nonfinite.element == 3 && m->run.nonfinite.count == 1);
        ms_destroy(m);
    }
}

/* What a step without a loss has left behind is told, as by any other call. */
static void an_earlier_step_is_reported(void **state) {
    (void)state;
    flawed_net n;
    ms_verify_report report;
    const ms_config config = t_config();
    flawed_start(&n, &config, FLAW_NONE, NULL);
    n.not_finite = NAN;
    ms_result result = ms_step(n.model, NULL);
    result = result == MS_RESULT_OK ? ms_verify(n.model, NULL, NULL, &report) : result;
    assert_int_equal(result, MS_RESULT_NONFINITE);
    n.not_finite = 0.0f;
    t_ok(n.model, ms_verify(n.model, NULL, NULL, &report));
    t_ok(n.model, t_settled(n.model, ms_step(n.model, NULL)));
    ms_destroy(n.model);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(nothing_differs_and_nothing_changes),
        cmocka_unit_test(broken_promises_show),
        cmocka_unit_test(the_tensor_at_fault_is_named),
        cmocka_unit_test(the_plan_in_force_is_what_is_verified),
        cmocka_unit_test(debug_mode_names_the_layer),
        cmocka_unit_test(differences_of_floats),
        cmocka_unit_test(differences_of_every_dtype),
        cmocka_unit_test(a_loss_that_is_not_finite_is_compared),
        cmocka_unit_test(large_tensors_are_compared_in_pieces),
        cmocka_unit_test(what_can_be_read_stays),
        cmocka_unit_test(a_gradient_that_is_off_by_so_much),
        cmocka_unit_test(a_verification_is_not_timed),
        cmocka_unit_test(a_shared_arena_is_left_alone),
#ifndef T_CUDA
        cmocka_unit_test(memory_is_given_back),
        cmocka_unit_test(too_little_memory_is_told),
#endif
        cmocka_unit_test(lent_memory_is_used_and_put_back),
        cmocka_unit_test(what_is_refused),
        cmocka_unit_test(what_is_not_finite_is_found),
        cmocka_unit_test(an_infinite_mask_is_no_find),
        cmocka_unit_test(padding_is_not_found),
        cmocka_unit_test(an_earlier_step_is_reported),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
