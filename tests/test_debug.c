/*  test_debug.c - ms_config.debug catches layers that do not do what they declare: a table of lies,
    each with the layer and the tensor that the error has to name. (That honest layers pass, with
    every feature there is, is test_declarations.c, which runs each test with debug as well.) */
#include "private.h"
#include "toy_layers.h"

/* A row is 64 bytes, so that what lies behind a tensor belongs to somebody else. */
enum { ROWS = 4, COLS = 16, COUNT = ROWS * COLS };

typedef enum lie {
    HONEST,
    // reads what it did not declare, by an address that it kept
    BACKWARD_READS_OUT,
    BACKWARD_READS_OUT_AS_MASK,
    BACKWARD_READS_IN,
    BACKWARD_READS_IN_AS_MASK,
    BACKWARD_READS_SAVED,
    BACKWARD_READS_PARAM,
    BACKWARD_READS_BUFFER,
    BACKWARD_READS_STRANGER,
    FORWARD_READS_STRANGER,
    FORWARD_READS_OLD_OUT,
    FORWARD_READS_WORKSPACE,
    BACKWARD_READS_WORKSPACE,
    BACKWARD_READS_OLD_GRADIENT,
    BACKWARD_ADDS_TO_OVERWRITES,
    BACKWARD_SETS_WHERE_BETA_IS_1,
    // leaves undone
    FORWARD_LEAVES_OUT,
    FORWARD_LEAVES_SAVED,
    BACKWARD_LEAVES_GRAD_IN,
    BACKWARD_LEAVES_GRAD_PARAM,
    RECOMPUTE_LEAVES_OUT,
    // writes what is not its own
    FORWARD_WRITES_BEYOND,
    FORWARD_WRITES_IN,
    FORWARD_WRITES_PARAM,
    FORWARD_WRITES_STRANGER,
    FORWARD_WRITES_STRANGER_ONCE,
    FORWARD_WRITES_BUFFER,
    BACKWARD_WRITES_IN,
    BACKWARD_WRITES_PARAM,
    BACKWARD_WRITES_SAVED,
    BACKWARD_WRITES_GRAD_OUT,
    BACKWARD_WRITES_STRANGER,
    EVAL_WRITES_PARAM,
    // is not what it was
    FORWARD_REDRAWS,
    FORWARD_COUNTS,
    BACKWARD_COUNTS,
    RECOMPUTE_DIFFERS,
    RECOMPUTE_CHANGES_STATE,
    RECOMPUTE_DEPENDS_ON_STATE,
    OWN_RECOMPUTE_DIFFERS,
    OWN_RECOMPUTE_READS_IN,
    OWN_RECOMPUTE_NEEDS_OUT,
    OWN_RECOMPUTE_NEEDS_SAVED,
    LIES
} lie;

typedef struct liar {
    lie tells;
    float *out, *in, *saved, *param, *buffer; // as forward last had them
    float *stranger;                          // the weight of the layer before
    int64_t beyond;                           // index from out[0] that is not its own
    t_rng dice;
    uint32_t count;
} liar;

typedef struct net {
    ms_config config;
    ms_model *m;
    ms_tensor x, weight, h, y, saved, q, buffer, state, loss;
    ms_layer of_liar;
    t_op before, after, last;
    liar of;
} net;

// ------------------------------------------------------------------------------------------------
// the layer: s = x + 1, y = x q b; state += 1 in forward, as it promises

static void forward_lies_first(const ms_call *call, liar *l) {
    float *scratch = (float *)call->workspace;
    bool forward = call->phase == MS_PHASE_FORWARD;
    l->out = t_data(&call->out[0]) != NULL ? t_data(&call->out[0]) : l->out;
    l->in = t_data(&call->in[0]) != NULL ? t_data(&call->in[0]) : l->in;
    l->buffer = t_data(&call->in[1]);
    l->saved = t_data(&call->saved[0]) != NULL ? t_data(&call->saved[0]) : l->saved;
    l->param = t_data(&call->param[0]);
    switch (l->tells) {
    case FORWARD_WRITES_IN:
        l->in[5] = 3.0f;
        break;
    case FORWARD_WRITES_PARAM:
        l->param[5] += 1.0f;
        break;
    case EVAL_WRITES_PARAM:
        l->param[5] += call->phase == MS_PHASE_EVAL ? 1.0f : 0.0f;
        break;
    case FORWARD_WRITES_BUFFER:
        l->buffer[5] *= 0.5f;
        break;
    case FORWARD_WRITES_STRANGER:
    case FORWARD_WRITES_STRANGER_ONCE:
        l->stranger[5] *= 0.5f;
        break;
    case FORWARD_READS_WORKSPACE:
        scratch[0] += 1.0f;
        break;
    case RECOMPUTE_CHANGES_STATE:
        t_data(&call->state[0])[0] += forward ? 0.0f : 1.0f;
        break;
    default:
        break;
    }
}

static float forward_element(const ms_call *call, liar *l, int64_t i) {
    const float *scratch = (const float *)call->workspace;
    float y = l->in[i] * l->param[i % COLS] * l->buffer[i % COLS];
    switch (l->tells) {
    case FORWARD_READS_STRANGER:
        return y + l->stranger[i];
    case FORWARD_READS_OLD_OUT:
        return y + 0.125f * l->out[i];
    case FORWARD_READS_WORKSPACE:
        return y + scratch[0];
    case FORWARD_REDRAWS:
        return t_chance(&l->dice, 0.5) ? y : 0.0f;
    case FORWARD_COUNTS:
        return y + (float)l->count;
    case RECOMPUTE_DIFFERS:
    case OWN_RECOMPUTE_DIFFERS:
        return call->phase == MS_PHASE_RECOMPUTE ? nextafterf(y, 100.0f) : y;
    case OWN_RECOMPUTE_NEEDS_SAVED:
        return call->saved[0].data == NULL ? nextafterf(y, 100.0f) : y;
    case RECOMPUTE_DEPENDS_ON_STATE:
        return y + t_data(&call->state[0])[0];
    default:
        return y;
    }
}

static int liar_forward(const ms_call *call) {
    liar *l = (liar *)call->user;
    float *y = t_data(&call->out[0]), *s = t_data(&call->saved[0]);
    forward_lies_first(call, l);
    l->count += 1;
    for (int64_t i = 0; i < COUNT; ++i) {
        bool leaves = l->tells == FORWARD_LEAVES_OUT ||
                      (l->tells == RECOMPUTE_LEAVES_OUT && call->phase == MS_PHASE_RECOMPUTE);
        if (y != NULL && !(leaves && i == 7)) {
            y[i] = forward_element(call, l, i);
        }
        if (s != NULL && !(l->tells == FORWARD_LEAVES_SAVED && i == COUNT - 1)) {
            s[i] = l->in[i] + (l->tells == OWN_RECOMPUTE_NEEDS_OUT && y == NULL ? 2.0f : 1.0f);
        }
    }
    if (l->tells == FORWARD_WRITES_BEYOND && y != NULL) {
        y[l->beyond] = 3.0f;
    }
    t_data(&call->state[0])[0] += call->phase == MS_PHASE_FORWARD ? 1.0f : 0.0f;
    return 0;
}

