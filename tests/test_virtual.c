/*  test_virtual.c - training on the virtual device (virtual.h): the same bits as on the CPU for
    every order in which streams may run; wrong ones where a wait is left out; every call and every
    operation fails once. */
#include "private.h"
#include "toy_layers.h"
#include "virtual.h"

enum { BLOCKS = 5, OPS = 4 * BLOCKS + 1, ROWS = 12, COLS = 8, STEPS = 5, SEEDS = 60 };

typedef struct net_case {
    const char *name;
    ms_optimizer_kind optimizer;
    float clip;
    uint32_t micro_count;
    bool tight, verifies;
    bool gains;      // a layer has state on the host
    bool host_input; // x stays there
} net_case;

static const net_case cases[] = {
    {"plain", MS_OPTIMIZER_ADAMW, 0.0f, 1, false, false, false, false},
    {"tight, clipped, accumulated", MS_OPTIMIZER_ADAMW, 0.25f, 2, true, true, false, false},
    {"tight, early updates", MS_OPTIMIZER_SGD, 0.0f, 1, true, true, false, false},
    {"tight, state on the host", MS_OPTIMIZER_ADAMW, 0.25f, 2, true, true, true, false},
};
enum { CASES = sizeof cases / sizeof cases[0] };

static const net_case own_update = {"own update", MS_OPTIMIZER_CUSTOM, 0.0f, 1, false, false, false,
                                    false};
static const net_case host_input = {
    "input on the host", MS_OPTIMIZER_SGD, 0.0f, 2, false, false, false, true};

typedef struct net {
    const net_case *how;
    v_device *device; // NULL: the CPU
    t_heap heap;
    ms_model *model;
    ms_tensor x, weight[BLOCKS], scale, shift, gain, loss;
    t_op op[OPS];
    v_layer layer[OPS];
    int op_count;
    float lent[BLOCKS]; // state on the host, on half of the devices
    int own_updates;    // that were called
} net;

// ------------------------------------------------------------------------------------------------
// the model: matmul, norm, dropout, residual sum; tied params in every block

static void add(net *n, ms_layer_desc desc) {
    const bool lazy = n->device != NULL && n->op[n->op_count].kind != T_MATMUL;
    const ms_layer_desc wrapped = lazy ? v_wrap(&desc, &n->layer[n->op_count]) : desc;
    ms_register_layer(n->model, &wrapped);
    n->op_count += 1;
}

static ms_layer_desc layer(net *n, t_kind kind, ms_tensor in, ms_tensor out) {
    return t_layer(&n->op[n->op_count], kind, t_kinds[kind].name, in, out);
}

static ms_tensor activation(net *n) {
    return ms_activation(n->model, "a", MS_DTYPE_F32, ms_shape2(ROWS, COLS));
}

/* A product times a gain that the host keeps, and changes in each forward: y = gain x W. A
   recomputation needs the gain of its forward, and must leave that of the next one alone. */
static int gain_forward(const ms_call *call) {
    float *gain = (float *)call->state[0].data;
    const float now = *gain;
    *gain = 0.75f * now + 0.2f;
    return ms_gemm(call, now, ms_matrix_of(&call->in[0]), ms_matrix_of(&call->param[0]), 0.0f,
                   ms_matrix_of(&call->out[0])) == MS_RESULT_OK
               ? 0
               : T_CALLBACK_ERROR;
}

static ms_tensor add_block(net *n, ms_tensor last, int i) {
    const ms_tensor product = activation(n), normed = activation(n), dropped = activation(n);
    const ms_tensor sum = activation(n);
    ms_layer_desc d = layer(n, T_MATMUL, last, product);
    d.param[0] = n->weight[i];
    if (n->how->gains && i % 2 == 1) {
        d.forward = gain_forward;
        d.state[0] = n->gain = ms_buffer(n->model, "gain", MS_DTYPE_F32, ms_shape1(1));
        ms_set_on_host(n->model, n->gain);
        if (n->device != NULL && n->device->lends) {
            t_ok(n->model, ms_borrow(n->model, n->gain, &n->lent[i]));
        }
    }
    add(n, d);
    d = layer(n, T_AFFINE, product, normed);
    d.param[0] = n->scale;
    d.param[1] = n->shift;
    add(n, d);
    add(n, layer(n, T_DROPOUT, normed, dropped));
    d = layer(n, T_ADD, dropped, sum);
    d.in[1] = last;
    add(n, d);
    return sum;
}

