/*  test_api.c - the life cycle and the order of its calls, failing callbacks, the log, reading and
    writing, names and handles. What is refused, and with which text, is in test_validate.c. */
#include "private.h"
#include "toy_layers.h"

static ms_model *plain_model(void) {
    ms_model *m = NULL;
    ms_config config = t_config();
    assert_int_equal(ms_create(&config, &m), MS_RESULT_OK);
    return m;
}

// ------------------------------------------------------------------------------------------------
// names, shapes

static void every_enum_value_has_a_name(void **state) {
    (void)state;
    assert_string_equal(ms_result_name(MS_RESULT_BUDGET), "MS_RESULT_BUDGET");
    assert_string_equal(ms_result_text(MS_RESULT_BUDGET), "no plan fits the memory budget");
    for (int i = 0; i < MS_RESULT_COUNT; ++i) {
        assert_memory_equal(ms_result_name((ms_result)i), "MS_RESULT_", 10);
        assert_true(strlen(ms_result_text((ms_result)i)) > 5);
    }
    assert_non_null(ms_result_name(MS_RESULT_COUNT));
    assert_non_null(ms_result_text(MS_RESULT_COUNT));
    for (int i = 0; i < MS_CATEGORY_COUNT; ++i) {
        assert_string_not_equal(ms_category_name((ms_category)i), "?");
    }
    assert_string_equal(ms_category_name(MS_CATEGORY_ACTIVATION_GRADIENT), "activation gradients");
    assert_string_equal(ms_category_name(MS_CATEGORY_COUNT), "?");
}

static void dtypes_have_their_names_and_sizes(void **state) {
    (void)state;
    static const char *const expected[] = {"f32", "f64", "f16", "bf16", "i64",
                                           "i32", "i16", "i8",  "u8"};
    static const uint64_t bytes[] = {4, 8, 2, 2, 8, 4, 2, 1, 1};
    for (int i = 0; i < MS_DTYPE_COUNT; ++i) {
        assert_string_equal(ms_dtype_name((ms_dtype)i), expected[i]);
        assert_true(ms_dtype_bytes((ms_dtype)i) == bytes[i]);
    }
    assert_string_equal(ms_dtype_name(MS_DTYPE_COUNT), "?");
    assert_true(ms_dtype_bytes(MS_DTYPE_COUNT) == 0);
}

static void shapes_count_their_elements(void **state) {
    (void)state;
    ms_shape shape = ms_shape4(2, 3, 5, 7);
    assert_int_equal(shape.rank, 4);
    assert_true(ms_shape_count(&shape) == 210);
    shape = ms_shape1(9);
    assert_true(shape.rank == 1 && ms_shape_count(&shape) == 9);
    shape = ms_shape3(4, 0, 4);
    assert_true(ms_shape_count(&shape) == 0);
    shape = ms_shape2(-1, -1);
    assert_true(ms_shape_count(&shape) == 0);
    shape = ms_shape3((int64_t)1 << 40, (int64_t)1 << 40, 2);
    assert_true(ms_shape_count(&shape) == 0);
    shape = ms_shape2((int64_t)1 << 40, ((int64_t)1 << 24) + 1); // 2^40 but for a carry
    assert_true(ms_shape_count(&shape) == 0);
    memset(&shape, 0, sizeof shape);
    assert_true(ms_shape_count(&shape) == 1);
}

/* The high half of a product, by halves of its factors. */
static uint64_t carry_of(uint64_t a, uint64_t b) {
    const uint64_t low = a & UINT32_MAX, high = a >> 32;
    const uint64_t middle = low * (b >> 32) + ((low * (b & UINT32_MAX)) >> 32);
    const uint64_t other = high * (b & UINT32_MAX) + (middle & UINT32_MAX);
    return high * (b >> 32) + (middle >> 32) + (other >> 32);
}

/* Whether a product wraps does not show in what is left of it: that may be larger than a factor. */
static void products_never_wrap(void **state) {
    (void)state;
    t_rng rng = t_seed(75);
    uint32_t larger = 0, whole = 0;
    for (int i = 0; i < 20000; ++i) {
        const uint64_t a = t_next(&rng) >> t_below(&rng, 64), b = t_next(&rng) >> t_below(&rng, 64);
        uint64_t product = 0;
        const bool fits = msi_multiply(a, b, &product);
        assert_true(fits == (carry_of(a, b) == 0) && product == a * b);
        larger += !fits && product >= a && product >= b;
        whole += fits;
    }
    assert_true(larger > 1000 && whole > 1000);
    static const uint64_t edges[] = {
        0,         1, 2, 3, UINT32_MAX, (uint64_t)UINT32_MAX + 1, UINT64_MAX / 3, UINT64_MAX / 2,
        UINT64_MAX};
    enum { EDGES = sizeof edges / sizeof edges[0] };
    for (int i = 0; i < EDGES * EDGES; ++i) {
        const uint64_t a = edges[i / EDGES], b = edges[i % EDGES];
        uint64_t product;
        assert_true(msi_multiply(a, b, &product) == (carry_of(a, b) == 0));
    }
}

// ------------------------------------------------------------------------------------------------
// the hardware

static void the_hardware_is_reported(void **state) {
    (void)state;
    ms_hardware hardware;
    ms_model *m = plain_model();
    memset(&hardware, 0xff, sizeof hardware);
    t_ok(m, ms_hardware_report(m, &hardware));
#ifdef T_CUDA
    assert_true(hardware.kind != MS_DEVICE_CPU);
#else
    assert_int_equal(hardware.kind, MS_DEVICE_CPU);
#endif
    assert_true(memchr(hardware.name, 0, sizeof hardware.name) != NULL);
    assert_true(hardware.processor_count < 100000);
    assert_true(hardware.total_bytes == 0 || hardware.free_bytes <= hardware.total_bytes);
    ms_destroy(m);
}

/* Budget 0: a part of the free memory, which the small chain does not fill. */
static void the_default_budget_is_a_part_of_the_free_memory(void **state) {
    (void)state;
    t_chain chain;
    ms_hardware hardware;
    ms_memory_report report;
    ms_config config = t_config();
    config.memory_budget_bytes = 0;
    t_chain_start(&chain, &config, 3);
    t_report(chain.model, &report);
    t_ok(chain.model, ms_hardware_report(chain.model, &hardware));
    assert_true(report.arena_bytes == report.plain_bytes);
    assert_true(report.budget_bytes >= report.arena_bytes);
    if (hardware.total_bytes != 0) {
        assert_true(report.budget_bytes <= hardware.total_bytes);
    }
    ms_destroy(chain.model);
}

// ------------------------------------------------------------------------------------------------
// the order of the calls

static void steps_need_a_wrap(void **state) {
    (void)state;
    t_chain chain;
    ms_memory_report report;
    t_text text = {NULL, 0};
    ms_config config = t_config();
    assert_int_equal(t_chain_create(&chain, &config, 2, T_CHAIN_ROWS, T_CHAIN_COLS), MS_RESULT_OK);
    ms_model *m = chain.model;
    t_error(m, ms_step(m, NULL), MS_RESULT_ORDER);
    t_error(m, ms_forward(m, NULL), MS_RESULT_ORDER);
    t_error(m, ms_eval(m, NULL), MS_RESULT_ORDER);
    t_error(m, ms_report(m, &report), MS_RESULT_ORDER);
    t_error(m, ms_print_plan(m, t_append, &text), MS_RESULT_ORDER);
    t_error(m, ms_print_plan_full(m, t_append, &text), MS_RESULT_ORDER);
    t_ok(m, ms_wrap(m));
    t_ok(m, t_chain_write(&chain, 1));
    t_ok(m, ms_step(m, NULL));
    ms_destroy(m);
}

static void calls_out_of_turn(void **state) {
    (void)state;
    t_chain chain, twin;
    ms_config config = t_config();
    t_chain_start(&chain, &config, 3);
    t_chain_start(&twin, &config, 3);
    ms_model *m = chain.model;
    t_error(m, ms_backward(m), MS_RESULT_ORDER);
    t_error(m, ms_update(m), MS_RESULT_ORDER);
    t_ok(m, ms_forward(m, NULL));
    t_error(m, ms_update(m), MS_RESULT_ORDER);
    t_ok(m, ms_backward(m));
    t_error(m, ms_backward(m), MS_RESULT_ORDER);
    t_ok(m, ms_update(m));
    t_error(m, ms_update(m), MS_RESULT_ORDER);
    t_ok(twin.model, ms_step(twin.model, NULL));
    t_chain_same(&chain, &twin);
    t_ok(m, ms_forward(m, NULL));
    t_ok(m, ms_eval(m, NULL)); // ends the step that was begun
    t_error(m, ms_backward(m), MS_RESULT_ORDER);
    t_ok(m, ms_step(m, NULL));
    t_ok(twin.model, ms_step(twin.model, NULL));
    t_chain_same(&chain, &twin);
    ms_destroy(m);
    ms_destroy(twin.model);
}

static void a_budget_of_one_byte(void **state) {
    (void)state;
    t_chain chain;
    ms_config config = t_config();
    config.memory_budget_bytes = 1;
    assert_int_equal(t_chain_create(&chain, &config, 3, T_CHAIN_ROWS, T_CHAIN_COLS), MS_RESULT_OK);
    t_error(chain.model, ms_wrap(chain.model), MS_RESULT_BUDGET);
    t_error(chain.model, ms_step(chain.model, NULL), MS_RESULT_ORDER);
    ms_set_budget(chain.model, 1 << 20);
    t_ok(chain.model, ms_wrap(chain.model));
    ms_destroy(chain.model);
}

static void a_dry_run_does_not_step(void **state) {
    (void)state;
    t_chain chain;
    float data[64];
    ms_config config = t_config();
    config.dry_run = true;
    assert_int_equal(t_chain_create(&chain, &config, 3, T_CHAIN_ROWS, T_CHAIN_COLS), MS_RESULT_OK);
    ms_model *m = chain.model;
    t_ok(m, ms_wrap(m));
    t_error(m, ms_step(m, NULL), MS_RESULT_DRY_RUN);
    t_error(m, ms_forward(m, NULL), MS_RESULT_DRY_RUN);
    t_error(m, ms_eval(m, NULL), MS_RESULT_DRY_RUN);
    t_error(m, ms_read(m, chain.weight[0], data), MS_RESULT_DRY_RUN);
    memset(data, 0, sizeof data);
    t_error(m, ms_write(m, chain.weight[0], data), MS_RESULT_DRY_RUN);
    ms_destroy(m);
}

