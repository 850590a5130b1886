/*  test_profile.c - where times come from: devices that are set, times that are known, profiles
    that are saved and loaded. The C library's idea of a decimal point is played here, so that
    numbers are seen in any locale. */
#include <math.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *decimal_point = ".";

/* vsnprintf, with this decimal point in numbers of the profile. */
static int local_vsnprintf(char *text, size_t bytes, const char *format, va_list args) {
    char plain[1024], local[2048];
    size_t count = 0;
    va_list again;
    va_copy(again, args);
    const int length = vsnprintf(plain, sizeof plain, format, again);
    va_end(again);
    if (length < 0 || length >= (int)sizeof plain || strcmp(format, "%.*g") != 0) {
        return vsnprintf(text, bytes, format, args);
    }
    for (int i = 0; i < length; i++) {
        const bool stop = plain[i] == '.' && i > 0 && plain[i - 1] >= '0' && plain[i - 1] <= '9';
        if (stop) {
            memcpy(local + count, decimal_point, strlen(decimal_point));
            count += strlen(decimal_point);
        } else {
            local[count++] = plain[i];
        }
    }
    const size_t taken = count < bytes ? count : bytes - 1;
    memcpy(text, local, taken);
    text[taken] = 0;
    return (int)count;
}

/* strtod, for which a full stop ends a number where it is no decimal point. */
static double local_strtod(const char *text, char **end) {
    char plain[256];
    size_t count = 0, at = 0;
    const size_t point = strlen(decimal_point);
    while (text[at] && count < sizeof plain - 1) {
        if (strncmp(text + at, decimal_point, point) == 0) {
            plain[count++] = '.';
            at += point;
        } else if (text[at] == '.') {
            break;
        } else {
            plain[count++] = text[at++];
        }
    }
    plain[count] = 0;
    (void)end;
    return strtod(plain, NULL);
}

#include "private.h"
#include "toy_layers.h"

static void use_point(const char *point) {
    decimal_point = point;
}

static bool same_bits(double a, double b) {
    return memcmp(&a, &b, sizeof a) == 0;
}

static msi_layer *layer_at(const t_chain *chain, uint32_t i) {
    assert_true(i < chain->model->graph.layers.count);
    return &chain->model->graph.layers.items[i];
}

static uint32_t layer_count(const t_chain *chain) {
    return chain->model->graph.layers.count;
}

static ms_layer layer_of(const ms_model *m, uint32_t i) {
    return msi_layer_handle(&m->graph, i);
}

static ms_layer_time time_of(double forward_us, double backward_us, double recompute_us) {
    ms_layer_time time;
    time.forward_us = forward_us;
    time.backward_us = backward_us;
    time.recompute_us = recompute_us;
    return time;
}

static void create_chain(t_chain *chain, const ms_config *config, uint32_t depth) {
    assert_int_equal(t_chain_create(chain, config, depth, T_CHAIN_ROWS, T_CHAIN_COLS),
                     MS_RESULT_OK);
}

static t_text save(const ms_model *m) {
    t_text text;
    memset(&text, 0, sizeof text);
    t_ok(m, ms_profile_save(m, t_append, &text));
    return text;
}

/* A device whose times are easily found by hand. */
static ms_hardware plain_device(void) {
    ms_hardware h;
    memset(&h, 0, sizeof h);
    snprintf(h.name, sizeof h.name, "by hand");
    h.kind = MS_DEVICE_DISCRETE;
    h.memory_gb_per_s = 1e9; // never in the way
    h.f32_tflops = 1e-3;     // a flop in a nanosecond
    h.launch_us = 3.0;
    return h;
}

// ------------------------------------------------------------------------------------------------
// devices

/* 2 flops per element of the matrix and row, twice that in backward; one per element without. */
static void times_are_those_of_the_device_that_is_set(void **state) {
    (void)state;
    t_chain chain;
    const ms_config config = t_config();
    const ms_hardware device = plain_device();
    const double product = 2.0 * T_CHAIN_COLS * T_CHAIN_COLS * T_CHAIN_ROWS * 1e-3;
    const double squash = (double)T_CHAIN_COLS * T_CHAIN_ROWS * 1e-3;
    create_chain(&chain, &config, 3);
    ms_set_hardware(chain.model, &device);
    t_ok(chain.model, ms_wrap(chain.model));
    for (uint32_t i = 0; i < 6; i++) {
        const double us = i % 2 == 0 ? product : squash;
        const ms_layer_time *time = &layer_at(&chain, i)->time[MSI_FORMAT_F32];
        assert_true(fabs(time->forward_us - (3.0 + us)) < 1e-6 * us);
        assert_true(fabs(time->backward_us - (3.0 + 2.0 * us)) < 1e-6 * us);
        assert_true(same_bits(time->recompute_us, time->forward_us));
    }
    ms_clear_hardware(chain.model); // the CPU again, from the next wrap on
    assert_true(chain.model->costs.hardware.launch_us == 3.0);
    t_ok(chain.model, ms_wrap(chain.model));
    assert_int_equal(chain.model->costs.hardware.kind, MS_DEVICE_CPU);
    assert_true(layer_at(&chain, 0)->time[MSI_FORMAT_F32].forward_us < 3.0);
    ms_destroy(chain.model);
}

/* Arithmetic or memory, not both together; TF32 where products may use it. Of a layer that reads and
   writes 4 bytes for each flop. */
static void what_takes_longer_is_the_time(void **state) {
    (void)state;
    static const struct {
        double gb_per_s, tf32_tflops;
        bool tf32;
        double flops_us; // in times of one flop at 1e-3 TFLOPS
    } cases[] = {{16.0, 4e-3, false, 1.0},
                 {4.0, 4e-3, false, 2.0},
                 {16.0, 4e-3, true, 0.5},
                 {1e9, 4e-3, true, 0.25},
                 {16.0, 0.0, true, 1.0}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        t_chain chain;
        ms_config config = t_config();
        ms_hardware device = plain_device();
        config.tf32 = cases[i].tf32;
        device.memory_gb_per_s = cases[i].gb_per_s;
        device.tf32_tflops = cases[i].tf32_tflops;
        create_chain(&chain, &config, 1);
        ms_set_hardware(chain.model, &device);
        t_ok(chain.model, ms_wrap(chain.model));
        const double expected = 3.0 + cases[i].flops_us * T_CHAIN_COLS * T_CHAIN_ROWS * 1e-3;
        assert_true(fabs(layer_at(&chain, 1)->time[MSI_FORMAT_F32].forward_us - expected) <
                    1e-6 * expected);
        ms_destroy(chain.model);
    }
}

static void speeds_of_0_are_those_of_the_kind(void **state) {
    (void)state;
    t_chain chain;
    const ms_config config = t_config();
    ms_hardware device;
    memset(&device, 0, sizeof device);
    create_chain(&chain, &config, 1);
    for (int kind = MS_DEVICE_CPU; kind <= MS_DEVICE_INTEGRATED; kind++) {
        device.kind = (ms_device_kind)kind;
        ms_set_hardware(chain.model, &device);
        t_ok(chain.model, ms_wrap(chain.model));
        ms_hardware in_force = chain.model->costs.hardware;
        for (int i = 0; i < MSI_SPEED_COUNT - 1; i++) {
            assert_true(*msi_speed(&in_force, i) > 0.0);
        }
        assert_true((in_force.launch_us > 0.0) == (kind != MS_DEVICE_CPU));
    }
    ms_destroy(chain.model);
}