static int count_own_update(const ms_update_args *args) {
    *(int *)args->user += 1;
    return 0;
}

static ms_optimizer_desc optimizer_of(net *n) {
    ms_optimizer_desc desc = t_optimizer(n->how->optimizer, 0.05f);
    desc.update = desc.kind == MS_OPTIMIZER_CUSTOM ? count_own_update : NULL;
    desc.user = &n->own_updates;
    desc.grad_clip_norm = n->how->clip;
    desc.momentum = desc.kind == MS_OPTIMIZER_SGD ? 0.5f : 0.0f;
    return desc;
}

static void register_net(net *n) {
    ms_model *m = n->model;
    const ms_optimizer_desc optimizer = optimizer_of(n);
    char name[32];
    n->x = ms_input(m, "x", MS_DTYPE_F32, ms_shape2(ROWS, COLS));
    if (n->how->host_input) {
        ms_set_on_host(m, n->x);
    }
    n->scale = ms_param(m, "scale", MS_DTYPE_F32, ms_shape1(COLS));
    n->shift = ms_param(m, "shift", MS_DTYPE_F32, ms_shape1(COLS));
    ms_tensor last = n->x;
    for (int i = 0; i < BLOCKS; ++i) {
        snprintf(name, sizeof name, "weight%d", i);
        n->weight[i] = ms_param(m, name, MS_DTYPE_F32, ms_shape2(COLS, COLS));
        last = add_block(n, last, i);
    }
    n->loss = t_losses_of(m, last);
    add(n, layer(n, T_LOSS, last, n->loss));
    ms_set_loss(m, n->loss);
    ms_set_optimizer(m, &optimizer);
}

/* Also of a copy. */
static int number_of(const net_case *how) {
    int c = 0;
    while (cases[c].name != how->name) {
        ++c;
    }
    return c;
}

static ms_result create_net(net *n, const net_case *how, v_device *device) {
    memset(n, 0, sizeof *n);
    n->how = how;
    n->device = device;
    ms_config config = t_config();
    config.allocator = t_heap_allocator(&n->heap);
    config.accumulation_steps = how->micro_count;
    config.early_update = how->tight && how->clip == 0.0f ? MS_SWITCH_ON : MS_SWITCH_DEFAULT;
    if (device != NULL) {
        config.backend = v_backend(device);
    }
    ms_result result = ms_create(&config, &n->model);
    if (result != MS_RESULT_OK) {
        return t_not_created(&n->model, result);
    }
    register_net(n);
    if (how->tight) { // the smallest budget takes most of the time of a plan
        static uint64_t known[CASES][2];
        uint64_t *budget = &known[number_of(how)][device != NULL];
        result = *budget == 0 ? ms_smallest_budget(n->model, budget) : MS_RESULT_OK;
        ms_set_budget(n->model, *budget);
    }
    return result == MS_RESULT_OK ? ms_wrap(n->model) : result;
}

static ms_result write_params(net *n) {
    const ms_tensor all[] = {n->scale,     n->shift,     n->weight[0], n->weight[1],
                             n->weight[2], n->weight[3], n->weight[4]};
    static float data[COLS * COLS]; // copies that come too late find it
    ms_result result = MS_RESULT_OK;
    t_rng rng = t_seed(3);
    for (size_t i = 0; i < sizeof all / sizeof all[0] && result == MS_RESULT_OK; ++i) {
        t_fill(&rng, data, COLS * COLS, 0.6f);
        result = ms_write(n->model, all[i], data);
    }
    return result;
}

// ------------------------------------------------------------------------------------------------
// training

typedef struct outcome {
    double loss[STEPS]; // of some of the steps
    float weight[BLOCKS][COLS * COLS], scale[COLS], gain;
} outcome;

/* Not on the CPU, which has not verified; it comes out alike. */
static ms_result verify(const net *n) {
    ms_verify_report report;
    if (n->device == NULL || !n->how->verifies) {
        return MS_RESULT_OK;
    }
    const ms_result result = ms_verify(n->model, NULL, NULL, &report);
    assert_true(result != MS_RESULT_OK ||
                (report.tensor_count == BLOCKS + 2 + (n->how->gains ? BLOCKS / 2 : 0) &&
                 report.plain_loss == report.wrapped_loss));
    return result == MS_RESULT_OK && report.differ_count > 0 ? MS_RESULT_CONTRACT : result;
}