// ------------------------------------------------------------------------------------------------
// callbacks that fail

static uint64_t tight_budget(const ms_config *config, uint32_t depth) {
    t_chain chain;
    uint64_t smallest = 0;
    ms_config dry = *config;
    dry.dry_run = true;
    dry.memory_budget_bytes = (uint64_t)1 << 40;
    assert_int_equal(t_chain_create(&chain, &dry, depth, T_CHAIN_ROWS, T_CHAIN_COLS), MS_RESULT_OK);
    t_ok(chain.model, ms_smallest_budget(chain.model, &smallest));
    ms_destroy(chain.model);
    return smallest;
}

static void tight_start(t_chain *chain, ms_config *config, uint32_t depth) {
    config->memory_budget_bytes = tight_budget(config, depth);
    assert_int_equal(t_chain_create(chain, config, depth, T_CHAIN_ROWS, T_CHAIN_COLS),
                     MS_RESULT_OK);
    t_ok(chain->model, ms_wrap(chain->model));
    t_ok(chain->model, t_chain_write(chain, 1));
}

static void expect_callback_error(t_chain *chain, t_op *op, ms_phase phase, const char *layer) {
    op->failing = 1u << phase;
    t_error(chain->model, ms_step(chain->model, NULL), MS_RESULT_CALLBACK);
    t_text_has(ms_last_error(chain->model), layer);
    t_text_has(ms_last_error(chain->model), "17");
    op->failing = 0;
}

/* The first matmul that a step of this plan calls in this phase. */
static uint32_t layer_that_runs(t_chain *chain, ms_phase phase) {
    for (uint32_t i = 0; i < chain->depth; ++i) {
        if (chain->matmul[i].calls[phase] > 0) {
            return i;
        }
    }
    fail_msg("no layer runs in phase %d", (int)phase);
    return 0;
}

/* With late updates a failure in any phase leaves params and state as they were. */
static void a_failing_callback_costs_one_step(void **state) {
    (void)state;
    static const ms_phase phases[] = {MS_PHASE_FORWARD, MS_PHASE_RECOMPUTE, MS_PHASE_BACKWARD};
    t_chain chain, twin;
    ms_config config = t_config();
    config.early_update = MS_SWITCH_OFF;
    tight_start(&chain, &config, 9);
    tight_start(&twin, &config, 9);
    for (int i = 0; i < 3; ++i) {
        char name[32];
        t_ok(chain.model, ms_step(chain.model, NULL));
        t_ok(twin.model, ms_step(twin.model, NULL));
        uint32_t layer = layer_that_runs(&chain, phases[i]);
        snprintf(name, sizeof name, "matmul%u", (unsigned)layer);
        expect_callback_error(&chain, &chain.matmul[layer], phases[i], name);
        t_chain_same(&chain, &twin);
        t_ok(chain.model, ms_step(chain.model, NULL));
        t_ok(twin.model, ms_step(twin.model, NULL));
        t_chain_same(&chain, &twin);
    }
    ms_destroy(chain.model);
    ms_destroy(twin.model);
}

static void a_failing_eval_does_not_end_training(void **state) {
    (void)state;
    t_chain chain, twin;
    ms_config config = t_config();
    t_chain_start(&chain, &config, 3);
    t_chain_start(&twin, &config, 3);
    chain.squash[1].failing = 1u << MS_PHASE_EVAL;
    t_error(chain.model, ms_eval(chain.model, NULL), MS_RESULT_CALLBACK);
    t_text_has(ms_last_error(chain.model), "squash1");
    t_ok(chain.model, ms_step(chain.model, NULL));
    t_ok(twin.model, ms_step(twin.model, NULL));
    t_chain_same(&chain, &twin);
    ms_destroy(chain.model);
    ms_destroy(twin.model);
}

/* With early updates a failure after the first of them leaves a model that must be written. */
static void an_update_cut_in_two_fails_the_model(void **state) {
    (void)state;
    t_chain chain, twin;
    ms_config config = t_config();
    config.early_update = MS_SWITCH_ON;
    t_chain_start(&chain, &config, 4);
    t_chain_start(&twin, &config, 4);
    ms_model *m = chain.model;
    expect_callback_error(&chain, &chain.matmul[3], MS_PHASE_FORWARD, "matmul3");
    t_ok(m, ms_step(m, NULL));
    t_ok(twin.model, ms_step(twin.model, NULL));
    t_chain_same(&chain, &twin);
    expect_callback_error(&chain, &chain.matmul[0], MS_PHASE_BACKWARD, "matmul0");
    t_error(m, ms_step(m, NULL), MS_RESULT_FAILED);
    t_error(m, ms_forward(m, NULL), MS_RESULT_FAILED);
    t_ok(m, t_chain_write(&chain, 2));
    t_error(m, ms_step(m, NULL), MS_RESULT_FAILED);
    t_ok(m, ms_wrap(m));
    t_ok(m, ms_step(m, NULL));
    ms_destroy(m);
    ms_destroy(twin.model);
}

static void a_loss_that_is_not_finite(void **state) {
    (void)state;
    static const float bad[] = {INFINITY, -INFINITY, NAN};
    t_chain chain, twin;
    double loss = 0.0;
    ms_config config = t_config();
    t_chain_start(&chain, &config, 3);
    t_chain_start(&twin, &config, 3);
    ms_model *m = chain.model;
    for (int i = 0; i < 3; ++i) {
        float x[T_CHAIN_INPUT];
        for (int k = 0; k < T_CHAIN_INPUT; ++k) {
            x[k] = bad[i];
        }
        t_ok(m, ms_write(m, chain.x, x));
        t_error(m, ms_step(m, &loss), MS_RESULT_NONFINITE);
        t_error(m, ms_backward(m), MS_RESULT_ORDER);
        t_error(m, ms_eval(m, &loss), MS_RESULT_NONFINITE);
        t_chain_same(&chain, &twin);
    }
    float *x = (float *)calloc(T_CHAIN_INPUT, sizeof(float));
    assert_non_null(x);
    t_ok(m, ms_write(m, chain.x, x));
    t_ok(twin.model, ms_write(twin.model, twin.x, x));
    free(x);
    t_ok(m, ms_step(m, NULL));
    t_ok(twin.model, ms_step(twin.model, NULL));
    t_chain_same(&chain, &twin);
    ms_destroy(m);
    ms_destroy(twin.model);
}

// ------------------------------------------------------------------------------------------------
// the log

typedef struct heard {
    uint32_t lines, errors, bad;
} heard;

static void hear(ms_log_level level, const char *tag, const char *text, void *user) {
    heard *h = (heard *)user;
    h->lines += 1;
    h->errors += level == MS_LOG_ERROR;
    h->bad += tag == NULL || tag[0] == 0 || text == NULL || text[0] == 0 ||
              strchr(text, '\n') != NULL || level < MS_LOG_ERROR || level > MS_LOG_DEBUG;
}

static void the_log_receives_text(void **state) {
    (void)state;
    t_chain chain;
    heard h = {0, 0, 0};
    ms_config config = t_config();
    config.log = hear;
    config.log_user = &h;
    t_chain_start(&chain, &config, 3);
    assert_true(h.lines > 0 && h.errors == 0 && h.bad == 0);
    ms_set_budget(chain.model, 1);
    t_error(chain.model, ms_wrap(chain.model), MS_RESULT_BUDGET);
    assert_true(h.errors > 0 && h.bad == 0);
    ms_destroy(chain.model);
}

/* Keeps the last warning. */
static void keep_warning(ms_log_level level, const char *tag, const char *text, void *user) {
    (void)tag;
    if (level == MS_LOG_WARNING) {
        snprintf((char *)user, 256, "%s", text);
    }
}

/* The warning of a net of x w, "side" of that, times v, and the loss. */
static void warning_of(char *warning, bool has_backward, bool meant) {
    t_op ops[4];
    ms_model *m;
    ms_config config = t_config();
    warning[0] = 0;
    config.log = keep_warning;
    config.log_user = warning;
    memset(ops, 0, sizeof ops);
    assert_int_equal(ms_create(&config, &m), MS_RESULT_OK);
    const ms_shape shape = ms_shape2(4, 4);
    const ms_tensor x = ms_input(m, "x", MS_DTYPE_F32, shape);
    const ms_tensor w = ms_param(m, "w", MS_DTYPE_F32, shape);
    const ms_tensor v = ms_param(m, "v", MS_DTYPE_F32, shape);
    const ms_tensor squashed = ms_activation(m, "squashed", MS_DTYPE_F32, shape);
    const ms_tensor product = t_add_layer(m, &ops[0], T_MATMUL, "product", x, w);
    ms_layer_desc side = t_layer(&ops[1], T_SQUASH, "side", product, squashed);
    side.backward = has_backward ? side.backward : NULL;
    side.no_backward = meant;
    ms_register_layer(m, &side);
    t_set_loss(m, &ops[3], T_LOSS, t_add_layer(m, &ops[2], T_MATMUL, "head", squashed, v));
    t_ok(m, ms_wrap(m));
    ms_destroy(m);
}

static void a_missing_backward_is_warned_of(void **state) {
    (void)state;
    char warning[256];
    warning_of(warning, true, false);
    assert_string_equal(warning, "");
    warning_of(warning, false, false);
    t_text_has(warning, "\"side\"");
    t_text_has(warning, "no_backward");
    warning_of(warning, false, true);
    t_text_has(warning, "\"w\""); // which gets no gradient
}

static void ignore_text(const char *text, size_t length, void *user) {
    (void)text;
    *(size_t *)user += length;
}

static void ignore_event(const ms_event *event, void *user) {
    (void)event;
    *(size_t *)user += 1;
}

static void ignore_decision(const ms_decision *decision, void *user) {
    (void)decision;
    *(size_t *)user += 1;
}

static int opens_never(void *user, const ms_open_args *args, void **state) {
    (void)args;
    (void)user;
    *state = NULL;
    return 41;
}