static void expect_refused(const ms_hardware *device, const char *part) {
    ms_model *m;
    t_ok(NULL, ms_create(NULL, &m));
    ms_set_hardware(m, device);
    t_error(m, ms_wrap(m), MS_RESULT_INVALID);
    t_text_has(ms_last_error(m), "ms_set_hardware");
    t_text_has(ms_last_error(m), part);
    ms_destroy(m);
}

static double reported_speed;

static void report_one_speed(void *user, ms_hardware *hardware) {
    (void)user;
    for (int i = 0; i < MSI_SPEED_COUNT; i++) {
        *msi_speed(hardware, i) = reported_speed;
    }
}

/* What a backend reports, and cannot be, is not known: the speeds are those of the kind, and the
   profile can be read. */
static void a_backend_cannot_report_the_impossible(void **state) {
    (void)state;
    static const double wrong[] = {-1.0, (double)INFINITY, (double)NAN, 1e16, 1e-12};
    for (size_t k = 0; k < sizeof wrong / sizeof wrong[0]; k++) {
        t_chain chain;
        t_text text = {NULL, 0};
        ms_config config = t_config();
        config.backend = ms_backend_cpu();
        config.backend.hardware = report_one_speed;
        reported_speed = wrong[k];
        create_chain(&chain, &config, 2);
        t_ok(chain.model, ms_wrap(chain.model));
        const ms_hardware *h = &chain.model->costs.hardware;
        assert_true(h->memory_gb_per_s == 20.0 && h->f32_tflops == 0.32);
        assert_true(h->launch_us == 0.0 || wrong[k] == 1e-12); // a launch may be that short
        t_ok(chain.model, ms_profile_save(chain.model, t_append, &text));
        t_ok(chain.model, ms_profile_load(chain.model, text.data, text.length));
        free(text.data);
        ms_destroy(chain.model);
    }
    assert_string_equal(msi_decimal((double)INFINITY).text, "."); // no digit, and no harm
}

static void wrong_devices_are_refused(void **state) {
    (void)state;
    static const double wrong[] = {-1.0, -1e-30, (double)INFINITY, (double)NAN, 1e16, 1e-12};
    for (int speed = 0; speed < MSI_SPEED_COUNT; speed++) {
        for (size_t k = 0; k < sizeof wrong / sizeof wrong[0]; k++) {
            ms_hardware device = plain_device();
            *msi_speed(&device, speed) = wrong[k];
            if (speed < MSI_SPEED_COUNT - 1 || wrong[k] != 1e-12) { // a launch may be that short
                expect_refused(&device, "a speed is negative, not finite, or higher than");
            }
        }
    }
    ms_hardware device = plain_device();
    device.kind = (ms_device_kind)3;
    expect_refused(&device, "kind of device");
    device = plain_device();
    memset(device.name, 'x', sizeof device.name);
    expect_refused(&device, "its name is not terminated");
    device = plain_device();
    device.total_bytes = 5;
    device.free_bytes = 6;
    expect_refused(&device, "more memory is free");
    device = plain_device();
    device.host_total_bytes = 5;
    device.host_free_bytes = 6;
    expect_refused(&device, "more host memory is free");

    t_chain chain; // after ms_wrap too: the plan stays, and the next ms_wrap refuses
    const ms_config config = t_config();
    ms_memory_report report;
    t_chain_start(&chain, &config, 2);
    ms_set_hardware(chain.model, &device);
    t_text_has(ms_last_error(chain.model), "more host memory is free");
    t_error(chain.model, ms_wrap(chain.model), MS_RESULT_INVALID);
    t_ok(chain.model, ms_step(chain.model, NULL));
    t_report(chain.model, &report);
    assert_int_equal(chain.model->costs.hardware.kind, MS_DEVICE_CPU);
    ms_set_hardware(NULL, &device);
    ms_destroy(chain.model);
}

/* target_utilization counts from what is free there, or from all of it, or from the host. */
static void the_budget_is_a_part_of_that_device(void **state) {
    (void)state;
    t_chain chain;
    ms_memory_report report;
    ms_config config = t_config();
    ms_hardware device = plain_device();
    config.memory_budget_bytes = 0;
    config.target_utilization = 0.5;
    create_chain(&chain, &config, 2);
    device.total_bytes = (uint64_t)1 << 30;
    ms_set_hardware(chain.model, &device);
    t_ok(chain.model, ms_wrap(chain.model));
    t_report(chain.model, &report);
    assert_true(report.budget_bytes == (uint64_t)1 << 29);
    device.free_bytes = (uint64_t)1 << 28;
    ms_set_hardware(chain.model, &device);
    t_ok(chain.model, ms_wrap(chain.model));
    t_report(chain.model, &report);
    assert_true(report.budget_bytes == (uint64_t)1 << 27);
    device.total_bytes = 0; // not known
    ms_set_hardware(chain.model, &device);
    t_ok(chain.model, ms_wrap(chain.model));
    t_report(chain.model, &report);
    assert_true(report.budget_bytes == (uint64_t)1 << 27);
    device.free_bytes = 0;
    ms_set_hardware(chain.model, &device);
    t_ok(chain.model, ms_wrap(chain.model));
    t_report(chain.model, &report);
    uint64_t total = 0, available = 0;
    msi_host_memory("", &total, &available);
    assert_true(report.budget_bytes > available / 4 && report.budget_bytes < available);
    ms_destroy(chain.model);
}

static t_device counted_device;

/* 1 MiB, of which the model takes some. */
static void report_what_is_left(void *user, ms_hardware *hardware) {
    (void)user;
    hardware->total_bytes = (uint64_t)1 << 20;
    hardware->free_bytes = hardware->total_bytes - counted_device.live_bytes;
}

/* What the model itself holds is free for its next plan. */
static void the_budget_is_the_same_again(void **state) {
    (void)state;
    t_chain chain;
    ms_config config = t_config();
    config.memory_budget_bytes = 0;
    config.target_utilization = 0.5;
    config.backend = t_device_backend(&counted_device);
    config.backend.hardware = report_what_is_left;
    create_chain(&chain, &config, 4);
    for (int i = 0; i < 3; i++) {
        ms_memory_report report;
        t_ok(chain.model, ms_wrap(chain.model));
        t_report(chain.model, &report);
        assert_true(counted_device.live_bytes >= report.arena_bytes && report.arena_bytes > 0);
        assert_true(report.budget_bytes == (uint64_t)1 << 19);
    }
    ms_destroy(chain.model);
}

/* A wrap that fails leaves device and times as they were. */
static void a_wrap_that_fails_changes_no_time(void **state) {
    (void)state;
    t_chain chain;
    const ms_config config = t_config();
    const ms_hardware device = plain_device();
    const ms_layer_time known = time_of(7.0, 8.0, 9.0);
    t_chain_start(&chain, &config, 4);
    const ms_layer_time before = layer_at(&chain, 0)->time[MSI_FORMAT_F32];
    const ms_hardware own = chain.model->costs.hardware;
    uint64_t smallest = 0;
    ms_set_hardware(chain.model, &device);
    ms_set_budget(chain.model, 64);
    t_error(chain.model, ms_wrap(chain.model), MS_RESULT_BUDGET);
    assert_memory_equal(&chain.model->costs.hardware, &own, sizeof own);
    assert_memory_equal(&layer_at(&chain, 0)->time, &before, sizeof before);
    t_ok(chain.model, ms_smallest_budget(chain.model, &smallest));
    assert_memory_equal(&chain.model->costs.hardware, &own, sizeof own);
    ms_set_layer_time(chain.model, layer_of(chain.model, 0), &known);
    ms_set_budget(chain.model, smallest);
    t_ok(chain.model, ms_wrap(chain.model));
    assert_memory_equal(&layer_at(&chain, 0)->time, &known, sizeof known);
    ms_destroy(chain.model);
}