static void backward_lies_last(const ms_call *call, const liar *l) {
    switch (l->tells) {
    case BACKWARD_WRITES_IN:
        t_data(&call->in[0])[3] = 0.5f;
        break;
    case BACKWARD_WRITES_PARAM:
        t_data(&call->param[0])[3] += 0.5f;
        break;
    case BACKWARD_WRITES_SAVED:
        t_data(&call->saved[0])[3] = 0.5f;
        break;
    case BACKWARD_WRITES_GRAD_OUT:
        t_data(&call->grad_out[0])[3] = 0.5f;
        break;
    case BACKWARD_WRITES_STRANGER:
        l->stranger[3] += 0.5f;
        break;
    default:
        break;
    }
}

/* What a lie adds to a slope. */
static float backward_extra(const ms_call *call, const liar *l, int64_t i) {
    const float *scratch = (const float *)call->workspace;
    switch (l->tells) {
    case BACKWARD_READS_OUT:
        return l->out[i];
    case BACKWARD_READS_OUT_AS_MASK:
        return l->out[i] > 0.0f ? 1.0f : 0.0f;
    case BACKWARD_READS_IN:
        return l->in[i];
    case BACKWARD_READS_IN_AS_MASK:
        return l->in[i] > 0.0f ? 1.0f : 0.0f;
    case BACKWARD_READS_SAVED:
        return l->saved[i];
    case BACKWARD_READS_PARAM:
        return l->param[i % COLS];
    case BACKWARD_READS_BUFFER:
        return l->buffer[i % COLS];
    case BACKWARD_READS_STRANGER:
        return l->stranger[i];
    case BACKWARD_READS_WORKSPACE:
        return scratch[1];
    case BACKWARD_COUNTS:
        return (float)l->count;
    default:
        return 0.0f;
    }
}

static int liar_backward(const ms_call *call) {
    liar *l = (liar *)call->user;
    float *grad_in = t_data(&call->grad_in[0]);
    const float *x = t_data(&call->in[0]), *s = t_data(&call->saved[0]);
    const float *q = t_data(&call->param[0]);
    bool blind = l->tells == BACKWARD_READS_OLD_GRADIENT || l->tells == BACKWARD_ADDS_TO_OVERWRITES;
    l->count += 1;
    for (int64_t i = 0; i < COUNT && grad_in != NULL; ++i) {
        float slope = backward_extra(call, l, i);
        slope += q != NULL ? q[i % COLS] : 0.0f;
        slope += x != NULL && s != NULL ? s[i] - x[i] : 0.0f;
        if (l->tells == BACKWARD_LEAVES_GRAD_IN && i == 9) {
            continue;
        }
        if (blind) {
            grad_in[i] += slope * t_grad_out(call, 0, i);
        } else {
            t_contribute(&call->grad_in[0], i, slope * t_grad_out(call, 0, i));
        }
    }
    for (int64_t c = 0; c < COLS; ++c) {
        float sum = 0.0f;
        for (int64_t i = c; i < COUNT; i += COLS) {
            sum += t_grad_out(call, 0, i);
        }
        if (l->tells == BACKWARD_SETS_WHERE_BETA_IS_1) {
            t_data(&call->grad_param[0])[c] = sum;
        } else if (l->tells != BACKWARD_LEAVES_GRAD_PARAM || c != 2) {
            t_contribute(&call->grad_param[0], c, sum);
        }
    }
    backward_lies_last(call, l);
    return 0;
}

// ------------------------------------------------------------------------------------------------
// the lies: how, and what the error names

enum { READS_ALL = 15, READS_IN = 1, READS_SAVED = 2, READS_PARAM = 4, READS_BUFFER = 8 };

typedef struct lie_info {
    const char *what;
    uint32_t reads;  // that it declares for backward
    bool recomputes; // it takes a recomputation to see it
    bool evaluates;  // it takes an eval
    const char *tensor;
} lie_info;

static const lie_info infos[LIES] = {
    {"honest", READS_ALL, false, false, NULL},
    {"backward reads an output", READS_ALL, false, false, NULL},
    {"backward reads an output as a mask", READS_ALL, false, false, NULL},
    {"backward reads an input", READS_ALL & ~READS_IN, false, false, NULL},
    {"backward reads an input as a mask", READS_ALL & ~READS_IN, false, false, NULL},
    {"backward reads saved", READS_ALL & ~READS_SAVED, false, false, NULL},
    {"backward reads a param", READS_ALL & ~READS_PARAM, false, false, NULL},
    {"backward reads a buffer", READS_ALL & ~READS_BUFFER, false, false, NULL},
    {"backward reads a stranger's param", READS_ALL, false, false, NULL},
    {"forward reads a stranger's param", READS_ALL, false, false, "weight"},
    {"forward reads what its output was", READS_ALL, false, false, "y-out"},
    {"forward reads its workspace", READS_ALL, false, false, "workspace of 64 bytes"},
    {"backward reads its workspace", READS_ALL, false, false, "workspace of 64 bytes"},
    {"backward adds where beta is 0", READS_ALL, false, false, NULL},
    {"backward adds where it overwrites", READS_ALL, false, false, NULL},
    {"backward sets where beta is 1", READS_ALL, false, false, "q-scale"},
    {"forward leaves out unwritten", READS_ALL, false, false, "y-out"},
    {"forward leaves saved unwritten", READS_ALL, false, false, "s-saved"},
    {"backward leaves a gradient unwritten", READS_ALL, false, false, "hidden"},
    {"backward leaves a gradient of a param unwritten", READS_ALL, false, false, "q-scale"},
    {"recompute leaves out unwritten", READS_ALL, true, false, "y-out"},
    {"forward writes beyond its output", READS_ALL, false, false, NULL},
    {"forward writes its input", READS_ALL, false, false, "hidden"},
    {"forward writes its param", READS_ALL, false, false, "q-scale"},
    {"forward writes a stranger's param", READS_ALL, false, false, "weight"},
    {"forward, which runs once, writes a stranger's param", READS_ALL, false, false, "weight"},
    {"forward writes a buffer that is no state", READS_ALL, false, false, "gain"},
    {"backward writes an input", READS_ALL, false, false, "hidden"},
    {"backward writes a param", READS_ALL, false, false, "q-scale"},
    {"backward writes saved", READS_ALL, false, false, "s-saved"},
    {"backward writes grad_out", READS_ALL, false, false, "y-out"},
    {"backward writes a stranger's param", READS_ALL, false, false, "weight"},
    {"eval writes a param", READS_ALL, false, true, "q-scale"},
    {"forward draws from its own dice", READS_ALL, false, false, "y-out"},
    {"forward counts its calls", READS_ALL, false, false, "y-out"},
    {"backward counts its calls", READS_ALL, false, false, "hidden"},
    {"recompute gives other bits", READS_ALL, true, false, "y-out"},
    {"recompute changes state that it keeps", READS_ALL, true, false, "running"},
    {"recompute depends on state that it keeps", READS_ALL, true, false, NULL},
    {"a recompute of its own gives other bits", READS_ALL, true, false, "y-out"},
    {"a recompute of its own reads an input", READS_ALL & ~READS_IN, true, false, "in[0]"},
    {"a recompute of its own needs an output", READS_ALL, false, false, "s-saved"},
    {"a recompute of its own needs a saved tensor", READS_ALL, false, false, "y-out"},
};