static void closes_never(void *state) {
    (void)state;
    fail();
}

static const char *text_of_opening(void *user, int error) {
    (void)user;
    return error == 41 ? "no such device here" : NULL;
}

/* Every function that returns a result returns that of ms_create, and leaves the text. */
static void every_function_returns(ms_model *m, ms_result expected, const char *part) {
    size_t written = 0;
    double value = 7.0;
    float data[4] = {0};
    uint64_t bytes = 7;
    int stage = 0;
    const int64_t sizes[MS_LIMIT_AXES] = {1};
    ms_hardware hardware;
    ms_memory_report report;
    ms_verify_report verified;
    ms_nonfinite nonfinite;
    ms_layer_desc layer;
    memset(&layer, 0, sizeof layer);
    memset(&hardware, 0, sizeof hardware);
    const ms_tensor x = ms_input(m, "x", MS_DTYPE_F32, ms_shape1(4));
    const ms_tensor p = ms_param(m, "p", MS_DTYPE_F32, ms_shape1(4));
    const ms_axis axis = ms_add_axis(m, "rows", 1, 2);
    const ms_layer none = ms_register_layer(m, &layer);
    const ms_optimizer_desc sgd = t_optimizer(MS_OPTIMIZER_SGD, 0.1f);
    assert_true(x.id == 0 && p.id == 0 && axis.id == 0 && none.id == 0);
    ms_set_hardware(m, &hardware);
    ms_set_hardware(m, NULL);
    ms_clear_hardware(m);
    ms_set_on_host(m, x);
    ms_stop_gradient(m, x);
    ms_refuse(m, "another text");
    ms_set_loss(m, x);
    ms_set_loss_factor(m, 2.0f);
    ms_add_output(m, x);
    ms_add_eval_output(m, x);
    ms_set_optimizer(m, &sgd);
    ms_set_learning_rate(m, (float)INFINITY);
    ms_set_group_learning_rate(m, ms_optimizer_group(m, &sgd), 1.0f);
    ms_set_param_group(m, p, ms_optimizer_group(m, &sgd));
    ms_set_weight_decay(m, p, 0.1f);
    ms_set_frozen(m, p, true);
    ms_set_budget(m, 1000);
    ms_set_accumulation(m, 2);
    ms_set_layer_technique(m, none, MS_TECHNIQUE_CHECKPOINTING, MS_SWITCH_ON);
    ms_set_tensor_technique(m, x, MS_TECHNIQUE_CHECKPOINTING, MS_SWITCH_ON);
    ms_set_layer_time(m, none, NULL);
    const ms_result results[] = {ms_wrap(m),
                                 ms_detach(m),
                                 ms_hardware_report(m, &hardware),
                                 ms_synchronize(m),
                                 ms_borrow(m, x, data),
                                 ms_borrow(m, x, NULL),
                                 ms_profile_save(m, ignore_text, &written),
                                 ms_profile_load(m, "", 0),
                                 ms_profile_load(m, NULL, 1),
                                 ms_smallest_budget(m, &bytes),
                                 ms_reshape(m, sizes),
                                 ms_write(m, x, data),
                                 ms_read(m, x, data),
                                 ms_write(m, x, NULL),
                                 ms_step(m, &value),
                                 ms_forward(m, &value),
                                 ms_backward(m),
                                 ms_update(m),
                                 ms_eval(m, &value),
                                 ms_gradient_norm(m, &value),
                                 ms_set_gradient_factor(m, 2.0f),
                                 ms_set_paused(m, p, true),
                                 ms_report(m, &report),
                                 ms_report(m, NULL),
                                 ms_visit_decisions(m, ignore_decision, &written),
                                 ms_verify(m, NULL, NULL, &verified),
                                 ms_find_nonfinite(m, &nonfinite),
                                 ms_visit_events(m, MS_PROGRAM_TRAIN, ignore_event, &written),
                                 ms_print_plan(m, ignore_text, &written),
                                 ms_print_program(m, MS_PROGRAM_EVAL, ignore_text, &written),
                                 ms_print_trace(m, ignore_text, &written),
                                 ms_print_metrics(m, ignore_text, &written)};
    for (size_t i = 0; i < sizeof results / sizeof results[0]; ++i) {
        if (results[i] != expected) {
            fail_msg("call %u returns %s", (unsigned)i, ms_result_name(results[i]));
        }
    }
    assert_true(written == 0 && value == 7.0 && bytes == 7);
    assert_false(ms_optimize_next(m, &stage));
    assert_true(ms_data(m, x) == NULL && ms_stream(m) == NULL);
    assert_true(ms_gradient(m, p).id == 0 && ms_optimizer_state(m, p, 0).id == 0);
    assert_true(ms_tensor_bytes(m, x) == 0 && ms_tensor_shape(m, x).rank == -1);
    assert_string_equal(ms_tensor_name(m, x), "?");
    t_text_has(ms_last_error(m), "ms_create");
    t_text_has(ms_last_error(m), part);
}

/* A failing ms_create leaves a model that only carries its error, without a log. Its memory comes
   from the allocator of the config, unless that is the fault, and is returned to it. */
static void a_model_carries_its_error(void **state) {
    (void)state;
    for (int which = 0; which < 5; ++which) {
        t_heap heap;
        memset(&heap, 0, sizeof heap);
        ms_config config = t_config();
        ms_model *m = NULL;
        config.allocator = t_heap_allocator(&heap);
        config.backend = ms_backend_cpu();
        const char *part = "target_utilization: it must be above 0 and at most 1, or 0 for 0.85 "
                           "(it is 2)";
        if (which == 0) {
            config.target_utilization = 2.0;
        } else if (which == 1) {
            int none = 9;
            config.mode = (ms_mode)none;
            part = "mode: there is no such mode: set one of ms_mode (it is 9)";
        } else if (which == 2) {
            config.allocator.release = NULL;
            part = "allocator: release is missing";
        } else if (which == 3) {
            config.allocator.alloc = NULL;
            part = "allocator: alloc is missing";
        } else {
            config.backend = t_backend_without_state();
            config.backend.open = opens_never;
            config.backend.close = closes_never;
            config.backend.error_text = text_of_opening;
            part = "no such device here";
        }
        const ms_result expected = which < 4 ? MS_RESULT_INVALID : MS_RESULT_BACKEND;
        assert_int_equal(ms_create(&config, &m), expected);
        assert_non_null(m);
        assert_int_equal(heap.calls, which == 2 || which == 3 ? 0 : which < 2 ? 1 : 2);
        every_function_returns(m, expected, part);
        ms_destroy(m);
        assert_true(heap.live_count == 0 && heap.wrong_releases == 0);
        if (heap.calls > 0) { // no memory for that either
            heap.fail_at = heap.calls + 1;
            m = (ms_model *)&m;
            assert_int_equal(ms_create(&config, &m),
                             which < 4 ? MS_RESULT_INVALID : MS_RESULT_OUT_OF_MEMORY);
            assert_null(m);
            assert_true(heap.has_failed && heap.live_count == 0);
        }
    }
}

/* Where a handle is 0 since its registration failed, that is what ms_write and ms_read say. */
static void writes_name_the_registration_that_failed(void **state) {
    (void)state;
    ms_model *m;
    float data[4] = {0};
    ms_config config = t_config();
    assert_int_equal(ms_create(&config, &m), MS_RESULT_OK);
    ms_tensor none = ms_param(m, "empty", MS_DTYPE_F32, ms_shape2(4, 0));
    t_error(m, ms_write(m, none, data), MS_RESULT_INVALID);
    t_text_has(ms_last_error(m), "\"empty\"");
    t_error(m, ms_read(m, none, data), MS_RESULT_INVALID);
    t_text_has(ms_last_error(m), "\"empty\"");
    ms_destroy(m);
}

// ------------------------------------------------------------------------------------------------
// reading and writing

static void values_survive_wrap_and_detach(void **state) {
    (void)state;
    t_chain chain;
    float expected[64], data[64];
    ms_config config = t_config();
    assert_int_equal(t_chain_create(&chain, &config, 3, T_CHAIN_ROWS, T_CHAIN_COLS), MS_RESULT_OK);
    ms_model *m = chain.model;
    t_rng rng = t_seed(4);
    t_fill(&rng, expected, 64, 1.0f);
    t_ok(m, ms_write(m, chain.weight[1], expected)); // before wrap
    t_ok(m, ms_read(m, chain.weight[1], data));
    assert_memory_equal(data, expected, sizeof data);
    t_ok(m, ms_wrap(m));
    t_ok(m, ms_read(m, chain.weight[1], data));
    assert_memory_equal(data, expected, sizeof data);
    t_ok(m, ms_detach(m));
    t_ok(m, ms_read(m, chain.weight[1], data));
    assert_memory_equal(data, expected, sizeof data);
    t_fill(&rng, expected, 64, 1.0f);
    t_ok(m, ms_write(m, chain.weight[1], expected)); // after it
    t_ok(m, ms_wrap(m));
    t_ok(m, ms_read(m, chain.weight[1], data));
    assert_memory_equal(data, expected, sizeof data);
    ms_destroy(m);
}