// ------------------------------------------------------------------------------------------------
// known times

static void known_times_come_first(void **state) {
    (void)state;
    t_chain chain;
    const ms_config config = t_config();
    create_chain(&chain, &config, 2);
    t_ok(chain.model, ms_wrap(chain.model));
    const ms_layer_time predicted = layer_at(&chain, 1)->time[MSI_FORMAT_F32];
    const ms_layer_time some = time_of(5.0, 0.0, 0.0), all = time_of(5.0, 6.0, 0.25);
    ms_set_layer_time(chain.model, layer_of(chain.model, 1), &some);
    assert_memory_equal(&layer_at(&chain, 1)->time, &predicted, sizeof predicted); // not yet
    t_ok(chain.model, ms_wrap(chain.model));
    assert_true(layer_at(&chain, 1)->time[MSI_FORMAT_F32].forward_us == 5.0);
    assert_true(layer_at(&chain, 1)->time[MSI_FORMAT_F32].recompute_us == 5.0); // by forward
    assert_true(
        same_bits(layer_at(&chain, 1)->time[MSI_FORMAT_F32].backward_us, predicted.backward_us));
    ms_set_layer_time(chain.model, layer_of(chain.model, 1), &all);
    t_ok(chain.model, ms_wrap(chain.model));
    assert_memory_equal(&layer_at(&chain, 1)->time, &all, sizeof all);
    ms_set_layer_time(chain.model, layer_of(chain.model, 1), NULL);
    t_ok(chain.model, ms_wrap(chain.model));
    assert_memory_equal(&layer_at(&chain, 1)->time, &predicted, sizeof predicted);
    ms_destroy(chain.model);
}

static ms_time_source time_source(const ms_model *m) {
    ms_memory_report report;
    t_report(m, &report);
    return report.time_source;
}

/* The report names the source of the times in force, after a reshape and a failing wrap too. */
static void the_report_says_where_times_come_from(void **state) {
    (void)state;
    t_chain chain;
    const ms_config config = t_config();
    create_chain(&chain, &config, 3);
    ms_model *m = chain.model;
    const ms_layer_time known = time_of(10.0, 20.0, 0.0), half = time_of(10.0, 0.0, 0.0);
    t_ok(m, ms_wrap(m));
    assert_int_equal(time_source(m), MS_TIME_SOURCE_ROOFLINE);
    for (uint32_t i = 0; i < layer_count(&chain); i++) {
        ms_set_layer_time(m, layer_of(chain.model, i), i == 1 ? &half : &known);
    }
    assert_int_equal(time_source(m), MS_TIME_SOURCE_ROOFLINE); // until the next wrap
    t_ok(m, ms_wrap(m));
    assert_int_equal(time_source(m), MS_TIME_SOURCE_MIXED);
    t_text text = save(m);
    ms_set_layer_time(m, layer_of(chain.model, 1), &known);
    t_ok(m, ms_wrap(m));
    assert_int_equal(time_source(m), MS_TIME_SOURCE_MEASURED);
    for (uint32_t i = 0; i < layer_count(&chain); i++) {
        ms_set_layer_time(m, layer_of(chain.model, i), NULL);
    }
    ms_set_budget(m, 64);
    t_error(m, ms_wrap(m), MS_RESULT_BUDGET);
    assert_int_equal(time_source(m), MS_TIME_SOURCE_ROOFLINE); // of the times in force now
    ms_set_budget(m, config.memory_budget_bytes);
    t_ok(m, ms_profile_load(m, text.data, text.length));
    t_ok(m, ms_wrap(m));
    assert_int_equal(time_source(m), MS_TIME_SOURCE_MEASURED); // a profile has all times
    free(text.data);
    ms_destroy(m);
    assert_string_equal(ms_time_source_name(MS_TIME_SOURCE_ROOFLINE), "roofline");
    assert_string_equal(ms_time_source_name(MS_TIME_SOURCE_MIXED), "partly measured");
    assert_string_equal(ms_time_source_name(MS_TIME_SOURCE_MEASURED), "measured");
    assert_string_equal(ms_time_source_name(MS_TIME_SOURCE_COUNT), "?");
}

static void wrong_times_are_refused(void **state) {
    (void)state;
    static const double wrong[] = {-1.0, (double)INFINITY, (double)NAN, 1.1e15};
    const ms_config config = t_config();
    const ms_layer_time fine = time_of(1.0, 1.0, 1.0);
    const ms_layer none = {0};
    for (size_t k = 0; k < sizeof wrong / sizeof wrong[0]; k++) {
        for (int which = 0; which < 3; which++) {
            t_chain chain;
            create_chain(&chain, &config, 1);
            const ms_layer_time time =
                time_of(which == 0 ? wrong[k] : 1.0, which == 1 ? wrong[k] : 1.0,
                        which == 2 ? wrong[k] : 1.0);
            ms_set_layer_time(chain.model, layer_of(chain.model, 0), &time);
            t_error(chain.model, ms_wrap(chain.model), MS_RESULT_INVALID);
            t_text_has(ms_last_error(chain.model),
                       "ms_set_layer_time: layer 0 \"matmul0\": a time");
            ms_destroy(chain.model);
        }
    }
    for (int beyond = 0; beyond < 2; beyond++) {
        t_chain chain;
        create_chain(&chain, &config, 1);
        const ms_layer layer = layer_of(chain.model, layer_count(&chain));
        ms_set_layer_time(chain.model, beyond ? layer : none, &fine);
        t_error(chain.model, ms_wrap(chain.model), MS_RESULT_INVALID);
        t_text_has(ms_last_error(chain.model), "is not a layer of this model");
        ms_destroy(chain.model);
    }
    ms_set_layer_time(NULL, none, &fine);
}

// ------------------------------------------------------------------------------------------------
// axes: one layer, rows of which there can be 2 to 8

typedef struct sized {
    ms_model *model;
    t_op matmul, loss;
} sized;

static void create_sized(sized *s, int64_t rows) {
    const ms_config config = t_config();
    memset(s, 0, sizeof *s);
    t_ok(NULL, ms_create(&config, &s->model));
    ms_model *m = s->model;
    const ms_axis axis = ms_add_axis(m, "rows", rows, 8);
    const ms_tensor x = ms_input(m, "x", MS_DTYPE_F32, ms_along(ms_shape2(rows, 4), 0, axis));
    const ms_tensor w = ms_param(m, "w", MS_DTYPE_F32, ms_shape2(4, 4));
    t_set_loss(m, &s->loss, T_LOSS, t_add_layer(m, &s->matmul, T_MATMUL, "matmul", x, w));
}