/* Where the plan puts y, and memory that the forward of the liar is not given. */
typedef struct place {
    ms_layer layer;
    uint64_t arena_bytes, y, beyond;
    bool found;
} place;

static bool is_given(const ms_event *event, uint64_t offset) {
    for (uint32_t i = 0; i < event->operand_count; ++i) {
        const ms_event_operand *o = &event->operands[i];
        if (offset + 64 > o->offset && offset < o->offset + o->bytes) {
            return true;
        }
    }
    return false;
}

static void find_place(const ms_event *event, void *user) {
    place *p = (place *)user;
    if (event->kind != MS_EVENT_FORWARD || event->layer.id != p->layer.id) {
        return;
    }
    for (uint32_t i = 0; i < event->operand_count; ++i) {
        if (event->operands[i].kind == MS_OPERAND_OUT) {
            p->y = event->operands[i].offset;
        }
    }
    uint64_t offset = p->y; // the next behind y, or else before it
    while (offset + 64 <= p->arena_bytes && is_given(event, offset)) {
        offset += 64;
    }
    if (offset + 64 > p->arena_bytes) {
        for (offset = p->y; offset > 0 && is_given(event, offset); offset -= 64) {
        }
    }
    p->beyond = offset;
    p->found = !is_given(event, offset);
}

static void register_liar(net *n) {
    const lie_info *info = &infos[n->of.tells];
    ms_layer_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.name = "liar";
    desc.forward = liar_forward;
    desc.backward = liar_backward;
    desc.user = &n->of;
    desc.in[0] = n->h;
    desc.in[1] = n->buffer;
    desc.out[0] = n->y;
    desc.saved[0] = n->saved;
    desc.param[0] = n->q;
    desc.state[0] = n->state;
    desc.recompute_keeps_state = true;
    desc.backward_reads.in = (info->reads & READS_IN) | (info->reads & READS_BUFFER) >> 2;
    desc.backward_reads.saved = (info->reads & READS_SAVED) != 0;
    desc.backward_reads.param = (info->reads & READS_PARAM) != 0;
    if (n->of.tells >= OWN_RECOMPUTE_DIFFERS) {
        desc.recompute = liar_forward;
        desc.recompute_reads.in = n->of.tells == OWN_RECOMPUTE_READS_IN ? 2 : 3;
        desc.recompute_reads.param = 1;
    }
    desc.no_recompute = n->of.tells == FORWARD_WRITES_STRANGER_ONCE;
    desc.forward_workspace.bytes = desc.backward_workspace.bytes = 64;
    desc.overwrites.in = n->of.tells == BACKWARD_ADDS_TO_OVERWRITES;
    n->of_liar = ms_register_layer(n->m, &desc);
}

static void net_create(net *n, lie tells, bool debug, bool smallest, bool keeps_y) {
    ms_tensor none = {0};
    memset(n, 0, sizeof *n);
    n->config = t_config();
    n->config.debug = debug;
    n->config.force_optimize = smallest;
    n->config.accumulation_steps = tells == BACKWARD_SETS_WHERE_BETA_IS_1 ? 2 : 1;
    n->of.tells = tells;
    n->of.dice = t_seed(3);
    assert_int_equal(ms_create(&n->config, &n->m), MS_RESULT_OK);
    ms_model *m = n->m;
    ms_shape shape = ms_shape2(ROWS, COLS);
    n->x = ms_input(m, "x", MS_DTYPE_F32, shape);
    n->weight = ms_param(m, "weight", MS_DTYPE_F32, ms_shape2(COLS, COLS));
    n->q = ms_param(m, "q-scale", MS_DTYPE_F32, ms_shape1(COLS));
    n->buffer = ms_buffer(m, "gain", MS_DTYPE_F32, ms_shape1(COLS));
    n->state = ms_buffer(m, "running", MS_DTYPE_F32, ms_shape1(1));
    n->h = ms_activation(m, "hidden", MS_DTYPE_F32, shape);
    n->y = ms_activation(m, "y-out", MS_DTYPE_F32, shape);
    n->saved = ms_saved(m, "s-saved", MS_DTYPE_F32, shape);
    ms_layer_desc before = t_layer(&n->before, T_MATMUL, "before", n->x, n->h);
    before.param[0] = n->weight;
    ms_register_layer(m, &before);
    register_liar(n);
    const ms_tensor z = t_add_layer(m, &n->after, T_SQUASH, "after", n->y, none);
    n->loss = t_set_loss(m, &n->last, T_LOSS, z);
    if (keeps_y) {
        ms_add_output(m, n->y);
    }
    if (infos[tells].recomputes) {
        ms_set_tensor_technique(m, n->y, MS_TECHNIQUE_CHECKPOINTING,
                                keeps_y ? MS_SWITCH_DEFAULT : MS_SWITCH_ON);
        ms_set_tensor_technique(m, n->saved, MS_TECHNIQUE_CHECKPOINTING, MS_SWITCH_ON);
    }
}

static void net_start(net *n) {
    float data[COLS * COLS];
    t_rng rng = t_seed(11);
    ms_memory_report report;
    place where;
    t_ok(n->m, ms_wrap(n->m));
    t_fill(&rng, data, COLS * COLS, 1.0f);
    t_ok(n->m, ms_write(n->m, n->x, data));
    t_ok(n->m, ms_write(n->m, n->buffer, data + 1));
    t_fill(&rng, data, COLS * COLS, 0.5f);
    t_ok(n->m, ms_write(n->m, n->weight, data));
    t_fill(&rng, data, COLS, 1.0f);
    t_ok(n->m, ms_write(n->m, n->q, data));
    n->of.stranger = (float *)ms_data(n->m, n->weight);
    assert_non_null(n->of.stranger);
    t_report(n->m, &report);
    memset(&where, 0, sizeof where);
    where.layer = n->of_liar;
    where.arena_bytes = report.arena_bytes;
    t_ok(n->m, ms_visit_events(n->m, MS_PROGRAM_TRAIN, find_place, &where));
    assert_true(where.found);
    n->of.beyond = ((int64_t)where.beyond - (int64_t)where.y) / (int64_t)sizeof(float);
}

static uint32_t faults;

static void complain(lie tells, bool smallest, const char *how, const ms_model *m) {
    print_error("%s%s: %s: \"%s\"\n", infos[tells].what, smallest ? " (smallest)" : "", how,
                ms_last_error(m));
    faults += 1;
}

static bool same_values(net *n, ms_tensor tensor, const float *before, uint64_t count) {
    float now[COLS * COLS];
    t_ok(n->m, ms_read(n->m, tensor, now));
    return memcmp(before, now, (size_t)count * sizeof(float)) == 0;
}

