/*  test_memory.c - who may see which byte: debug mode, the allocator's hooks, and every allocation and
    every call of the backend failing once. */
#include "private.h"
#include "toy_layers.h"

#if defined(__SANITIZE_ADDRESS__)
#define T_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define T_ASAN 1
#endif
#endif

#ifdef T_ASAN
#include <sanitizer/asan_interface.h>
#define T_UNCHECKED __attribute__((no_sanitize_address, noinline))
#else
#define T_UNCHECKED
#endif

// ------------------------------------------------------------------------------------------------
// debug mode

enum { WIDE_ROWS = 4, WIDE_COLS = 512, NARROW_COLS = 4, WIDE_COUNT = WIDE_ROWS * WIDE_COLS };

/* x -> widen -> narrow -> probe -> loss: the wide value is dead when the probe runs, and nothing
   that lives then is large enough to cover it. */
typedef struct wide_net {
    t_op probe; // first: the user of every layer but the loss
    ms_model *model;
    ms_tensor x, weight;
    const float *stale;      // where widen wrote
    uint32_t nans[2];        // that the probe finds there, in forward and in backward
    uint32_t poisoned[2];    // of these
    uint32_t unlisted[2];    // operands of backward with and without data, where none is declared
    uint32_t workspace_nans; // of 16
    t_op loss_op;
} wide_net;

static T_UNCHECKED float peek(const float *address) {
    return *(const volatile float *)address;
}

static int widen_forward(const ms_call *call) {
    wide_net *net = (wide_net *)call->user;
    float *y = t_data(&call->out[0]);
    for (int i = 0; i < WIDE_COUNT; ++i) {
        y[i] = t_data(&call->in[0])[i / WIDE_COLS * NARROW_COLS + i % NARROW_COLS];
    }
    net->stale = y;
    return 0;
}

static int narrow_forward(const ms_call *call) {
    const float *weight = t_data(&call->param[0]);
    for (int i = 0; i < WIDE_ROWS * NARROW_COLS; ++i) {
        int from = i / NARROW_COLS * WIDE_COLS + i % NARROW_COLS;
        t_data(&call->out[0])[i] = t_data(&call->in[0])[from] * weight[i % NARROW_COLS];
    }
    return 0;
}

/* Declares that it reads nothing, and counts what it is given all the same. */
static int narrow_backward(const ms_call *call) {
    wide_net *net = (wide_net *)call->user;
    net->unlisted[call->in[0].data != NULL] += 1;
    net->unlisted[call->out[0].data != NULL] += 1;
    net->unlisted[call->param[0].data != NULL] += 1;
    for (int c = 0; c < NARROW_COLS; ++c) {
        t_contribute(&call->grad_param[0], c, t_grad_out(call, 0, c));
    }
    return 0;
}

static void probe_stale(wide_net *net, int when) {
    net->nans[when] = 0;
    net->poisoned[when] = 0;
    for (int i = 0; i < WIDE_COUNT; ++i) {
        net->nans[when] += t_is_nan(peek(net->stale + i));
#ifdef T_ASAN
        net->poisoned[when] += __asan_address_is_poisoned(net->stale + i) != 0;
#endif
    }
}

static int probe_forward(const ms_call *call) {
    wide_net *net = (wide_net *)call->user;
    const float *workspace = (const float *)call->workspace;
    probe_stale(net, 0);
    net->workspace_nans = 0;
    for (int i = 0; i < 16; ++i) {
        net->workspace_nans += t_is_nan(workspace[i]);
    }
    return t_forward(call);
}

static int probe_backward(const ms_call *call) {
    probe_stale((wide_net *)call->user, 1);
    return t_backward(call);
}

static ms_tensor wide_layer(wide_net *net, const char *name, ms_layer_fn forward,
                            ms_layer_fn backward, ms_tensor in, int64_t cols) {
    ms_layer_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.name = name;
    desc.forward = forward;
    desc.backward = backward;
    desc.user = net;
    desc.backward_reads.nothing = true;
    desc.forward_workspace.bytes = 64;
    desc.in[0] = in;
    desc.param[0] = forward == narrow_forward ? net->weight : desc.param[0];
    desc.out[0] = ms_activation(net->model, name, MS_DTYPE_F32, ms_shape2(WIDE_ROWS, cols));
    ms_register_layer(net->model, &desc);
    return desc.out[0];
}