static void everything_that_lives_is_read(void **state) {
    (void)state;
    t_chain chain;
    float data[T_CHAIN_INPUT], state_in[64];
    ms_config config = t_config();
    assert_int_equal(t_chain_create(&chain, &config, 3, T_CHAIN_ROWS, T_CHAIN_COLS), MS_RESULT_OK);
    ms_model *m = chain.model;
    ms_add_output(m, chain.hidden[0]);
    t_ok(m, ms_wrap(m));
    t_ok(m, t_chain_write(&chain, 1));
    ms_tensor gradient = ms_gradient(m, chain.weight[0]);
    ms_tensor moment = ms_optimizer_state(m, chain.weight[0], 0);
    assert_true(gradient.id != 0 && moment.id != 0);
    assert_true(ms_optimizer_state(m, chain.weight[0], 1).id != 0);
    assert_int_equal(ms_optimizer_state(m, chain.weight[0], 2).id, 0);
    assert_int_equal(ms_optimizer_state(m, chain.weight[0], -1).id, 0);
    assert_int_equal(ms_optimizer_state(m, chain.x, 0).id, 0);
    assert_true(ms_read(m, ms_gradient(m, chain.x), data) != MS_RESULT_OK);
    assert_true(ms_tensor_count(m, gradient) == 64 && ms_tensor_bytes(m, gradient) == 256);
    t_error(m, ms_read(m, gradient, data), MS_RESULT_ORDER);
    t_error(m, ms_read(m, chain.loss, data), MS_RESULT_ORDER);
    t_ok(m, ms_forward(m, NULL));
    t_ok(m, ms_read(m, chain.loss, data));
    t_ok(m, ms_backward(m));
    t_ok(m, ms_read(m, gradient, data));
    t_ok(m, ms_update(m));
    t_ok(m, ms_read(m, chain.hidden[0], data));
    t_error(m, ms_read(m, chain.hidden[1], data), MS_RESULT_ORDER);
    t_error(m, ms_write(m, chain.hidden[0], data), MS_RESULT_INVALID);
    t_ok(m, ms_read(m, moment, state_in));
    state_in[5] = 0.125f;
    t_ok(m, ms_write(m, moment, state_in));
    t_ok(m, ms_wrap(m));
    t_ok(m, ms_read(m, moment, data));
    assert_memory_equal(data, state_in, sizeof state_in);
    ms_destroy(m);
}

/* Passes on its input, and copies the gradient of its output to its state. */
static int tap_forward(const ms_call *call) {
    memcpy(call->out[0].data, call->in[0].data, (size_t)t_count(&call->in[0]) * sizeof(float));
    return 0;
}

static int tap_backward(const ms_call *call) {
    for (int64_t i = 0; i < t_count(&call->grad_out[0]); ++i) {
        t_data(&call->state[0])[i] = t_data(&call->grad_out[0])[i];
        t_contribute(&call->grad_in[0], i, t_data(&call->grad_out[0])[i]);
    }
    return 0;
}

/* A layer can copy the gradient that it passes on to its state, in every plan: what arrives is p/2 times
   the gradient of y, and that of q is half of it. ms_want_gradient keeps the same. */
static void a_layer_of_ones_own_copies_the_gradient_of_an_activation(void **state) {
    (void)state;
    for (int way = 0; way < 4; ++way) {
        enum { COLS = 8 };
        float weight[COLS * COLS], x[COLS], twos[COLS], copy[COLS], kept[COLS], of_q[COLS];
        t_op ops[3];
        ms_model *m;
        ms_config config = t_config();
        config.debug = way % 2 == 1;
        config.force_optimize = way / 2 == 1;
        memset(ops, 0, sizeof ops);
        assert_int_equal(ms_create(&config, &m), MS_RESULT_OK);
        const ms_shape row = ms_shape2(1, COLS);
        const ms_tensor in = ms_input(m, "x", MS_DTYPE_F32, row);
        const ms_tensor w = ms_param(m, "W", MS_DTYPE_F32, ms_shape2(COLS, COLS));
        const ms_tensor p = ms_param(m, "p", MS_DTYPE_F32, ms_shape1(COLS));
        const ms_tensor q = ms_param(m, "q", MS_DTYPE_F32, ms_shape1(COLS));
        const ms_tensor tapped = ms_buffer(m, "gradient of h", MS_DTYPE_F32, row);
        const ms_tensor h = t_add_layer(m, &ops[0], T_MATMUL, "h", in, w);
        ms_layer_desc tap;
        memset(&tap, 0, sizeof tap);
        tap.name = "tap";
        tap.forward = tap_forward;
        tap.backward = tap_backward;
        tap.in[0] = h;
        tap.out[0] = ms_activation(m, "tapped", MS_DTYPE_F32, row);
        tap.state[0] = tapped;
        tap.backward_state = 1;
        tap.backward_reads.nothing = true;
        tap.recompute_keeps_state = true;
        ms_register_layer(m, &tap);
        const ms_tensor y = ms_activation(m, "y", MS_DTYPE_F32, row);
        ms_layer_desc affine = t_layer(&ops[1], T_AFFINE, "affine", tap.out[0], y);
        affine.param[0] = p;
        affine.param[1] = q;
        t_register(m, &ops[1], &affine);
        (void)t_set_loss(m, &ops[2], T_LOSS, y);
        ms_want_gradient(m, tap.out[0]);
        ms_optimizer_desc none = ms_optimizer_defaults(MS_OPTIMIZER_NONE);
        ms_set_optimizer(m, &none);
        t_ok(m, ms_wrap(m));
        t_rng rng = t_seed(3);
        t_fill(&rng, weight, COLS * COLS, 1.0f);
        t_fill(&rng, x, COLS, 1.0f);
        for (int i = 0; i < COLS; ++i) {
            twos[i] = 2.0f;
        }
        t_ok(m, ms_write(m, in, x));
        t_ok(m, ms_write(m, w, weight));
        t_ok(m, ms_write(m, p, twos));
        t_ok(m, ms_write(m, q, x));
        t_ok(m, ms_step(m, NULL));
        t_error(m, ms_read(m, ms_gradient(m, h), copy), MS_RESULT_ORDER);
        t_text_has(ms_last_error(m), "ms_want_gradient keeps it");
        t_ok(m, ms_read(m, tapped, copy));
        t_ok(m, ms_read(m, ms_gradient(m, tap.out[0]), kept));
        assert_memory_equal(copy, kept, sizeof copy);
        t_ok(m, ms_read(m, ms_gradient(m, q), of_q));
        for (int i = 0; i < COLS; ++i) {
            assert_true(copy[i] != 0.0f && copy[i] == 2.0f * of_q[i]);
        }
        ms_destroy(m);
    }
}

typedef struct sought {
    ms_tensor handle;
    bool found;
} sought;

static void seek_value(const ms_lifetime *l, void *user) {
    sought *s = (sought *)user;
    s->found |= l->tensor.id == s->handle.id;
}

/* Which params have optimizer state: ms_visit_lifetimes says it, and the errors of the others say
   why they have none. */
static void params_that_are_not_trained_have_no_state(void **state) {
    (void)state;
    t_chain chain;
    float data[T_CHAIN_COLS * T_CHAIN_COLS];
    ms_config config = t_config();
    assert_int_equal(t_chain_create(&chain, &config, 3, T_CHAIN_ROWS, T_CHAIN_COLS), MS_RESULT_OK);
    ms_model *m = chain.model;
    const ms_tensor lonely = ms_param(m, "lonely", MS_DTYPE_F32, ms_shape1(4));
    ms_set_frozen(m, chain.weight[1], true);
    t_ok(m, ms_wrap(m));
    const ms_tensor params[] = {chain.weight[0], chain.weight[1], chain.weight[2], lonely};
    for (int i = 0; i < 4; ++i) {
        const bool trains = i % 2 == 0;
        sought s = {ms_optimizer_state(m, params[i], 1), false};
        assert_true(s.handle.id != 0);
        t_ok(m, ms_visit_lifetimes(m, MS_PROGRAM_TRAIN, seek_value, &s));
        assert_int_equal(s.found, trains);
        t_error(m, ms_read(m, s.handle, data), trains ? MS_RESULT_OK : MS_RESULT_ORDER);
        if (!trains) {
            t_text_has(ms_last_error(m), "a param that is frozen, or that the loss does not");
        }
        t_error(m, ms_write(m, s.handle, data), trains ? MS_RESULT_OK : MS_RESULT_INVALID);
        if (!trains) {
            t_text_has(ms_last_error(m), "ms_write: there is no optimizer state of");
            t_text_has(ms_last_error(m), "a param that is frozen, or that the loss does not");
            t_error(m, ms_read(m, ms_gradient(m, params[i]), data), MS_RESULT_ORDER);
            t_text_has(ms_last_error(m), "a param that is frozen, or that the loss does not");
        }
    }
    ms_destroy(m);
}

/* A handle of state that the optimizer set later does not have. */
static void an_optimizer_with_less_state(void **state) {
    (void)state;
    t_chain chain;
    float data[T_CHAIN_COLS * T_CHAIN_COLS] = {0};
    ms_config config = t_config();
    assert_int_equal(t_chain_create(&chain, &config, 2, T_CHAIN_ROWS, T_CHAIN_COLS), MS_RESULT_OK);
    ms_model *m = chain.model;
    const ms_tensor second = ms_optimizer_state(m, chain.weight[0], 1);
    ms_optimizer_desc sgd = ms_optimizer_defaults(MS_OPTIMIZER_SGD);
    sgd.momentum = 0.5f;
    ms_set_optimizer(m, &sgd);
    t_ok(m, ms_wrap(m));
    t_error(m, ms_write(m, second, data), MS_RESULT_INVALID);
    t_text_has(ms_last_error(m), "the optimizer has fewer tensors of state");
    ms_destroy(m);
}

/* Between the calls of a step a value can be read if its live range spans the place where the step
   has stopped: neither if it ended with the last instruction that ran, nor if it begins with the
   next one. No backward reads "ends", whose last use is the forward of the loss; and the gradient of
   "lives" has its last use in the backward of the first layer. */
static void only_what_still_lives_is_read(void **state) {
    (void)state;
    t_net n;
    float data[T_NET_COUNT];
    t_net_begin(&n);
    t_net_create(&n);
    const ms_tensor p = t_net_param(&n, "p");
    const ms_tensor lives = t_net_scale(&n, "lives", n.x, 0.0f, p);
    const ms_tensor ends = t_net_scale(&n, "ends", lives, 0.0f, p);
    const ms_tensor none = {0}, loss = t_net_scale(&n, "loss", ends, 1.0f, none);
    ms_set_loss(n.m, loss);
    t_net_start(&n);
    t_net_write_param(&n, p, 2.0f);
    t_ok(n.m, ms_forward(n.m, NULL));
    t_ok(n.m, ms_read(n.m, lives, data));
    t_ok(n.m, ms_read(n.m, loss, data));
    t_error(n.m, ms_read(n.m, ends, data), MS_RESULT_ORDER);
    t_text_has(ms_last_error(n.m), "\"ends\"");
    assert_null(ms_data(n.m, ends));
    t_error(n.m, ms_read(n.m, ms_gradient(n.m, loss), data), MS_RESULT_ORDER);
    t_ok(n.m, ms_backward(n.m));
    t_ok(n.m, ms_read(n.m, ms_gradient(n.m, p), data));
    t_error(n.m, ms_read(n.m, ms_gradient(n.m, lives), data), MS_RESULT_ORDER);
    t_error(n.m, ms_read(n.m, lives, data), MS_RESULT_ORDER);
    t_net_end(&n);
}