/* A step with debug: MS_RESULT_CONTRACT, with the names; params as they were. */
static void expect_caught(lie tells, bool smallest, bool keeps_y) {
    net n;
    float weight[COLS * COLS], q[COLS];
    net_create(&n, tells, true, smallest, keeps_y);
    net_start(&n);
    t_ok(n.m, ms_read(n.m, n.weight, weight));
    t_ok(n.m, ms_read(n.m, n.q, q));
    ms_result result = infos[tells].evaluates ? ms_eval(n.m, NULL) : ms_step(n.m, NULL);
    if (tells == BACKWARD_SETS_WHERE_BETA_IS_1 && result == MS_RESULT_OK) {
        result = ms_step(n.m, NULL); // the second micro-batch
    }
    if (result != MS_RESULT_CONTRACT) {
        complain(tells, smallest, ms_result_name(result), n.m);
        ms_destroy(n.m);
        return;
    }
    const char *text = ms_last_error(n.m);
    if (strstr(text, "layer 1 \"liar\"") == NULL) {
        complain(tells, smallest, "the layer is not named", n.m);
    }
    if (infos[tells].tensor != NULL && strstr(text, infos[tells].tensor) == NULL) {
        complain(tells, smallest, "the tensor is not named", n.m);
    }
    if (tells < OWN_RECOMPUTE_DIFFERS && strstr(text, "recompute callback") != NULL) {
        complain(tells, smallest, "there is no recompute callback", n.m);
    }
    if (tells == RECOMPUTE_DIFFERS &&
        strstr(text, "its forward callback, run again (MS_PHASE_RECOMPUTE), makes") == NULL) {
        complain(tells, smallest, "it does not say that forward was run again", n.m);
    }
    if (t_environment("TEXTS", 0) != 0) {
        printf("%-50s | %s\n", infos[tells].what, text);
    }
    if (!same_values(&n, n.weight, weight, COLS * COLS) || !same_values(&n, n.q, q, COLS)) {
        complain(tells, smallest, "params have changed", n.m);
    }
    n.of.tells = HONEST; // and then it mends its ways, if its declarations allow
    if (infos[tells].reads == READS_ALL && tells != BACKWARD_ADDS_TO_OVERWRITES) {
        result = ms_step(n.m, NULL);
        if (result != MS_RESULT_OK) {
            complain(tells, smallest, "an honest step after the lie", n.m);
        }
    }
    ms_destroy(n.m);
}

/* Whether all that a lie does with what it reads is to compare it with 0. Told of finite numbers alone,
   compilers compare the poison, which is NaN, as they like: as if it were positive, say, as the other
   poison is. */
static bool asks_for_the_sign(lie tells) {
#ifdef __FAST_MATH__
    return tells == BACKWARD_READS_OUT_AS_MASK || tells == BACKWARD_READS_IN_AS_MASK;
#else
    (void)tells;
    return false;
#endif
}

static void lies_are_caught(void **state) {
    (void)state;
    faults = 0;
    for (int tells = HONEST + 1; tells < LIES; ++tells) {
        if (asks_for_the_sign((lie)tells)) {
            continue;
        }
        expect_caught((lie)tells, false, false);
        expect_caught((lie)tells, true, false);
    }
    if (faults != 0) {
        fail_msg("%u faults in %u lies", (unsigned)faults, (unsigned)LIES - 1);
    }
}

/* An output that is kept, or that a layer after it reads, lies there for all to read. */
static void lies_about_what_still_lives(void **state) {
    (void)state;
    faults = 0;
    expect_caught(BACKWARD_READS_OUT, false, true);
    for (int smallest = 0; smallest < 2 && !asks_for_the_sign(BACKWARD_READS_OUT_AS_MASK);
         ++smallest) {
        expect_caught(BACKWARD_READS_OUT_AS_MASK, smallest == 1, true);
    }
    assert_int_equal(faults, 0);
}

/* Without debug a lie goes through; with it an honest layer does, and gives the same bits. */
static void the_honest_pass(void **state) {
    (void)state;
    for (int smallest = 0; smallest < 2; ++smallest) {
        net n, twin;
        net_create(&n, HONEST, true, smallest != 0, false);
        net_create(&twin, HONEST, false, false, false);
        net_start(&n);
        net_start(&twin);
        for (int step = 0; step < 4; ++step) {
            float weight[COLS * COLS], q[COLS], running[1];
            double losses[2];
            t_ok(n.m, ms_step(n.m, &losses[0]));
            t_ok(twin.m, ms_step(twin.m, &losses[1]));
            assert_true(losses[0] == losses[1]);
            t_ok(twin.m, ms_read(twin.m, twin.weight, weight));
            t_ok(twin.m, ms_read(twin.m, twin.q, q));
            t_ok(twin.m, ms_read(twin.m, twin.state, running));
            assert_true(running[0] == (float)(step + 1));
            assert_true(same_values(&n, n.weight, weight, COLS * COLS));
            assert_true(same_values(&n, n.q, q, COLS));
            assert_true(same_values(&n, n.state, running, 1));
            t_ok(n.m, ms_eval(n.m, &losses[0]));
            t_ok(twin.m, ms_eval(twin.m, &losses[1]));
            assert_true(losses[0] == losses[1]);
        }
        ms_destroy(n.m);
        ms_destroy(twin.m);
    }
    net careless;
    net_create(&careless, FORWARD_REDRAWS, false, false, false);
    net_start(&careless);
    t_ok(careless.m, ms_step(careless.m, NULL));
    ms_destroy(careless.m);
}

/* A chain of toy layers: each kind declares exactly what it reads. */
static void the_kinds_of_testing_pass(void **state) {
    (void)state;
    for (int smallest = 0; smallest < 2; ++smallest) {
        t_chain chain, twin;
        ms_config config = t_config();
        config.force_optimize = smallest != 0;
        t_chain_start(&twin, &config, 6);
        config.debug = true;
        t_chain_start(&chain, &config, 6);
        for (int step = 0; step < 3; ++step) {
            t_ok(chain.model, ms_step(chain.model, NULL));
            t_ok(twin.model, ms_step(twin.model, NULL));
            t_chain_same(&chain, &twin);
        }
        ms_destroy(chain.model);
        ms_destroy(twin.model);
    }
}

/* A gradient larger than any buffer, of which one element is written over: the last but one. */
enum { LONG = 5000 };

typedef struct long_layer {
    float slope; // of the first element
    bool lies;
} long_layer;

static int long_forward(const ms_call *call) {
    float sum = 0.0f;
    for (int i = 0; i < LONG; ++i) {
        sum += 0.001f * t_data(&call->param[0])[i];
    }
    t_data(&call->out[0])[0] = sum;
    return 0;
}

static int long_backward(const ms_call *call) {
    const long_layer *l = (const long_layer *)call->user;
    const float gradient = t_data(&call->grad_out[0])[0];
    for (int i = 0; i < LONG; ++i) {
        if (l->lies && i == LONG - 2) {
            t_data(&call->grad_param[0])[i] = gradient * 0.001f;
        } else {
            t_contribute(&call->grad_param[0], i, gradient * (i == 0 ? l->slope : 0.001f));
        }
    }
    return 0;
}

/* A model in debug mode whose only layer makes the loss from a param with so many elements. */
static ms_model *start_one(ms_config config, ms_layer_desc d, int count, float element) {
    float param[LONG];
    ms_model *m;
    config.debug = true;
    assert_int_equal(ms_create(&config, &m), MS_RESULT_OK);
    d.param[0] = ms_param(m, "p", MS_DTYPE_F32, ms_shape1(count));
    d.out[0] = ms_activation(m, "loss", MS_DTYPE_F32, ms_shape1(1));
    ms_register_layer(m, &d);
    ms_set_loss(m, d.out[0]);
    for (int i = 0; i < count; ++i) {
        param[i] = element;
    }
    t_ok(m, ms_wrap(m));
    t_ok(m, ms_write(m, d.param[0], param));
    return m;
}

