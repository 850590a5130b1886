/*  test_memory.c - who may see which byte: debug mode, the layout, the allocator's hooks, and every
    allocation and every call of the backend failing once. */
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
    uint64_t budget = chain_plain_bytes(5) * 9 / 10;
    for (uint64_t fail_at = 1;; ++fail_at) {
        hooked h;
        hooked_init(&h);
        h.heap.fail_at = fail_at;
        ms_result result = build(&h, budget);
        if (!h.heap.has_failed) {
            t_ok(h.chain.model, result);
            assert_true(fail_at > 5);
            ms_destroy(h.chain.model);
            hooked_expect_empty(&h);
            break;
        }
        t_error(h.chain.model, result, MS_RESULT_OUT_OF_MEMORY);
        assert_true(ms_last_error(h.chain.model)[0] != 0);
        ms_destroy(h.chain.model);
        hooked_expect_empty(&h);
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

/* One model, wrapped and trained, then act with its n-th allocation (or call of the backend)
   failing: the error is clean, and the model trains on as its untouched twin does. */
static bool fails_cleanly(model_fn act, uint64_t budget, uint64_t fail_at, bool on_device) {
    hooked h;
    t_chain twin;
    ms_config config = t_config();
    hooked_init(&h);
    t_chain_start(&h.chain, &h.config, 5);
    t_chain_start(&twin, &config, 5);
    step_both(&h, &twin);
    ms_set_budget(h.chain.model, budget);
    if (on_device) {
        h.device.fail_at = h.device.calls + fail_at;
    } else {
        h.heap.fail_at = h.heap.calls + fail_at;
    }
    ms_result result = act(h.chain.model);
    bool failed = on_device ? h.device.calls >= h.device.fail_at : h.heap.has_failed;
    h.heap.fail_at = h.device.fail_at = 0;
    if (failed && on_device) {
        assert_true(result == MS_RESULT_BACKEND || result == MS_RESULT_OUT_OF_MEMORY);
    } else {
        t_error(h.chain.model, result, failed ? MS_RESULT_OUT_OF_MEMORY : MS_RESULT_OK);
    }
    step_both(&h, &twin);
    t_ok(h.chain.model, act(h.chain.model));
    step_both(&h, &twin);
    ms_destroy(h.chain.model);
    ms_destroy(twin.model);
    hooked_expect_empty(&h);
    return failed;
}

static void failing_calls_leave_the_model_as_it_was(void **state) {
    (void)state;
    static const model_fn acts[] = {ms_wrap, ms_detach, ask_smallest};
    uint64_t budget = chain_plain_bytes(5) * 9 / 10;
    for (size_t i = 0; i < sizeof acts / sizeof acts[0]; ++i) {
        uint64_t fail_at = 1;
        while (fails_cleanly(acts[i], budget, fail_at, false)) {
            fail_at += 1;
        }
        assert_true(fail_at > 1);
    }
}

static void every_backend_call_of_a_rewrap_fails_once(void **state) {
    (void)state;
    uint64_t budget = chain_plain_bytes(5) * 9 / 10;
    uint64_t fail_at = 1;
    while (fails_cleanly(ms_wrap, budget, fail_at, true)) {
        fail_at += 1;
    }
    assert_true(fail_at > 1);
}

/* Every call of the backend in a step fails once. A failure in forward or backward leaves the
   values as they were; one in the update leaves a failed model, which writing and wrapping cure. */
static bool step_fails_cleanly(uint64_t fail_at, uint32_t seen[2]) {
    hooked h;
    t_chain twin;
    ms_config config = t_config();
    hooked_init(&h);
    t_chain_start(&h.chain, &h.config, 4);
    t_chain_start(&twin, &config, 4);
    step_both(&h, &twin);
    h.device.fail_at = h.device.calls + fail_at;
    uint64_t updates = h.device.updates;
    ms_result result = ms_step(h.chain.model, NULL);
    bool failed = h.device.calls >= h.device.fail_at;
    updates = h.device.updates - updates;
    if (!failed) {
        t_ok(h.chain.model, result);
    } else if (updates == 0) { // of a gemm the callback learns, and passes it on
        assert_true(result == MS_RESULT_BACKEND || result == MS_RESULT_CALLBACK);
        step_both(&h, &twin);
        seen[0] += 1;
    } else {
        t_error(h.chain.model, result, MS_RESULT_BACKEND);
        t_error(h.chain.model, ms_step(h.chain.model, NULL), MS_RESULT_FAILED);
        t_ok(h.chain.model, t_chain_write(&h.chain, 1));
        t_ok(h.chain.model, ms_wrap(h.chain.model));
        t_ok(h.chain.model, ms_step(h.chain.model, NULL));
        seen[1] += 1;
    }
    ms_destroy(h.chain.model);
    ms_destroy(twin.model);
    hooked_expect_empty(&h);
    return failed;
}

static void every_backend_call_of_a_step_fails_once(void **state) {
    (void)state;
    uint32_t seen[2] = {0, 0};
    uint64_t fail_at = 1;
    while (step_fails_cleanly(fail_at, seen)) {
        fail_at += 1;
    }
    assert_true(seen[0] > 0 && seen[1] > 0);
}
// ------------------------------------------------------------------------------------------------
// the layout

enum { LAYOUT_BLOCKS = 120, LAYOUT_TIME = 60, LAYOUT_EFFORT = 2000000 };

static ms_allocator plain_allocator(t_heap *heap) {
    memset(heap, 0, sizeof *heap);
    return t_heap_allocator(heap);
}

static uint32_t random_blocks(t_rng *rng, msi_block *blocks) {
    uint32_t count = t_below(rng, LAYOUT_BLOCKS) + 1;
    memset(blocks, 0, LAYOUT_BLOCKS * sizeof *blocks);
    for (uint32_t i = 0; i < count; ++i) {
        uint32_t longest = t_chance(rng, 0.2) ? LAYOUT_TIME : 8;
        blocks[i].bytes = 64u * t_below(rng, t_chance(rng, 0.2) ? 200 : 20);
        blocks[i].first = t_below(rng, LAYOUT_TIME);
        blocks[i].last = blocks[i].first + t_below(rng, longest);
        blocks[i].offset = UINT64_MAX;
        blocks[i].from_top = t_chance(rng, 0.3);
    }
    return count;
}

static uint64_t load_bound(const msi_block *blocks, uint32_t count) {
    uint64_t bound = 0;
    for (uint32_t now = 0; now < 2 * LAYOUT_TIME; ++now) {
        uint64_t sum = 0;
        for (uint32_t i = 0; i < count; ++i) {
            sum += blocks[i].first <= now && now <= blocks[i].last ? blocks[i].bytes : 0;
        }
        bound = sum > bound ? sum : bound;
    }
    return bound;
}

static void check_layout(const msi_block *blocks, uint32_t count, uint64_t height) {
    for (uint32_t i = 0; i < count; ++i) {
        const msi_block *a = &blocks[i];
        assert_true(a->bytes == 0 || (a->offset % 64 == 0 && a->offset + a->bytes <= height));
        for (uint32_t k = 0; k < i; ++k) {
            const msi_block *b = &blocks[k];
            bool in_time = a->first <= b->last && b->first <= a->last;
            bool in_space = a->offset < b->offset + b->bytes && b->offset < a->offset + a->bytes;
            assert_false(in_time && in_space);
        }
    }
}

static bool is_valid(const msi_block *blocks, uint32_t count, uint64_t *bound) {
    const ms_allocator none = {NULL, NULL, NULL, NULL};
    bool valid = false;
    assert_int_equal(msi_layout_check(&none, blocks, count, &valid, bound), MS_RESULT_OK);
    return valid;
}

static void random_layouts(void **state) {
    (void)state;
    t_heap heap;
    ms_allocator allocator = plain_allocator(&heap);
    msi_block blocks[LAYOUT_BLOCKS], twins[LAYOUT_BLOCKS];
    double ratios = 0.0;
    for (uint64_t seed = 0; seed < 200; ++seed) {
        t_rng rng = t_seed(seed);
        uint32_t count = random_blocks(&rng, blocks);
        uint64_t height = 0, again = 0, bound = 0;
        memcpy(twins, blocks, sizeof blocks);
        assert_int_equal(msi_layout(&allocator, blocks, count, LAYOUT_EFFORT, &height), 0);
        assert_int_equal(msi_layout(&allocator, twins, count, LAYOUT_EFFORT, &again), 0);
        assert_true(height == again);
        assert_memory_equal(blocks, twins, count * sizeof *blocks);
        check_layout(blocks, count, height);
        assert_true(is_valid(blocks, count, &bound));
        assert_true(bound == load_bound(blocks, count) && height >= bound);
        ratios += bound == 0 ? 1.0 : (double)height / (double)bound;
    }
    assert_true(ratios / 200.0 < 1.02);
    assert_true(heap.live_count == 0 && heap.wrong_releases == 0);
}

enum { PASS_LAYERS = 60, PASS_BLOCKS = 8 * PASS_LAYERS };

static void add_block(msi_block *blocks, uint32_t *count, uint64_t bytes, uint32_t first,
                      uint32_t last) {
    msi_block *b = &blocks[(*count)++];
    memset(b, 0, sizeof *b);
    b->bytes = bytes;
    b->first = first;
    b->last = last;
    b->offset = UINT64_MAX;
}

/* A step of a chain that keeps every `every`-th activation, and makes the others again, segment by
   segment, in backward; with gradients that follow, and scratch memory. Sizes differ by up to
   2^8. */
static uint32_t chain_blocks(t_rng *rng, uint32_t every, msi_block *blocks) {
    uint64_t bytes[PASS_LAYERS];
    uint32_t count = 0, now = PASS_LAYERS;
    for (uint32_t i = 0; i < PASS_LAYERS; ++i) {
        bytes[i] = 64 * (uint64_t)exp2(4.0 + 8.0 * t_unit(rng));
        if (i % every != 0) { // dropped
            add_block(blocks, &count, bytes[i], i, i + 1);
        }
        if (t_chance(rng, 0.3)) {
            add_block(blocks, &count, 64 * (uint64_t)exp2(4.0 + 8.0 * t_unit(rng)), i, i);
        }
    }
    for (uint32_t end = PASS_LAYERS; end > 0;) { // layers [begin, end) come back
        const uint32_t begin = (end - 1) / every * every, made = now, length = end - begin;
        for (uint32_t i = begin + 1; i < end; ++i) {
            add_block(blocks, &count, bytes[i], made + i - begin - 1, made + length + end - 1 - i);
        }
        now += length - 1;
        for (uint32_t i = end; i-- > begin; ++now) {
            add_block(blocks, &count, bytes[i], now, now + 1); // its gradient
        }
        add_block(blocks, &count, bytes[begin], begin, now);
        end = begin;
    }
    return count;
}

/* Where checkpoints die and come back in the midst of others, little is lost. */
static void layouts_of_recomputation(void **state) {
    (void)state;
    static msi_block blocks[PASS_BLOCKS];
    t_heap heap;
    ms_allocator allocator = plain_allocator(&heap);
    double worst = 1.0, sum = 0.0;
    for (uint64_t seed = 0; seed < 60; ++seed) {
        t_rng rng = t_seed(seed);
        uint64_t height = 0, bound = 0;
        uint32_t count = chain_blocks(&rng, 1 + (uint32_t)(seed % 12), blocks);
        assert_true(count <= PASS_BLOCKS);
        assert_int_equal(msi_layout(&allocator, blocks, count, 10 * LAYOUT_EFFORT, &height), 0);
        check_layout(blocks, count, height);
        assert_true(is_valid(blocks, count, &bound));
        const double ratio = (double)height / (double)bound;
        worst = ratio > worst ? ratio : worst;
        sum += ratio;
    }
    print_message("arena over lower bound: %.5f, at most %.5f\n", sum / 60.0, worst);
    assert_true(sum / 60.0 < 1.0005 && worst < 1.005);
}

enum { LARGE_BLOCKS = 20000 };

/* A plain step of a chain: activations that live until their backward, gradients, and gradients of
   params that live until the updates at the end. `spread`: of sizes, in powers of two. */
static uint32_t large_chain(t_rng *rng, double spread, msi_block *blocks) {
    const uint32_t layers = LARGE_BLOCKS / 4;
    uint32_t count = 0;
    for (uint32_t i = 0; i < layers; ++i) {
        const uint32_t back = 2 * layers - 1 - i;
        const uint64_t bytes = 64 * (uint64_t)exp2(8.0 + spread * t_unit(rng));
        add_block(blocks, &count, bytes, i, back);
        add_block(blocks, &count, bytes, back - (i + 1 < layers), back);
        add_block(blocks, &count, 64 * (1 + t_below(rng, 8)), back, 3 * layers - 1 - i);
        if (spread > 0.0) {
            add_block(blocks, &count, 64 * (uint64_t)exp2(6.0 + spread * t_unit(rng)), i, i);
        }
    }
    return count;
}

/* The same net with skips to anywhere later, saved tensors, and activations that backward does not
   read. */
static uint32_t large_net(t_rng *rng, msi_block *blocks) {
    const uint32_t layers = LARGE_BLOCKS / 5;
    uint32_t count = 0;
    for (uint32_t i = 0; i < layers; ++i) {
        const uint32_t back = 2 * layers - 1 - i, left = layers - i;
        const uint32_t skip = t_chance(rng, 0.1) ? t_below(rng, left) : t_below(rng, 3);
        const uint64_t bytes = 64 * (uint64_t)exp2(10.0 * t_unit(rng));
        add_block(blocks, &count, bytes, i, t_chance(rng, 0.7) ? back : i + skip);
        add_block(blocks, &count, 64 * (1 + t_below(rng, 20)), i, back);
        add_block(blocks, &count, bytes, skip < left ? back - skip : back, back + 1);
        add_block(blocks, &count, 64 * (1 + t_below(rng, 900)), back, back);
        add_block(blocks, &count, 64 * (1 + t_below(rng, 90)), back,
                  t_chance(rng, 0.3) ? 2 * layers : back + t_below(rng, 12));
    }
    return count;
}

enum { PEAK_BLOCKS = 400, PEAK_TIME = 500 };

/* Half of the blocks are nested around the middle; some live to the end. */
static uint32_t nested_blocks(t_rng *rng, msi_block *blocks) {
    const uint32_t wanted = 1 + t_below(rng, PEAK_BLOCKS - 1), time = 4 + t_below(rng, PEAK_TIME);
    uint32_t count = 0;
    while (count < wanted) {
        uint32_t first = t_below(rng, time);
        uint32_t last = first + t_below(rng, t_chance(rng, 0.3) ? time : 12);
        if (t_chance(rng, 0.5)) {
            first /= 2;
            last = time - first + t_below(rng, 5);
        } else if (t_chance(rng, 0.2)) {
            last = time + t_below(rng, 9);
        }
        add_block(blocks, &count, 64 * t_below(rng, t_chance(rng, 0.2) ? 300 : 30), first, last);
    }
    return count;
}

/* What first-fit in the order of w gives after the first `begin` blocks, found by trial of all. */
static void check_first_fit(const msi_layout_work *w, uint32_t begin) {
    for (uint32_t i = begin; i < w->used; ++i) {
        const uint32_t block = w->order[i];
        const uint64_t bytes = w->blocks[block].bytes;
        uint64_t low = 0;
        for (uint32_t k = 0; k < i; ++k) {
            const uint32_t other = w->order[k];
            const uint64_t high = w->best[other] + w->blocks[other].bytes;
            if (w->first[other] <= w->last[block] && w->first[block] <= w->last[other] &&
                w->best[other] < low + bytes && high > low) {
                low = high;
                k = UINT32_MAX; // again, from the first
            }
        }
        assert_true(low == w->best[block]);
    }
}

/* Layouts from the peak are layouts, and where nothing hangs, they are what first-fit gives. */
static void layouts_from_the_peak(void **state) {
    (void)state;
    static const msi_stacking ways[] = {{0, true, MSI_ORDER_BYTES},   {64, false, MSI_ORDER_BYTES},
                                        {0, false, MSI_ORDER_BYTES},  {0, true, MSI_ORDER_LOAD},
                                        {0, false, MSI_ORDER_LOAD},   {8, true, MSI_ORDER_BYTES},
                                        {100, true, MSI_ORDER_BYTES}, {1, false, MSI_ORDER_SPAN}};
    const ms_allocator none = {NULL, NULL, NULL, NULL};
    static msi_block blocks[PEAK_BLOCKS];
    for (uint64_t seed = 0; seed < 400; ++seed) {
        t_rng rng = t_seed(seed);
        const uint32_t count = nested_blocks(&rng, blocks);
        const msi_stacking *how = &ways[seed % (sizeof ways / sizeof ways[0])];
        msi_layout_work w;
        uint64_t *memory, height = 0, bound;
        assert_int_equal(msi_layout_begin(&w, &none, blocks, count, &memory), MS_RESULT_OK);
        if (w.used > 0) {
            assert_true(msi_layout_from_peak(&w, how, UINT64_MAX) > 0);
            assert_true(w.height < UINT64_MAX);
        }
        for (uint32_t i = 0; i < count; ++i) {
            blocks[i].offset = blocks[i].bytes ? w.best[i] : 0;
            height = msi_larger(height, blocks[i].offset + blocks[i].bytes);
        }
        assert_true(is_valid(blocks, count, &bound) && (w.used == 0 || height == w.height));
        if (w.used > 0 && !how->hang) {
            check_first_fit(&w, w.stacks.count);
        }
        msi_release(&none, memory, msi_layout_bind(&w, NULL));
    }
}

/* What a block that meets those before it in the order of w can have as highest offset below the
   bound, found by trial of all; UINT64_MAX: there is none. */
static uint64_t highest_offset(const msi_layout_work *w, uint32_t i) {
    const uint32_t block = w->order[i];
    const uint64_t bytes = w->blocks[block].bytes;
    uint64_t high = w->bound;
    for (uint32_t k = 0; k < i && high >= bytes; ++k) {
        const uint32_t other = w->order[k];
        if (w->first[other] <= w->last[block] && w->first[block] <= w->last[other] &&
            w->best[other] < high && w->best[other] + w->blocks[other].bytes > high - bytes) {
            high = w->best[other];
            k = UINT32_MAX; // again, from the first
        }
    }
    return high >= bytes ? high - bytes : UINT64_MAX;
}

/* First-fit looks at few blocks and finds what trial of all finds, in any order, and from both ends. */
static void first_fit_finds_the_first_gap(void **state) {
    (void)state;
    const ms_allocator none = {NULL, NULL, NULL, NULL};
    static msi_block blocks[PEAK_BLOCKS];
    uint32_t hanging = 0, strides = 0;
    for (uint64_t seed = 0; seed < t_sweep(300, 3000); ++seed) {
        t_rng rng = t_seed(seed);
        const uint32_t count = nested_blocks(&rng, blocks);
        const bool both = t_chance(&rng, 0.5);
        msi_layout_work w;
        uint64_t *memory, bound;
        assert_int_equal(msi_layout_begin(&w, &none, blocks, count, &memory), MS_RESULT_OK);
        if (w.used > 0) {
            w.effort = UINT64_MAX;
            msi_layout_list_living(&w);
            strides += w.stride > 1;
            msi_layout_sort(&w, (msi_layout_order)t_below(&rng, MSI_ORDER_SPAN_CLASS + 1), 4);
            assert_true(msi_layout_first_fit(&w, both));
        }
        for (uint32_t i = 0; i < count; ++i) {
            blocks[i].offset = blocks[i].bytes ? w.best[i] : 0;
        }
        assert_true(is_valid(blocks, count, &bound));
        for (uint32_t i = 0; i < w.used && both; ++i) {
            const uint32_t block = w.order[i];
            const uint64_t high = highest_offset(&w, i);
            if (w.last[block] - w.first[block] < 3 && high < UINT64_MAX) {
                assert_true(w.best[block] == high);
                hanging++;
            }
        }
        if (!both) {
            check_first_fit(&w, 0);
        }
        msi_release(&none, memory, msi_layout_bind(&w, NULL));
    }
    assert_true(hanging > 1000 && strides > 100);
}

/* With tens of thousands of blocks the layout still comes close to the bound. */
static void layouts_of_large_graphs(void **state) {
    (void)state;
    t_heap heap;
    ms_allocator allocator = plain_allocator(&heap);
    msi_block *blocks = (msi_block *)malloc(LARGE_BLOCKS * sizeof *blocks);
    assert_non_null(blocks);
    for (uint64_t seed = 0; seed < 6; ++seed) {
        t_rng rng = t_seed(seed);
        uint64_t height = 0, bound = 0;
        const uint32_t count =
            seed < 3 ? large_chain(&rng, 3.0 * (double)seed, blocks) : large_net(&rng, blocks);
        assert_true(count <= LARGE_BLOCKS);
        assert_int_equal(msi_layout(&allocator, blocks, count, LAYOUT_EFFORT, &height), 0);
        assert_true(is_valid(blocks, count, &bound));
        const double ratio = (double)height / (double)bound;
        print_message("%u blocks: arena over lower bound %.5f\n", count, ratio);
        assert_true(ratio <= 1.005);
    }
    free(blocks);
}

/* A step of a chain of equal layers that makes its activations again in segments. */
static uint32_t segmented_chain(uint32_t layers, uint32_t width, msi_block *blocks) {
    uint32_t count = 0, now = layers;
    for (uint32_t end = layers; end > 0; end -= width) { // layers [end - width, end) come back
        const uint32_t made = now;
        add_block(blocks, &count, 256, end - width, made + 2 * width);
        for (uint32_t k = 1; k < width; ++k) {
            const uint64_t bytes = 64 + 64 * (uint64_t)((end + k * k) % 97);
            add_block(blocks, &count, 64, end - width + k, end - width + k + 1);
            add_block(blocks, &count, bytes, made + k, made + 2 * width - k);
        }
        now += 2 * width;
    }
    return count;
}

/* What recomputation brings back lives longer, the larger the graph; its layout takes about as many
   operations for each block all the same. */
static void layouts_of_recomputation_take_near_linear_time(void **state) {
    (void)state;
    static const msi_stacking way = {0, true, MSI_ORDER_BYTES};
    static const uint32_t widths[] = {50, 200}; // squares of these are layers
    const ms_allocator none = {NULL, NULL, NULL, NULL};
    double each[2];
    for (int i = 0; i < 2; ++i) {
        const uint32_t layers = widths[i] * widths[i];
        msi_block *blocks = (msi_block *)malloc(2 * (size_t)layers * sizeof *blocks);
        assert_non_null(blocks);
        const uint32_t count = segmented_chain(layers, widths[i], blocks);
        msi_layout_work w;
        uint64_t *memory;
        assert_int_equal(msi_layout_begin(&w, &none, blocks, count, &memory), MS_RESULT_OK);
        const uint64_t left = msi_layout_from_peak(&w, &way, UINT64_MAX);
        each[i] = (double)(UINT64_MAX - left) / (double)count;
        print_message("%u blocks: %.0f operations each, arena over lower bound %.5f\n", count,
                      each[i], (double)w.height / (double)w.bound);
        msi_release(&none, memory, msi_layout_bind(&w, NULL));
        free(blocks);
    }
    assert_true(each[1] < 6.0 * each[0]);
}

/* Two blocks that overlap are no layout, whatever else stands there. */
static void an_invalid_layout_is_told(void **state) {
    (void)state;
    msi_block blocks[3];
    uint64_t bound;
    memset(blocks, 0, sizeof blocks);
    for (uint32_t i = 0; i < 3; ++i) {
        blocks[i].bytes = 128;
        blocks[i].offset = 128 * (uint64_t)i;
        blocks[i].first = i;
        blocks[i].last = i + 1;
    }
    assert_true(is_valid(blocks, 3, &bound));
    blocks[2].offset = 0; // over block 0, which is dead by then
    assert_true(is_valid(blocks, 3, &bound));
    blocks[2].offset = 192;
    assert_false(is_valid(blocks, 3, &bound));
    blocks[2].first = blocks[2].last = 1;
    blocks[2].offset = 64;
    assert_false(is_valid(blocks, 3, &bound));
}

/* Gradients are hinted to lie at the top, where they pile up while activations end below. The layout
   is as good with all hints turned round, so its height does not show them. */
static void gradients_come_from_the_top(void **state) {
    (void)state;
    t_chain chain;
    ms_config config = t_config();
    uint32_t count[2] = {0, 0};
    t_chain_start(&chain, &config, 6);
    const msi_program *p = &chain.model->run.plan->train;
    for (uint32_t i = chain.model->run.store->residents.count; i < p->ranges.count; ++i) {
        const msi_range *range = &p->ranges.items[i];
        const bool gradient = range->category == MS_CATEGORY_GRADIENT;
        if (range->alias_of == MSI_NONE) {
            assert_true(p->blocks.items[range->block].from_top == (uint8_t)gradient);
            count[gradient] += 1;
        }
    }
    assert_true(count[0] > 0 && count[1] > 0);
    ms_destroy(chain.model);
}

static void layouts_of_nothing_and_of_little(void **state) {
    (void)state;
    t_heap heap;
    ms_allocator allocator = plain_allocator(&heap);
    msi_block blocks[3];
    uint64_t height = 99;
    assert_int_equal(msi_layout(&allocator, NULL, 0, LAYOUT_EFFORT, &height), MS_RESULT_OK);
    assert_true(height == 0);
    memset(blocks, 0, sizeof blocks);
    blocks[0].bytes = 192;
    blocks[0].first = blocks[0].last = 4;
    assert_int_equal(msi_layout(&allocator, blocks, 1, LAYOUT_EFFORT, &height), MS_RESULT_OK);
    assert_true(height == 192 && blocks[0].offset == 0);
    blocks[1] = blocks[2] = blocks[0];
    blocks[1].bytes = 0;
    assert_int_equal(msi_layout(&allocator, blocks, 3, LAYOUT_EFFORT, &height), MS_RESULT_OK);
    assert_true(height == 384);
    check_layout(blocks, 3, height);
    for (int i = 0; i < 3; ++i) {
        blocks[i].bytes = 0;
    }
    assert_int_equal(msi_layout(&allocator, blocks, 3, LAYOUT_EFFORT, &height), MS_RESULT_OK);
    assert_true(height == 0);
    assert_true(heap.live_count == 0);
}

/* With no effort to spend there is still a layout. */
static void a_layout_without_effort(void **state) {
    (void)state;
    t_heap heap;
    ms_allocator allocator = plain_allocator(&heap);
    msi_block blocks[LAYOUT_BLOCKS];
    for (uint64_t seed = 0; seed < 50; ++seed) {
        t_rng rng = t_seed(seed);
        uint32_t count = random_blocks(&rng, blocks);
        uint64_t height = 0;
        assert_int_equal(msi_layout(&allocator, blocks, count, 0, &height), MS_RESULT_OK);
        check_layout(blocks, count, height);
    }
}

static void a_layout_without_memory(void **state) {
    (void)state;
    t_heap heap;
    ms_allocator allocator = plain_allocator(&heap);
    msi_block blocks[LAYOUT_BLOCKS];
    t_rng rng = t_seed(3);
    uint64_t fail_at = 1, height = 0;
    uint32_t count = random_blocks(&rng, blocks);
    for (;; ++fail_at) {
        memset(&heap, 0, sizeof heap);
        heap.fail_at = fail_at;
        ms_result result = msi_layout(&allocator, blocks, count, LAYOUT_EFFORT, &height);
        assert_true(heap.live_count == 0 && heap.wrong_releases == 0);
        if (!heap.has_failed) {
            assert_int_equal(result, MS_RESULT_OK);
            break;
        }
        assert_int_equal(result, MS_RESULT_OUT_OF_MEMORY);
    }
    assert_true(fail_at > 1);
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
        cmocka_unit_test(every_allocation_of_a_first_wrap_fails_once),
        cmocka_unit_test(failing_calls_leave_the_model_as_it_was),
        cmocka_unit_test(every_backend_call_of_a_rewrap_fails_once),
        cmocka_unit_test(every_backend_call_of_a_step_fails_once),
        cmocka_unit_test(random_layouts),
        cmocka_unit_test(layouts_of_recomputation),
        cmocka_unit_test(layouts_from_the_peak),
        cmocka_unit_test(first_fit_finds_the_first_gap),
        cmocka_unit_test(layouts_of_large_graphs),
        cmocka_unit_test(layouts_of_recomputation_take_near_linear_time),
        cmocka_unit_test(an_invalid_layout_is_told),
        cmocka_unit_test(gradients_come_from_the_top),
        cmocka_unit_test(layouts_of_nothing_and_of_little),
        cmocka_unit_test(a_layout_without_effort),
        cmocka_unit_test(a_layout_without_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