/* Kept in eval alone: readable behind ms_eval, gone behind a step. */
static void eval_outputs_are_kept_in_eval(void **state) {
    (void)state;
    t_chain chain;
    ms_config config = t_config();
    config.debug = true;
    assert_int_equal(t_chain_create(&chain, &config, 3, T_CHAIN_ROWS, T_CHAIN_COLS), MS_RESULT_OK);
    ms_model *m = chain.model;
    const msi_layer *first = &m->graph.layers.items[0];
    const uint32_t out = msi_group(&m->graph, first, MSI_GROUP_OUT)[0];
    const ms_tensor kept = msi_handle(&m->graph, out, MSI_ROLE_VALUE);
    float *values = (float *)malloc((size_t)ms_tensor_bytes(m, kept));
    assert_non_null(values);
    ms_add_eval_output(m, kept);
    t_ok(m, ms_wrap(m));
    t_ok(m, t_chain_write(&chain, 1));
    t_ok(m, ms_eval(m, NULL));
    t_ok(m, ms_read(m, kept, values));
    for (uint64_t i = 0; i < ms_tensor_count(m, kept); ++i) {
        assert_true(msi_is_finite((double)values[i]));
    }
    t_ok(m, ms_step(m, NULL));
    t_error(m, ms_read(m, kept, values), MS_RESULT_ORDER);
    free(values);
    ms_destroy(m);
}

/* What a handle is of, and its name: before ms_wrap and after it. */
static void handles_keep_their_names(void **state) {
    (void)state;
    t_chain chain;
    ms_config config = t_config();
    assert_int_equal(t_chain_create(&chain, &config, 3, T_CHAIN_ROWS, T_CHAIN_COLS), MS_RESULT_OK);
    ms_model *m = chain.model;
    for (int round = 0; round < 2; ++round) {
        const ms_tensor weight = chain.weight[1], state_of = ms_optimizer_state(m, weight, 1);
        const ms_tensor gradient = ms_gradient(m, weight),
                        of_hidden = ms_gradient(m, chain.hidden[2]);
        assert_int_equal(ms_tensor_of(m, weight).id, weight.id);
        assert_int_equal(ms_tensor_of(m, gradient).id, weight.id);
        assert_int_equal(ms_tensor_of(m, state_of).id, weight.id);
        assert_int_equal(ms_tensor_of(m, of_hidden).id, chain.hidden[2].id);
        assert_string_equal(ms_tensor_name(m, chain.x), "x");
        assert_string_equal(ms_tensor_name(m, gradient), ms_tensor_name(m, weight));
        assert_string_equal(ms_tensor_name(m, state_of), ms_tensor_name(m, weight));
        assert_string_not_equal(ms_tensor_name(m, weight), ms_tensor_name(m, chain.weight[0]));
        const ms_layer first = msi_layer_handle(&m->graph, 0), none = {0};
        const ms_layer beyond = msi_layer_handle(&m->graph, m->graph.layers.count);
        assert_string_equal(ms_layer_name(m, first), "matmul0");
        assert_string_equal(ms_layer_name(m, beyond), "?");
        assert_string_equal(ms_layer_name(m, none), "?");
        assert_int_equal(ms_layer_index(m, first), 0);
        assert_int_equal(ms_layer_index(m, beyond), UINT32_MAX);
        const uint32_t wrong[] = {
            0, msi_handle(&m->graph, m->graph.tensors.count, MSI_ROLE_VALUE).id,
            msi_id(&m->graph, UINT32_MAX - 1), msi_id(&m->graph, UINT32_MAX / 2)};
        for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; ++i) {
            const ms_tensor handle = {wrong[i]};
            assert_int_equal(ms_tensor_of(m, handle).id, 0);
            assert_string_equal(ms_tensor_name(m, handle), "?");
        }
        t_ok(m, ms_wrap(m));
    }
    ms_destroy(m);
}

static void sizes_of_tensors(void **state) {
    (void)state;
    ms_model *m = plain_model();
    ms_tensor x = ms_input(m, "x", MS_DTYPE_I16, ms_shape3(2, 3, 4));
    ms_tensor wrong = {77};
    assert_true(ms_tensor_count(m, x) == 24 && ms_tensor_bytes(m, x) == 48);
    assert_true(ms_tensor_count(m, wrong) == 0 && ms_tensor_bytes(m, wrong) == 0);
    assert_true(ms_tensor_dtype(m, x) == MS_DTYPE_I16 &&
                ms_tensor_dtype(m, wrong) == MS_DTYPE_COUNT);
    t_ok(m, ms_expect_bytes(m, x, 48));
    t_error(m, ms_expect_bytes(m, x, 24), MS_RESULT_INVALID);
    t_text_has(ms_last_error(m), "\"x\" has 48 bytes, but what was passed has 24");
    t_error(m, ms_expect_bytes(m, wrong, 0), MS_RESULT_INVALID);
    t_text_has(ms_last_error(m), "not a tensor of this model");
    ms_destroy(m);
}

// ------------------------------------------------------------------------------------------------
// MS_OPTIMIZE, and models side by side

static void optimize_scopes_a_block(void **state) {
    (void)state;
    t_chain chain, twin;
    ms_memory_report report;
    int entered = 0;
    ms_config config = t_config();
    uint64_t budget = tight_budget(&config, 9);
    t_chain_start(&chain, &config, 9);
    t_chain_start(&twin, &config, 9);
    ms_model *m = chain.model;
    ms_set_budget(m, budget);
    MS_OPTIMIZE(m) {
        entered += 1;
        t_report(m, &report);
        assert_true(report.arena_bytes <= budget && report.arena_bytes < report.plain_bytes);
        t_ok(m, ms_step(m, NULL));
    }
    assert_int_equal(entered, 1);
    t_report(m, &report);
    assert_true(report.arena_bytes == report.plain_bytes);
    t_ok(twin.model, ms_step(twin.model, NULL));
    t_chain_same(&chain, &twin);
    ms_set_budget(m, 1);
    MS_OPTIMIZE(m) {
        entered += 1;
    }
    assert_int_equal(entered, 1); // skipped
    t_text_has(ms_last_error(m), "budget");
    ms_destroy(m);
    ms_destroy(twin.model);
}

static void two_models_are_independent(void **state) {
    (void)state;
    t_chain a, b, alone;
    ms_config config = t_config();
    t_chain_start(&a, &config, 4);
    t_chain_start(&b, &config, 4);
    t_chain_start(&alone, &config, 4);
    t_ok(b.model, t_chain_write(&b, 99));
    for (int step = 0; step < 3; ++step) { // their phases interleaved
        t_ok(a.model, ms_forward(a.model, NULL));
        t_ok(b.model, ms_forward(b.model, NULL));
        t_ok(a.model, ms_backward(a.model));
        t_error(b.model, ms_update(b.model), MS_RESULT_ORDER);
        t_ok(a.model, ms_update(a.model));
        t_ok(b.model, ms_backward(b.model));
        t_ok(b.model, ms_update(b.model));
        t_ok(alone.model, ms_step(alone.model, NULL));
    }
    ms_destroy(b.model);
    assert_string_equal(ms_last_error(a.model), "");
    t_chain_same(&a, &alone);
    ms_destroy(a.model);
    ms_destroy(alone.model);
}

// ------------------------------------------------------------------------------------------------
// found in review: each of these once went wrong

typedef struct tiny {
    t_op twice; // first, so that the user of its layer is the tiny
    t_op times;
    ms_model *model;
    ms_tensor x, p, loss;
} tiny;

/* A layer after the loss that doubles it, without a backward; it may work in place. */
static ms_layer_desc tiny_tail(tiny *t, const char *name) {
    t->twice.scalar = 2.0f;
    const ms_tensor after = ms_activation(t->model, "after", MS_DTYPE_F32, ms_shape1(1));
    ms_layer_desc desc = t_layer(&t->twice, T_SCALE, name, t->loss, after);
    desc.backward = NULL;
    memset(desc.grad_in_place, 0, sizeof desc.grad_in_place);
    memset(&desc.backward_reads, 0, sizeof desc.backward_reads);
    return desc;
}

/* loss = x * (p in `slots` slots); with `tail`, a last layer that may work in place of the loss. */
static void tiny_create(tiny *t, const ms_config *config, int slots, bool tail) {
    const ms_shape one = ms_shape1(1);
    memset(t, 0, sizeof *t);
    assert_int_equal(ms_create(config, &t->model), MS_RESULT_OK);
    t->x = ms_input(t->model, "x", MS_DTYPE_F32, one);
    t->p = ms_param(t->model, "p", MS_DTYPE_F32, one);
    t->loss = ms_activation(t->model, "loss", MS_DTYPE_F32, one);
    ms_layer_desc d = t_layer(&t->times, T_MIX, "times", t->x, t->loss);
    for (int k = 0; k < slots; ++k) {
        d.param[k] = t->p;
    }
    t_register(t->model, &t->times, &d);
    ms_set_loss(t->model, t->loss);
    if (tail) {
        d = tiny_tail(t, "twice");
        ms_register_layer(t->model, &d);
    }
}

static void tiny_start(tiny *t, const ms_config *config, int slots, bool tail) {
    const float x = 3.0f, p = 0.5f;
    tiny_create(t, config, slots, tail);
    t_ok(t->model, ms_wrap(t->model));
    t_ok(t->model, ms_write(t->model, t->x, &x));
    t_ok(t->model, ms_write(t->model, t->p, &p));
}