static void wide_create(wide_net *net, bool debug, ms_layer_fn backward) {
    static const float ones[WIDE_ROWS * NARROW_COLS] = {1, 1, 1, 1, 1, 1, 1, 1,
                                                        1, 1, 1, 1, 1, 1, 1, 1};
    ms_config config = t_config();
    config.debug = debug;
    memset(net, 0, sizeof *net);
    net->probe.kind = T_SCALE;
    net->probe.scalar = 2.0f;
    assert_int_equal(ms_create(&config, &net->model), MS_RESULT_OK);
    ms_model *m = net->model;
    net->x = ms_input(m, "x", MS_DTYPE_F32, ms_shape2(WIDE_ROWS, NARROW_COLS));
    net->weight = ms_param(m, "weight", MS_DTYPE_F32, ms_shape1(NARROW_COLS));
    ms_tensor value = wide_layer(net, "widen", widen_forward, NULL, net->x, WIDE_COLS);
    value = wide_layer(net, "narrow", narrow_forward, backward, value, NARROW_COLS);
    value = wide_layer(net, "probe", probe_forward, probe_backward, value, NARROW_COLS);
    t_set_loss(m, &net->loss_op, T_LOSS, value);
    t_ok(m, ms_wrap(m));
    t_ok(m, ms_write(m, net->x, ones));
    t_ok(m, ms_write(m, net->weight, ones));
}

static void undeclared_operands_have_no_data(void **state) {
    (void)state;
    for (int debug = 0; debug < 2; ++debug) {
        wide_net net;
        wide_create(&net, debug != 0, narrow_backward);
        t_ok(net.model, ms_step(net.model, NULL));
        assert_int_equal(net.unlisted[0], debug ? 0 : 3);
        assert_true(debug ? net.unlisted[1] >= 6 : net.unlisted[1] == 0); // poison, in debug mode
        ms_destroy(net.model);
    }
}

static void dead_memory_holds_nan(void **state) {
    (void)state;
    wide_net net;
    wide_create(&net, true, narrow_backward);
    for (int step = 0; step < 3; ++step) {
        t_ok(net.model, ms_step(net.model, NULL));
        for (int when = 0; when < 2; ++when) { // a few small values may lie there by now
            assert_true(net.nans[when] >= WIDE_COUNT - 6 * 16);
        }
        assert_int_equal(net.workspace_nans, 16);
    }
    ms_destroy(net.model);
}

/* So that the test above cannot pass for another reason. Under AddressSanitizer dead memory is
   always watched. */
static void dead_memory_keeps_its_bytes_without_debug(void **state) {
    (void)state;
#ifdef T_ASAN
    print_message("skipped: AddressSanitizer watches dead memory\n");
    skip();
#else
    wide_net net;
    wide_create(&net, false, narrow_backward);
    t_ok(net.model, ms_step(net.model, NULL));
    assert_int_equal(net.nans[0], 0);
    assert_int_equal(net.nans[1], 0);
    assert_int_equal(net.poisoned[0], 0);
    ms_destroy(net.model);
#endif
}

static void dead_memory_is_poisoned(void **state) {
    (void)state;
#if defined(T_ASAN) && !defined(T_CUDA) // which watches the arena of the CPU
    wide_net net;
    wide_create(&net, false, narrow_backward);
    t_ok(net.model, ms_step(net.model, NULL));
    assert_true(net.poisoned[0] >= WIDE_COUNT - 6 * 16);
    assert_true(net.poisoned[1] >= WIDE_COUNT - 6 * 16);
    ms_destroy(net.model);
#else
    print_message("skipped: this build has no AddressSanitizer, or runs on CUDA\n");
    skip();
#endif
}

/* A layer that reads an operand it did not declare, from where forward saw it, is named. */
static int cheating_backward(const ms_call *call) {
    const wide_net *net = (const wide_net *)call->user;
    for (int c = 0; c < NARROW_COLS; ++c) {
        float undeclared = peek(net->stale + WIDE_COUNT - NARROW_COLS + c);
        t_contribute(&call->grad_param[0], c, t_grad_out(call, 0, c) * undeclared);
    }
    return 0;
}

static void a_stale_pointer_is_found(void **state) {
    (void)state;
    wide_net net;
    wide_create(&net, true, cheating_backward);
    t_error(net.model, ms_step(net.model, NULL), MS_RESULT_CONTRACT);
    t_text_has(ms_last_error(net.model), "\"narrow\"");
    ms_destroy(net.model);
}