/* Fresh data for every micro-batch; only every other loss is waited for. */
static ms_result train(net *n, outcome *o) {
    static float data[ROWS * COLS];
    t_rng rng = t_seed(11);
    ms_result result = write_params(n);
    for (uint32_t i = 0; i < STEPS * n->how->micro_count && result == MS_RESULT_OK; ++i) {
        t_fill(&rng, data, ROWS * COLS, 1.0f);
        result = ms_write(n->model, n->x, data);
        memset(data, V_RUBBISH, sizeof data); // what was written is ours again
        const uint32_t step = i / n->how->micro_count;
        result = result == MS_RESULT_OK && i % 3 == 1 ? verify(n) : result;
        if (result == MS_RESULT_OK) {
            result = ms_step(n->model, step % 2 == 0 ? &o->loss[step] : NULL);
        }
    }
    for (int i = 0; i < BLOCKS && result == MS_RESULT_OK; ++i) {
        result = ms_read(n->model, n->weight[i], o->weight[i]);
    }
    if (result == MS_RESULT_OK && n->how->gains) {
        result = ms_read(n->model, n->gain, &o->gain);
    }
    return result == MS_RESULT_OK ? ms_read(n->model, n->scale, o->scale) : result;
}

static void run_on_cpu(const net_case *how, outcome *o) {
    net n;
    memset(o, 0, sizeof *o);
    assert_int_equal(create_net(&n, how, NULL), MS_RESULT_OK);
    t_ok(n.model, train(&n, o));
    ms_destroy(n.model);
}

/* Whether it comes out as on the CPU. */
static bool run_on(v_device *device, const net_case *how, const outcome *expected) {
    net n;
    outcome o;
    memset(&o, 0, sizeof o);
    ms_result result = create_net(&n, how, device);
    result = result == MS_RESULT_OK ? train(&n, &o) : result;
    ms_destroy(n.model);
    assert_int_equal(n.heap.live_bytes, 0);
    assert_int_equal(device->states, 0);
    return result == MS_RESULT_OK && memcmp(&o, expected, sizeof o) == 0;
}

static void every_order_gives_the_same(void **state) {
    (void)state;
    for (int c = 0; c < CASES; ++c) {
        outcome expected;
        run_on_cpu(&cases[c], &expected);
        assert_true(expected.loss[STEPS - 1] < expected.loss[0]);
        for (uint64_t seed = 0; seed < t_size(SEEDS / 3, SEEDS); ++seed) {
            v_device device;
            v_open(&device, seed);
            device.lends = seed % 2 == 1;
            if (!run_on(&device, &cases[c], &expected)) {
                fail_msg("%s, seed %u: not as on the CPU", cases[c].name, (unsigned)seed);
            }
            assert_int_equal(device.engine.pending, 0);
            assert_int_equal(device.callback_error, 0);
            assert_int_equal(device.overtaken, 0);
            v_close(&device);
        }
    }
}

/* The device reads an input on the host late: the next one is written after that. */
static void inputs_on_the_host_stay_until_they_are_read(void **state) {
    (void)state;
    outcome expected;
    run_on_cpu(&host_input, &expected);
    for (uint64_t seed = 0; seed < 5; ++seed) {
        v_device device;
        v_open(&device, seed);
        assert_true(run_on(&device, &host_input, &expected));
        v_close(&device);
    }
}

/* How many of the seeds show that something is wrong, without verification, which reads to memory
   that is gone when a copy comes too late. */
static int count_caught(const net_case *how, int seeds, bool of_streams, bool of_host) {
    net_case unverified = *how;
    unverified.verifies = false;
    outcome expected;
    int caught = 0;
    run_on_cpu(&unverified, &expected);
    for (int seed = 1; seed <= seeds; ++seed) {
        v_device device;
        v_open(&device, (uint64_t)seed);
        device.drops_waits = of_streams;
        device.drops_waits_of_host = of_host;
        caught += !run_on(&device, &unverified, &expected);
        v_close(&device);
    }
    return caught;
}