static void expect_times(const ms_model *m, double forward_us, double backward_us) {
    const ms_layer_time *time = &m->graph.layers.items[0].time[MSI_FORMAT_F32];
    assert_true(fabs(time->forward_us - forward_us) < 1e-9);
    assert_true(fabs(time->backward_us - backward_us) < 1e-9);
}

/* The time that an instruction of a sample takes: another one for each layer and phase, 0 for what
   is no call of a layer. */
static double told_us(const msi_instruction *i) {
    switch (i->op) {
    case MSI_OP_FORWARD:
        return 10.0 + i->target;
    case MSI_OP_RECOMPUTE:
    case MSI_OP_REPEAT:
        return 200.0 + i->target;
    case MSI_OP_BACKWARD:
        return 3000.0 + i->target;
    default:
        return 0.0;
    }
}

/* Tells one sample after another what each instruction took, without a clock: every layer learns
   the median of its forwards, of its recomputations and of its backwards, and a layer that is never
   recomputed has the time of its forward for that too. */
static void samples_are_of_their_layer_and_phase(void **state) {
    (void)state;
    static const double factors[] = {1.0, 3.0, 2.0};
    t_chain chain;
    uint64_t smallest = 0;
    uint32_t recomputed = 0;
    ms_config config = t_config();
    config.empirical_profiling = MS_SWITCH_ON;
    config.warmup_steps = 3;
    create_chain(&chain, &config, 6);
    ms_model *m = chain.model;
    t_ok(m, ms_smallest_budget(m, &smallest));
    ms_set_budget(m, smallest);
    t_ok(m, ms_wrap(m));
    const msi_program *p = &m->run.plan->train;
    msi_timing *t = m->run.timing;
    t->warmup = MSI_WARMUP_SAMPLE;
    for (int sample = 0; sample < 3; sample++) {
        memset(t->us, 0, t->series_count * sizeof *t->us);
        memset(t->amount, 0, t->series_count * sizeof *t->amount);
        for (uint32_t i = 0; i < p->code.instructions.count; i++) {
            msi_add_time(m, p, i, factors[sample] * told_us(&p->code.instructions.items[i]));
        }
        t_ok(m, msi_end_timing(m, true));
    }
    for (uint32_t i = 0; i < layer_count(&chain); i++) {
        const ms_layer_time *learnt = &layer_at(&chain, i)->measured;
        bool again = false;
        for (uint32_t k = 0; k < p->code.instructions.count; k++) {
            const msi_instruction *at = &p->code.instructions.items[k];
            again |= at->target == i && told_us(at) == 200.0 + i;
        }
        recomputed += again;
        assert_true(fabs(learnt->forward_us - 2.0 * (10.0 + i)) < 1e-9);
        assert_true(fabs(learnt->recompute_us - 2.0 * ((again ? 200.0 : 10.0) + i)) < 1e-9);
        assert_true(fabs(learnt->backward_us - 2.0 * (3000.0 + i)) < 1e-9);
    }
    assert_true(recomputed > 0 && recomputed < layer_count(&chain));
    ms_destroy(m);
}

static void times_grow_with_the_output(void **state) {
    (void)state;
    sized s, other;
    const ms_layer_time known = time_of(10.0, 20.0, 0.0);
    int64_t rows = 8;
    create_sized(&s, 4);
    ms_set_layer_time(s.model, layer_of(s.model, 0), &known);
    t_ok(s.model, ms_wrap(s.model));
    expect_times(s.model, 10.0, 20.0);
    t_ok(s.model, ms_reshape(s.model, &rows));
    expect_times(s.model, 20.0, 40.0);
    t_text at_8 = save(s.model);
    rows = 2;
    t_ok(s.model, ms_reshape(s.model, &rows));
    expect_times(s.model, 5.0, 10.0);
    rows = 8;
    t_ok(s.model, ms_reshape(s.model, &rows)); // a plan that is there already
    expect_times(s.model, 20.0, 40.0);

    create_sized(&other, 4); // the profile of 8 rows in a model of 4
    t_ok(other.model, ms_profile_load(other.model, at_8.data, at_8.length));
    t_ok(other.model, ms_wrap(other.model));
    expect_times(other.model, 10.0, 20.0);
    t_ok(other.model, ms_reshape(other.model, &rows));
    expect_times(other.model, 20.0, 40.0);
    free(at_8.data);
    ms_destroy(s.model);
    ms_destroy(other.model);
}

// ------------------------------------------------------------------------------------------------
// profiles

/* Times that no formula gives, of every magnitude. */
static void set_odd_times(t_chain *chain, uint64_t seed) {
    t_rng rng = t_seed(seed);
    for (uint32_t i = 0; i < layer_count(chain); i++) {
        const ms_layer_time time =
            time_of(exp(20.0 * t_unit(&rng) - 8.0), exp(20.0 * t_unit(&rng) - 8.0),
                    exp(20.0 * t_unit(&rng) - 8.0));
        ms_set_layer_time(chain->model, layer_of(chain->model, i), &time);
    }
}

static void expect_same_times(const t_chain *a, const t_chain *b) {
    assert_int_equal(layer_count(a), layer_count(b));
    for (uint32_t i = 0; i < layer_count(a); i++) {
        assert_memory_equal(&layer_at(a, i)->time, &layer_at(b, i)->time, sizeof(ms_layer_time));
    }
}

static void what_is_saved_is_loaded_to_the_bit(void **state) {
    (void)state;
    static const char *const points[] = {".", ",", "\xd9\xab"}; // Arabic, in UTF-8
    t_text first;
    memset(&first, 0, sizeof first);
    for (int i = 0; i < 9; i++) {
        t_chain a, b;
        ms_memory_report of_a, of_b;
        ms_config config = t_config();
        config.memory_budget_bytes = 30000;
        create_chain(&a, &config, 12);
        create_chain(&b, &config, 12);
        set_odd_times(&a, 7);
        t_ok(a.model, ms_wrap(a.model));
        use_point(points[i / 3]);
        t_text text = save(a.model);
        use_point(points[i % 3]);
        t_ok(b.model, ms_profile_load(b.model, text.data, text.length));
        use_point(".");
        t_ok(b.model, ms_wrap(b.model));
        expect_same_times(&a, &b);
        t_report(a.model, &of_a);
        t_report(b.model, &of_b);
        assert_true(of_a.recompute_count > 0);
        assert_true(of_a.plan_hash == of_b.plan_hash);
        assert_true(same_bits(of_a.step_us, of_b.step_us));
        t_text again = save(b.model);
        assert_string_equal(text.data, again.data);
        if (first.data) {
            assert_string_equal(first.data, text.data); // in every locale
        } else {
            first = text;
        }
        if (first.data != text.data) {
            free(text.data);
        }
        free(again.data);
        ms_destroy(a.model);
        ms_destroy(b.model);
    }
    free(first.data);
}

/* Of layers so large that no time of theirs could be set: as times that grow with the sizes are. */
static void the_longest_times_are_loaded_too(void **state) {
    (void)state;
    t_chain a, b;
    create_chain(&a, NULL, 4);
    create_chain(&b, NULL, 4);
    layer_at(&a, 1)->known = time_of(3e16, 1e26, 0.0);
    layer_at(&a, 2)->known = time_of(1e300, 1.0, 1e29); // more than is believed
    t_ok(a.model, ms_wrap(a.model));
    assert_true(layer_at(&a, 2)->time[MSI_FORMAT_F32].forward_us == 1e27);
    t_text text = save(a.model);
    t_ok(b.model, ms_profile_load(b.model, text.data, text.length));
    t_ok(b.model, ms_wrap(b.model));
    expect_same_times(&a, &b);
    free(text.data);
    ms_destroy(a.model);
    ms_destroy(b.model);
}