// ------------------------------------------------------------------------------------------------
// the allocator's hooks

typedef struct hooked {
    t_heap heap;
    t_device device;
    ms_config config;
    t_chain chain;
} hooked;

static void hooked_init(hooked *h) {
    memset(h, 0, sizeof *h);
    h->config = t_config();
    h->config.allocator = t_heap_allocator(&h->heap);
    h->config.backend = t_device_backend(&h->device);
}

static void hooked_expect_empty(const hooked *h) {
    assert_true(h->heap.live_count == 0 && h->heap.live_bytes == 0);
    assert_true(h->heap.wrong_releases == 0);
    assert_true(h->device.live_count == 0 && h->device.live_bytes == 0);
    assert_true(h->device.wrong_releases == 0);
}

static uint64_t smaller_budget(const ms_model *model, uint64_t percent) {
    ms_memory_report report;
    t_report(model, &report);
    return report.plain_bytes * percent / 100;
}

static void steps_allocate_nothing(void **state) {
    (void)state;
    for (uint64_t percent = 100; percent >= 85; percent -= 15) {
        hooked h;
        double loss = 0.0;
        hooked_init(&h);
        t_chain_start(&h.chain, &h.config, 12);
        ms_model *m = h.chain.model;
        ms_set_budget(m, smaller_budget(m, percent));
        t_ok(m, ms_wrap(m));
        uint64_t calls = h.heap.calls, live = h.heap.live_bytes, device = h.device.allocations;
        float *x = (float *)calloc(T_CHAIN_INPUT, sizeof(float));
        assert_non_null(x);
        for (int step = 0; step < 3; ++step) {
            t_ok(m, ms_write(m, h.chain.x, x));
            t_ok(m, ms_step(m, &loss));
            t_ok(m, ms_forward(m, &loss));
            t_ok(m, ms_backward(m));
            t_ok(m, ms_update(m));
            t_ok(m, ms_eval(m, &loss));
            t_ok(m, ms_read(m, h.chain.x, x));
        }
        free(x);
        assert_true(h.heap.calls == calls && h.heap.live_bytes == live);
        assert_true(h.device.allocations == device);
        ms_destroy(m);
        hooked_expect_empty(&h);
    }
}

static void every_byte_goes_through_the_hooks(void **state) {
    (void)state;
    hooked h;
    ms_memory_report report;
    hooked_init(&h);
    t_chain_start(&h.chain, &h.config, 6);
    ms_model *m = h.chain.model;
    t_report(m, &report);
    assert_true(h.device.live_bytes == report.arena_bytes);
    assert_true(h.heap.live_bytes > report.arena_bytes); // the arena and the plan
    for (uint64_t percent = 95; percent >= 85; percent -= 5) {
        ms_set_budget(m, smaller_budget(m, percent));
        t_ok(m, ms_wrap(m));
        t_report(m, &report);
        assert_true(h.device.live_count == 1 && h.device.live_bytes == report.arena_bytes);
        t_ok(m, ms_step(m, NULL));
    }
    t_ok(m, ms_detach(m));
    t_ok(m, ms_step(m, NULL));
    ms_destroy(m);
    hooked_expect_empty(&h);
}

/* Wrapping again and again holds no more memory than wrapping once. */
static void wrapping_again_does_not_grow(void **state) {
    (void)state;
    hooked h;
    hooked_init(&h);
    t_chain_start(&h.chain, &h.config, 6);
    ms_model *m = h.chain.model;
    t_ok(m, ms_wrap(m));
    uint64_t live = h.heap.live_bytes, count = h.heap.live_count;
    for (int i = 0; i < 5; ++i) {
        t_ok(m, ms_wrap(m));
    }
    assert_true(h.heap.live_bytes == live && h.heap.live_count == count);
    ms_destroy(m);
    hooked_expect_empty(&h);
}

/* Has a page and no more, and notes what it was asked for last. */
static void *alloc_a_page(uint64_t bytes, void *user) {
    *(uint64_t *)user = bytes;
    return bytes <= 4096 ? malloc((size_t)bytes) : NULL;
}

static void release_a_page(void *memory, uint64_t bytes, void *user) {
    *(uint64_t *)user -= bytes;
    free(memory);
}