static void net_catches_missing_waits(void **state) {
    (void)state;
    const int seeds = (int)t_size(40, 100), least = seeds * 9 / 10;
    const int of_streams = count_caught(&cases[0], seeds, true, false);
    const int of_host = count_caught(&cases[0], seeds, false, true);
    print_message("without waits between streams wrong for %d, without those of the host for %d of "
                  "%d seeds\n",
                  of_streams, of_host, seeds);
    assert_in_range(of_streams, least, seeds);
    assert_in_range(of_host, least, seeds);
    assert_int_equal(count_caught(&cases[0], seeds, false, false), 0);
    const int of_host_state = count_caught(&cases[CASES - 1], seeds, false, true);
    print_message("with state on the host, without waits of the host wrong for %d\n",
                  of_host_state);
    assert_in_range(of_host_state, least, seeds);
}

typedef struct timeline {
    uint32_t count[MS_EVENT_COUNT];
    double end_us;
} timeline;

static void note_event(const ms_event *event, void *user) {
    timeline *t = (timeline *)user;
    const double end_us = event->start_us + event->duration_us;
    t->count[event->kind] += 1;
    t->end_us = end_us > t->end_us ? end_us : t->end_us;
}

/* Checks that what instructions work on is live then, which for a wait are both ends of a copy; and
   that forward, after which the host may do as it likes, awaits its own copies. */
static void check_copies(const msi_program *p, uint32_t resident_count) {
    uint32_t copies = 0, waits = 0;
    for (uint32_t now = 0; now < p->code.instructions.count; ++now) {
        const msi_instruction *i = &p->code.instructions.items[now];
        copies += i->op == MSI_OP_COPY_IN || i->op == MSI_OP_COPY_OUT;
        waits += i->op == MSI_OP_WAIT;
        assert_true(now + 1 != p->code.forward_end || (copies > 0 && waits == copies));
        for (uint32_t k = 0; k < i->operand_count; ++k) {
            const uint32_t range = p->code.operands.items[i->operand_first + k].range;
            if (range != MSI_NONE && range >= resident_count) {
                assert_in_range(now, p->code.ranges.items[range].first,
                                p->code.ranges.items[range].last);
            }
        }
    }
}

/* State that a recomputation has changed on the host is put back: copied out of device memory, on a
   stream of its own, and awaited. Every such copy has its wait. Told once more, the step takes the
   time that planning found. */
static void state_on_the_host_crosses_the_link(void **state) {
    (void)state;
    v_device device;
    net n;
    timeline t;
    ms_memory_report report;
    memset(&t, 0, sizeof t);
    v_open(&device, 1);
    assert_int_equal(create_net(&n, &cases[CASES - 1], &device), MS_RESULT_OK);
    t_ok(n.model, ms_visit_events(n.model, MS_PROGRAM_TRAIN, note_event, &t));
    assert_true(t.count[MS_EVENT_RECOMPUTE] > 0);
    assert_true(t.count[MS_EVENT_COPY_IN] > 0 && t.count[MS_EVENT_COPY_OUT] > 0);
    assert_int_equal(t.count[MS_EVENT_WAIT],
                     t.count[MS_EVENT_COPY_IN] + t.count[MS_EVENT_COPY_OUT]);
    check_copies(&n.model->run.plan->train, n.model->run.store->residents.count);
    t_report(n.model, &report);
    assert_true(fabs(t.end_us - report.last_micro_us) <= 1e-7 * report.step_us);
    ms_destroy(n.model);
    v_close(&device);
}

static uint64_t waits_in_steps(bool with_loss, int steps) {
    v_device device;
    net n;
    double loss = 0.0;
    v_open(&device, 5);
    assert_int_equal(create_net(&n, &cases[0], &device), MS_RESULT_OK);
    t_ok(n.model, write_params(&n));
    t_write_zeros(n.model);
    t_ok(n.model, ms_step(n.model, &loss));
    const uint64_t before = device.waits_of_host;
    for (int i = 0; i < steps; ++i) {
        t_ok(n.model, ms_step(n.model, with_loss ? &loss : NULL));
    }
    const uint64_t waits = device.waits_of_host - before;
    ms_destroy(n.model);
    v_close(&device);
    return waits;
}

// ------------------------------------------------------------------------------------------------
// failures