/* Loaded times decide what is dropped: never a dear layer, where there are cheap ones. */
static void loaded_times_decide(void **state) {
    (void)state;
    uint64_t hashes[2];
    for (int late = 0; late < 2; late++) {
        t_chain a, b;
        ms_memory_report of_a, of_b;
        ms_config config = t_config();
        config.memory_budget_bytes = 29000;
        create_chain(&a, &config, 12);
        create_chain(&b, &config, 12);
        for (uint32_t i = 0; i < layer_count(&a); i++) {
            const bool dear = (i < layer_count(&a) / 2) != (late == 1);
            const ms_layer_time time = dear ? time_of(900.0, 1.0, 0.0) : time_of(0.01, 1.0, 0.0);
            ms_set_layer_time(a.model, layer_of(a.model, i), &time);
        }
        t_ok(a.model, ms_wrap(a.model));
        t_text text = save(a.model);
        t_ok(b.model, ms_wrap(b.model));
        t_ok(b.model, ms_profile_load(b.model, text.data, text.length));
        t_ok(b.model, ms_wrap(b.model)); // behind a wrap as well
        t_report(a.model, &of_a);
        t_report(b.model, &of_b);
        assert_true(of_b.recompute_count > 0 && of_b.recompute_share < 0.001);
        assert_true(of_a.plan_hash == of_b.plan_hash);
        hashes[late] = of_b.plan_hash;
        free(text.data);
        ms_destroy(a.model);
        ms_destroy(b.model);
    }
    assert_true(hashes[0] != hashes[1]);
}

static void known_before_loaded_before_predicted(void **state) {
    (void)state;
    t_chain a, b;
    const ms_config config = t_config();
    const ms_layer_time loaded = time_of(11.0, 12.0, 13.0), known = time_of(0.0, 22.0, 0.0);
    create_chain(&a, &config, 1);
    create_chain(&b, &config, 1);
    ms_set_layer_time(a.model, layer_of(a.model, 0), &loaded);
    t_ok(a.model, ms_wrap(a.model));
    t_text text = save(a.model);
    ms_set_layer_time(b.model, layer_of(b.model, 0), &known);
    t_ok(b.model, ms_profile_load(b.model, text.data, text.length));
    t_ok(b.model, ms_wrap(b.model));
    const ms_layer_time expected = time_of(11.0, 22.0, 13.0);
    assert_memory_equal(&layer_at(&b, 0)->time, &expected, sizeof expected);
    ms_set_layer_time(b.model, layer_of(b.model, 0), NULL);
    t_ok(b.model, ms_wrap(b.model));
    assert_memory_equal(&layer_at(&b, 0)->time, &loaded, sizeof loaded);
    free(text.data);
    ms_destroy(a.model);
    ms_destroy(b.model);
}

/* Speeds come along, but not before those of ms_set_hardware. */
static void speeds_are_loaded(void **state) {
    (void)state;
    t_chain a, b;
    const ms_config config = t_config();
    ms_hardware device = plain_device(), other = plain_device();
    device.kind = MS_DEVICE_CPU;
    device.to_host_gb_per_s = 1.0 / 3.0;
    other.launch_us = 5.0;
    create_chain(&a, &config, 2);
    create_chain(&b, &config, 2);
    ms_set_hardware(a.model, &device);
    t_ok(a.model, ms_wrap(a.model));
    a.model->costs.bytes_per_us[MSI_COST_COPY] = 1234.5;
    t_text text = save(a.model);
    t_ok(b.model, ms_profile_load(b.model, text.data, text.length));
    t_ok(b.model, ms_wrap(b.model));
    assert_string_not_equal(b.model->costs.hardware.name, "by hand");
    for (int k = 0; k < MSI_SPEED_COUNT; k++) {
        assert_true(same_bits(*msi_speed(&a.model->costs.hardware, k),
                              *msi_speed(&b.model->costs.hardware, k)));
    }
    assert_memory_equal(a.model->costs.bytes_per_us, b.model->costs.bytes_per_us,
                        sizeof a.model->costs.bytes_per_us);
    ms_set_hardware(b.model, &other);
    t_ok(b.model, ms_wrap(b.model));
    assert_true(b.model->costs.hardware.launch_us == 5.0);
    ms_clear_hardware(b.model);
    t_ok(b.model, ms_wrap(b.model));
    assert_true(b.model->costs.hardware.launch_us == 3.0);
    free(text.data);
    ms_destroy(a.model);
    ms_destroy(b.model);
}

static void names_are_for_people(void **state) {
    (void)state;
    ms_model *m[2];
    t_op op[2], loss[2];
    t_text text;
    for (int i = 0; i < 2; i++) {
        t_ok(NULL, ms_create(NULL, &m[i]));
        memset(&op[i], 0, sizeof op[i]);
        memset(&loss[i], 0, sizeof loss[i]);
        const char *const name = i == 0 ? "two\nlines, a tab\t and 100 %s" : "";
        const ms_tensor x = ms_input(m[i], i == 0 ? "x" : "y", MS_DTYPE_F32, ms_shape2(2, 2));
        const ms_tensor w = ms_param(m[i], "w", MS_DTYPE_F32, ms_shape2(2, 2));
        t_set_loss(m[i], &loss[i], T_LOSS, t_add_layer(m[i], &op[i], T_MATMUL, name, x, w));
        t_ok(m[i], ms_wrap(m[i]));
        text = save(m[i]);
        if (i == 0) {
            t_text_has(text.data, " two?lines, a tab? and 100 %s\n");
            t_ok(m[0], ms_profile_load(m[0], text.data, text.length));
        } else {
            t_ok(m[0], ms_profile_load(m[0], text.data, text.length));
        }
        free(text.data);
    }
    ms_destroy(m[0]);
    ms_destroy(m[1]);
}

static void when_it_can_be_saved(void **state) {
    (void)state;
    t_chain chain;
    t_text text;
    const ms_config config = t_config();
    memset(&text, 0, sizeof text);
    create_chain(&chain, &config, 2);
    assert_int_equal(ms_profile_save(NULL, t_append, &text), MS_RESULT_INVALID);
    assert_int_equal(ms_profile_save(chain.model, NULL, NULL), MS_RESULT_INVALID);
    assert_int_equal(ms_profile_save(chain.model, t_append, &text), MS_RESULT_ORDER);
    t_ok(chain.model, ms_wrap(chain.model));
    t_ok(chain.model, ms_profile_save(chain.model, t_append, &text));
    assert_int_equal(ms_profile_load(NULL, text.data, text.length), MS_RESULT_INVALID);
    t_error(chain.model, ms_profile_load(chain.model, NULL, 1), MS_RESULT_INVALID);
    t_error(chain.model, ms_profile_load(chain.model, NULL, 0), MS_RESULT_INVALID);
    t_text_has(ms_last_error(chain.model), "this is not a profile");
    free(text.data);
    ms_destroy(chain.model);
}

// ------------------------------------------------------------------------------------------------
// numbers