/* The CPU's device memory is a little more than what is wanted, for the alignment: the sum does not
   wrap around to a size that the allocator has. */
static void sizes_of_device_memory_never_wrap(void **state) {
    (void)state;
    const ms_backend cpu = ms_backend_cpu();
    uint64_t asked = 0;
    ms_allocator host;
    host.alloc = alloc_a_page;
    host.release = release_a_page;
    host.user = &asked;
    for (uint64_t less = 0; less < 1024; ++less) {
        const uint64_t bytes = UINT64_MAX - less;
        void *memory = &asked;
        asked = 0;
        assert_int_not_equal(msi_cpu_memory_alloc(NULL, &host, bytes, &memory), 0);
        assert_null(memory);
        assert_true(asked == 0 || asked >= bytes);
    }
    for (uint64_t bytes = 0; bytes < 1024; bytes += 37) {
        void *memory = NULL;
        assert_int_equal(cpu.memory_alloc(cpu.user, &host, bytes, &memory), 0);
        assert_true(memory != NULL && (uintptr_t)memory % MSI_ALIGNMENT == 0);
        memset(memory, 0x5a, (size_t)bytes);
        cpu.memory_release(cpu.user, &host, memory, bytes);
        assert_true(asked == 0); // it was given back whole
    }
}

static void destroy_accepts_every_stage(void **state) {
    (void)state;
    for (int stage = 0; stage < 4; ++stage) {
        hooked h;
        hooked_init(&h);
        if (stage == 0) {
            assert_int_equal(ms_create(&h.config, &h.chain.model), MS_RESULT_OK);
        } else {
            assert_int_equal(t_chain_create(&h.chain, &h.config, 4, T_CHAIN_ROWS, T_CHAIN_COLS),
                             MS_RESULT_OK);
        }
        if (stage >= 2) {
            t_ok(h.chain.model, t_chain_write(&h.chain, 1));
        }
        if (stage == 3) {
            t_ok(h.chain.model, ms_wrap(h.chain.model));
            t_ok(h.chain.model, ms_forward(h.chain.model, NULL));
        }
        ms_destroy(h.chain.model);
        hooked_expect_empty(&h);
    }
    ms_destroy(NULL);
}

// ------------------------------------------------------------------------------------------------
// every allocation fails once

/* Registration, first values, wrap: the first failure is what is returned. */
static ms_result build(hooked *h, uint64_t budget) {
    h->config.memory_budget_bytes = budget;
    ms_result result = t_chain_create(&h->chain, &h->config, 5, T_CHAIN_ROWS, T_CHAIN_COLS);
    if (result == MS_RESULT_OK) {
        result = t_chain_write(&h->chain, 1);
    }
    /* Even where writing failed: wrap returns the registration error that sticks, or works. */
    ms_result wrapped = h->chain.model != NULL ? ms_wrap(h->chain.model) : result;
    return wrapped != MS_RESULT_OK ? wrapped : result;
}

static uint64_t chain_plain_bytes(uint32_t depth) {
    t_chain chain;
    ms_memory_report report;
    ms_config config = t_config();
    t_chain_start(&chain, &config, depth);
    t_report(chain.model, &report);
    ms_destroy(chain.model);
    return report.plain_bytes;
}

static void every_allocation_of_a_first_wrap_fails_once(void **state) {
    (void)state;
    const uint64_t budget = chain_plain_bytes(5) * 9 / 10;
    hooked h;
    t_failing f = t_failing_heap(&h.heap);
    f.device = &h.device;
    while (t_next_failure(&f, 1)) {
        hooked_init(&h);
        t_arm(&f);
        const ms_result result = build(&h, budget);
        t_failed(&f, h.chain.model, result);
        ms_destroy(h.chain.model);
    }
    assert_true(f.error_count > 4);
}

/* A chain whose values are written before it is wrapped, on the heap alone. */
typedef struct early {
    t_heap heap;
    ms_config config;
    t_chain chain;
} early;

enum { EARLY_DEPTH = 4, EARLY_COLS = 96 };