/* Runs in which something fails; after each, one that does not. Returns how many. */
static uint64_t fails_cleanly(const net_case *how, bool late) {
    outcome expected, o;
    v_device device;
    uint64_t *fail_at = late ? &device.late_fail_at : &device.engine.fail_at;
    t_failing f = t_failing_of(NULL, fail_at, UINT32_MAX - 1);
    run_on_cpu(how, &expected);
    while (t_next_failure(&f, late                    ? 1 + f.at / t_size(8, 15)
                              : f.at > 200            ? 5 + t_stride(81) // steps are alike
                              : f.at > t_size(10, 30) ? t_stride(21)
                                                      : 1)) {
        net n;
        v_open(&device, f.at);
        t_arm(&f);
        ms_result result = create_net(&n, how, &device);
        result = n.model != NULL && result == MS_RESULT_OK ? train(&n, &o) : result;
        t_failed(&f, n.model, result);
        ms_destroy(n.model);
        assert_int_equal(n.heap.live_bytes, 0);
        assert_int_equal(device.states, 0);
        device.late_error = 0;
        assert_true(run_on(&device, how, &expected));
        v_close(&device);
    }
    return f.at;
}

static void every_call_fails_once(void **state) {
    (void)state;
    for (int c = 0; c < CASES; ++c) {
        assert_true(fails_cleanly(&cases[c], false) > 200);
    }
}

static void every_operation_fails_once(void **state) {
    (void)state;
    assert_true(fails_cleanly(&cases[1], true) > 200);
}

/* The host waits for losses that it asks for, and for nothing else. */
static void steps_do_not_wait(void **state) {
    (void)state;
    assert_int_equal(waits_in_steps(false, 12), 0);
    assert_int_equal(waits_in_steps(true, 12), 12);
}

static ms_result step_on(net *n, uint64_t seed, bool is_finite) {
    float data[ROWS * COLS];
    t_rng rng = t_seed(seed);
    ms_result result = MS_RESULT_OK;
    for (uint32_t i = 0; i < n->how->micro_count && result == MS_RESULT_OK; ++i) {
        t_fill(&rng, data, ROWS * COLS, 1.0f);
        data[0] = is_finite ? data[0] : NAN;
        result = ms_write(n->model, n->x, data);
        result = result == MS_RESULT_OK ? ms_step(n->model, NULL) : result;
    }
    return result;
}

/* Checks that a weight and its optimizer state are the same in both. */
static void compare_weights(net *n, net *twin) {
    for (int of = -1; of < (int)t_state_count(&n->model->optimizers.groups.items[0].desc); ++of) {
        float found[COLS * COLS], expected[COLS * COLS];
        const ms_tensor w = n->weight[0], v = twin->weight[0];
        t_ok(n->model, ms_read(n->model, of < 0 ? w : ms_optimizer_state(n->model, w, of), found));
        t_ok(twin->model,
             ms_read(twin->model, of < 0 ? v : ms_optimizer_state(twin->model, v, of), expected));
        assert_memory_equal(found, expected, sizeof found);
    }
}

/* A halted step updates nothing, nor does one that is queued before the host has heard of it. The
   next step has the number of the one that was halted, for dropout and bias corrections. */
static void halted_steps_update_nothing(void **state) {
    (void)state;
    for (int c = 0; c < 3; ++c) {
        net n, twin;
        v_device device;
        v_open(&device, 5);
        assert_int_equal(create_net(&n, &cases[c], &device), MS_RESULT_OK);
        assert_int_equal(create_net(&twin, &cases[c], NULL), MS_RESULT_OK);
        net *const nets[] = {&n, &twin};
        for (int i = 0; i < 2; ++i) {
            t_ok(nets[i]->model, write_params(nets[i]));
            t_ok(nets[i]->model, step_on(nets[i], 1, true));
        }
        ms_result result = step_on(&n, 2, false);
        result = result == MS_RESULT_OK ? step_on(&n, 3, true) : result;
        t_error(n.model, t_settled(n.model, result), MS_RESULT_NONFINITE);
        compare_weights(&n, &twin);
        for (int i = 0; i < 2; ++i) {
            t_ok(nets[i]->model, step_on(nets[i], 4, true));
        }
        compare_weights(&n, &twin);
        ms_destroy(n.model);
        ms_destroy(twin.model);
        v_close(&device);
    }
}