static void numbers_keep_their_bits(void **state) {
    (void)state;
    static const double edges[] = {0.0,
                                   1.0,
                                   0.1,
                                   1.0 / 3.0,
                                   1e15,
                                   5e-324,
                                   1e22,
                                   123456.75,
                                   1e-7,
                                   2.5e-5,
                                   1e300,
                                   1.7976931348623157e308,
                                   4096.0,
                                   0.30000000000000004,
                                   2.2250738585072014e-308,
                                   9007199254740993.0};
    static const char *const points[] = {".", ",", "\xd9\xab"};
    const volatile double thousand = 1e3; // -Ofast would multiply by 0.001, which is not the same
    t_rng rng = t_seed(11);
    for (int i = 0; i < 3000; i++) {
        double x = i < 16 ? edges[i] : ldexp(t_unit(&rng), (int)t_below(&rng, 200) - 100);
        x = i > 2000 ? floor(1e6 * t_unit(&rng)) / thousand : x;
        use_point(points[i % 3]);
        const msi_words text = msi_decimal(x);
        use_point(points[i / 3 % 3]);
        double back = -1.0;
        assert_true(msi_parse_number(text.text, strlen(text.text), &back));
        use_point(".");
        assert_true(same_bits(x, back));
        assert_true(same_bits(x, strtod(text.text, NULL))); // it is what others read, too
        assert_true(i <= 2000 || strlen(text.text) <= 10);
    }
}

static void what_is_no_number(void **state) {
    (void)state;
    static const char *const wrong[] = {
        "",     "-1",       "+1",
        "1.",   ".5",       "1e",
        "1e+",  "0x10",     "nan",
        "inf",  "1,5",      "1 ",
        " 1",   "1.5.5",    "1e5e5",
        "1.e5", "infinity", "1_0",
        "e5",   "1E5",      "12345678901234567890123456789012345678901"};
    static const char *const right[] = {"0", "007", "1e5", "1e-5", "1e+05", "12.5e2", "1e999"};
    double x = 0.0;
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        if (msi_parse_number(wrong[i], strlen(wrong[i]), &x)) {
            print_error("\"%s\" is taken for a number\n", wrong[i]);
            fail();
        }
    }
    for (size_t i = 0; i < sizeof right / sizeof right[0]; i++) {
        assert_true(msi_parse_number(right[i], strlen(right[i]), &x));
        assert_true(x == strtod(right[i], NULL));
    }
}

// ------------------------------------------------------------------------------------------------
// the hash of the graph: one small graph, and everything about it that can be otherwise

enum { CHANGES = 31 };

static int nothing_else(const ms_call *call) {
    (void)call;
    return 0;
}

/* Change 0 is none; with is_renamed all names and callbacks are others. */
static uint64_t hash_of(int change, bool is_renamed) {
    ms_model *m;
    ms_layer_desc d, e;
    t_ok(NULL, ms_create(NULL, &m));
    memset(&d, 0, sizeof d);
    memset(&e, 0, sizeof e);
    const ms_dtype dtype = change == 1 ? MS_DTYPE_BF16 : MS_DTYPE_F32;
    const ms_axis axis = ms_add_axis(m, "axis", 2, change == 2 ? 8 : 4);
    const ms_shape shape = ms_shape2(2, change == 3 ? 5 : 3);
    const ms_tensor x = ms_input(m, is_renamed ? "X" : "x", dtype, ms_along(shape, 0, axis));
    const ms_tensor y = ms_activation(m, "y", MS_DTYPE_F32, ms_along(shape, 0, axis));
    const ms_tensor y2 = ms_activation(m, "y2", MS_DTYPE_F32, ms_along(shape, 0, axis));
    const ms_tensor s =
        ms_saved(m, "s", MS_DTYPE_F32, change == 4 ? shape : ms_along(shape, 0, axis));
    const ms_tensor w = change == 5 ? ms_buffer(m, "w", MS_DTYPE_F32, ms_shape1(3))
                                    : ms_param(m, "w", MS_DTYPE_F32, ms_shape1(3));
    const ms_tensor v[] = {ms_param(m, "v0", MS_DTYPE_F32, ms_shape1(3)),
                           ms_param(m, "v1", MS_DTYPE_F32, ms_shape1(3))};
    const ms_tensor z = ms_activation(m, "z", MS_DTYPE_F32, ms_shape1(2));
    d.name = is_renamed ? "renamed" : "first";
    d.forward = is_renamed ? nothing_else : t_nothing;
    d.backward = change == 6 ? NULL : d.forward;
    d.recompute = change == 7 || change == 14 ? d.forward : NULL;
    d.user = is_renamed ? &d : NULL;
    d.in[0] = x;
    d.in[change == 8 ? 2 : 1] = change == 5 ? w : x;
    d.out[change == 9 ? 1 : 0] = y;
    d.out[change == 10 ? 3 : 2] = y2;
    d.saved[0] = s;
    if (change != 5) {
        d.param[change == 11 ? 1 : 0] = w;
    }
    d.backward_reads.in = change == 12 ? 1 : 0;
    d.backward_reads.nothing = change == 13;
    d.recompute_reads.in = change == 14 ? 1 : 0;
    d.accumulates.in = change == 15 ? 1 : 0;
    d.overwrites.in = change == 16 ? 1 : 0;
    d.in_place[2] = change == 17 ? 1 : 0;
    d.grad_in_place[0].out = change == 18 ? 4 : 0;
    d.clobbers.grad_out = change == 19 ? 4 : 0;
    d.optional_saved = change == 20 ? 1 : 0;
    d.no_recompute = change == 21;
    d.forward_workspace.bytes = change == 22 ? 64 : 0;
    d.forward_workspace.row_bytes = change == 23 ? 64 : 0;
    d.backward_workspace.bytes = change == 24 ? 64 : 32;
    d.backward_workspace.contents = change == 25 ? MS_CONTENTS_ZERO : MS_CONTENTS_ANY;
    ms_register_layer(m, &d);
    e.name = "second";
    e.forward = e.backward = t_nothing;
    e.in[0] = change == 26 ? y2 : y;
    e.out[0] = z;
    e.param[0] = v[change == 30]; // the last operand of all
    ms_register_layer(m, &e);
    ms_set_loss(m, change == 27 ? y : z);
    if (change == 28) {
        ms_stop_gradient(m, y2);
    }
    if (change == 29) {
        ms_set_on_host(m, x);
    }
    if (m->errors.sticky != MS_RESULT_OK) {
        print_error("change %d: %s\n", change, ms_last_error(m));
        fail();
    }
    if (is_renamed) {
        const int64_t size = 1;
        t_ok(m, ms_reshape(m, &size)); // the present size does not matter
    }
    const uint64_t hash = msi_hash_graph(&m->graph);
    ms_destroy(m);
    return hash;
}

static void every_part_of_the_graph_counts(void **state) {
    (void)state;
    uint64_t hashes[CHANGES];
    for (int i = 0; i < CHANGES; i++) {
        hashes[i] = hash_of(i, false);
        assert_true(hashes[i] == hash_of(i, true));
        for (int k = 0; k < i; k++) {
            if (hashes[i] == hashes[k]) {
                print_error("changes %d and %d have one hash\n", k, i);
                fail();
            }
        }
    }
}

// ------------------------------------------------------------------------------------------------
// texts that are wrong

typedef struct wrong_text {
    const char *from, *to, *expected;
} wrong_text;