static void early_open(early *e, bool resizes, bool offloads) {
    memset(e, 0, sizeof *e);
    e->config = t_config();
    e->config.allocator = t_heap_allocator(&e->heap);
    e->config.allocator.resize = resizes ? t_heap_resize : NULL;
    e->config.offloading = offloads ? MS_SWITCH_ON : MS_SWITCH_OFF;
    assert_int_equal(t_chain_create(&e->chain, &e->config, EARLY_DEPTH, 4, EARLY_COLS), 0);
    ms_model *m = e->chain.model;
    if (offloads) {
        uint64_t least;
        t_ok(m, ms_smallest_budget(m, &least));
        ms_set_budget(m, least);
    }
    t_ok(m, t_chain_write(&e->chain, 1));
    float moment[EARLY_COLS * EARLY_COLS];
    for (int i = 0; i < EARLY_COLS * EARLY_COLS; ++i) {
        moment[i] = (float)i * 1e-6f;
    }
    for (int k = 0; k < 2; ++k) { // in another format than the plan has it
        t_ok(m, ms_write(m, ms_optimizer_state(m, e->chain.weight[2], k), moment));
    }
}

/* Of what was written before ms_wrap, one value at most exists twice if the arena can grow. */
static void written_values_move_in_turn(void **state) {
    (void)state;
    const uint64_t value = EARLY_COLS * EARLY_COLS * sizeof(float);
#ifdef T_CUDA
    skip(); // memory of a GPU does not grow in its place
#endif
    for (int offloads = 0; offloads < 2; ++offloads) {
        for (int resizes = 0; resizes < 2; ++resizes) {
            early e;
            early_open(&e, resizes != 0, offloads != 0);
            e.heap.most_bytes = 0;
            t_ok(e.chain.model, ms_wrap(e.chain.model));
            const uint64_t more = e.heap.most_bytes - e.heap.live_bytes;
            print_message("%s, %s: %.2f values more than what is left\n",
                          offloads ? "offloading" : "plain", resizes ? "growing" : "fixed",
                          (double)more / (double)value);
            assert_true(resizes && !offloads ? more < value + 4096 : more >= value);
            ms_destroy(e.chain.model);
            assert_true(e.heap.live_count == 0 && e.heap.wrong_releases == 0);
        }
    }
}

/* Whatever fails in the first ms_wrap: what was written can be read, and the next one works. */
static void a_failed_first_wrap_keeps_what_was_written(void **state) {
    (void)state;
#ifdef T_CUDA
    skip();
#endif
    for (int offloads = 0; offloads < 2; ++offloads) {
        t_chain twin;
        early e;
        uint32_t moved = 0; // rounds in which values had moved before
        t_failing f = t_failing_heap(&e.heap);
        early_open(&e, false, offloads != 0);
        twin = e.chain;
        const uint64_t before = e.heap.calls;
        t_ok(twin.model, ms_wrap(twin.model));
        const uint64_t calls = e.heap.calls - before; // the last of which are for what is planned
        float *written = t_chain_weights(&twin);
        t_ok(twin.model, ms_step(twin.model, NULL));
        float *trained = t_chain_weights(&twin);
        ms_destroy(twin.model);
        const uint64_t bytes = EARLY_DEPTH * EARLY_COLS * EARLY_COLS * sizeof(float);
        while (t_next_failure(&f, f.at + 20 < calls ? 1 + (calls - f.at - 20) / 4 : 1)) {
            early_open(&e, true, offloads != 0);
            ms_model *m = e.chain.model;
            t_arm(&f);
            (void)t_failed(&f, m, ms_wrap(m));
            moved += m->refuge.memory != NULL;
            float *kept = t_chain_weights(&e.chain);
            assert_memory_equal(kept, written, bytes);
            t_ok(m, ms_wrap(m));
            t_ok(m, ms_step(m, NULL));
            float *now = t_chain_weights(&e.chain);
            assert_memory_equal(now, trained, bytes);
            free(kept);
            free(now);
            ms_destroy(m);
        }
        assert_true(f.error_count > 4 && (moved > 0 || offloads));
        free(written);
        free(trained);
    }
}

typedef ms_result (*model_fn)(ms_model *model);

static ms_result ask_smallest(ms_model *model) {
    uint64_t bytes = 0;
    return ms_smallest_budget(model, &bytes);
}

static void step_both(hooked *h, t_chain *twin) {
    double loss = 0.0, expected = 1.0;
    t_ok(h->chain.model, ms_step(h->chain.model, &loss));
    t_ok(twin->model, ms_step(twin->model, &expected));
    assert_memory_equal(&loss, &expected, sizeof loss);
    t_chain_same(&h->chain, twin);
}