static ms_model *start_long(const ms_config *config, long_layer *l) {
    return start_one(*config, t_new_layer("long", long_forward, long_backward, l), LONG, 0.0f);
}

/* Writes to where its output lay `lag` runs ago, before it writes its output. */
enum { RUNS_KEPT = 16 };

typedef struct late_layer {
    uint32_t lag, runs;
    float *out[RUNS_KEPT];
} late_layer;

static int late_forward(const ms_call *call) {
    late_layer *l = (late_layer *)call->user;
    float *out = t_data(&call->out[0]);
    if (l->lag > 0 && l->runs >= l->lag) {
        l->out[(l->runs - l->lag) % RUNS_KEPT][0] = 5.0f;
    }
    l->out[l->runs++ % RUNS_KEPT] = out;
    out[0] = t_data(&call->param[0])[0];
    return 0;
}

/* What it writes depends on where that is, in a way that differs between any two places near by. */
static int placed_forward(const ms_call *call) {
    const uintptr_t address = (uintptr_t)call->out[0].data;
    t_data(&call->out[0])[0] = (float)(address % 65536u) * t_data(&call->param[0])[0];
    return 0;
}

static int late_backward(const ms_call *call) {
    t_contribute(&call->grad_param[0], 0, t_grad_out(call, 0, 0));
    return 0;
}

/* In a step a layer is never run twice at one place, so a pointer of any earlier run shows, not only
   one of the run just before. */
static void a_pointer_of_any_earlier_run_shows(void **state) {
    (void)state;
    for (uint32_t lag = 0; lag < 4; ++lag) {
        late_layer l;
        memset(&l, 0, sizeof l);
        l.lag = lag;
        ms_layer_desc d = t_new_layer("late", late_forward, late_backward, &l);
        d.backward_reads.nothing = true;
        ms_model *m = start_one(t_config(), d, 1, 1.0f);
        t_error(m, ms_step(m, NULL), lag == 0 ? MS_RESULT_OK : MS_RESULT_CONTRACT);
        assert_true(l.runs > lag);
        if (lag > 0) {
            t_text_has(ms_last_error(m), "layer 0 \"late\": its forward callback");
            t_text_has(ms_last_error(m), " writes ");
        }
        ms_destroy(m);
    }
}

/* A layer that depends on its addresses gives the same bits at the same place, where it is run again
   to see why it differs elsewhere: it is not said to give other bits each time. */
static void a_layer_that_depends_on_its_addresses(void **state) {
    (void)state;
    ms_layer_desc d = t_new_layer("placed", placed_forward, late_backward, NULL);
    d.backward_reads.nothing = true;
    ms_model *m = start_one(t_config(), d, 1, 1.0f);
    t_error(m, ms_step(m, NULL), MS_RESULT_CONTRACT);
    t_text_has(ms_last_error(m), "uses what an earlier call has left behind for out[0]");
    ms_destroy(m);
}

static void a_sum_is_checked_to_its_end(void **state) {
    (void)state;
    long_layer l = {0.001f, false};
    const ms_config config = t_config();
    ms_model *m = start_long(&config, &l);
    t_ok(m, ms_step(m, NULL));
    l.lies = true;
    t_error(m, ms_step(m, NULL), MS_RESULT_CONTRACT);
    t_text_has(ms_last_error(m), "layer 0 \"long\": its backward callback writes over");
    ms_destroy(m);
}

/* A gradient that overflows does so whatever it is added to: no lie. */
static void an_infinite_gradient_is_no_lie(void **state) {
    (void)state;
    const float slopes[] = {(float)INFINITY, 3e38f, -3e38f, 1e30f, -1e30f};
    for (int k = 0; k < 10; ++k) {
        long_layer l = {slopes[k / 2], false};
        ms_config config = t_config();
        config.accumulation_steps = k % 2 ? 2 : 1; // the plan has beta 1: beta 0 is tried as well
        ms_model *m = start_long(&config, &l);
        t_ok(m, ms_step(m, NULL));
        if (k % 2) { // the sum overflows, or not
            const ms_result result = ms_step(m, NULL);
            assert_true(result == MS_RESULT_OK || result == MS_RESULT_NONFINITE);
        }
        ms_destroy(m);
    }
}

/* Fills its workspace, which is far larger than its operands: in one callback or another. */
enum { ROOMY_BYTES = 1 << 20 };

static void fill_workspace(const ms_call *call) {
    memset(call->workspace, 0x11, (size_t)call->workspace_bytes);
    *(uint64_t *)call->user += call->workspace_bytes == ROOMY_BYTES;
}

static int roomy_forward(const ms_call *call) {
    fill_workspace(call);
    t_data(&call->out[0])[0] = t_data(&call->param[0])[0];
    return 0;
}

static int roomy_backward(const ms_call *call) {
    fill_workspace(call);
    t_contribute(&call->grad_param[0], 0, t_data(&call->grad_out[0])[0]);
    return 0;
}

static void each_workspace_has_room(void **state) {
    (void)state;
    for (int which = 0; which < 3; ++which) {
        uint64_t calls = 0;
        ms_layer_desc d = t_new_layer("roomy", roomy_forward, roomy_backward, &calls);
        d.recompute = roomy_forward;
        d.recompute_reads.param = 1;
        ms_workspace *const workspaces[] = {&d.forward_workspace, &d.backward_workspace,
                                            &d.recompute_workspace};
        workspaces[which]->bytes = ROOMY_BYTES;
        ms_model *m = start_one(t_config(), d, 1, 1.0f);
        t_ok(m, ms_step(m, NULL));
        assert_true(calls > 0);
        ms_destroy(m);
    }
}

/* The last layer that was logged, so that even a crash has a name. */
typedef struct last_log {
    char text[64];
    uint32_t lines;
} last_log;

static void note_log(ms_log_level level, const char *tag, const char *text, void *user) {
    last_log *log = (last_log *)user;
    if (level == MS_LOG_DEBUG && strcmp(tag, "debug") == 0) {
        snprintf(log->text, sizeof log->text, "%s", text);
        log->lines += 1;
    }
}

static int logged_forward(const ms_call *call) {
    last_log *log = (last_log *)call->user;
    if (call->phase == MS_PHASE_FORWARD) { // a recomputation is tried before backward too
        assert_string_equal(log->text, "layer 0 \"logged\": forward");
    }
    t_data(&call->out[0])[0] = t_data(&call->param[0])[0];
    return 0;
}

static int logged_backward(const ms_call *call) {
    last_log *log = (last_log *)call->user;
    if (call->phase == MS_PHASE_BACKWARD) {
        assert_string_equal(log->text, "layer 0 \"logged\": backward");
        t_contribute(&call->grad_param[0], 0, t_data(&call->grad_out[0])[0]);
    }
    return 0;
}