/* The text with the first `from` replaced; the caller frees. */
static char *replaced(const char *text, const char *from, const char *to) {
    const char *at = strstr(text, from);
    assert_non_null(at);
    char *made = (char *)malloc(strlen(text) + strlen(to) + 1);
    assert_non_null(made);
    const size_t before = (size_t)(at - text);
    memcpy(made, text, before);
    memcpy(made + before, to, strlen(to));
    memcpy(made + before + strlen(to), at + strlen(from), strlen(at + strlen(from)) + 1);
    return made;
}

typedef struct victim {
    t_chain chain;
    msi_layer *layers; // as they were
    ms_hardware profile;
    double bytes_per_us[MSI_COST_COUNT];
} victim;

static void expect_untouched(const victim *v) {
    const ms_model *m = v->chain.model;
    assert_memory_equal(m->graph.layers.items, v->layers,
                        m->graph.layers.count * sizeof *v->layers);
    assert_memory_equal(&m->sources.profile, &v->profile, sizeof m->sources.profile);
    assert_memory_equal(m->costs.bytes_per_us, v->bytes_per_us, sizeof m->costs.bytes_per_us);
}

/* A chain with a profile, and that as text. */
static t_text start_victim(victim *v) {
    const ms_config config = t_config();
    create_chain(&v->chain, &config, 2);
    ms_model *m = v->chain.model;
    set_odd_times(&v->chain, 3);
    t_ok(m, ms_wrap(m));
    t_text text = save(m);
    t_ok(m, ms_profile_load(m, text.data, text.length));
    const size_t bytes = m->graph.layers.count * sizeof *v->layers;
    v->layers = (msi_layer *)malloc(bytes);
    assert_non_null(v->layers);
    memcpy(v->layers, m->graph.layers.items, bytes);
    v->profile = m->sources.profile;
    memcpy(v->bytes_per_us, m->costs.bytes_per_us, sizeof v->bytes_per_us);
    return text;
}

static void end_victim(victim *v, t_text *text) {
    free(v->layers);
    free(text->data);
    ms_destroy(v->chain.model);
}

static void errors_say_what_is_wrong_and_where(void **state) {
    (void)state;
    static const wrong_text wrong[] = {
        {"memscale-profile 4", "memscale-profil 1", "this is not a profile"},
        {"memscale-profile 4", "{\"a\": 1}",
         "this is not a profile: its first line is not "
         "\"memscale-profile 4\""},
        {"memscale-profile 4", "memscale-profile 1",
         "line 1: the profile is of version 1, but this "
         "library reads version 4"},
        {"memscale-profile 4", "memscale-profile 0", "line 1: the profile is of version 0"},
        {"memscale-profile 4", "memscale-profile", "line 1: \"\" is not a number"},
        {"graph ", "graph 0", "line 2: the profile is of graph 0"},
        {"graph ", "graf ", "line 2 does not begin with \"graph\""},
        {"device ", "", "line 3 does not begin with \"device\""},
        {"speeds ", "speeds x", "line 4: \"x20\" is not a number, for a speed"},
        {"speeds 20", "speeds 2e16", "line 4: 2e16 is out of range, for a speed"},
        {"speeds 20", "speeds 1e-30", "line 4: a speed is out of range"},
        {"bytes_per_us", "bytes", "line 5 does not begin with \"bytes_per_us\""},
        {"layers 5", "layers 6", "line 6: 6 layers, but this model has 5"},
        {"layers 5", "layers", "line 6: \"\" is not a number, for the number of layers"},
        {"384 matmul0", "384e99 matmul0", "line 7: 384e99 is out of range, for elements of output"},
        {" 384 matmul0", "", "line 7: \"\" is not a number, for elements of output"},
        {" 384 squash0", ",0 384 squash0", "line 8: "},
        {"end\n", "and\n", "line 12 does not begin with \"end\""},
        {"end\n", "", "the text ends after line 11, where \"end\" should follow: it is cut off"},
        {"end\n", "end\n\n", "there is text after line 12, the end"},
        {"\nend\n", "\nend of it\n", NULL}, // a word that nobody asks for
        {"device ", "device another ", NULL},
        {"\nend\n", "\nend", NULL}};
    victim v;
    t_text text = start_victim(&v);
    ms_model *m = v.chain.model;
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        char *made = replaced(text.data, wrong[i].from, wrong[i].to);
        if (wrong[i].expected) {
            t_error(m, ms_profile_load(m, made, strlen(made)), MS_RESULT_INVALID);
            t_text_has(ms_last_error(m), "ms_profile_load: ");
            t_text_has(ms_last_error(m), wrong[i].expected);
        } else {
            t_ok(m, ms_profile_load(m, made, strlen(made)));
        }
        expect_untouched(&v);
        free(made);
    }
    end_victim(&v, &text);
}

static void lines_may_end_in_the_other_way(void **state) {
    (void)state;
    victim v;
    t_text text = start_victim(&v);
    char *made = (char *)malloc(2 * text.length);
    assert_non_null(made);
    size_t length = 0;
    for (size_t i = 0; i < text.length; i++) {
        if (text.data[i] == '\n') {
            made[length++] = '\r';
        }
        made[length++] = text.data[i];
    }
    t_ok(v.chain.model, ms_profile_load(v.chain.model, made, length));
    expect_untouched(&v);
    free(made);
    end_victim(&v, &text);
}

/* Cut off at any byte, in memory that ends there. */
static void what_is_cut_off_is_refused(void **state) {
    (void)state;
    victim v;
    t_text text = start_victim(&v);
    for (size_t length = 0; length + 1 < text.length; length++) { // the last line end may lack
        char *part = (char *)malloc(length ? length : 1);
        assert_non_null(part);
        memcpy(part, text.data, length);
        t_error(v.chain.model, ms_profile_load(v.chain.model, part, length), MS_RESULT_INVALID);
        expect_untouched(&v);
        free(part);
    }
    end_victim(&v, &text);
}

static void mutate(t_rng *rng, char *data, size_t length) {
    static const char signs[] = "0123456789.e+- \n\r\t,x\x80";
    for (uint32_t k = 0; k <= t_below(rng, 3); k++) {
        const size_t at = t_below(rng, (uint32_t)length);
        const size_t other = t_below(rng, (uint32_t)length);
        switch (t_below(rng, 3)) {
        case 0:
            data[at] = signs[t_below(rng, sizeof signs)]; // the 0 at its end, too
            break;
        case 1:
            data[at] = data[other];
            break;
        default: // a part once more, over another
            memmove(data + at, data + other,
                    t_below(rng, (uint32_t)(length - (at > other ? at : other))));
        }
    }
}