static void start_on(net *n, const net_case *how, v_device *device) {
    v_open(device, 5);
    assert_int_equal(create_net(n, how, device), MS_RESULT_OK);
    t_ok(n->model, write_params(n));
    t_ok(n->model, step_on(n, 1, true));
}

/* A step that fails returns after what it has enqueued, so that the trainer may free or change what
   callbacks were given. */
static void failed_steps_leave_nothing_enqueued(void **state) {
    (void)state;
    uint64_t failures = 0, waits = 0;
    for (bool failed = true; failed; failures += failed) {
        v_device device;
        net n;
        start_on(&n, &cases[0], &device);
        t_ok(n.model, ms_synchronize(n.model));
        const uint64_t before = device.waits_of_host;
        device.engine.fail_at = 1 + failures;
        failed = ms_step(n.model, NULL) != MS_RESULT_OK;
        assert_true(!failed || device.engine.pending == 0);
        waits += failed ? device.waits_of_host - before : 0;
        device.engine.fail_at = 0;
        ms_destroy(n.model);
        v_close(&device);
    }
    assert_true(failures > 20 && waits > failures / 2);
}

/* Forward and backward on input that is not finite, which the host has not heard of yet. */
static void halt_in_backward(net *n) {
    float data[ROWS * COLS] = {0};
    data[0] = NAN;
    t_ok(n->model, ms_write(n->model, n->x, data));
    t_ok(n->model, ms_forward(n->model, NULL));
    t_ok(n->model, ms_backward(n->model));
}

/* A model has not failed by updates inside backward that the device has left out. */
static void halts_in_backward_leave_the_model_whole(void **state) {
    (void)state;
    v_device device;
    net n;
    start_on(&n, &cases[2], &device);
    halt_in_backward(&n);
    assert_true(n.model->run.updates_done > 0);
    t_error(n.model, ms_synchronize(n.model), MS_RESULT_NONFINITE);
    t_ok(n.model, step_on(&n, 2, true));
    t_ok(n.model, ms_synchronize(n.model));
    ms_destroy(n.model);
    v_close(&device);
}

/* A wrap that fails has heard of the halt; the update that comes next reports it. */
static void failing_wraps_forget_no_halt(void **state) {
    (void)state;
    v_device device;
    net n;
    float before[COLS * COLS], after[COLS * COLS];
    start_on(&n, &cases[0], &device);
    t_ok(n.model, ms_read(n.model, n.weight[0], before));
    halt_in_backward(&n);
    ms_set_budget(n.model, 1);
    t_error(n.model, ms_wrap(n.model), MS_RESULT_BUDGET);
    t_error(n.model, ms_update(n.model), MS_RESULT_NONFINITE);
    t_ok(n.model, ms_read(n.model, n.weight[0], after));
    assert_memory_equal(before, after, sizeof before);
    t_ok(n.model, step_on(&n, 2, true));
    ms_destroy(n.model);
    v_close(&device);
}

/* A trainer's own update, which runs on the host, is not called in a halted step. */
static void own_updates_come_after_the_verdict(void **state) {
    (void)state;
    v_device device;
    net n;
    start_on(&n, &own_update, &device);
    assert_int_equal(n.own_updates, BLOCKS + 2);
    t_error(n.model, t_settled(n.model, step_on(&n, 2, false)), MS_RESULT_NONFINITE);
    assert_int_equal(n.own_updates, BLOCKS + 2);
    t_ok(n.model, step_on(&n, 3, true));
    assert_int_equal(n.own_updates, 2 * (BLOCKS + 2));
    ms_destroy(n.model);
    v_close(&device);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_order_gives_the_same),
        cmocka_unit_test(inputs_on_the_host_stay_until_they_are_read),
        cmocka_unit_test(net_catches_missing_waits),
        cmocka_unit_test(state_on_the_host_crosses_the_link),
        cmocka_unit_test(steps_do_not_wait),
        cmocka_unit_test(halted_steps_update_nothing),
        cmocka_unit_test(failed_steps_leave_nothing_enqueued),
        cmocka_unit_test(halts_in_backward_leave_the_model_whole),
        cmocka_unit_test(failing_wraps_forget_no_halt),
        cmocka_unit_test(own_updates_come_after_the_verdict),
        cmocka_unit_test(every_call_fails_once),
        cmocka_unit_test(every_operation_fails_once),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