static void layers_are_logged_before_they_run(void **state) {
    (void)state;
    last_log log;
    memset(&log, 0, sizeof log);
    ms_config config = t_config();
    config.log = note_log;
    config.log_user = &log;
    const ms_layer_desc d = t_new_layer("logged", logged_forward, logged_backward, &log);
    ms_model *m = start_one(config, d, 1, 1.0f);
    t_ok(m, ms_step(m, NULL));
    assert_int_equal(log.lines, 2);
    ms_destroy(m);
}

/* A callback that fails while it is checked is a callback that fails. */
static void callbacks_still_fail(void **state) {
    (void)state;
    net n;
    net_create(&n, HONEST, true, false, false);
    net_start(&n);
    n.after.failing = 1u << MS_PHASE_FORWARD;
    t_error(n.m, ms_step(n.m, NULL), MS_RESULT_CALLBACK);
    t_text_has(ms_last_error(n.m), "after");
    n.after.failing = 1u << MS_PHASE_BACKWARD;
    t_error(n.m, ms_step(n.m, NULL), MS_RESULT_CALLBACK);
    n.after.failing = 0;
    t_ok(n.m, ms_step(n.m, NULL));
    ms_destroy(n.m);
}

// ------------------------------------------------------------------------------------------------
// calls in 16 bits: y = h q + b, s = h + 1; b and, where that is asked for, y stay F32

typedef enum half_lie {
    HALF_HONEST,
    OUT_AS_FLOATS,
    SAVED_AS_FLOATS,
    IN_AS_FLOATS,
    PARAM_AS_FLOATS,
    GRAD_OUT_AS_FLOATS,
    GRAD_IN_AS_FLOATS,
    GRAD_PARAM_AS_FLOATS,
    OUT_AS_HALF,
    GRAD_PARAM_AS_HALF,
    GRAD_PARAM_AS_HALF_SUM, // where the layer only adds
    HALF_LIES
} half_lie;

/* What each error says. */
static const char *const half_texts[HALF_LIES][2] = {
    {"", ""},
    {"writes beyond the end of out[0]", "elements have 2 bytes"},
    {"writes beyond the end of saved[0]", "elements have 2 bytes"},
    {"reads beyond the end of in[0]", "elements have 2 bytes"},
    {"reads beyond the end of param[0]", "elements have 2 bytes"},
    {"reads beyond the end of grad_out[0]", "elements have 2 bytes"},
    {"writes beyond the end of grad_in[0]", "elements have 2 bytes"},
    {"writes beyond the end of grad_param[0]", "elements have 2 bytes"},
    {"reads a part that nobody has written of in[0]", "the dtype of its ms_view"},
    {"writes elements of 2 bytes to grad_param[1]", "half_gradients"},
    {"writes elements of 2 bytes to grad_param[1]", "half_gradients"},
};

typedef struct half_net {
    ms_model *m;
    ms_tensor x, w, h, q, b, y, s, loss;
    half_lie tells;
    float extreme;    // added to element 3 of one gradient
    int extreme_at;   // 0: of in; 1, 2: of a param
    float read[COLS]; // q, by the last forward
    bool reads;
} half_net;

/* An element, in a dtype that is that of the view unless the layer lies about it. */
static float half_get(const ms_view *v, int64_t i, bool lies) {
    return msi_load(v->data, lies ? MS_DTYPE_F32 : v->dtype, (uint64_t)i);
}

static void half_put(const ms_view *v, int64_t i, float x, ms_dtype dtype) {
    if (v->data != NULL) {
        msi_store_as(v->data, dtype, (uint64_t)i, x);
    }
}

static void half_give(const ms_view *v, int64_t i, float x, ms_dtype dtype, bool adds) {
    if (v->data != NULL) {
        const bool sum = adds || v->beta != 0.0f;
        half_put(v, i, sum ? msi_load(v->data, dtype, (uint64_t)i) + x : x, dtype);
    }
}

static ms_dtype half_dtype(const ms_view *v, bool as_floats) {
    return as_floats ? MS_DTYPE_F32 : v->dtype;
}

static int half_forward(const ms_call *call) {
    half_net *n = (half_net *)call->user;
    const ms_view *y = &call->out[0], *s = &call->saved[0];
    const ms_dtype y_dtype =
        n->tells == OUT_AS_HALF ? call->dtype : half_dtype(y, n->tells == OUT_AS_FLOATS);
    for (int64_t i = 0; i < COUNT; ++i) {
        const float h = half_get(&call->in[0], i, n->tells == IN_AS_FLOATS);
        const float q = half_get(&call->param[0], i % COLS, n->tells == PARAM_AS_FLOATS);
        half_put(y, i, h * q + t_data(&call->param[1])[i % COLS], y_dtype);
        half_put(s, i, h + 1.0f, half_dtype(s, n->tells == SAVED_AS_FLOATS));
    }
    return n->reads ? (int)ms_read(call->model, n->q, n->read) : 0;
}

static int half_backward(const ms_call *call) {
    const half_net *n = (const half_net *)call->user;
    const bool as_half = n->tells == GRAD_PARAM_AS_HALF || n->tells == GRAD_PARAM_AS_HALF_SUM;
    const ms_view *grad_in = &call->grad_in[0], *grad_q = &call->grad_param[0];
    const ms_view *grad_b = &call->grad_param[1];
    for (int64_t i = 0; i < COUNT; ++i) {
        const float g = half_get(&call->grad_out[0], i, n->tells == GRAD_OUT_AS_FLOATS);
        const float x = i == 3 && n->extreme_at == 0 ? n->extreme : 0.0f;
        half_give(grad_in, i, g * half_get(&call->param[0], i % COLS, false) + x,
                  half_dtype(grad_in, n->tells == GRAD_IN_AS_FLOATS), false);
    }
    for (int64_t c = 0; c < COLS; ++c) {
        float of_q = c == 3 && n->extreme_at == 1 ? n->extreme : 0.0f;
        float of_b = c == 3 && n->extreme_at == 2 ? n->extreme : 0.0f;
        for (int64_t i = c; i < COUNT; i += COLS) {
            const float g = half_get(&call->grad_out[0], i, n->tells == GRAD_OUT_AS_FLOATS);
            of_q += g * (half_get(&call->saved[0], i, false) - 1.0f);
            of_b += g;
        }
        half_give(grad_q, c, of_q, half_dtype(grad_q, n->tells == GRAD_PARAM_AS_FLOATS), false);
        half_give(grad_b, c, of_b, as_half ? call->dtype : MS_DTYPE_F32,
                  n->tells == GRAD_PARAM_AS_HALF_SUM);
    }
    return 0;
}

/* h = x w */
static int half_lift(const ms_call *call) {
    for (int64_t i = 0; i < COUNT && call->out[0].data != NULL; ++i) {
        half_put(&call->out[0], i,
                 half_get(&call->in[0], i, false) * half_get(&call->param[0], i % COLS, false),
                 call->out[0].dtype);
    }
    return 0;
}

static int half_lift_backward(const ms_call *call) {
    const ms_view *grad = &call->grad_param[0];
    for (int64_t c = 0; c < COLS; ++c) {
        float sum = 0.0f;
        for (int64_t i = c; i < COUNT; i += COLS) {
            sum += half_get(&call->grad_out[0], i, false) * half_get(&call->in[0], i, false);
        }
        half_give(grad, c, sum, grad->dtype, false);
    }
    return 0;
}