/* Whatever is loaded leads to a plan, and is saved again. */
static void mutated_texts_are_refused_or_make_sense(void **state) {
    (void)state;
    victim v;
    t_rng rng = t_seed(23);
    t_text text = start_victim(&v);
    ms_model *m = v.chain.model;
    uint32_t loaded = 0, refused = 0;
    char *data = (char *)malloc(text.length);
    assert_non_null(data);
    for (int i = 0; i < 20000; i++) {
        memcpy(data, text.data, text.length);
        mutate(&rng, data, text.length);
        const ms_result result = ms_profile_load(m, data, text.length);
        if (result != MS_RESULT_OK) {
            assert_int_equal(result, MS_RESULT_INVALID);
            refused++;
            continue;
        }
        loaded++;
        for (uint32_t k = 0; k < layer_count(&v.chain); k++) {
            const msi_layer *l = layer_at(&v.chain, k);
            const ms_layer_time *us = &l->measured;
            assert_true(us->forward_us >= 0.0 && us->forward_us <= msi_longest_us);
            assert_true(us->backward_us >= 0.0 && us->backward_us <= msi_longest_us);
            assert_true(us->recompute_us >= 0.0 && us->recompute_us <= msi_longest_us);
            assert_true(l->measured_elements >= 0.0 && l->measured_elements <= 1e18);
        }
        if (loaded % 64 == 0) {
            t_text again;
            t_ok(m, ms_wrap(m));
            again = save(m);
            t_ok(m, ms_profile_load(m, again.data, again.length));
            free(again.data);
        }
    }
    assert_true(loaded > 1000 && refused > 1000);
    free(data);
    end_victim(&v, &text);
}

// ------------------------------------------------------------------------------------------------
// without static profiling

static void every_layer_must_have_its_times(void **state) {
    (void)state;
    t_chain chain, saved;
    ms_config config = t_config();
    const ms_layer_time forward = time_of(1.0, 0.0, 0.0), both = time_of(1.0, 2.0, 0.0);
    uint64_t bytes;
    create_chain(&saved, &config, 2);
    t_ok(saved.model, ms_wrap(saved.model));
    t_text text = save(saved.model);
    config.static_profiling = MS_SWITCH_OFF;
    create_chain(&chain, &config, 2);
    t_error(chain.model, ms_wrap(chain.model), MS_RESULT_INVALID);
    t_text_has(ms_last_error(chain.model), "layer 0 \"matmul0\": the time of its forward");
    t_text_has(ms_last_error(chain.model), "static_profiling");
    t_error(chain.model, ms_smallest_budget(chain.model, &bytes), MS_RESULT_INVALID);
    for (uint32_t i = 0; i + 1 < layer_count(&chain); i++) {
        ms_set_layer_time(chain.model, layer_of(chain.model, i), &both);
    }
    ms_set_layer_time(chain.model, layer_of(chain.model, 4), &forward);
    t_error(chain.model, ms_wrap(chain.model), MS_RESULT_INVALID);
    t_text_has(ms_last_error(chain.model), "the time of its backward");
    ms_set_layer_time(chain.model, layer_of(chain.model, 4), &both);
    t_ok(chain.model, ms_wrap(chain.model));
    ms_set_layer_time(chain.model, layer_of(chain.model, 2), NULL);
    t_error(chain.model, ms_wrap(chain.model), MS_RESULT_INVALID);
    t_text_has(ms_last_error(chain.model), "layer 2 \"matmul1\"");
    t_ok(chain.model, ms_profile_load(chain.model, text.data, text.length));
    t_ok(chain.model, ms_wrap(chain.model));
    assert_true(same_bits(layer_at(&chain, 2)->time[MSI_FORMAT_F32].forward_us,
                          layer_at(&saved, 2)->time[MSI_FORMAT_F32].forward_us));
    free(text.data);
    ms_destroy(chain.model);
    ms_destroy(saved.model);
}

// ------------------------------------------------------------------------------------------------
// every allocation fails once

static ms_result live(t_chain *chain, const ms_config *config, const t_text *text) {
    const ms_hardware device = plain_device();
    ms_result result = t_chain_create(chain, config, 3, T_CHAIN_ROWS, T_CHAIN_COLS);
    if (result != MS_RESULT_OK) {
        return result;
    }
    ms_set_hardware(chain->model, &device);
    if (layer_count(chain) == 7) {
        set_odd_times(chain, 5);
        result = ms_profile_load(chain->model, text->data, text->length);
        result = result == MS_RESULT_INVALID ? MS_RESULT_OK : result; // where a tensor is missing
    }
    return result == MS_RESULT_OK ? ms_wrap(chain->model) : result;
}

static void every_allocation_fails_once(void **state) {
    (void)state;
    t_chain whole, chain;
    t_heap heap;
    ms_config config = t_config();
    create_chain(&whole, &config, 3);
    t_ok(whole.model, ms_wrap(whole.model));
    t_text text = save(whole.model);
    memset(&heap, 0, sizeof heap);
    config.allocator = t_heap_allocator(&heap);
    t_failing f = t_failing_heap(&heap);
    while (t_next_failure(&f, 1)) {
        t_arm(&f);
        const ms_result result = live(&chain, &config, &text);
        t_failed(&f, chain.model, result);
        ms_destroy(chain.model);
    }
    assert_true(f.error_count >= 20);
    free(text.data);
    ms_destroy(whole.model);
}

/* Loading and saving take no memory of the model's. */
static void nothing_is_allocated(void **state) {
    (void)state;
    t_chain chain;
    t_heap heap;
    ms_config config = t_config();
    memset(&heap, 0, sizeof heap);
    config.allocator = t_heap_allocator(&heap);
    create_chain(&chain, &config, 3);
    t_ok(chain.model, ms_wrap(chain.model));
    const uint64_t calls = heap.calls;
    t_text text = save(chain.model);
    t_ok(chain.model, ms_profile_load(chain.model, text.data, text.length));
    assert_true(heap.calls == calls);
    free(text.data);
    ms_destroy(chain.model);
}

int main(void) {
    t_hook.format = local_vsnprintf;
    t_hook.parse = local_strtod;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(times_are_those_of_the_device_that_is_set),
        cmocka_unit_test(what_takes_longer_is_the_time),
        cmocka_unit_test(speeds_of_0_are_those_of_the_kind),
        cmocka_unit_test(a_backend_cannot_report_the_impossible),
        cmocka_unit_test(wrong_devices_are_refused),
        cmocka_unit_test(the_budget_is_a_part_of_that_device),
        cmocka_unit_test(the_budget_is_the_same_again),
        cmocka_unit_test(a_wrap_that_fails_changes_no_time),
        cmocka_unit_test(known_times_come_first),
        cmocka_unit_test(the_report_says_where_times_come_from),
        cmocka_unit_test(wrong_times_are_refused),
        cmocka_unit_test(samples_are_of_their_layer_and_phase),
        cmocka_unit_test(times_grow_with_the_output),
        cmocka_unit_test(what_is_saved_is_loaded_to_the_bit),
        cmocka_unit_test(the_longest_times_are_loaded_too),
        cmocka_unit_test(loaded_times_decide),
        cmocka_unit_test(known_before_loaded_before_predicted),
        cmocka_unit_test(speeds_are_loaded),
        cmocka_unit_test(names_are_for_people),
        cmocka_unit_test(when_it_can_be_saved),
        cmocka_unit_test(numbers_keep_their_bits),
        cmocka_unit_test(what_is_no_number),
        cmocka_unit_test(every_part_of_the_graph_counts),
        cmocka_unit_test(errors_say_what_is_wrong_and_where),
        cmocka_unit_test(lines_may_end_in_the_other_way),
        cmocka_unit_test(what_is_cut_off_is_refused),
        cmocka_unit_test(mutated_texts_are_refused_or_make_sense),
        cmocka_unit_test(every_layer_must_have_its_times),
        cmocka_unit_test(every_allocation_fails_once),
        cmocka_unit_test(nothing_is_allocated),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