static void a_param_may_stand_in_many_slots(void **state) {
    (void)state;
    tiny early, late;
    ms_config config = t_config();
    config.early_update = MS_SWITCH_ON;
    tiny_start(&early, &config, MS_LIMIT_PARAM, false);
    config.early_update = MS_SWITCH_OFF;
    tiny_start(&late, &config, MS_LIMIT_PARAM, false);
    float gradient = 0.0f, of_early = 0.0f, of_late = 1.0f;
    t_ok(late.model, ms_forward(late.model, NULL));
    t_ok(late.model, ms_backward(late.model));
    t_ok(late.model, ms_read(late.model, ms_gradient(late.model, late.p), &gradient));
    assert_true(gradient == 3.0f * MS_LIMIT_PARAM);
    t_ok(late.model, ms_update(late.model));
    t_ok(early.model, ms_step(early.model, NULL));
    t_ok(late.model, ms_read(late.model, late.p, &of_late));
    t_ok(early.model, ms_read(early.model, early.p, &of_early));
    assert_true(of_early == of_late);
    ms_destroy(early.model);
    ms_destroy(late.model);
}

static void the_loss_is_never_overwritten(void **state) {
    (void)state;
    tiny t;
    double trained = 0.0, evaluated = 1.0;
    float kept = 0.0f;
    ms_config config = t_config();
    tiny_start(&t, &config, 1, true);
    t_ok(t.model, ms_forward(t.model, &trained));
    t_ok(t.model, ms_eval(t.model, &evaluated));
    assert_true(trained == 1.5 && evaluated == 1.5);
    t_ok(t.model, ms_read(t.model, t.loss, &kept));
    assert_true(kept == 1.5f);
    ms_destroy(t.model);
}

/* Everything that would pull the plan from under the running step is refused there: returns 0, or
   which call was not. */
static int reenter(const tiny *t) {
    ms_model *m = t->model;
    const float value = 0.0f;
    uint64_t bytes;
    const ms_result results[] = {ms_wrap(m),
                                 ms_detach(m),
                                 ms_step(m, NULL),
                                 ms_eval(m, NULL),
                                 ms_forward(m, NULL),
                                 ms_backward(m),
                                 ms_update(m),
                                 ms_smallest_budget(m, &bytes),
                                 ms_write(m, t->p, &value),
                                 ms_write(m, t->x, &value)};
    for (size_t i = 0; i < sizeof results / sizeof results[0]; ++i) {
        if (results[i] != MS_RESULT_ORDER) {
            return 100 + (int)i;
        }
    }
    return 0;
}

static int reentering_forward(const ms_call *call) {
    const int error = reenter((const tiny *)call->user);
    return error ? error : t_forward(call);
}

static int reentering_update(const ms_update_args *args) {
    return reenter((const tiny *)args->user);
}

static void callbacks_cannot_step(void **state) {
    (void)state;
    tiny t;
    ms_config config = t_config();
    const float x = 3.0f;
    tiny_create(&t, &config, 1, false);
    ms_layer_desc d = tiny_tail(&t, "reentering");
    d.forward = reentering_forward;
    ms_register_layer(t.model, &d);
    ms_optimizer_desc own = t_optimizer(MS_OPTIMIZER_CUSTOM, 0.01f);
    own.update = reentering_update;
    own.user = &t;
    ms_set_optimizer(t.model, &own);
    t_ok(t.model, ms_wrap(t.model));
    t_ok(t.model, ms_write(t.model, t.x, &x));
    t_write_zeros(t.model);
    t_ok(t.model, ms_step(t.model, NULL));
    t_ok(t.model, ms_step(t.model, NULL));
    ms_destroy(t.model);
}

static void a_loss_factor_waits_for_the_next_step(void **state) {
    (void)state;
    tiny t;
    float gradient = 0.0f;
    ms_config config = t_config();
    config.early_update = MS_SWITCH_OFF;
    tiny_start(&t, &config, 1, false);
    for (int step = 0; step < 2; ++step) {
        t_ok(t.model, ms_forward(t.model, NULL));
        ms_set_loss_factor(t.model, 10.0f);
        t_ok(t.model, ms_backward(t.model));
        t_ok(t.model, ms_read(t.model, ms_gradient(t.model, t.p), &gradient));
        assert_true(gradient == (step == 0 ? 3.0f : 30.0f));
        t_ok(t.model, ms_update(t.model));
    }
    ms_destroy(t.model);
}

/* A factor of 0 is 0: nothing is learned, and the loss is 0. Then the mean again. */
static void a_loss_factor_may_be_zero(void **state) {
    (void)state;
    static const float expected[] = {3.0f, 30.0f, 0.0f, 3.0f};
    tiny t;
    ms_config config = t_config();
    config.early_update = MS_SWITCH_OFF;
    tiny_start(&t, &config, 1, false);
    for (int step = 0; step < 4; ++step) {
        float gradient = -1.0f;
        double loss;
        t_ok(t.model, ms_forward(t.model, &loss));
        assert_true((loss == 0.0) == (step == 2));
        t_ok(t.model, ms_backward(t.model));
        t_ok(t.model, ms_read(t.model, ms_gradient(t.model, t.p), &gradient));
        assert_true(gradient == expected[step]);
        if (step == 2) {
            ms_set_loss_mean(t.model);
        } else {
            ms_set_loss_factor(t.model, step == 0 ? 10.0f : 0.0f);
        }
    }
    ms_set_loss_mean(NULL);
    ms_destroy(t.model);
}

/* Backward would see other values than forward did. */
static void a_write_ends_the_step_that_it_would_spoil(void **state) {
    (void)state;
    for (int how = 0; how < 4; ++how) {
        tiny t;
        const float next = 4.0f;
        float *lent = (float *)t_lend(2 * sizeof *lent);
        assert_non_null(lent);
        ms_config config = t_config();
        tiny_create(&t, &config, 1, false);
        ms_model *m = t.model;
        if (how >= 2) {
            t_ok(m, ms_borrow(m, how == 2 ? t.x : t.p, &lent[0]));
        }
        t_ok(m, ms_wrap(m));
        for (int k = 0; k < 2; ++k) {
            t_ok(m, ms_write(m, k ? t.p : t.x, &next));
        }
        t_ok(m, ms_forward(m, NULL));
        if (how < 2) {
            t_ok(m, ms_write(m, how == 0 ? t.x : t.p, &next));
        } else {
            t_ok(m, ms_borrow(m, how == 2 ? t.x : t.p, &lent[1]));
        }
        t_error(m, ms_backward(m), MS_RESULT_ORDER);
        t_ok(m, ms_write(m, how % 2 == 0 ? t.x : t.p, &next));
        t_ok(m, ms_step(m, NULL));
        ms_destroy(m);
        t_take_back(lent);
    }
}

/* What a visitor has tried, and what it was told. */
typedef struct visitor {
    ms_model *model;
    uint32_t calls;
    bool logs; // the log callback tries too
} visitor;

/* Everything that would change or free the plan under the function that calls back. */
static void disturb(visitor *v) {
    ms_model *m = v->model;
    const int64_t sizes[MS_LIMIT_AXES] = {2};
    ms_verify_report verified;
    ms_nonfinite found;
    uint64_t bytes;
    v->model = NULL; // once, and not in the log of its own errors
    v->calls += 1;
    const ms_result results[] = {ms_wrap(m),
                                 ms_detach(m),
                                 ms_reshape(m, sizes),
                                 ms_step(m, NULL),
                                 ms_forward(m, NULL),
                                 ms_backward(m),
                                 ms_update(m),
                                 ms_eval(m, NULL),
                                 ms_verify(m, NULL, NULL, &verified),
                                 ms_find_nonfinite(m, &found),
                                 ms_smallest_budget(m, &bytes)};
    for (size_t i = 0; i < sizeof results / sizeof results[0]; ++i) {
        if (results[i] != MS_RESULT_ORDER) {
            fail_msg("call %u: %s", (unsigned)i, ms_result_name(results[i]));
        }
    }
    t_text_has(ms_last_error(m), "ms_smallest_budget: called from the callback of ms_");
    ms_destroy(m);
    t_text_has(ms_last_error(m), "ms_destroy: called from the callback of ms_");
    ms_memory_report report;
    t_ok(m, ms_report(m, &report)); // reading is fine
    v->model = m;
}

static void disturbing_event(const ms_event *event, void *user) {
    (void)event;
    disturb((visitor *)user);
}

static void disturbing_lifetime(const ms_lifetime *lifetime, void *user) {
    (void)lifetime;
    disturb((visitor *)user);
}

static void disturbing_decision(const ms_decision *decision, void *user) {
    (void)decision;
    disturb((visitor *)user);
}

static void disturbing_difference(const ms_difference *difference, void *user) {
    (void)difference;
    disturb((visitor *)user);
}

/* Between the visits of a listing the plan may change; within them it may not. */
static void disturbing_text(const char *text, size_t length, void *user) {
    visitor *v = (visitor *)user;
    (void)text;
    assert_true(length < 1 << 20);
    if (v->model->run.visits != NULL) {
        disturb(v);
    }
}

static void disturbing_log(ms_log_level level, const char *tag, const char *text, void *user) {
    visitor *v = (visitor *)user;
    (void)level;
    (void)tag;
    (void)text;
    if (v->logs && v->model != NULL && v->model->run.plan != NULL) {
        disturb(v);
    }
}

/* Messages about what is refused in a visit do not end it. */
static void silent_log(ms_log_level level, const char *tag, const char *text, void *user) {
    (void)level;
    (void)tag;
    (void)text;
    (void)user;
}

static uint32_t disturbing_policy(const ms_policy_args *args) {
    visitor *v = (visitor *)args->user;
    if (v->logs) {
        disturb(v);
    }
    return 0;
}