/* The loss of a row is half its sum of squares; in F32. */
static int half_squares(const ms_call *call) {
    for (int64_t r = 0; r < ROWS; ++r) {
        float sum = 0.0f;
        for (int64_t i = r * COLS; i < (r + 1) * COLS; ++i) {
            sum += 0.5f * half_get(&call->in[0], i, false) * half_get(&call->in[0], i, false);
        }
        t_data(&call->out[0])[r] = sum;
    }
    return 0;
}

static int half_squares_backward(const ms_call *call) {
    for (int64_t i = 0; i < COUNT; ++i) {
        half_give(&call->grad_in[0], i,
                  half_get(&call->in[0], i, false) * t_data(&call->grad_out[0])[i / COLS],
                  call->grad_in[0].dtype, false);
    }
    return 0;
}

static void half_register(half_net *n) {
    ms_layer_desc d;
    const ms_shape shape = ms_shape2(ROWS, COLS);
    n->x = ms_input(n->m, "x", MS_DTYPE_F32, shape);
    n->w = ms_param(n->m, "w", MS_DTYPE_F32, ms_shape1(COLS));
    n->q = ms_param(n->m, "q", MS_DTYPE_F32, ms_shape1(COLS));
    n->b = ms_param(n->m, "b", MS_DTYPE_F32, ms_shape1(COLS));
    n->h = ms_activation(n->m, "h", MS_DTYPE_F32, shape);
    n->y = ms_activation(n->m, "y", MS_DTYPE_F32, shape);
    n->s = ms_saved(n->m, "s", MS_DTYPE_F32, shape);
    n->loss = ms_activation(n->m, "losses", MS_DTYPE_F32, ms_shape1(ROWS));
    ms_layer layer[3];
    memset(&d, 0, sizeof d);
    d.dtypes.accepts = 1u << MS_DTYPE_BF16 | 1u << MS_DTYPE_F16;
    d.name = "lift";
    d.forward = half_lift;
    d.backward = half_lift_backward;
    d.in[0] = n->x;
    d.param[0] = n->w;
    d.out[0] = n->h;
    layer[0] = ms_register_layer(n->m, &d);
    d.name = "liar";
    d.forward = half_forward;
    d.backward = half_backward;
    d.user = n;
    d.in[0] = n->h;
    d.param[0] = n->q;
    d.param[1] = n->b;
    d.out[0] = n->y;
    d.saved[0] = n->s;
    d.dtypes.f32_param = 2;
    d.dtypes.f32_out = n->tells == OUT_AS_HALF;
    d.dtypes.half_gradients = 1;
    d.accumulates.param = n->tells == GRAD_PARAM_AS_HALF_SUM ? 2 : 0;
    layer[1] = ms_register_layer(n->m, &d);
    memset(&d.dtypes, 0, sizeof d.dtypes);
    d.name = "squares";
    d.forward = half_squares;
    d.backward = half_squares_backward;
    d.in[0] = n->y;
    d.param[0].id = d.param[1].id = d.saved[0].id = 0;
    d.accumulates.param = 0;
    d.out[0] = n->loss;
    layer[2] = ms_register_layer(n->m, &d);
    ms_set_loss(n->m, n->loss);
    for (int k = 0; k < 2; ++k) {
        ms_set_layer_technique(n->m, layer[k], MS_TECHNIQUE_MIXED_PRECISION, MS_SWITCH_ON);
    }
}

static void half_create(half_net *n, half_lie tells, const ms_config *config) {
    float data[COUNT];
    t_rng rng = t_seed(21);
    const ms_optimizer_desc sgd = t_optimizer(MS_OPTIMIZER_SGD, 0.01f);
    memset(n, 0, sizeof *n);
    n->tells = tells;
    n->extreme_at = -1;
    assert_int_equal(ms_create(config, &n->m), MS_RESULT_OK);
    half_register(n);
    ms_set_optimizer(n->m, &sgd);
    t_ok(n->m, ms_wrap(n->m));
    const ms_tensor all[] = {n->x, n->w, n->q, n->b};
    for (int k = 0; k < 4; ++k) {
        t_fill(&rng, data, COUNT, 1.0f);
        t_ok(n->m, ms_write(n->m, all[k], data));
    }
}

static ms_config half_config(ms_dtype dtype, bool smallest, bool masters) {
    ms_config config = t_config();
    config.debug = true;
    config.mixed_dtype = dtype;
    config.force_optimize = smallest;
    config.master_weights = masters ? MS_SWITCH_DEFAULT : MS_SWITCH_OFF;
    config.loss_scaling.initial = 64.0f;
    return config;
}

static const ms_dtype half_dtypes[] = {MS_DTYPE_BF16, MS_DTYPE_F16};

static int clobbering_backward(const ms_call *call) {
    for (int64_t i = 0; i < COUNT; ++i) {
        const float g = t_data(&call->grad_out[0])[i];
        if (call->param[0].data || call->grad_param[0].data) {
            t_contribute(&call->grad_param[0], i, g);
        } else {
            t_data(&call->grad_in[0])[i] = 2.0f * g; // perhaps the same
        }
    }
    return 0;
}

static int ones_forward(const ms_call *call) {
    for (int64_t i = 0; i < COUNT; ++i) {
        t_data(&call->out[0])[i] = 1.0f;
    }
    return 0;
}

/* What a layer may destroy and what it computes in the same place: the result is what stays. */
static void a_result_over_what_may_be_destroyed_stays(void **state) {
    (void)state;
    const ms_optimizer_desc none = t_optimizer(MS_OPTIMIZER_NONE, 0.0f);
    float gradient[2][COUNT];
    for (int debug = 0; debug < 2; ++debug) {
        ms_model *m;
        ms_config config = t_config();
        config.debug = debug == 1;
        assert_int_equal(ms_create(&config, &m), MS_RESULT_OK);
        const ms_tensor w = ms_param(m, "w", MS_DTYPE_F32, ms_shape1(COUNT));
        ms_tensor x = ms_input(m, "x", MS_DTYPE_F32, ms_shape1(COUNT));
        for (int i = 0; i < 3; ++i) {
            ms_layer_desc d;
            memset(&d, 0, sizeof d);
            d.name = "layer";
            d.forward = ones_forward;
            d.backward = clobbering_backward;
            d.backward_reads.nothing = true;
            d.in[0] = x;
            x = d.out[0] = ms_activation(m, "y", MS_DTYPE_F32, ms_shape1(COUNT));
            if (i == 0) {
                d.param[0] = w;
            } else {
                d.grad_in_place[0].grad_out = d.clobbers.grad_out = d.overwrites.in = 1;
            }
            ms_register_layer(m, &d);
        }
        ms_set_loss(m, x);
        ms_set_optimizer(m, &none);
        t_ok(m, ms_wrap(m));
        t_write_zeros(m);
        t_ok(m, ms_step(m, NULL));
        t_ok(m, ms_read(m, ms_gradient(m, w), gradient[debug]));
        ms_destroy(m);
    }
    assert_memory_equal(gradient[0], gradient[1], sizeof gradient[0]);
}