static void start_both(hooked *h, t_chain *twin, uint32_t depth) {
    ms_config config = t_config();
    config.backend = t_backend_without_state(); // as the hooked one has: a GPU's products differ
    config.backend.name = "twin";
    hooked_init(h);
    t_chain_start(&h->chain, &h->config, depth);
    t_chain_start(twin, &config, depth);
    step_both(h, twin);
}

static void end_both(hooked *h, t_chain *twin) {
    ms_destroy(h->chain.model);
    ms_destroy(twin->model);
}

/* One model, wrapped and trained, then act with its n-th allocation (or call of the backend)
   failing: the error is clean, and the model trains on as its untouched twin does. */
static void fails_cleanly(model_fn act, bool on_device) {
    const uint64_t budget = chain_plain_bytes(5) * 9 / 10;
    hooked h;
    t_chain twin;
    t_failing f = on_device ? t_failing_device(&h.device) : t_failing_heap(&h.heap);
    f.heap = &h.heap;
    f.device = &h.device;
    while (t_next_failure(&f, 1)) {
        start_both(&h, &twin, 5);
        ms_set_budget(h.chain.model, budget);
        t_arm(&f);
        const ms_result result = act(h.chain.model);
        t_failed(&f, h.chain.model, result);
        step_both(&h, &twin);
        t_ok(h.chain.model, act(h.chain.model));
        step_both(&h, &twin);
        end_both(&h, &twin);
    }
    assert_true(f.error_count > 0);
}

static void failing_calls_leave_the_model_as_it_was(void **state) {
    (void)state;
    fails_cleanly(ms_wrap, false);
    fails_cleanly(ms_detach, false);
    fails_cleanly(ask_smallest, false);
}

static void every_backend_call_of_a_rewrap_fails_once(void **state) {
    (void)state;
    fails_cleanly(ms_wrap, true);
}

/* A failure in forward or backward leaves the values as they were; one in the update leaves a failed
   model, which writing and wrapping cure. */
static void every_backend_call_of_a_step_fails_once(void **state) {
    (void)state;
    uint32_t seen[2] = {0, 0};
    hooked h;
    t_chain twin;
    t_failing f = t_failing_device(&h.device);
    f.heap = &h.heap;
    while (t_next_failure(&f, 1)) {
        start_both(&h, &twin, 4);
        ms_model *m = h.chain.model;
        const uint64_t updates = h.device.updates;
        t_arm(&f);
        const ms_result result = ms_step(m, NULL);
        const bool failed = t_failed(&f, m, result), in_update = h.device.updates > updates;
        if (failed && in_update) {
            assert_int_equal(result, MS_RESULT_BACKEND);
            t_error(m, ms_step(m, NULL), MS_RESULT_FAILED);
            t_ok(m, t_chain_write(&h.chain, 1));
            t_ok(m, ms_wrap(m));
            t_ok(m, ms_step(m, NULL));
        } else if (failed) {
            assert_int_not_equal(result, MS_RESULT_OUT_OF_MEMORY);
            step_both(&h, &twin);
        }
        seen[in_update] += failed;
        end_both(&h, &twin);
    }
    assert_true(seen[0] > 0 && seen[1] > 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(undeclared_operands_have_no_data),
        cmocka_unit_test(dead_memory_holds_nan),
        cmocka_unit_test(dead_memory_keeps_its_bytes_without_debug),
        cmocka_unit_test(dead_memory_is_poisoned),
        cmocka_unit_test(a_stale_pointer_is_found),
        cmocka_unit_test(steps_allocate_nothing),
        cmocka_unit_test(every_byte_goes_through_the_hooks),
        cmocka_unit_test(wrapping_again_does_not_grow),
        cmocka_unit_test(sizes_of_device_memory_never_wrap),
        cmocka_unit_test(destroy_accepts_every_stage),
        cmocka_unit_test(written_values_move_in_turn),
        cmocka_unit_test(a_failed_first_wrap_keeps_what_was_written),
        cmocka_unit_test(every_allocation_of_a_first_wrap_fails_once),
        cmocka_unit_test(failing_calls_leave_the_model_as_it_was),
        cmocka_unit_test(every_backend_call_of_a_rewrap_fails_once),
        cmocka_unit_test(every_backend_call_of_a_step_fails_once),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