/* No callback can free the plan that its caller goes through. */
static void visitors_cannot_change_the_plan(void **state) {
    (void)state;
    for (int which = 0; which < 11; ++which) {
        tiny t;
        ms_verify_report verified;
        visitor v = {NULL, 0, false};
        ms_config config = t_config();
        config.log = which == 8 ? disturbing_log : silent_log;
        config.log_user = &v;
        config.auto_policy = which == 9;
        config.policy = disturbing_policy;
        config.policy_user = &v;
        tiny_create(&t, &config, 1, false);
        ms_model *m = v.model = t.model;
        ms_add_axis(m, "rows", 1, 2);
        t_ok(m, ms_wrap(m));
        t_write_zeros(m);
        v.logs = true;
        const ms_result results[] = {
            which == 0 ? ms_visit_events(m, MS_PROGRAM_TRAIN, disturbing_event, &v) : MS_RESULT_OK,
            which == 1 ? ms_visit_events(m, MS_PROGRAM_EVAL, disturbing_event, &v) : MS_RESULT_OK,
            which == 2 ? ms_visit_decisions(m, disturbing_decision, &v) : MS_RESULT_OK,
            which == 3 ? ms_print_plan(m, disturbing_text, &v) : MS_RESULT_OK,
            which == 4 ? ms_print_program(m, MS_PROGRAM_TRAIN, disturbing_text, &v) : MS_RESULT_OK,
            which == 5 ? ms_print_trace(m, disturbing_text, &v) : MS_RESULT_OK,
            which == 6 ? ms_profile_save(m, disturbing_text, &v) : MS_RESULT_OK,
            which == 7 ? ms_visit_lifetimes(m, MS_PROGRAM_TRAIN, disturbing_lifetime, &v)
                       : MS_RESULT_OK,
            which == 8 || which == 9 ? ms_wrap(m) : MS_RESULT_OK,
            which == 10 ? ms_verify(m, disturbing_difference, &v, &verified) : MS_RESULT_OK};
        for (size_t i = 0; i < sizeof results / sizeof results[0]; ++i) {
            assert_int_equal(results[i], MS_RESULT_OK);
        }
        assert_true(v.calls > 0);
        v.logs = false;
        t_ok(m, ms_step(m, NULL)); // afterwards all is allowed again
        t_ok(m, ms_wrap(m));
        ms_destroy(m);
    }
}

/* An error inside the log callback does not replace the one that is being logged. */
static void log_that_fails(ms_log_level level, const char *tag, const char *text, void *user) {
    ms_model **m = (ms_model **)user;
    (void)tag;
    if (level == MS_LOG_ERROR && *m != NULL) {
        t_text_has(text, "ms_backward");
        t_error(*m, ms_wrap(*m), MS_RESULT_ORDER);
    }
}

static void the_error_that_is_logged_stays(void **state) {
    (void)state;
    ms_model *m = NULL;
    tiny t;
    ms_config config = t_config();
    config.log = log_that_fails;
    config.log_user = &m;
    tiny_start(&t, &config, 1, false);
    m = t.model;
    t_error(m, ms_backward(m), MS_RESULT_ORDER);
    t_text_has(ms_last_error(m), "ms_backward: call ms_forward first");
    ms_destroy(m);
}

/* Steps need values that only the trainer has: of inputs and params, not of buffers and state. */
static void what_was_never_written_is_no_zero(void **state) {
    (void)state;
    for (int late = 0; late < 2; ++late) { // written after ms_wrap, or before
        tiny t;
        float value = 0.5f, read = 7.0f;
        ms_verify_report report;
        ms_config config = t_config();
        tiny_create(&t, &config, 1, false);
        ms_model *m = t.model;
        if (!late) {
            t_ok(m, ms_write(m, t.x, &value));
        }
        t_ok(m, ms_wrap(m));
        const char *missing = late ? "input \"x\", which layer 0 \"times\" reads, has no value"
                                   : "param \"p\", which layer 0 \"times\" reads, has no value";
        t_error(m, ms_step(m, NULL), MS_RESULT_ORDER);
        t_text_has(ms_last_error(m), missing);
        t_text_has(ms_last_error(m), "ms_write");
        t_error(m, ms_forward(m, NULL), MS_RESULT_ORDER);
        t_error(m, ms_eval(m, NULL), MS_RESULT_ORDER);
        t_error(m, ms_verify(m, NULL, NULL, &report), MS_RESULT_ORDER);
        t_ok(m, ms_read(m, t.p, &read)); // which changes nothing
        assert_true(read == 0.0f);
        t_error(m, ms_eval(m, NULL), MS_RESULT_ORDER);
        t_ok(m, ms_write(m, ms_optimizer_state(m, t.p, 0), &read)); // nor does state
        t_ok(m, ms_write(m, late ? t.x : t.p, &value));
        t_error(m, ms_eval(m, NULL), late ? MS_RESULT_ORDER : MS_RESULT_OK);
        float *address = (float *)ms_data(m, t.p); // to be filled in place
        assert_non_null(address);
        t_ok(m, ms_step(m, NULL));
        t_ok(m, ms_detach(m)); // values stay
        t_ok(m, ms_step(m, NULL));
        ms_destroy(m);
    }
}

/* Inputs along an axis count as not written after their sizes have changed; others do, and so does
   what is borrowed or filled in place. */
static void a_reshape_forgets_inputs(void **state) {
    (void)state;
    for (int which = 0; which < 4; ++which) {
        static float memory[4];
        const float values[4] = {1.0f, 2.0f, 3.0f, 4.0f};
        const int64_t same = 2, other = 3;
        t_op op, sum;
        ms_model *m;
        ms_config config = t_config();
        assert_int_equal(ms_create(&config, &m), MS_RESULT_OK);
        const ms_axis axis = ms_add_axis(m, "rows", 2, 4);
        const ms_shape shape = which == 3 ? ms_shape1(4) : ms_along(ms_shape1(2), 0, axis);
        const ms_tensor x = ms_input(m, "x", MS_DTYPE_F32, shape);
        const ms_tensor p = ms_param(m, "p", MS_DTYPE_F32, ms_shape1(1));
        const ms_tensor loss = ms_activation(m, "loss", MS_DTYPE_F32, shape);
        memset(&op, 0, sizeof op);
        memset(&sum, 0, sizeof sum);
        ms_layer_desc d = t_layer(&op, T_SCALE, "scale", x, loss);
        d.param[0] = p;
        ms_register_layer(m, &d);
        ms_set_loss(m, loss);
        if (which == 1) {
            t_ok(m, ms_borrow(m, x, memory));
        }
        t_ok(m, ms_wrap(m));
        t_ok(m, ms_write(m, p, values));
        t_ok(m, ms_write(m, x, values));
        t_ok(m, ms_eval(m, NULL));
        if (which == 2) {
            assert_non_null(ms_data(m, x));
        }
        t_ok(m, ms_reshape(m, &same));
        t_ok(m, ms_eval(m, NULL));
        t_ok(m, ms_reshape(m, &other));
        t_error(m, ms_eval(m, NULL), which == 0 ? MS_RESULT_ORDER : MS_RESULT_OK);
        if (which == 0) {
            t_text_has(ms_last_error(m), "at the present sizes of the axes");
            t_ok(m, ms_write(m, x, values));
            t_ok(m, ms_eval(m, NULL));
        }
        ms_destroy(m);
    }
}

static uint64_t steps_done(const ms_model *m) {
    ms_memory_report report;
    t_report(m, &report);
    return report.step_count;
}

static int fails_in_eval(const ms_call *call) {
    return call->phase == MS_PHASE_EVAL ? 5 : t_unary_forward(call);
}

/* An eval that fails, between two micro-batches, leaves the first one done. */
static void a_failing_eval_keeps_micro_batches(void **state) {
    (void)state;
    tiny t;
    ms_config config = t_config();
    config.accumulation_steps = 3;
    tiny_create(&t, &config, 1, false);
    ms_layer_desc d = tiny_tail(&t, "moody");
    d.forward = fails_in_eval;
    ms_register_layer(t.model, &d);
    t_ok(t.model, ms_wrap(t.model));
    t_write_zeros(t.model);
    for (int micro = 0; micro < 3; ++micro) {
        assert_int_equal(steps_done(t.model), 0);
        t_ok(t.model, ms_step(t.model, NULL));
        t_error(t.model, ms_eval(t.model, NULL), MS_RESULT_CALLBACK);
    }
    assert_int_equal(steps_done(t.model), 1);
    ms_destroy(t.model);
}

/* Micro-batches of another number are not counted: their sums are weighted otherwise. */
static void another_micro_count_waits_for_the_step(void **state) {
    (void)state;
    tiny t;
    ms_config config = t_config();
    config.accumulation_steps = 4;
    tiny_start(&t, &config, 1, false);
    t_ok(t.model, ms_step(t.model, NULL));
    t_ok(t.model, ms_wrap(t.model)); // of the same number: one is done
    t_ok(t.model, ms_step(t.model, NULL));
    ms_set_accumulation(t.model, 3);
    t_error(t.model, ms_wrap(t.model), MS_RESULT_ORDER);
    for (int micro = 2; micro < 4; ++micro) {
        assert_int_equal(steps_done(t.model), 0);
        t_ok(t.model, ms_step(t.model, NULL));
    }
    assert_int_equal(steps_done(t.model), 1);
    t_ok(t.model, ms_wrap(t.model));
    for (int micro = 0; micro < 3; ++micro) {
        assert_int_equal(steps_done(t.model), 1);
        t_ok(t.model, ms_step(t.model, NULL));
    }
    assert_int_equal(steps_done(t.model), 2);
    ms_destroy(t.model);
}

enum { LATE_CALLS = 9 };

/* A call that comes too late, or that names something of another model: functions without a result
   only. Returns what its text has. */
static const char *late_call(ms_model *m, ms_tensor foreign, ms_layer layer, int which) {
    switch (which) {
    case 0:
        assert_int_equal(ms_param(m, "late", MS_DTYPE_F32, ms_shape1(1)).id, 0);
        return "param \"late\"";
    case 1:
        assert_int_equal(ms_register_layer(m, NULL).id, 0);
        return "closed since ms_wrap";
    case 2:
        ms_add_output(m, foreign);
        return "ms_add_output";
    case 3:
        ms_set_frozen(m, foreign, true);
        return "ms_set_frozen";
    case 4:
        ms_set_learning_rate(m, (float)INFINITY);
        return "ms_set_learning_rate";
    case 5:
        ms_set_layer_technique(m, layer, MS_TECHNIQUE_CHECKPOINTING, MS_SWITCH_ON);
        return "ms_set_layer_technique";
    case 6:
        ms_set_tensor_technique(m, foreign, MS_TECHNIQUE_CHECKPOINTING, MS_SWITCH_ON);
        return "ms_set_tensor_technique";
    case 7:
        ms_set_loss_factor(m, (float)INFINITY);
        return "ms_set_loss_factor";
    default:
        ms_refuse(m, "not like this");
        return "not like this";
    }
}

/* The next ms_wrap returns what was refused since the last one, once: the plan is as good as
   before, steps go on, and other changes of plan do not look at it. */