static void lies_about_the_dtype_are_caught(void **state) {
    (void)state;
    for (int how = 0; how < 8 * HALF_LIES; ++how) {
        const half_lie tells = (half_lie)(how / 8);
        const ms_config config = half_config(half_dtypes[how % 2], how / 2 % 2, how / 4 % 2);
        half_net n;
        half_create(&n, tells, &config);
        const ms_result result = ms_step(n.m, NULL);
        if (tells == HALF_HONEST) {
            t_ok(n.m, result);
        } else {
            t_error(n.m, result, MS_RESULT_CONTRACT);
            t_text_has(ms_last_error(n.m), "layer 1 \"liar\"");
            t_text_has(ms_last_error(n.m), half_texts[tells][0]);
            t_text_has(ms_last_error(n.m), half_texts[tells][1]);
            if (t_environment("TEXTS", 0) != 0 && how % 8 == 0) {
                printf("%s\n", ms_last_error(n.m));
            }
        }
        ms_destroy(n.m);
    }
}

static void half_same(const half_net *a, const half_net *b) {
    const ms_tensor of_a[] = {a->w, a->q, a->b}, of_b[] = {b->w, b->q, b->b};
    for (int k = 0; k < 3; ++k) {
        float values[2][COLS];
        t_ok(a->m, ms_read(a->m, of_a[k], values[0]));
        t_ok(b->m, ms_read(b->m, of_b[k], values[1]));
        assert_memory_equal(values[0], values[1], sizeof values[0]);
    }
}

/* The same dtypes and bits as without debug mode; also what ms_read gives a callback. */
static void the_honest_pass_in_16_bits(void **state) {
    (void)state;
    for (int how = 0; how < 16; ++how) {
        ms_config config = half_config(half_dtypes[how % 2], how / 2 % 2, how / 4 % 2);
        half_net n, twin;
        config.accumulation_steps = how / 8 ? 2 : 1;
        half_create(&n, HALF_HONEST, &config);
        config.debug = false;
        half_create(&twin, HALF_HONEST, &config);
        n.reads = twin.reads = true;
        for (uint32_t t = 0; t < n.m->graph.tensors.count; ++t) {
            assert_int_equal(n.m->run.plan->decisions[t].format,
                             twin.m->run.plan->decisions[t].format);
        }
        assert_int_not_equal(n.m->run.plan->decisions[msi_index(&n.m->graph, n.h)].format,
                             MS_STATE_FORMAT_F32);
        for (int step = 0; step < 4; ++step) {
            double losses[2];
            t_ok(n.m, ms_step(n.m, &losses[0]));
            t_ok(twin.m, ms_step(twin.m, &losses[1]));
            assert_true(losses[0] == losses[1]);
            assert_memory_equal(n.read, twin.read, sizeof n.read);
            half_same(&n, &twin);
        }
        ms_destroy(n.m);
        ms_destroy(twin.m);
    }
}

/* What a mode or a budget chooses, debug mode leaves as it is. */
static void debug_mode_changes_no_choice(void **state) {
    (void)state;
    uint32_t in_half = 0;
    for (int how = 0; how < 4; ++how) {
        ms_memory_report reports[2];
        for (int k = 0; k < 2; ++k) {
            ms_config config = t_config();
            ms_hardware hardware;
            memset(&hardware, 0, sizeof hardware);
            hardware.kind = MS_DEVICE_CPU;
            hardware.bf16 = true;
            config.debug = k == 1;
            config.force_optimize = how % 2;
            config.mode = how / 2 ? MS_MODE_AGGRESSIVE : MS_MODE_BALANCED;
            config.mixed_precision = how / 2 ? MS_SWITCH_DEFAULT : MS_SWITCH_ON;
            half_net n;
            memset(&n, 0, sizeof n);
            assert_int_equal(ms_create(&config, &n.m), MS_RESULT_OK);
            half_register(&n);
            for (uint32_t t = 0; t < n.m->graph.tensors.count; ++t) {
                n.m->graph.tensors.items[t].technique[MS_TECHNIQUE_MIXED_PRECISION] =
                    (uint8_t)MS_SWITCH_DEFAULT;
            }
            ms_set_hardware(n.m, &hardware);
            t_ok(n.m, ms_wrap(n.m));
            t_report(n.m, &reports[k]);
            in_half += n.m->run.plan->decisions[msi_index(&n.m->graph, n.h)].format != 0;
            ms_destroy(n.m);
        }
        assert_true(reports[0].plan_hash == reports[1].plan_hash);
    }
    assert_true(in_half >= 2);
}

/* Overflows skip a step, as without debug mode, and numbers near the largest are added up. */
static void overflows_are_no_lies(void **state) {
    (void)state;
    const float extremes[] = {INFINITY, -INFINITY, NAN,   3e38f,  -3e38f, 65000.0f,
                              -65000.f, 40000.0f,  33e3f, -33e3f, 1e30f,  -1e30f};
    for (int how = 0; how < 12 * 3 * 4; ++how) {
        const bool micro = how % 2, f16 = how / 2 % 2;
        ms_config config = half_config(half_dtypes[f16], false, true);
        ms_memory_report reports[2];
        ms_result results[2][2];
        half_net n[2];
        config.accumulation_steps = micro ? 2 : 1;
        for (int k = 0; k < 2; ++k) {
            config.debug = k == 0;
            half_create(&n[k], HALF_HONEST, &config);
            n[k].extreme = extremes[how / 12];
            n[k].extreme_at = how / 4 % 3;
            for (int step = 0; step < 2; ++step) {
                double loss;
                results[k][step] = ms_step(n[k].m, &loss);
                assert_true(results[k][step] == MS_RESULT_OK ||
                            results[k][step] == MS_RESULT_NONFINITE); // of what params became
                n[k].extreme = micro ? n[k].extreme : 0.0f;
            }
            t_ok(n[k].m, ms_synchronize(n[k].m)); // the count is that of steps that are done
            t_report(n[k].m, &reports[k]);
        }
        assert_memory_equal(results[0], results[1], sizeof results[0]);
        assert_int_equal(reports[0].skipped_steps, reports[1].skipped_steps);
        assert_true(!f16 || how / 12 > 2 || reports[0].skipped_steps == 1);
        half_same(&n[0], &n[1]);
        ms_destroy(n[0].m);
        ms_destroy(n[1].m);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_honest_pass),
        cmocka_unit_test(lies_are_caught),
        cmocka_unit_test(lies_about_what_still_lives),
        cmocka_unit_test(the_kinds_of_testing_pass),
        cmocka_unit_test(a_pointer_of_any_earlier_run_shows),
        cmocka_unit_test(a_layer_that_depends_on_its_addresses),
        cmocka_unit_test(a_sum_is_checked_to_its_end),
        cmocka_unit_test(an_infinite_gradient_is_no_lie),
        cmocka_unit_test(each_workspace_has_room),
        cmocka_unit_test(layers_are_logged_before_they_run),
        cmocka_unit_test(callbacks_still_fail),
        cmocka_unit_test(a_result_over_what_may_be_destroyed_stays),
        cmocka_unit_test(lies_about_the_dtype_are_caught),
        cmocka_unit_test(the_honest_pass_in_16_bits),
        cmocka_unit_test(debug_mode_changes_no_choice),
        cmocka_unit_test(overflows_are_no_lies),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