static void wrap_returns_what_was_refused(void **state) {
    (void)state;
    for (int which = 0; which < LATE_CALLS; ++which) {
        tiny t, other;
        ms_config config = t_config();
        tiny_start(&t, &config, 1, false);
        tiny_start(&other, &config, 1, false);
        const ms_layer layer = msi_layer_handle(&other.model->graph, 0);
        const char *part = late_call(t.model, other.p, layer, which);
        char first[MSI_ERROR_BYTES];
        snprintf(first, sizeof first, "%s", ms_last_error(t.model));
        t_text_has(first, part);
        (void)late_call(t.model, other.p, layer, (which + 1) % LATE_CALLS);
        assert_string_not_equal(ms_last_error(t.model), first); // each has a text, not only one
        t_ok(t.model, ms_step(t.model, NULL));
        t_ok(t.model, ms_detach(t.model));
        assert_int_not_equal(ms_wrap(t.model), MS_RESULT_OK);
        t_text_has(ms_last_error(t.model), "since the last ms_wrap");
        t_text_has(ms_last_error(t.model), part);
        t_ok(t.model, ms_step(t.model, NULL));
        t_ok(t.model, ms_wrap(t.model));
        t_ok(t.model, ms_step(t.model, NULL));
        ms_destroy(t.model);
        ms_destroy(other.model);
    }
}

/* Handles of a twin, made by the same calls, are refused wherever a handle is taken. */
static void another_models_handles_are_refused(void **state) {
    (void)state;
    float value[64] = {0};
    ms_config config = t_config();
    for (int wrapped = 0; wrapped < 2; ++wrapped) {
        tiny t, twin;
        tiny_create(&t, &config, 1, false);
        tiny_create(&twin, &config, 1, false);
        t_ok(twin.model, ms_wrap(twin.model));
        if (wrapped != 0) {
            t_ok(t.model, ms_wrap(t.model));
        }
        const ms_tensor gradient = ms_gradient(twin.model, twin.p);
        const ms_tensor moment = ms_optimizer_state(twin.model, twin.p, 0);
        const ms_tensor foreign[] = {twin.x, twin.p, gradient, moment};
        assert_true(gradient.id != 0 && moment.id != 0);
        for (size_t i = 0; i < sizeof foreign / sizeof foreign[0]; ++i) {
            const ms_tensor f = foreign[i];
            t_error(t.model, ms_write(t.model, f, value), MS_RESULT_INVALID);
            t_text_has(ms_last_error(t.model), "of this model");
            t_error(t.model, ms_read(t.model, f, value), MS_RESULT_INVALID);
            assert_null(ms_data(t.model, f));
            assert_int_equal(ms_gradient(t.model, f).id, 0);
            assert_int_equal(ms_optimizer_state(t.model, f, 0).id, 0);
            assert_int_equal(ms_tensor_of(t.model, f).id, 0);
            assert_int_equal(ms_tensor_shape(t.model, f).rank, -1);
            assert_true(ms_tensor_bytes(t.model, f) == 0 && ms_tensor_count(t.model, f) == 0);
            assert_string_equal(ms_tensor_name(t.model, f), "?");
            t_error(t.model, ms_borrow(t.model, f, value), MS_RESULT_INVALID);
        }
        const ms_layer layer = msi_layer_handle(&twin.model->graph, 0);
        assert_string_equal(ms_layer_name(t.model, layer), "?");
        assert_int_equal(ms_layer_index(t.model, layer), UINT32_MAX);
        assert_int_equal(ms_layer_index(twin.model, layer), 0);
        ms_destroy(t.model);
        ms_destroy(twin.model);
    }
}

/* The same for what registration is given: a tensor in a slot, a loss, an axis. */
static void another_models_handles_are_no_operands(void **state) {
    (void)state;
    for (int which = 0; which < 4; ++which) {
        ms_config config = t_config();
        tiny t, twin;
        tiny_create(&t, &config, 1, false);
        tiny_create(&twin, &config, 1, false);
        const ms_axis own = ms_add_axis(t.model, "rows", 2, 4);
        const ms_axis axis = ms_add_axis(twin.model, "rows", 2, 4);
        const ms_tensor y = ms_activation(t.model, "y", MS_DTYPE_F32,
                                          ms_along(ms_shape1(2), 0, which == 3 ? axis : own));
        ms_layer_desc d = t_layer(&t.twice, T_SCALE, "stranger", which == 0 ? twin.x : t.x, y);
        d.backward = NULL;
        assert_true((ms_register_layer(t.model, &d).id == 0) == (which == 0 || which == 3));
        if (which == 1) {
            ms_set_loss(t.model, twin.loss);
        }
        t_error(t.model, ms_wrap(t.model), which == 2 ? MS_RESULT_OK : MS_RESULT_INVALID);
        if (which != 2) {
            t_text_has(ms_last_error(t.model), which == 0   ? "is not a tensor of this model"
                                               : which == 1 ? "ms_set_loss"
                                                            : "axis of another model");
        }
        const ms_shape both = ms_along(ms_along(ms_shape2(2, 2), 0, own), 1, axis);
        assert_int_equal(both.rank, -1);
        ms_destroy(t.model);
        ms_destroy(twin.model);
    }
}

/* Ids wrap around below 2^32 and never become 0, wherever they begin. */
static void ids_count_from_any_tag(void **state) {
    (void)state;
    static const uint32_t tags[] = {0, 1, 77, UINT32_MAX - 1, UINT32_MAX - 2, UINT32_MAX - 10};
    for (size_t k = 0; k < sizeof tags / sizeof tags[0]; ++k) {
        msi_graph g;
        memset(&g, 0, sizeof g);
        g.tag = tags[k];
        g.tensors.count = MSI_MAX_TENSORS;
        for (uint32_t i = 0; i < 40; ++i) {
            const uint32_t t = i < 20 ? i : MSI_MAX_TENSORS - (40 - i);
            for (uint32_t role = 0; role < (uint32_t)MSI_ROLE_RESIDENT_COUNT; ++role) {
                const ms_tensor handle = msi_handle(&g, t, (msi_role)role);
                assert_true(handle.id != 0 && msi_index(&g, handle) == t);
                assert_int_equal(msi_role_of(&g, handle), role);
            }
        }
        const ms_tensor none = {0}, beyond = msi_handle(&g, MSI_MAX_TENSORS, MSI_ROLE_VALUE);
        assert_true(msi_index(&g, none) == MSI_NONE && msi_index(&g, beyond) == MSI_NONE);
    }
}

static void forged_handles_are_refused(void **state) {
    (void)state;
    tiny t;
    float value = 0.0f;
    ms_config config = t_config();
    tiny_create(&t, &config, 1, false);
    ms_tensor odd = t.x, state_of_input = t.x;
    odd.id += 9u << 28;
    state_of_input.id += (uint32_t)MSI_ROLE_STATE0;
    assert_int_equal(ms_tensor_shape(t.model, odd).rank, -1);
    assert_true(ms_tensor_bytes(t.model, odd) == 0);
    t_error(t.model, ms_write(t.model, state_of_input, &value), MS_RESULT_INVALID);
    const ms_matrix nothing = ms_matrix_of(NULL);
    assert_true(nothing.rows == 0 && nothing.data == NULL);
    assert_false(ms_optimize_next(t.model, NULL));
    ms_destroy(t.model);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_enum_value_has_a_name),
        cmocka_unit_test(dtypes_have_their_names_and_sizes),
        cmocka_unit_test(shapes_count_their_elements),
        cmocka_unit_test(products_never_wrap),
        cmocka_unit_test(the_hardware_is_reported),
        cmocka_unit_test(the_default_budget_is_a_part_of_the_free_memory),
        cmocka_unit_test(steps_need_a_wrap),
        cmocka_unit_test(calls_out_of_turn),
        cmocka_unit_test(a_budget_of_one_byte),
        cmocka_unit_test(a_dry_run_does_not_step),
        cmocka_unit_test(a_failing_callback_costs_one_step),
        cmocka_unit_test(a_failing_eval_does_not_end_training),
        cmocka_unit_test(an_update_cut_in_two_fails_the_model),
        cmocka_unit_test(a_loss_that_is_not_finite),
        cmocka_unit_test(the_log_receives_text),
        cmocka_unit_test(a_missing_backward_is_warned_of),
        cmocka_unit_test(a_model_carries_its_error),
        cmocka_unit_test(writes_name_the_registration_that_failed),
        cmocka_unit_test(values_survive_wrap_and_detach),
        cmocka_unit_test(everything_that_lives_is_read),
        cmocka_unit_test(a_layer_of_ones_own_copies_the_gradient_of_an_activation),
        cmocka_unit_test(params_that_are_not_trained_have_no_state),
        cmocka_unit_test(an_optimizer_with_less_state),
        T_TWICE(only_what_still_lives_is_read),
        cmocka_unit_test(handles_keep_their_names),
        cmocka_unit_test(sizes_of_tensors),
        cmocka_unit_test(eval_outputs_are_kept_in_eval),
        cmocka_unit_test(optimize_scopes_a_block),
        cmocka_unit_test(two_models_are_independent),
        cmocka_unit_test(a_param_may_stand_in_many_slots),
        cmocka_unit_test(the_loss_is_never_overwritten),
        cmocka_unit_test(callbacks_cannot_step),
        cmocka_unit_test(a_loss_factor_waits_for_the_next_step),
        cmocka_unit_test(a_loss_factor_may_be_zero),
        cmocka_unit_test(a_write_ends_the_step_that_it_would_spoil),
        cmocka_unit_test(visitors_cannot_change_the_plan),
        cmocka_unit_test(the_error_that_is_logged_stays),
        cmocka_unit_test(wrap_returns_what_was_refused),
        cmocka_unit_test(a_failing_eval_keeps_micro_batches),
        cmocka_unit_test(another_micro_count_waits_for_the_step),
        cmocka_unit_test(what_was_never_written_is_no_zero),
        cmocka_unit_test(a_reshape_forgets_inputs),
        cmocka_unit_test(another_models_handles_are_refused),
        cmocka_unit_test(another_models_handles_are_no_operands),
        cmocka_unit_test(ids_count_from_any_tag),
        cmocka_unit_test(forged_handles_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
