/*  test_rules.c - modes, switches and forced techniques; what was decided for each layer, and the
    rule that did; the words where nothing fits; policies. */
#define T_OFFLOADS
#include "private.h"
#include "toy_layers.h"
#include "random_dag.h"

// ------------------------------------------------------------------------------------------------
// a model with a layer for every rule, planned without callbacks

enum { ZOO_BLOCKS = 12, ZOO_LAYERS = 2 * ZOO_BLOCKS + 2 };

enum { // blocks that are unlike the others
    ZOO_RUNS_ONCE = 3,
    ZOO_RECOMPUTE_READS = 4,
    ZOO_SHARED = 6, // its param is that of the block before
    ZOO_READ_AGAIN = 7,
    ZOO_BORROWED = 8,
    ZOO_OUTPUT = 9,
    ZOO_FROZEN = 10
};

typedef struct zoo {
    ms_model *m;
    int64_t rows, cols;
    ms_tensor x, weight[ZOO_BLOCKS], product[ZOO_BLOCKS], hidden[ZOO_BLOCKS], side;
    ms_layer linear[ZOO_BLOCKS], act[ZOO_BLOCKS], aside, loss;
    float borrowed[64 * 64];
    uint64_t smallest, plain; // budgets that are known; 0: none
} zoo;

static ms_layer_desc zoo_layer(const char *name, ms_tensor in, ms_tensor out) {
    ms_layer_desc d;
    memset(&d, 0, sizeof d);
    d.name = name;
    d.forward = t_nothing;
    d.backward = t_nothing;
    d.in[0] = in;
    d.out[0] = out;
    return d;
}

static void zoo_block(zoo *z, int i, ms_tensor in, ms_shape shape) {
    char name[32];
    ms_model *m = z->m;
    snprintf(name, sizeof name, "w%d", i);
    z->weight[i] = i == ZOO_SHARED ? z->weight[i - 1]
                                   : ms_param(m, name, MS_DTYPE_F32, ms_shape2(z->cols, z->cols));
    z->product[i] = ms_activation(m, "product", MS_DTYPE_F32, shape);
    z->hidden[i] = ms_activation(m, "hidden", MS_DTYPE_F32, shape);
    snprintf(name, sizeof name, "linear%d", i);
    ms_layer_desc d = zoo_layer(name, in, z->product[i]);
    d.param[0] = z->weight[i];
    d.backward_reads.in = d.backward_reads.param = 1;
    z->linear[i] = ms_register_layer(m, &d);
    snprintf(name, sizeof name, "act%d", i);
    d = zoo_layer(name, z->product[i], z->hidden[i]);
    d.backward_reads.out = 1;
    d.no_recompute = i == ZOO_RUNS_ONCE;
    if (i == ZOO_RECOMPUTE_READS) {
        d.recompute = t_nothing;
        d.no_recompute = true;
        d.recompute_reads.out = 1;
    }
    z->act[i] = ms_register_layer(m, &d);
    if (i == ZOO_READ_AGAIN) {
        z->side = ms_activation(m, "side", MS_DTYPE_F32, shape);
        d = zoo_layer("aside", z->hidden[i], z->side);
        d.param[0] = z->weight[i];
        d.backward = NULL;
        d.no_backward = true;
        z->aside = ms_register_layer(m, &d);
    }
}

/* `largest` of the rows, where they lie along an axis; 0: they do not. */
static void zoo_create_along(zoo *z, const ms_config *config, int64_t rows, int64_t cols,
                             int64_t largest) {
    memset(z, 0, sizeof *z);
    z->rows = rows;
    z->cols = cols;
    assert_int_equal(ms_create(config, &z->m), MS_RESULT_OK);
    ms_shape shape = ms_shape2(rows, cols), losses = ms_shape1(rows);
    if (largest > 0) {
        ms_axis batch = ms_add_axis(z->m, "batch", rows, largest);
        shape = ms_along(shape, 0, batch);
        losses = ms_along(losses, 0, batch);
    }
    z->x = ms_input(z->m, "x", MS_DTYPE_F32, shape);
    ms_tensor last = z->x;
    for (int i = 0; i < ZOO_BLOCKS; ++i) {
        zoo_block(z, i, last, shape);
        last = z->hidden[i];
    }
    ms_tensor loss = ms_activation(z->m, "losses", MS_DTYPE_F32, losses);
    ms_layer_desc d = zoo_layer("loss", last, loss);
    d.backward_reads.in = 1;
    z->loss = ms_register_layer(z->m, &d);
    ms_set_loss(z->m, loss);
    ms_add_output(z->m, z->hidden[ZOO_OUTPUT]);
    ms_set_frozen(z->m, z->weight[ZOO_FROZEN], true);
    ms_tensor gradient = ms_gradient(z->m, z->weight[ZOO_BORROWED]);
    t_ok(z->m, ms_borrow(z->m, gradient, z->borrowed));
}

static ms_config zoo_config(void) {
    ms_config config = t_config();
    config.dry_run = true;
    return config;
}

static void zoo_create(zoo *z, const ms_config *config) {
    zoo_create_along(z, config, 256, 16, 0);
}

/* A budget between the smallest (0) and the plain arena (100). */
static uint64_t budget_between(ms_model *m, uint64_t percent) {
    uint64_t smallest = 0;
    ms_memory_report report;
    ms_set_budget(m, (uint64_t)1 << 40);
    t_ok(m, ms_wrap(m));
    t_report(m, &report);
    t_ok(m, ms_smallest_budget(m, &smallest));
    return smallest + (report.plain_bytes - smallest) * percent / 100;
}

/* For a model that is wrapped for several budgets, and not changed otherwise: to find the smallest
   one takes most of the time. */
static void zoo_keep_budgets(zoo *z) {
    z->smallest = budget_between(z->m, 0);
    z->plain = budget_between(z->m, 100);
}

static void zoo_wrap(zoo *z, uint64_t percent) {
    const uint64_t known = z->smallest + (z->plain - z->smallest) * percent / 100;
    ms_set_budget(z->m, z->smallest > 0 ? known : budget_between(z->m, percent));
    t_ok(z->m, ms_wrap(z->m));
}

/* A discrete GPU that is not here, with a link of so many GB/s in each direction and launches that
   take next to no time, so that no tensor of a test is too small to be moved. */
static ms_hardware gpu_hardware(double link) {
    ms_hardware h;
    memset(&h, 0, sizeof h);
    snprintf(h.name, sizeof h.name, "described by hand");
    h.kind = MS_DEVICE_DISCRETE;
    h.total_bytes = h.free_bytes = h.host_total_bytes = h.host_free_bytes = (uint64_t)1 << 34;
    h.memory_gb_per_s = 500.0;
    h.to_device_gb_per_s = h.to_host_gb_per_s = link;
    h.f32_tflops = 10.0;
    h.launch_us = 1e-4;
    return h;
}

// ------------------------------------------------------------------------------------------------
// the decisions of a model

enum { MAX_LAYERS = 128 };

typedef struct decisions {
    ms_decision at[MAX_LAYERS][MS_TECHNIQUE_COUNT];
    uint32_t count;
} decisions;

static void keep_decision(const ms_decision *decision, void *user) {
    decisions *d = (decisions *)user;
    uint32_t layer = d->count / MS_TECHNIQUE_COUNT;
    assert_true(layer < MAX_LAYERS && decision->layer_index == layer); // in order, all of them
    assert_int_equal(decision->technique, d->count % MS_TECHNIQUE_COUNT);
    d->at[layer][decision->technique] = *decision;
    d->count += 1;
}

static void get_decisions(const ms_model *m, decisions *d) {
    ms_memory_report report;
    memset(d, 0, sizeof *d);
    t_ok(m, ms_visit_decisions(m, keep_decision, d));
    t_report(m, &report);
    assert_int_equal(d->count, report.layer_count * MS_TECHNIQUE_COUNT);
}

static const ms_decision *decision_of(const decisions *d, ms_layer layer, ms_technique technique) {
    uint32_t i = 0;
    while (i < MAX_LAYERS - 1 && d->at[i][technique].layer.id != layer.id) {
        i++;
    }
    return &d->at[i][technique];
}

static void expect_rule(const ms_model *m, ms_layer layer, ms_technique technique,
                        const char *rule) {
    decisions d;
    get_decisions(m, &d);
    const ms_decision *decision = decision_of(&d, layer, technique);
    if (strcmp(decision->rule->id, rule) != 0) {
        print_error("%s of layer %u: rule %s, expected %s\n", ms_technique_name(technique),
                    (unsigned)decision->layer_index, decision->rule->id, rule);
        fail();
    }
}

#define CHECKPOINTING MS_TECHNIQUE_CHECKPOINTING
#define EARLY_UPDATE  MS_TECHNIQUE_EARLY_UPDATE
#define OFFLOADING    MS_TECHNIQUE_OFFLOADING

static bool is_rule_of_applied(const ms_rule *rule) {
    static const char *const ids[] = {"forced",     "switched-on",  "smallest", "checkpoint",
                                      "on-the-way", "early-update", "offload"};
    bool is = false;
    for (size_t i = 0; i < sizeof ids / sizeof *ids; ++i) {
        is |= strcmp(ids[i], rule->id) == 0;
    }
    return is;
}

// ------------------------------------------------------------------------------------------------
// every rule, where it must fire

static void rules_of_a_budget(void **state) {
    (void)state;
    zoo z;
    ms_config config = zoo_config();
    zoo_create(&z, &config);
    zoo_wrap(&z, 25);
    ms_memory_report report;
    t_report(z.m, &report);
    assert_true(report.pressure > 1.0 && report.recompute_count > 0);
    expect_rule(z.m, z.linear[2], CHECKPOINTING, "on-the-way");
    expect_rule(z.m, z.act[2], CHECKPOINTING, "checkpoint");
    expect_rule(z.m, z.act[ZOO_RUNS_ONCE], CHECKPOINTING, "runs-once");
    expect_rule(z.m, z.act[ZOO_RECOMPUTE_READS], CHECKPOINTING, "recompute-reads");
    expect_rule(z.m, z.act[ZOO_OUTPUT], CHECKPOINTING, "output");
    expect_rule(z.m, z.act[ZOO_BLOCKS - 1], CHECKPOINTING, "not-idle");
    expect_rule(z.m, z.linear[ZOO_BLOCKS - 1], CHECKPOINTING, "unread");
    expect_rule(z.m, z.loss, CHECKPOINTING, "output");
    expect_rule(z.m, z.act[2], EARLY_UPDATE, "no-gradient");
    expect_rule(z.m, z.linear[ZOO_FROZEN], EARLY_UPDATE, "no-gradient");
    expect_rule(z.m, z.linear[ZOO_BORROWED], EARLY_UPDATE, "borrowed");
    expect_rule(z.m, z.linear[ZOO_READ_AGAIN], EARLY_UPDATE, "read-again");
    expect_rule(z.m, z.linear[ZOO_SHARED], EARLY_UPDATE, "shared");
    expect_rule(z.m, z.linear[2], MS_TECHNIQUE_OFFLOADING, "shared-memory");
    expect_rule(z.m, z.linear[2], MS_TECHNIQUE_TILING, "mode");
    expect_rule(z.m, z.linear[2], MS_TECHNIQUE_MIXED_PRECISION, "mode");
    expect_rule(z.m, z.linear[2], MS_TECHNIQUE_OPTIMIZER_8BIT, "mode");
    zoo_wrap(&z, 80);
    uint32_t fits = 0;
    decisions d;
    get_decisions(z.m, &d);
    for (int i = 0; i < ZOO_BLOCKS; ++i) {
        fits += strcmp(decision_of(&d, z.act[i], CHECKPOINTING)->rule->id, "fits") == 0;
    }
    assert_true(fits > 0); // the budget was met before their turn
    ms_destroy(z.m);
}

/* Params are large, activations small: updates inside backward are what helps. */
static void rules_of_early_updates(void **state) {
    (void)state;
    zoo z;
    ms_config config = zoo_config();
    ms_optimizer_desc optimizer;
    zoo_create_along(&z, &config, 4, 64, 0);
    zoo_wrap(&z, 0);
    expect_rule(z.m, z.linear[2], EARLY_UPDATE, "early-update");
    expect_rule(z.m, z.linear[ZOO_SHARED - 1], EARLY_UPDATE, "early-update");
    zoo_wrap(&z, 100); // the plain plan fits to the byte
    expect_rule(z.m, z.linear[2], EARLY_UPDATE, "smart-skip");
    ms_set_tensor_technique(z.m, z.weight[2], EARLY_UPDATE, MS_SWITCH_OFF);
    zoo_wrap(&z, 0);
    expect_rule(z.m, z.linear[2], EARLY_UPDATE, "forbidden");
    ms_destroy(z.m);
    zoo_create(&z, &config);
    ms_set_accumulation(z.m, 2);
    zoo_wrap(&z, 25);
    expect_rule(z.m, z.linear[2], EARLY_UPDATE, "all-gradients");
    ms_destroy(z.m);
    zoo_create(&z, &config);
    memset(&optimizer, 0, sizeof optimizer);
    optimizer.grad_clip_norm = 1.0f;
    ms_set_optimizer(z.m, &optimizer);
    zoo_wrap(&z, 25);
    expect_rule(z.m, z.linear[2], EARLY_UPDATE, "all-gradients");
    ms_destroy(z.m);
    config.early_update = MS_SWITCH_ON;
    zoo_create_along(&z, &config, 4, 64, 0);
    ms_set_budget(z.m, (uint64_t)1 << 40); // whatever the budget
    t_ok(z.m, ms_wrap(z.m));
    expect_rule(z.m, z.linear[2], EARLY_UPDATE, "switched-on");
    expect_rule(z.m, z.linear[ZOO_SHARED], EARLY_UPDATE, "shared");
    expect_rule(z.m, z.act[2], EARLY_UPDATE, "no-gradient");
    ms_destroy(z.m);
    config.early_update = MS_SWITCH_OFF;
    zoo_create_along(&z, &config, 4, 64, 0);
    zoo_wrap(&z, 0);
    expect_rule(z.m, z.linear[2], EARLY_UPDATE, "off");
    ms_destroy(z.m);
}

/* The peak is where few gradients are complete. What is switched ON does not wait all the same. */
static void updates_that_may_wait(void **state) {
    (void)state;
    for (int on = 0; on < 2; ++on) {
        zoo z;
        ms_config config = zoo_config();
        uint32_t late = 0;
        config.early_update = on ? MS_SWITCH_ON : MS_SWITCH_DEFAULT;
        zoo_create(&z, &config);
        for (uint64_t percent = 60; percent < 100; percent += 5) {
            decisions d;
            zoo_wrap(&z, percent);
            get_decisions(z.m, &d);
            for (int i = 0; i < ZOO_BLOCKS; ++i) {
                late += strcmp(decision_of(&d, z.linear[i], EARLY_UPDATE)->rule->id, "late") == 0;
            }
        }
        assert_true(on ? late == 0 : late > 0);
        ms_destroy(z.m);
    }
}

static void rules_of_the_user(void **state) {
    (void)state;
    zoo z;
    ms_config config = zoo_config();
    zoo_create(&z, &config);
    ms_set_budget(z.m, (uint64_t)1 << 40);
    t_ok(z.m, ms_wrap(z.m));
    expect_rule(z.m, z.act[2], CHECKPOINTING, "smart-skip");
    expect_rule(z.m, z.linear[2], EARLY_UPDATE, "smart-skip");
    expect_rule(z.m, z.linear[2], MS_TECHNIQUE_TILING, "mode");
    ms_set_layer_technique(z.m, z.act[2], CHECKPOINTING, MS_SWITCH_ON);
    ms_set_layer_technique(z.m, z.linear[2], EARLY_UPDATE, MS_SWITCH_ON);
    t_ok(z.m, ms_wrap(z.m));
    expect_rule(z.m, z.act[2], CHECKPOINTING, "forced");
    expect_rule(z.m, z.linear[2], EARLY_UPDATE, "forced");
    expect_rule(z.m, z.linear[2], CHECKPOINTING, "smart-skip");
    expect_rule(z.m, z.act[1], CHECKPOINTING, "smart-skip");
    t_ok(z.m, ms_detach(z.m));
    expect_rule(z.m, z.act[2], CHECKPOINTING, "detached");
    expect_rule(z.m, z.linear[2], EARLY_UPDATE, "detached");
    expect_rule(z.m, z.linear[2], MS_TECHNIQUE_TILING, "detached");
    ms_set_layer_technique(z.m, z.act[2], CHECKPOINTING, MS_SWITCH_OFF);
    ms_set_layer_technique(z.m, z.act[2], MS_TECHNIQUE_TILING, MS_SWITCH_OFF);
    zoo_wrap(&z, 25);
    expect_rule(z.m, z.act[2], CHECKPOINTING, "forbidden");
    expect_rule(z.m, z.act[2], MS_TECHNIQUE_TILING, "forbidden");
    expect_rule(z.m, z.act[1], MS_TECHNIQUE_TILING, "mode");
    ms_destroy(z.m);
    config.checkpointing = MS_SWITCH_OFF;
    zoo_create(&z, &config);
    zoo_wrap(&z, 0);
    expect_rule(z.m, z.act[2], CHECKPOINTING, "off");
    ms_set_layer_technique(z.m, z.act[2], CHECKPOINTING, MS_SWITCH_ON); // says more than the switch
    zoo_wrap(&z, 0);
    expect_rule(z.m, z.act[2], CHECKPOINTING, "forced");
    expect_rule(z.m, z.act[1], CHECKPOINTING, "off");
    ms_destroy(z.m);
    memset(&config.checkpointing, 0, sizeof config.checkpointing);
    config.force_optimize = true;
    zoo_create_along(&z, &config, 4, 64, 0);
    ms_set_budget(z.m, (uint64_t)1 << 40); // whatever the budget
    t_ok(z.m, ms_wrap(z.m));
    decisions d;
    uint32_t smallest = 0, no_gain = 0;
    get_decisions(z.m, &d);
    for (int i = 0; i < ZOO_BLOCKS; ++i) {
        const char *id = decision_of(&d, z.act[i], CHECKPOINTING)->rule->id;
        smallest += strcmp(id, "smallest") == 0;
        no_gain += strcmp(id, "no-gain") == 0;
        assert_true(strcmp(id, "fits") != 0 && strcmp(id, "smart-skip") != 0);
    }
    assert_true(smallest > 0 && no_gain > 0);
    ms_destroy(z.m);
}

typedef struct pair {
    ms_model *m;
    ms_tensor value[2];
    ms_layer layer;
} pair;

/* A layer with two outputs, the second of so many rows, which are idle while larger values come and
   go. */
static void pair_create(pair *p, const ms_config *config, int64_t rows) {
    assert_int_equal(ms_create(config, &p->m), MS_RESULT_OK);
    const ms_tensor x = ms_input(p->m, "x", MS_DTYPE_F32, ms_shape2(16, 64));
    p->value[0] = ms_activation(p->m, "a", MS_DTYPE_F32, ms_shape2(16, 64));
    p->value[1] = ms_activation(p->m, "b", MS_DTYPE_F32, ms_shape2(rows, 64));
    ms_layer_desc d = zoo_layer("pair", x, p->value[0]);
    d.out[1] = p->value[1];
    d.param[0] = ms_param(p->m, "w", MS_DTYPE_F32, ms_shape1(16));
    p->layer = ms_register_layer(p->m, &d);
    ms_tensor last = p->value[0];
    for (int i = 0; i < 3; ++i) {
        const ms_tensor next = ms_activation(p->m, "wide", MS_DTYPE_F32, ms_shape2(256, 64));
        d = zoo_layer("widen", last, next);
        d.in[1] = i == 0 ? p->value[1] : d.in[1];
        d.backward_reads.in = MS_ALL_SLOTS;
        (void)ms_register_layer(p->m, &d);
        last = next;
    }
    ms_set_loss(p->m, last);
}

/* Which of the tensors of a layer explains the decision about it. */
static void rules_of_two_outputs(void **state) {
    (void)state;
    static const struct {
        bool force_optimize;
        int64_t rows; // of the second; the first has 16
        ms_switch said[2];
        const char *rule;
    } cases[] = {{false, 16, {MS_SWITCH_OFF, MS_SWITCH_DEFAULT}, "forbidden"},
                 {false, 16, {MS_SWITCH_DEFAULT, MS_SWITCH_OFF}, "smart-skip"},
                 {false, 17, {MS_SWITCH_DEFAULT, MS_SWITCH_OFF}, "forbidden"},
                 {false, 17, {MS_SWITCH_OFF, MS_SWITCH_DEFAULT}, "smart-skip"},
                 {true, 16, {MS_SWITCH_ON, MS_SWITCH_ON}, "forced"},
                 {true, 16, {MS_SWITCH_DEFAULT, MS_SWITCH_ON}, "smallest"},
                 {true, 16, {MS_SWITCH_ON, MS_SWITCH_DEFAULT}, "smallest"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; ++i) {
        pair p;
        ms_config config = zoo_config();
        config.force_optimize = cases[i].force_optimize;
        pair_create(&p, &config, cases[i].rows);
        for (int k = 0; k < 2; ++k) {
            ms_set_tensor_technique(p.m, p.value[k], CHECKPOINTING, cases[i].said[k]);
        }
        t_ok(p.m, ms_wrap(p.m));
        expect_rule(p.m, p.layer, CHECKPOINTING, cases[i].rule);
        ms_destroy(p.m);
    }
}

/* The same graph on devices that are not here. */
static void rules_of_the_device(void **state) {
    (void)state;
    static const struct {
        ms_device_kind kind;
        bool bf16;
        const char *offloading, *mixed;
    } devices[] = {{MS_DEVICE_CPU, false, "shared-memory", "not-native"},
                   {MS_DEVICE_INTEGRATED, true, "shared-memory", "smart-skip"},
                   {MS_DEVICE_DISCRETE, false, "smart-skip", "not-native"},
                   {MS_DEVICE_DISCRETE, true, "smart-skip", "smart-skip"}};
    for (size_t i = 0; i < sizeof devices / sizeof *devices; ++i) {
        zoo z;
        ms_config config = zoo_config();
        ms_hardware hardware;
        config.mode = MS_MODE_AGGRESSIVE;
        memset(&hardware, 0, sizeof hardware);
        snprintf(hardware.name, sizeof hardware.name, "described by hand");
        hardware.kind = devices[i].kind;
        hardware.bf16 = devices[i].bf16;
        hardware.total_bytes = hardware.free_bytes = (uint64_t)1 << 34;
        zoo_create(&z, &config);
        ms_set_hardware(z.m, &hardware);
        t_ok(z.m, ms_wrap(z.m));
        expect_rule(z.m, z.act[2], MS_TECHNIQUE_OFFLOADING, devices[i].offloading);
        expect_rule(z.m, z.act[2], MS_TECHNIQUE_MIXED_PRECISION, devices[i].mixed);
        expect_rule(z.m, z.act[2], MS_TECHNIQUE_TILING, "smart-skip");
        expect_rule(z.m, z.act[2], MS_TECHNIQUE_OPTIMIZER_8BIT, "smart-skip");
        ms_destroy(z.m);
    }
}

/* A zoo on a discrete GPU that may offload, with a link of so many GB/s. */
static void zoo_on_gpu(zoo *z, ms_config *config, double link, double launch_us) {
    ms_hardware hardware = gpu_hardware(link);
    hardware.launch_us = launch_us;
    config->offloading = config->offloading == MS_SWITCH_OFF ? MS_SWITCH_OFF : MS_SWITCH_ON;
    zoo_create(z, config);
    ms_set_hardware(z->m, &hardware);
}

static void rules_of_offloading(void **state) {
    (void)state;
    zoo z;
    ms_config config = zoo_config();
    decisions d;
    zoo_on_gpu(&z, &config, 1000.0, 1e-4);
    t_ok(z.m, ms_wrap(z.m));
    expect_rule(z.m, z.linear[2], OFFLOADING, "fits"); // ON: not skipped, and not needed
    zoo_wrap(&z, 0);
    expect_rule(z.m, z.linear[2], OFFLOADING, "offload");
    expect_rule(z.m, z.linear[ZOO_SHARED], OFFLOADING, "shared");
    expect_rule(z.m, z.act[ZOO_OUTPUT], OFFLOADING, "output");
    get_decisions(z.m, &d);
    const ms_decision *of = decision_of(&d, z.linear[ZOO_FROZEN], OFFLOADING);
    assert_true(of->saved_bytes == of->saved_bytes_of[MS_CATEGORY_PARAM]);
    assert_true(of->saved_bytes == 16 * 16 * 4);
    zoo_wrap(&z, 50);
    expect_rule(z.m, z.act[ZOO_BLOCKS - 1], OFFLOADING, "not-idle");
    ms_set_layer_technique(z.m, z.linear[2], OFFLOADING, MS_SWITCH_OFF);
    ms_set_layer_technique(z.m, z.act[2], OFFLOADING, MS_SWITCH_OFF);
    ms_set_layer_technique(z.m, z.act[4], OFFLOADING, MS_SWITCH_ON);
    zoo_wrap(&z, 25);
    expect_rule(z.m, z.linear[2], OFFLOADING, "forbidden");
    expect_rule(z.m, z.act[2], OFFLOADING, "forbidden");
    expect_rule(z.m, z.act[4], OFFLOADING, "forced");
    ms_destroy(z.m);

    zoo_on_gpu(&z, &config, 1e-3, 1e-4); // a copy takes longer than the step
    zoo_keep_budgets(&z);
    zoo_wrap(&z, 25);
    uint32_t recomputed = 0, late = 0;
    for (uint64_t percent = 0; percent <= 100; percent += 25) {
        zoo_wrap(&z, percent);
        get_decisions(z.m, &d);
        for (int i = 0; i < ZOO_BLOCKS - 1; ++i) {
            const char *id = decision_of(&d, z.act[i], OFFLOADING)->rule->id;
            recomputed += strcmp(id, "recomputed") == 0;
            late += strcmp(id, "needed-at-once") == 0;
        }
    }
    assert_true(recomputed > 0 && late > 0);
    ms_destroy(z.m);

    const ms_hardware slow = gpu_hardware(1e-3);
    zoo_create_along(&z, &config, 4, 64, 0);
    ms_set_hardware(z.m, &slow);
    ms_set_tensor_technique(z.m, z.weight[ZOO_FROZEN], OFFLOADING, MS_SWITCH_ON);
    t_ok(z.m, ms_wrap(z.m));
    expect_rule(z.m, z.linear[2], OFFLOADING, "link-saturated");
    ms_destroy(z.m);

    config.max_host_bytes = 1; // or its copies would hide, as small as they are
    zoo_on_gpu(&z, &config, 1000.0, 10.0);
    zoo_wrap(&z, 25);
    expect_rule(z.m, z.linear[2], OFFLOADING, "too-small");
    ms_destroy(z.m);

    config.max_host_bytes = 2 * 16 * 16 * 4; // room for two params
    config.checkpointing = MS_SWITCH_OFF;
    zoo_on_gpu(&z, &config, 1000.0, 1e-4);
    zoo_wrap(&z, 25);
    expect_rule(z.m, z.act[2], OFFLOADING, "host-full");
    ms_memory_report report;
    t_report(z.m, &report);
    assert_true(report.recompute_count == 0 && report.host_bytes <= config.max_host_bytes);
    ms_destroy(z.m);
    config.max_host_bytes = 0;
    config.checkpointing = MS_SWITCH_DEFAULT;

    config.force_optimize = true;
    zoo_on_gpu(&z, &config, 1000.0, 1e-4);
    t_ok(z.m, ms_wrap(z.m));
    expect_rule(z.m, z.linear[2], OFFLOADING, "smallest");
    t_ok(z.m, ms_detach(z.m));
    expect_rule(z.m, z.linear[2], OFFLOADING, "detached");
    ms_destroy(z.m);
    config.force_optimize = false;
    config.offloading = MS_SWITCH_OFF;
    zoo_on_gpu(&z, &config, 1000.0, 1e-4);
    zoo_wrap(&z, 25);
    expect_rule(z.m, z.linear[2], OFFLOADING, "off");
    ms_destroy(z.m);
}

/* What is forced for a param alone is all that its layer tells of: its value, or its state. */
static void what_is_moved_is_told_by_category(void **state) {
    (void)state;
    static const ms_category categories[] = {MS_CATEGORY_PARAM, MS_CATEGORY_OPTIMIZER,
                                             MS_CATEGORY_GRADIENT};
    for (int k = 0; k < 3; ++k) {
        zoo z;
        decisions d;
        ms_config config = zoo_config();
        t_text text = {NULL, 0};
        static float borrowed[16 * 16];
        config.accumulation_steps = 2;
        zoo_on_gpu(&z, &config, 1000.0, 1e-4);
        const ms_tensor w = z.weight[2];
        ms_set_tensor_technique(z.m,
                                k == 0   ? w
                                : k == 1 ? ms_optimizer_state(z.m, w, 0)
                                         : ms_gradient(z.m, w),
                                OFFLOADING, MS_SWITCH_ON);
        if (k == 0) {
            t_ok(z.m, ms_borrow(z.m, z.weight[4], borrowed));
            ms_set_frozen(z.m, z.weight[4], true);
        }
        t_ok(z.m, ms_wrap(z.m));
        get_decisions(z.m, &d);
        const ms_decision *of = decision_of(&d, z.linear[2], OFFLOADING);
        assert_true(of->is_applied && of->added_us >= 0.0);
        assert_string_equal(of->rule->id, "forced");
        assert_true(of->saved_bytes == (k == 1 ? 2u : 1u) * 16 * 16 * 4);
        assert_true(of->saved_bytes == of->saved_bytes_of[categories[k]]);
        if (k == 0) {
            expect_rule(z.m, z.linear[4], OFFLOADING, "borrowed");
        }
        t_ok(z.m, ms_print_plan(z.m, t_append, &text));
        t_text_has(text.data, k == 0   ? "+ offloading P      forced"
                              : k == 1 ? "+ offloading O      forced"
                                       : "+ offloading G      forced");
        free(text.data);
        ms_destroy(z.m);
    }
}

/* Also where params are so large that their updates would come in parts. */
static void what_fits_is_left_alone(void **state) {
    (void)state;
    zoo z;
    ms_memory_report r;
    ms_config config = zoo_config();
    const ms_hardware hardware = gpu_hardware(100.0);
    zoo_create_along(&z, &config, 512, 2176, 0);
    ms_set_hardware(z.m, &hardware);
    ms_set_budget(z.m, (uint64_t)1 << 40);
    t_ok(z.m, ms_wrap(z.m));
    t_report(z.m, &r);
    assert_true(r.host_bytes == 0 && r.arena_bytes == r.plain_bytes);
    expect_rule(z.m, z.linear[2], OFFLOADING, "smart-skip");
    ms_destroy(z.m);
}

/* Weight 3 is lent on the host, other weights and moments on the device. */
static void lent_stays_where_it_is(const ms_lifetime *l, void *user) {
    zoo *z = (zoo *)user;
    for (int i = 0; i < ZOO_BLOCKS; ++i) {
        const ms_tensor w = z->weight[i];
        const ms_tensor lent = i % 2 ? w : ms_optimizer_state(z->m, w, 1);
        if (l->tensor.id == lent.id && l->is_resident) {
            assert_true(l->is_on_host == (i == 3));
        }
    }
}

/* What the trainer lends is device memory, unless its home is forced to be the host: no search may
   take it for memory of the host, and no plan takes a home on the host for device memory. */
static void what_is_lent_stays_where_it_is(void **state) {
    (void)state;
    zoo z;
    ms_config config = zoo_config();
    static float lent[2 * ZOO_BLOCKS][64 * 64];
    config.force_optimize = true;
    for (int wide = 0; wide < 2; ++wide) { // activations are large; or params
        zoo_create_along(&z, &config, wide ? 4 : 256, wide ? 64 : 16, 0);
        const ms_hardware hardware = gpu_hardware(100.0);
        ms_set_hardware(z.m, &hardware);
        for (int i = 0; i < ZOO_BLOCKS; ++i) {
            const ms_tensor w = z.weight[i], v = ms_optimizer_state(z.m, w, 1);
            t_ok(z.m, ms_borrow(z.m, i % 2 ? w : v, lent[2 * i]));
        }
        ms_set_tensor_technique(z.m, z.weight[3], OFFLOADING, MS_SWITCH_ON);
        t_ok(z.m, ms_wrap(z.m));
        t_ok(z.m, ms_visit_lifetimes(z.m, MS_PROGRAM_TRAIN, lent_stays_where_it_is, &z));
        t_ok(z.m, ms_detach(z.m));
        t_ok(z.m, ms_visit_lifetimes(z.m, MS_PROGRAM_TRAIN, lent_stays_where_it_is, &z));
        ms_destroy(z.m);
    }
}

/* Copies that are issued and not awaited, by what the events say orders them. */
typedef struct ordered {
    uint64_t signalled[MS_STREAM_COUNT][64]; // copies of a stream up to that signal, by number
    uint64_t issued[MS_STREAM_COUNT], done[MS_STREAM_COUNT];
    uint32_t waits, parts, signals;
    ms_stream_kind stream_of[64];
    double end_us[MS_STREAM_COUNT]; // of what runs on a stream
} ordered;

static void order_event(const ms_event *event, void *user) {
    ordered *o = (ordered *)user;
    if (event->kind >= MS_EVENT_DROP) {
        return;
    }
    assert_true(event->start_us >= o->end_us[event->stream]); // one at a time in each lane
    o->end_us[event->stream] = event->start_us + event->duration_us - 1e-6;
    o->parts += event->part_count > 0;
    assert_true(event->part_count == 0 || event->part < event->part_count);
    if (event->stream != MS_STREAM_COMPUTE) {
        o->issued[event->stream] += event->operand_count / 2;
        if (event->signal != UINT32_MAX) {
            assert_true(event->signal < 64);
            o->stream_of[event->signal] = event->stream;
            o->signalled[event->stream][event->signal] = o->issued[event->stream];
            o->signals++;
        }
    } else if (event->kind == MS_EVENT_WAIT) {
        const ms_stream_kind stream = o->stream_of[event->signal];
        const uint64_t done = o->signalled[stream][event->signal];
        assert_true(done > o->done[stream]); // no wait is for what was awaited before
        assert_true(event->operand_count == 2 * (done - o->done[stream]));
        o->done[stream] = done;
        o->waits++;
    } else {
        assert_true(!event->follows && event->signal == UINT32_MAX);
    }
}

/* A listing shows what is on the host, which copies there are, and what they wait for. */
static void listings_show_what_is_moved(void **state) {
    (void)state;
    zoo z;
    ordered o;
    ms_config config = zoo_config();
    ms_memory_report r;
    t_text plan = {NULL, 0}, program = {NULL, 0}, trace = {NULL, 0};
    static float borrowed[64 * 64];
    zoo_create_along(&z, &config, 4, 64, 0);
    const ms_hardware hardware = gpu_hardware(10.0);
    ms_set_hardware(z.m, &hardware);
    t_ok(z.m, ms_borrow(z.m, z.weight[5], borrowed));
    ms_set_layer_technique(z.m, z.linear[2], OFFLOADING, MS_SWITCH_ON);
    ms_set_layer_technique(z.m, z.act[1], OFFLOADING, MS_SWITCH_ON);
    ms_set_tensor_technique(z.m, z.weight[5], OFFLOADING, MS_SWITCH_ON);
    t_ok(z.m, ms_wrap(z.m));
    t_report(z.m, &r);
    memset(&o, 0, sizeof o);
    t_ok(z.m, ms_visit_events(z.m, MS_PROGRAM_TRAIN, order_event, &o));
    assert_true(o.waits > 2 && o.signals == o.waits);
    for (int k = 0; k < MS_STREAM_COUNT; ++k) {
        assert_true(o.issued[k] == o.done[k]);
    }
    t_ok(z.m, ms_print_plan_full(z.m, t_append, &plan));
    t_ok(z.m, ms_print_program(z.m, MS_PROGRAM_TRAIN, t_append, &program));
    t_ok(z.m, ms_print_trace(z.m, t_append, &trace));
    t_text_has(plan.data, "\non the host ");
    t_text_has(plan.data, "  optimizer state 32.00 KiB");
    t_text_has(plan.data, "\ncopied in a step: ");
    t_text_has(plan.data, "\nthe largest of what is on the host, in all ");
    t_text_has(plan.data, "always, on the host");
    t_text_has(program.data, " w2@host+0x");
    t_text_has(program.data, " w5@outside");
    t_text_has(program.data, " m.w2@host+0x");
    t_text_has(program.data, ", after what is computed");
    char signal[32], awaited[32]; // of the first copy out
    const unsigned first_out = (unsigned)z.m->run.plan->train.code.event_count;
    snprintf(signal, sizeof signal, ", signal %u\n", first_out);
    snprintf(awaited, sizeof awaited, ", for signal %u\n", first_out);
    t_text_has(program.data, signal);
    t_text_has(program.data, awaited);
    t_text_has(trace.data,
               "\"tid\":1,\"name\":\"thread_name\",\"args\":{\"name\":\"copies to the dev");
    t_text_has(trace.data,
               "\"tid\":2,\"name\":\"thread_name\",\"args\":{\"name\":\"copies to the host");
    t_text_has(trace.data, "\"tid\":1,\"cat\":\"copy in\"");
    t_text_has(trace.data, "\"tid\":2,\"cat\":\"copy out\"");
    t_text_has(trace.data, "\"tid\":0,\"cat\":\"wait\"");
    t_text_has(trace.data, "\"name\":\"host bytes\"");
    free(plan.data);
    free(program.data);
    free(trace.data);
    ms_destroy(z.m);
}

// ------------------------------------------------------------------------------------------------
// modes and switches

static void modes_allow_what_they_say(void **state) {
    (void)state;
    static const struct {
        ms_mode mode;
        const char *of[MS_TECHNIQUE_COUNT]; // the rule on a CPU where the plain plan fits
    } expected[] = {
        {MS_MODE_CONSERVATIVE,
         {"smart-skip", "smart-skip", "mode", "mode", "mode", "mode", "mode"}},
        {MS_MODE_BALANCED,
         {"smart-skip", "smart-skip", "shared-memory", "mode", "mode", "mode", "alone"}},
        {MS_MODE_AGGRESSIVE,
         {"smart-skip", "smart-skip", "shared-memory", "smart-skip", "not-native", "smart-skip",
          "alone"}}};
    for (size_t i = 0; i < sizeof expected / sizeof *expected; ++i) {
        zoo z;
        ms_config config = zoo_config();
        ms_memory_report report;
        config.mode = expected[i].mode;
        zoo_create(&z, &config);
        t_ok(z.m, ms_wrap(z.m));
        t_report(z.m, &report);
        assert_int_equal(report.mode, expected[i].mode);
        for (int k = 0; k < MS_TECHNIQUE_COUNT; ++k) {
            const bool native =
                strcmp(expected[i].of[k], "not-native") == 0 && z.m->costs.hardware.bf16;
            expect_rule(z.m, z.act[2], (ms_technique)k, native ? "smart-skip" : expected[i].of[k]);
        }
        ms_destroy(z.m);
    }
}

static void keep_last_text(ms_log_level level, const char *tag, const char *text, void *user) {
    (void)level, (void)tag;
    snprintf((char *)user, 256, "%s", text);
}

static void wrong_configs_are_refused(void **state) {
    (void)state;
    for (int i = 0; i < 10; ++i) {
        char text[256] = "";
        ms_config config = t_config();
        ms_switch *const switches[] = {&config.checkpointing,    &config.offloading,
                                       &config.tiling,           &config.mixed_precision,
                                       &config.optimizer_8bit,   &config.early_update,
                                       &config.static_profiling, &config.empirical_profiling};
        ms_model *m = NULL;
        config.log = keep_last_text;
        config.log_user = text;
        if (i < 8) {
            *switches[i] = (ms_switch)3;
        } else if (i == 8) {
            config.mode = MS_MODE_COUNT;
        } else {
            config.warmup_steps = 1001;
        }
        assert_int_equal(ms_create(&config, &m), MS_RESULT_INVALID);
        assert_non_null(strstr(text, ms_last_error(m))); // the log has the name of the result too
        t_not_created(&m, MS_RESULT_INVALID);
        t_text_has(text, i < 8 ? "switch" : i == 8 ? "mode" : "warmup_steps");
    }
}

/* Tiles cannot be forced on a layer that does not declare rows; a switch asks for what there is. */
static void tiles_need_rows(void **state) {
    (void)state;
    const ms_technique technique = MS_TECHNIQUE_TILING;
    for (int how = 0; how < 3; ++how) {
        zoo z;
        ms_config config = zoo_config();
        config.tiling = how == 0 ? MS_SWITCH_ON : MS_SWITCH_DEFAULT;
        zoo_create(&z, &config);
        if (how == 1) {
            ms_set_layer_technique(z.m, z.linear[2], technique, MS_SWITCH_ON);
        } else if (how == 2) {
            ms_set_tensor_technique(z.m, z.hidden[2], technique, MS_SWITCH_ON);
        }
        if (how == 0) {
            zoo_wrap(&z, 25);
            expect_rule(z.m, z.linear[2], technique, "no-rows");
            ms_destroy(z.m);
            continue;
        }
        t_error(z.m, ms_wrap(z.m), MS_RESULT_INVALID);
        t_text_has(ms_last_error(z.m), "tiling is forced on");
        t_text_has(ms_last_error(z.m), "does not declare rows");
        uint64_t bytes;
        t_error(z.m, ms_smallest_budget(z.m, &bytes), MS_RESULT_INVALID);
        ms_set_layer_technique(z.m, z.linear[2], technique, MS_SWITCH_OFF);
        ms_set_layer_technique(z.m, z.act[2], technique, MS_SWITCH_OFF);
        t_ok(z.m, ms_wrap(z.m)); // to forbid it is fine, and leaves nothing behind
        expect_rule(z.m, z.linear[2], technique, "forbidden");
        ms_destroy(z.m);
    }
}

/* 16 bits cannot be forced on what a layer makes that takes F32 alone; a switch asks for what there
   is. */
static void layers_of_f32_stay_so(void **state) {
    (void)state;
    for (int how = 0; how < 3; ++how) {
        zoo z;
        ms_config config = zoo_config();
        config.mixed_precision = how == 0 ? MS_SWITCH_ON : MS_SWITCH_DEFAULT;
        config.force_optimize = true;
        zoo_create(&z, &config);
        if (how == 1) {
            ms_set_layer_technique(z.m, z.linear[2], MS_TECHNIQUE_MIXED_PRECISION, MS_SWITCH_ON);
        } else if (how == 2) {
            ms_set_tensor_technique(z.m, z.hidden[2], MS_TECHNIQUE_MIXED_PRECISION, MS_SWITCH_ON);
        }
        if (how == 0) {
            t_ok(z.m, ms_wrap(z.m));
            expect_rule(z.m, z.linear[2], MS_TECHNIQUE_MIXED_PRECISION, "not-accepted");
        } else {
            t_error(z.m, ms_wrap(z.m), MS_RESULT_INVALID);
            t_text_has(ms_last_error(z.m), "does not accept the dtype");
        }
        ms_destroy(z.m);
    }
}

static void techniques_have_their_tensors(void **state) {
    (void)state;
    static const bool takes[MS_TECHNIQUE_COUNT][3] = {
        // input, param, activation
        {false, false, true}, {false, true, false}, {true, true, true},  {false, false, true},
        {false, true, true},  {false, true, false}, {false, true, false}};
    for (int k = 0; k < MS_TECHNIQUE_COUNT; ++k) {
        for (int kind = 0; kind < 3; ++kind) {
            zoo z;
            ms_config config = zoo_config();
            zoo_create(&z, &config);
            const ms_tensor tensors[] = {z.x, z.weight[2], z.hidden[2]};
            ms_set_tensor_technique(z.m, tensors[kind], (ms_technique)k, MS_SWITCH_OFF);
            t_error(z.m, ms_wrap(z.m), takes[k][kind] ? MS_RESULT_OK : MS_RESULT_INVALID);
            ms_destroy(z.m);
        }
    }
}

static void names_of_enums(void **state) {
    (void)state;
    assert_string_equal(ms_mode_name(MS_MODE_BALANCED), "BALANCED");
    assert_string_equal(ms_mode_name(MS_MODE_CONSERVATIVE), "CONSERVATIVE");
    assert_string_equal(ms_mode_name(MS_MODE_AGGRESSIVE), "AGGRESSIVE");
    assert_string_equal(ms_mode_name(MS_MODE_COUNT), "?");
    assert_string_equal(ms_technique_name(MS_TECHNIQUE_CHECKPOINTING), "checkpointing");
    assert_string_equal(ms_technique_name(MS_TECHNIQUE_EARLY_UPDATE), "early update");
    assert_string_equal(ms_technique_name(MS_TECHNIQUE_OPTIMIZER_8BIT), "8-bit optimizer");
    assert_string_equal(ms_technique_name(MS_TECHNIQUE_COUNT), "?");
    assert_string_equal(ms_decision_source_name(MS_DECISION_SOURCE_RULE), "rule");
    assert_string_equal(ms_decision_source_name(MS_DECISION_SOURCE_USER_CONFIG), "user_config");
    assert_string_equal(ms_decision_source_name(MS_DECISION_SOURCE_POLICY), "policy");
    const int beyond = MS_DECISION_SOURCE_POLICY + 1;
    assert_string_equal(ms_decision_source_name((ms_decision_source)beyond), "?");
}

static ms_decision_source source_with(const ms_config *config, ms_technique technique,
                                      ms_switch force) {
    zoo z;
    ms_memory_report report;
    zoo_create(&z, config);
    ms_set_layer_technique(z.m, z.linear[2], technique, force);
    t_ok(z.m, ms_wrap(z.m));
    t_report(z.m, &report);
    ms_destroy(z.m);
    return report.decision_source;
}

static void who_has_decided(void **state) {
    (void)state;
    const ms_switch nothing_said = MS_SWITCH_DEFAULT;
    for (int i = 0; i < 10; ++i) {
        ms_config config = zoo_config();
        ms_switch *const switches[] = {&config.checkpointing,  &config.offloading,
                                       &config.tiling,         &config.mixed_precision,
                                       &config.optimizer_8bit, &config.early_update};
        if (i < 6) {
            *switches[i] = MS_SWITCH_OFF;
        }
        config.mode = i == 6 ? MS_MODE_CONSERVATIVE : i == 7 ? MS_MODE_AGGRESSIVE : config.mode;
        config.force_optimize = i == 8;
        assert_int_equal(source_with(&config, CHECKPOINTING, nothing_said),
                         i == 9 ? MS_DECISION_SOURCE_RULE : MS_DECISION_SOURCE_USER_CONFIG);
    }
    ms_config config = zoo_config();
    for (int k = 0; k < MS_TECHNIQUE_COUNT; ++k) {
        assert_int_equal(source_with(&config, (ms_technique)k, MS_SWITCH_OFF),
                         MS_DECISION_SOURCE_USER_CONFIG);
    }
    assert_int_equal(source_with(&config, EARLY_UPDATE, MS_SWITCH_ON),
                     MS_DECISION_SOURCE_USER_CONFIG);
}

// ------------------------------------------------------------------------------------------------
// decisions against the events of the program

typedef struct walked {
    const ms_model *model;
    uint32_t recomputed[MAX_LAYERS];
    double recompute_us[MAX_LAYERS];
    uint64_t not_held[MAX_LAYERS];
    uint32_t written_by[RD_VALUES];                    // per tensor: its layer + 1
    uint64_t offset[RD_VALUES], held_bytes[RD_VALUES]; // of what forward made; 0: it is free again
    bool backward, freed[RD_VALUES];
} walked;

/* A value that forward made, that is freed before the first backward, and that a backward reads. */
static void walk(const ms_event *event, void *user) {
    walked *w = (walked *)user;
    w->backward |= event->kind == MS_EVENT_BACKWARD;
    if (event->kind == MS_EVENT_RECOMPUTE) {
        w->recomputed[event->layer_index] += 1;
        w->recompute_us[event->layer_index] += event->duration_us;
    }
    for (uint32_t k = 0; k < event->operand_count; ++k) {
        const ms_event_operand *o = &event->operands[k];
        const uint32_t t = msi_value_index(&w->model->graph, o->tensor);
        if (t == MSI_NONE) {
            continue;
        }
        if (event->kind == MS_EVENT_FORWARD && o->is_written) {
            w->written_by[t] = event->layer_index + 1;
            for (uint32_t i = 0; i < RD_VALUES && o->is_new; ++i) { // in place of another
                w->held_bytes[i] = w->offset[i] == o->offset ? 0 : w->held_bytes[i];
            }
            w->offset[t] = o->offset;
            w->held_bytes[t] = o->bytes;
        }
        if (event->kind == MS_EVENT_DROP && !w->backward) {
            w->freed[t] = true;
            w->held_bytes[t] = 0;
        }
        if (event->kind == MS_EVENT_BACKWARD && !o->is_written && w->freed[t] &&
            w->written_by[t] != 0) {
            w->not_held[w->written_by[t] - 1] += (o->bytes + 63) & ~(uint64_t)63;
            w->freed[t] = false; // once
        }
    }
}

/* What a layer made and backward still finds. */
static uint64_t held_bytes_of(const walked *w, uint32_t layer) {
    uint64_t held = 0;
    for (uint32_t t = 0; t < RD_VALUES; ++t) {
        held += w->written_by[t] == layer ? w->held_bytes[t] : 0;
    }
    return held;
}

static void check_against_events(ms_model *m) {
    decisions d;
    walked w;
    ms_memory_report report;
    double added_us = 0.0;
    memset(&w, 0, sizeof w);
    w.model = m;
    t_report(m, &report);
    get_decisions(m, &d);
    t_ok(m, ms_visit_events(m, MS_PROGRAM_TRAIN, walk, &w));
    for (uint32_t i = 0; i < report.layer_count; ++i) {
        const ms_decision *c = &d.at[i][CHECKPOINTING];
        assert_true(c->is_applied == (w.recomputed[i] > 0));
        assert_true(fabs(c->added_us - w.recompute_us[i]) <= 1e-9 * (1.0 + c->added_us));
        assert_true(c->saved_bytes == w.not_held[i]);
        assert_true(c->kept_bytes == held_bytes_of(&w, i + 1));
        added_us += c->added_us;
    }
    assert_true(fabs(added_us - report.recompute_share * report.plain_step_us) <=
                1e-6 * (1.0 + added_us));
}

static void decisions_are_those_of_the_program(void **state) {
    (void)state;
    for (int64_t cols = 4; cols <= 64; cols *= 4) {
        zoo z;
        ms_config config = zoo_config();
        zoo_create_along(&z, &config, 64, cols, 0);
        zoo_keep_budgets(&z);
        for (uint64_t percent = 0; percent <= 100; percent += 10) {
            zoo_wrap(&z, percent);
            check_against_events(z.m);
        }
        ms_destroy(z.m);
        t_chain chain;
        ms_config of_chain = t_config();
        t_chain_start(&chain, &of_chain, 20);
        const uint64_t smallest = budget_between(chain.model, 0);
        const uint64_t room = budget_between(chain.model, 100) - smallest;
        for (uint64_t percent = 0; percent <= 100; percent += 10) {
            ms_set_budget(chain.model, smallest + room * percent / 100);
            t_ok(chain.model, ms_wrap(chain.model));
            check_against_events(chain.model);
        }
        ms_destroy(chain.model);
    }
}

/* Bytes of gradients that are used up before the end of backward. */
static uint64_t early_bytes(const ms_model *m) {
    const msi_program *p = &m->run.plan->train;
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < p->code.backward_end; ++i) {
        const msi_instruction *instruction = &p->code.instructions.items[i];
        if (instruction->op == MSI_OP_UPDATE) {
            bytes += msi_align(m->graph.tensors.items[instruction->target].bytes);
        }
    }
    return bytes;
}

typedef struct recomputations {
    uint32_t of[MAX_LAYERS];
} recomputations;

static void count_recomputations(const ms_event *event, void *user) {
    if (event->kind == MS_EVENT_RECOMPUTE) {
        ((recomputations *)user)->of[event->layer_index] += 1;
    }
}

/* What the peak and the layouts have come down by is what the arena is smaller by. */
static void check_freed(const ms_model *m) {
    ms_memory_report r;
    t_report(m, &r);
    for (int k = 0; k < MS_TECHNIQUE_COUNT; ++k) {
        assert_true(k <= OFFLOADING || r.freed_bytes[k] == 0);
    }
    assert_true((int64_t)(r.plain_bytes - r.arena_bytes) - r.layout_freed_bytes ==
                (int64_t)(m->run.plan->plain_live_bytes - r.lower_bound_bytes));
    assert_true(r.early_update || r.freed_bytes[EARLY_UPDATE] == 0);
    assert_true(r.recompute_count > 0 || r.freed_bytes[CHECKPOINTING] == 0);
}

typedef struct alive {
    uint64_t bytes[4096]; // by instruction
    uint64_t peak_bytes;
    bool residents_end;
} alive;

static void add_lifetime(const ms_lifetime *l, void *user) {
    alive *a = (alive *)user;
    assert_true(l->size == sizeof *l && l->first <= l->last && l->last < 4096 && l->name != NULL);
    assert_false(l->is_resident && a->residents_end); // they come first
    a->residents_end = !l->is_resident;
    for (uint32_t i = l->first; i <= l->last && !l->is_outside; ++i) {
        a->bytes[i] += l->bytes;
    }
    a->peak_bytes += l->is_at_peak ? l->bytes : 0;
}

static void compare_alive(const ms_event *event, void *user) {
    const alive *a = (const alive *)user;
    assert_true(event->kind >= MS_EVENT_DROP || a->bytes[event->index] == event->live_bytes);
}

/* The lifetimes of values add up to the live bytes of every instruction. */
static void check_lifetimes(const ms_model *m) {
    uint64_t most = 0;
    ms_memory_report r;
    t_report(m, &r);
    for (int program = MS_PROGRAM_TRAIN; program <= MS_PROGRAM_EVAL; ++program) {
        alive *a = (alive *)calloc(1, sizeof *a);
        assert_non_null(a);
        t_ok(m, ms_visit_lifetimes(m, (ms_program)program, add_lifetime, a));
        t_ok(m, ms_visit_events(m, (ms_program)program, compare_alive, a));
        most = a->peak_bytes > most ? a->peak_bytes : most;
        free(a);
    }
    assert_true(most == r.lower_bound_bytes);
    for (int category = 0; category < MS_CATEGORY_COUNT; ++category) {
        most -= r.peak_bytes[category];
    }
    assert_true(most == 0);
}

/* A value whose memory is taken over at the peak does not count there. */
static void what_is_taken_over_at_the_peak_counts_once(void **state) {
    (void)state;
    for (int backward = 0; backward < 2; ++backward) {
        const ms_config config = zoo_config();
        const ms_shape shape = ms_shape2(64, 16);
        ms_model *m;
        ms_memory_report r;
        assert_int_equal(ms_create(&config, &m), MS_RESULT_OK);
        ms_tensor x = ms_input(m, "x", MS_DTYPE_F32, shape);
        for (int i = 0; i < 3; ++i) {
            ms_tensor y = ms_activation(m, "y", MS_DTYPE_F32, shape);
            ms_layer_desc d = zoo_layer("layer", x, y);
            if (i == 1) {
                d.in_place[0] = 1;
                d.grad_in_place[0].grad_out = 1;
                (backward ? &d.backward_workspace : &d.forward_workspace)->bytes = 1 << 20;
            } else {
                d.param[0] = ms_param(m, "w", MS_DTYPE_F32, ms_shape1(16));
            }
            d.backward_reads.nothing = 1;
            ms_register_layer(m, &d);
            x = y;
        }
        ms_set_loss(m, x);
        t_ok(m, ms_wrap(m));
        t_report(m, &r);
        assert_true(r.peak_bytes[MS_CATEGORY_WORKSPACE] == 1 << 20);
        check_lifetimes(m);
        ms_destroy(m);
    }
}

/* What an update of the trainer's own does not undo is not done to its gradients. */
static void gradients_are_scaled_for_own_optimizers_only(void **state) {
    (void)state;
    zoo z;
    const ms_config config = zoo_config();
    zoo_create(&z, &config);
    z.m->costs.hardware.fp16_tensor = z.m->costs.hardware.bf16 = true;
    for (int f16 = 0; f16 < 2; ++f16) {
        z.m->config.mixed_dtype = f16 ? MS_DTYPE_F16 : MS_DTYPE_BF16;
        for (int kind = MS_OPTIMIZER_ADAMW; kind <= MS_OPTIMIZER_NONE; ++kind) {
            z.m->optimizers.groups.items[0].desc.kind = (ms_optimizer_kind)kind;
            msi_analyze_kinds(z.m);
            for (int how = 0; how < 2; ++how) {
                z.m->config.mixed_precision = how ? MS_SWITCH_ON : MS_SWITCH_DEFAULT;
                const uint32_t allowed = msi_allowed(z.m, MS_MODE_AGGRESSIVE);
                assert_int_equal((allowed & MSI_MIXED) != 0, !f16 || t_is_built_in(kind));
            }
        }
    }
    ms_destroy(z.m);
}

static bool has_state_on_host(const ms_model *m) {
    bool has = false;
    for (uint32_t t = 0; t < m->graph.tensors.count; ++t) {
        has |=
            m->graph.tensors.items[t].on_host && m->graph.tensors.items[t].kind == MSI_KIND_BUFFER;
    }
    return has;
}

/* What must hold of any graph, whatever is forced and whatever solver made the plan. */
static void check_decisions(const ms_model *m) {
    decisions d;
    recomputations again;
    ms_memory_report report;
    uint64_t bytes = 0;
    uint32_t stands_for = 0;
    double added_us = 0.0, wait_us = 0.0;
    memset(&again, 0, sizeof again);
    check_freed(m);
    check_lifetimes(m);
    t_report(m, &report);
    get_decisions(m, &d);
    t_ok(m, ms_visit_events(m, MS_PROGRAM_TRAIN, count_recomputations, &again));
    for (uint32_t i = 0; i < report.layer_count; ++i) {
        for (int k = 0; k < MS_TECHNIQUE_COUNT; ++k) {
            const ms_decision *c = &d.at[i][k];
            assert_true(c->is_applied == is_rule_of_applied(c->rule));
            assert_true(c->is_applied || (c->saved_bytes == 0 && !(c->added_us > 0.0)));
            uint64_t sum = 0;
            for (int category = 0; category < MS_CATEGORY_COUNT; ++category) {
                sum += c->saved_bytes_of[category];
            }
            assert_true(sum == c->saved_bytes);
            assert_true(!c->is_applied || k <= OFFLOADING);
            assert_true(c->kept_bytes == d.at[i][0].kept_bytes);
            assert_true(k <= OFFLOADING || c->refused_bytes == 0);
            assert_true(!(c->refused_us > 0.0) || c->refused_bytes > 0);
            assert_true(c->alike_count == d.at[i][0].alike_count);
            stands_for += k == 0 ? c->alike_count : 0;
        }
        assert_true(d.at[i][CHECKPOINTING].is_applied == (again.of[i] > 0));
        added_us += d.at[i][CHECKPOINTING].added_us;
        wait_us += d.at[i][OFFLOADING].added_us;
        bytes += d.at[i][EARLY_UPDATE].saved_bytes;
    }
    assert_true(bytes == early_bytes(m) && stands_for == report.layer_count);
    const double copies_us = report.to_device_us + report.to_host_us;
    const double waits_us = (1.0 - report.hidden_share) * copies_us - wait_us;
    const double close_us =
        1e-4 * copies_us + msi_copy_us(&m->costs, MSI_ENGINE_TO_HOST, MSI_STATES_BYTES); // verdict
    assert_true(waits_us >= -close_us); // the rest: for state on the host
    assert_true(has_state_on_host(m) || waits_us <= close_us);
    const msi_prediction *p =
        &m->run.plan->train.predicted; // decisions are about the last micro-batch
    const double again_us = report.recompute_share * report.plain_step_us;
    assert_true(fabs(added_us - p->last.recompute_us) <= 1e-6 * (1.0 + added_us));
    assert_true(fabs(again_us - p->step.recompute_us) <= 1e-6 * (1.0 + again_us));
}

static void decisions_of_random_graphs(void **state) {
    (void)state;
    const uint64_t count = t_environment("MEMSCALE_TEST_DAGS", t_sweep(30, 150));
    uint32_t applied[2] = {0, 0}, rules = 0;
    bool met[MSI_RULE_COUNT];
    memset(met, 0, sizeof met);
    for (uint64_t seed = 1; seed <= count; ++seed) {
        char failure[RD_TEXT] = "";
        ms_config config = zoo_config();
        rd_graph *graph = rd_generate(seed);
        config.force_optimize = seed % 7 == 0;
        config.mode = (ms_mode)(seed % MS_MODE_COUNT);
        const ms_hardware hardware = gpu_hardware((double)(1u << seed % 12));
        config.offloading = seed % 3 == 0 ? MS_SWITCH_ON : MS_SWITCH_DEFAULT;
        rd_net *net = rd_net_create(graph, &config, "net", failure, false);
        ms_model *m = net->model;
        if (seed % 2 == 0) {
            ms_set_hardware(m, &hardware);
        }
        const uint64_t smallest = budget_between(m, 0);
        ms_memory_report plain;
        t_report(m, &plain);
        for (uint64_t percent = 0; percent <= 100; percent += 25) {
            decisions d;
            ms_set_budget(m, smallest + (plain.plain_bytes - smallest) * percent / 100);
            t_ok(m, ms_wrap(m));
            check_decisions(m);
            get_decisions(m, &d);
            for (uint32_t i = 0; i < d.count; ++i) {
                const ms_decision *c = &d.at[i / MS_TECHNIQUE_COUNT][i % MS_TECHNIQUE_COUNT];
                uint32_t rule = 0;
                while (ms_rule_at(rule) != c->rule) {
                    rule += 1;
                }
                met[rule] = true;
                applied[c->technique < 2 ? c->technique : 0] += c->is_applied;
            }
        }
        t_ok(m, ms_detach(m));
        check_decisions(m);
        rd_net_destroy(net);
        free(graph);
    }
    for (uint32_t i = 0; i < MSI_RULE_COUNT; ++i) {
        rules += met[i];
    }
    assert_true(applied[0] > 0 && applied[1] > 0);
    assert_true(rules > MSI_RULE_COUNT / 2);
}

/* Where nothing runs beside copies, all of their time is waited for. */
static void copies_without_streams_are_waited_for(void **state) {
    (void)state;
    zoo z;
    decisions d;
    ms_memory_report r;
    double added_us = 0.0;
    ms_config config = zoo_config();
    config.backend = t_backend_without_state();
    zoo_create_along(&z, &config, 24, 16, 0);
    for (int i = 0; i < ZOO_OUTPUT; ++i) {
        ms_set_tensor_technique(z.m, i % 2 == 0 ? z.weight[i] : z.hidden[i], OFFLOADING,
                                MS_SWITCH_ON);
    }
    t_ok(z.m, ms_wrap(z.m));
    get_decisions(z.m, &d);
    t_report(z.m, &r);
    for (uint32_t i = 0; i < r.layer_count; ++i) {
        added_us += d.at[i][OFFLOADING].added_us;
    }
    const double us = r.to_device_us + r.to_host_us;
    assert_true(r.to_device_us > 0.0 && r.to_host_us > 0.0 && !(r.hidden_share > 0.0));
    assert_true(fabs(added_us - us) <= 1e-4 * us);
    ms_destroy(z.m);
}

/* What a recompute callback reads stays only where forward cannot run again. */
static void what_a_recomputation_reads(void **state) {
    (void)state;
    enum { CASES = 6, COUNT = 4 * CASES };
    uint32_t kept[CASES] = {0}, dropped[CASES] = {0}, left[CASES] = {0};
    ms_config config = zoo_config();
    ms_model *m;
    ms_layer layers[COUNT];
    decisions d;
    assert_int_equal(ms_create(&config, &m), MS_RESULT_OK);
    ms_tensor x = ms_input(m, "x", MS_DTYPE_F32, ms_shape2(64, 16));
    for (int i = 0; i < COUNT; ++i) {
        ms_layer_desc l =
            zoo_layer("layer", x, ms_activation(m, "y", MS_DTYPE_F32, ms_shape2(64, 16)));
        l.param[0] = ms_param(m, "w", MS_DTYPE_F32, ms_shape1(16));
        l.backward_reads.out = 1;
        l.no_recompute = i % CASES % 2;
        l.recompute = i % CASES >= 2 ? t_nothing : NULL;
        l.recompute_reads.out = i % CASES >= 4;
        layers[i] = ms_register_layer(m, &l);
        x = l.out[0];
    }
    ms_set_loss(m, x);
    const uint64_t smallest = budget_between(m, 0), plain = budget_between(m, 100);
    for (uint64_t percent = 0; percent < 100; percent += 20) {
        ms_set_budget(m, smallest + (plain - smallest) * percent / 100);
        t_ok(m, ms_wrap(m));
        get_decisions(m, &d);
        for (int i = 0; i < COUNT - 1; ++i) {
            const ms_decision *c = decision_of(&d, layers[i], CHECKPOINTING);
            const char *id = c->rule->id;
            const bool forbids = strcmp(id, "runs-once") == 0 || strcmp(id, "recompute-reads") == 0;
            kept[i % CASES] += forbids;
            dropped[i % CASES] += c->is_applied;
            left[i % CASES] += strcmp(id, "fits") == 0;
        }
    }
    for (int k = 0; k < CASES; ++k) {
        const bool stays =
            k == 1 || k == 5; // no_recompute, without a callback or with one that reads
        assert_true((kept[k] > 0) == stays && (dropped[k] > 0) == !stays &&
                    (left[k] > 0) == !stays);
    }
    ms_destroy(m);
}

// ------------------------------------------------------------------------------------------------
// the table of rules, and its page

static void rules_are_listed_once_each(void **state) {
    (void)state;
    uint32_t count = 0;
    for (; ms_rule_at(count) != NULL; ++count) {
        const ms_rule *rule = ms_rule_at(count);
        assert_true(strlen(rule->id) > 0 && strlen(rule->id) <= 15);
        assert_true(strlen(rule->condition) > 0 && strlen(rule->reason) > 0);
        assert_null(strchr(rule->id, ' '));
        for (uint32_t i = 0; i < count; ++i) {
            assert_string_not_equal(ms_rule_at(i)->id, rule->id);
        }
    }
    assert_true(count > 20);
    assert_null(ms_rule_at(count + 1));
    assert_null(ms_rule_at(UINT32_MAX));
}

/* docs/decision-engine.md has the same table, in the same order. */
static void rules_are_documented(void **state) {
    (void)state;
    char line[512], expected[512];
    uint32_t count = 0;
    FILE *file = fopen("docs/decision-engine.md", "r");
    if (file == NULL) {
        print_message("run it in the repository's folder\n");
        skip();
    }
    while (fgets(line, sizeof line, file) != NULL) {
        const bool is_rule = strncmp(line, "| `", 3) == 0;
        const ms_rule *rule = is_rule ? ms_rule_at(count++) : NULL;
        if (rule != NULL) {
            snprintf(expected, sizeof expected, "| `%s` | %s | %s |\n", rule->id, rule->condition,
                     rule->reason);
            assert_string_equal(line, expected);
        }
    }
    fclose(file);
    assert_true(count > 20 && ms_rule_at(count - 1) != NULL && ms_rule_at(count) == NULL);
}

// ------------------------------------------------------------------------------------------------
// listings, and what the log is told

/* Turns each run of spaces and line ends into one space, from the text's place on. */
static void join_lines(char *text) {
    char *to = text;
    for (const char *c = text; *c; c += strspn(c, " \n") ? strspn(c, " \n") : 1) {
        *to++ = *c == '\n' ? ' ' : *c;
    }
    *to = 0;
}

/* No line ends with a space, or is longer than 100 characters. */
static void has_neat_lines(const char *text) {
    for (const char *line = text; *line; line += strcspn(line, "\n") + 1) {
        const size_t length = strcspn(line, "\n");
        assert_true(length == 0 || line[length - 1] != ' ');
        assert_in_range(length, 0, 100);
    }
}

/* The lines of a layer name the rules that were not the same for all layers. */
static void the_listing_explains(void **state) {
    (void)state;
    static const uint64_t percents[] = {0, 25, 60, 100};
    zoo z;
    ms_config config = zoo_config();
    zoo_create(&z, &config);
    for (size_t at = 0; at < sizeof percents / sizeof *percents; ++at) {
        t_text text = {NULL, 0};
        decisions d;
        zoo_wrap(&z, percents[at]);
        get_decisions(z.m, &d);
        t_ok(z.m, ms_print_plan_full(z.m, t_append, &text));
        assert_in_range(MSI_RULE_COUNT, 1, MSI_MOST_RULES);
        char *table = strstr(text.data, "\nlayer "), *rules = strstr(text.data, "\nrules");
        assert_true(table != NULL && rules != NULL && table < rules);
        has_neat_lines(text.data);
        join_lines(rules + 1);
        for (uint32_t number = 0; ms_rule_at(number) != NULL; ++number) { // the legend
            const ms_rule *rule = ms_rule_at(number);
            char line[512];
            bool occurs = false;
            for (uint32_t i = 0; i < d.count; ++i) {
                occurs |= d.at[i / MS_TECHNIQUE_COUNT][i % MS_TECHNIQUE_COUNT].rule == rule;
            }
            snprintf(line, sizeof line, " %s %s: %s ", rule->id, rule->condition, rule->reason);
            assert_true((strstr(rules, line) != NULL) == occurs);
        }
        const char *cell_at = table;
        for (uint32_t i = 0; i < ZOO_LAYERS && percents[at] != 100; ++i) {
            for (int k = 0; k < 2; ++k) { // checkpointing, early update
                const ms_decision *c = &d.at[i][k];
                char cell[64];
                snprintf(cell, sizeof cell, "%c %-18s%s", c->is_applied ? '+' : '-',
                         ms_technique_name(c->technique), c->rule->id);
                cell_at = strstr(cell_at, cell);
                assert_true(cell_at != NULL && cell_at < rules);
                cell_at += strlen(cell);
            }
        }
        t_text_has(text.data, "mode BALANCED (rule), pressure ");
        free(text.data);
    }
    assert_int_equal(ms_visit_decisions(NULL, keep_decision, NULL), MS_RESULT_INVALID);
    t_error(z.m, ms_visit_decisions(z.m, NULL, NULL), MS_RESULT_INVALID);
    ms_destroy(z.m);
    zoo_create(&z, &config);
    decisions none;
    memset(&none, 0, sizeof none);
    t_error(z.m, ms_visit_decisions(z.m, keep_decision, &none), MS_RESULT_ORDER);
    assert_int_equal(none.count, 0);
    ms_destroy(z.m);
}

/* Live bytes at the peak of the plan in force without some of its techniques. */
static int64_t live_without(ms_model *m, bool drops, bool early, bool moves) {
    msi_plan *plan = msi_new_plan(m);
    msi_shortage shortage;
    msi_lowering lowering;
    msi_scorer s;
    assert_non_null(plan);
    assert_true(msi_scorer_init(&s, m, m->run.store, plan, &lowering, &shortage));
    memcpy(plan->decisions, m->run.plan->decisions, msi_decisions_bytes(&m->graph));
    for (uint32_t t = 0; t < m->graph.tensors.count; ++t) {
        msi_tensor_decision *d = &plan->decisions[t];
        d->pass = drops ? d->pass : 0;
        d->update_after = early ? d->update_after : MSI_NONE;
        d->moves = moves ? d->moves : 0;
    }
    const msi_score score = msi_estimate(&s, plan->decisions);
    msi_make_eval(&s);
    const uint64_t eval = plan->train.layout.resident_bytes + plan->eval.layout.peak_bytes;
    msi_lowering_free(&lowering);
    msi_plan_free(m, plan);
    return (int64_t)(score.live_bytes > eval ? score.live_bytes : eval);
}

/* A technique has what the peak would be larger by without it. One that is alone has it all. */
static uint32_t check_each_alone(ms_model *m) {
    ms_memory_report r;
    uint32_t used = 0;
    int64_t most = 0;
    t_report(m, &r);
    check_freed(m);
    for (int k = 0; k < 3; ++k) {
        assert_true(r.freed_bytes[k] ==
                    live_without(m, k != 0, k != 1, k != 2) - (int64_t)r.lower_bound_bytes);
        used += r.freed_bytes[k] != 0;
        most = r.freed_bytes[k] > most ? r.freed_bytes[k] : most;
    }
    assert_true(used != 1 ||
                most == (int64_t)(m->run.plan->plain_live_bytes - r.lower_bound_bytes));
    return used;
}

static void techniques_have_what_the_plan_would_lose(void **state) {
    (void)state;
    uint32_t most = 0;
    for (int i = 0; i < 4; ++i) {
        zoo z;
        ms_config config = zoo_config();
        ms_memory_report r;
        const ms_hardware hardware = gpu_hardware(20.0);
        config.offloading = i < 2 ? MS_SWITCH_OFF : MS_SWITCH_ON;
        zoo_create_along(&z, &config, i % 2 == 0 ? 24 : 4, i % 2 == 0 ? 32 : 64, 0);
        ms_set_hardware(z.m, &hardware);
        zoo_keep_budgets(&z);
        for (uint64_t percent = 0; percent <= 100; percent += t_size(25, 20)) {
            zoo_wrap(&z, percent);
            const uint32_t used = check_each_alone(z.m);
            most = used > most ? used : most;
        }
        t_ok(z.m, ms_detach(z.m));
        t_report(z.m, &r);
        check_freed(z.m);
        for (int k = 0; k < MS_TECHNIQUE_COUNT; ++k) {
            assert_true(r.freed_bytes[k] == 0);
        }
        ms_destroy(z.m);
    }
    assert_int_equal(most, 3);
}

/* Graphs whose smallest plans recompute until eval, which takes as much as before, has the larger
   peak. */
static void what_is_freed_counts_the_peak_of_eval(void **state) {
    (void)state;
    static const uint64_t seeds[] = {264, 512, 601, 650, 833, 1097, 1248, 1478, 1487};
    uint32_t met = 0;
    for (size_t i = 0; i < sizeof seeds / sizeof seeds[0]; ++i) {
        char failure[RD_TEXT] = "";
        ms_config config = zoo_config();
        rd_graph *graph = rd_generate(seeds[i]);
        config.force_optimize = true;
        rd_net *net = rd_net_create(graph, &config, "net", failure, false);
        t_ok(net->model, ms_wrap(net->model));
        const msi_plan *plan = net->model->run.plan;
        const bool eval_is_larger = plan->eval.layout.peak_bytes > plan->train.layout.peak_bytes;
        met += check_each_alone(net->model) > 0 && eval_is_larger;
        rd_net_destroy(net);
        free(graph);
    }
    assert_true(met > 0); // otherwise look for other seeds
}

/* Plans for other sizes have what is resident where the plan for the largest sizes has it, in the
   same formats, and have room in its memory, on the device and on the host. */
static void other_sizes_keep_to_the_memory_there_is(void **state) {
    (void)state;
    enum { LARGEST = 64 };
    uint32_t on_host = 0, sent = 0;
    zoo z;
    ms_config config = zoo_config();
    ms_memory_report r;
    const ms_hardware hardware = gpu_hardware(20.0);
    config.offloading = MS_SWITCH_ON;
    config.max_host_bytes = (uint64_t)1 << 34;
    config.backend.has_state_formats = true;
    config.optimizer_8bit = MS_SWITCH_ON;
    zoo_create_along(&z, &config, LARGEST, 32, LARGEST);
    ms_set_hardware(z.m, &hardware);
    t_ok(z.m, ms_wrap(z.m));
    t_report(z.m, &r);
    const uint64_t plain = r.plain_bytes;
    for (uint64_t percent = 30; percent <= 80; percent += t_size(25, 5)) {
        int64_t rows = LARGEST;
        t_ok(z.m, ms_reshape(z.m, &rows));
        ms_set_budget(z.m, plain * percent / 100);
        t_ok(z.m, ms_wrap(z.m));
        t_report(z.m, &r);
        const uint64_t room = r.arena_bytes, host_room = r.host_bytes;
        for (rows = 1; rows < LARGEST; rows += 16) {
            t_ok(z.m, ms_reshape(z.m, &rows));
            t_report(z.m, &r);
            assert_true(r.arena_bytes <= room && r.host_bytes <= host_room);
            const msi_store *store = z.m->run.store;
            for (uint32_t k = 0; k < store->residents.count; ++k) {
                const msi_resident *there = &store->residents.items[k];
                const msi_range *range = &z.m->run.plan->train.code.ranges.items[k];
                assert_true(range->on_host == there->on_host && range->bytes == there->bytes);
                assert_true(range->format == there->format);
                on_host += there->on_host;
            }
            sent += z.m->run.plan->train.layout.sent_bytes > 0;
        }
    }
    assert_true(on_host > 0);
    assert_true(sent > 0);
    ms_destroy(z.m);
}

/* What a model holds on the host already is there for its next plan. */
static void the_host_memory_of_a_model_counts_as_free(void **state) {
    (void)state;
    zoo z;
    ms_config config = t_config();
    ms_memory_report before, after;
    ms_hardware hardware = gpu_hardware(20.0);
    config.offloading = MS_SWITCH_ON;
    zoo_create_along(&z, &config, 24, 32, 0);
    ms_set_hardware(z.m, &hardware);
    t_ok(z.m, ms_wrap(z.m));
    t_report(z.m, &before);
    ms_set_budget(z.m, before.plain_bytes * 60 / 100);
    t_ok(z.m, ms_wrap(z.m));
    t_report(z.m, &before);
    for (int left = 0; left < 2; ++left) { // a model that needs all that there is, wrapped again
        const uint64_t held = z.m->run.store->host_room;
        assert_true(held > 0 && before.host_bytes > 0);
        hardware.host_free_bytes = held / 4 + (left ? 0 : held);
        ms_set_hardware(z.m, &hardware);
        t_ok(z.m, ms_wrap(z.m));
        t_report(z.m, &after);
        assert_true((double)after.host_bytes <=
                    0.85 * ((double)hardware.host_free_bytes + (double)held));
        assert_true(left == 0 || after.host_bytes > hardware.host_free_bytes);
    }
    ms_destroy(z.m);
}

/* A refusal looks at plans of other modes and with other switches: some scale the loss, and cannot
   update inside backward. A device that has F16 alone rounds to it from the first plan on. */
static void a_refusal_scales_the_loss_where_it_must(void **state) {
    (void)state;
    static const char *const devices[] = {"RTX 3090", "T4"};
    for (int k = 0; k < 24; ++k) {
        ms_config config = t_config();
        ms_model *m;
        ms_layer_desc d;
        ms_tensor x;
        ms_optimizer_desc optimizer;
        config.dry_run = true;
        config.memory_budget_bytes = 1000;
        config.mode = (ms_mode)(k % 3);
        config.mixed_precision = k / 3 % 2 ? MS_SWITCH_OFF : MS_SWITCH_DEFAULT;
        config.mixed_dtype = k / 6 % 2 ? MS_DTYPE_F16 : MS_DTYPE_F32;
        t_ok(NULL, ms_create(&config, &m));
        ms_set_hardware(m, ms_hardware_find(devices[k / 12]));
        x = ms_input(m, "x", MS_DTYPE_F32, ms_shape2(64, 64));
        for (int i = 0; i < 4; ++i) {
            memset(&d, 0, sizeof d);
            d.in[0] = x;
            d.param[0] = ms_param(m, "w", MS_DTYPE_F32, ms_shape2(64, i < 3 ? 64 : 1));
            x = ms_activation(m, "a", MS_DTYPE_F32, ms_shape2(64, i < 3 ? 64 : 1));
            d.out[0] = x;
            d.dtypes.accepts = 1u << MS_DTYPE_BF16 | 1u << MS_DTYPE_F16;
            d.dtypes.f32_out = i == 3;
            ms_register_layer(m, &d);
        }
        ms_set_loss(m, x);
        memset(&optimizer, 0, sizeof optimizer);
        optimizer.kind = MS_OPTIMIZER_ADAMW;
        ms_set_optimizer(m, &optimizer);
        t_error(m, ms_wrap(m), MS_RESULT_BUDGET);
        t_text_has(ms_last_error(m), "the smallest feasible budget");
        if (config.mixed_precision != MS_SWITCH_OFF && k / 6 == 2) {
            assert_int_equal(m->graph.tensors.items[0].narrow, MSI_FORMAT_F16);
        }
        ms_destroy(m);
    }
}

/* The copies of a program and what is on the host meanwhile, as its events have them. */
typedef struct copied {
    uint64_t bytes[MS_STREAM_COUNT], host_bytes, mapped;
    double us[MS_STREAM_COUNT], wait_us, free_us;
    double mapped_gb_per_s;
} copied;

static void add_copy(const ms_event *event, void *user) {
    copied *c = (copied *)user;
    if (event->kind < MS_EVENT_DROP && event->stream == MS_STREAM_COMPUTE) {
        c->wait_us += event->kind == MS_EVENT_WAIT ? event->start_us - c->free_us : 0.0;
        c->free_us = event->start_us + event->duration_us;
    } else if (event->kind == MS_EVENT_LOSS || event->kind == MS_EVENT_INPUT) {
        c->free_us = event->start_us + event->duration_us;
    } else if (event->kind == MS_EVENT_COPY_IN || event->kind == MS_EVENT_COPY_OUT) {
        for (uint32_t k = 0; k < event->operand_count; k += 2) {
            const ms_event_operand *target = &event->operands[k], *source = target + 1;
            assert_true(target->is_on_host != source->is_on_host);
            assert_true(target->bytes == source->bytes);
            c->bytes[event->stream] += target->bytes;
        }
        c->us[event->stream] += event->duration_us;
    }
    for (uint32_t k = 0; k < event->operand_count && event->kind == MS_EVENT_UPDATE; ++k) {
        const uint64_t bytes = event->operands[k].is_on_host ? event->operands[k].bytes : 0;
        const double us = 2.0 * (double)bytes / (c->mapped_gb_per_s * 1e3);
        c->wait_us += us;
        for (int way = MS_STREAM_TO_DEVICE; way <= MS_STREAM_TO_HOST; ++way) {
            c->bytes[way] += bytes;
            c->us[way] += us;
        }
        c->mapped += bytes > 0;
    }
    c->host_bytes = event->host_bytes > c->host_bytes ? event->host_bytes : c->host_bytes;
}

/* Of what the report says about the host and its link, by the lists. */
static void reports_tell_what_is_moved(void **state) {
    (void)state;
    uint32_t moving = 0, hidden = 0;
    for (int i = 0; i < 4; ++i) {
        zoo z;
        ms_config config = zoo_config();
        const ms_hardware hardware = gpu_hardware(i < 2 ? 1000.0 : 2.0);
        config.offloading = MS_SWITCH_ON;
        zoo_create_along(&z, &config, i % 2 == 0 ? 24 : 4, i % 2 == 0 ? 32 : 64, 0);
        ms_set_hardware(z.m, &hardware);
        zoo_keep_budgets(&z);
        for (uint64_t percent = 0; percent <= 100; percent += 50) {
            copied c;
            ms_memory_report r;
            uint64_t sum = 0;
            memset(&c, 0, sizeof c);
            c.mapped_gb_per_s = 2.0 * hardware.to_host_gb_per_s;
            zoo_wrap(&z, percent);
            t_report(z.m, &r);
            t_ok(z.m, ms_visit_events(z.m, MS_PROGRAM_TRAIN, add_copy, &c));
            for (int k = 0; k < MS_CATEGORY_COUNT; ++k) {
                sum += r.host_bytes_of[k];
            }
            assert_true(sum == r.host_bytes && c.host_bytes <= r.host_bytes);
            assert_true(c.host_bytes + r.host_bytes_of[MS_CATEGORY_WORKSPACE] >= r.host_bytes);
            assert_true(r.to_device_bytes == c.bytes[MS_STREAM_TO_DEVICE]);
            assert_true(r.to_host_bytes == c.bytes[MS_STREAM_TO_HOST]);
            const double us = c.us[MS_STREAM_TO_DEVICE] + c.us[MS_STREAM_TO_HOST];
            assert_true(fabs(r.to_device_us + r.to_host_us - us) <= 1e-9 * us);
            assert_true(r.hidden_share >= 0.0 && r.hidden_share <= 1.0);
            assert_true(us > 0.0 || !(r.hidden_share > 0.0));
            assert_true(!(us > 0.0) || fabs((1.0 - r.hidden_share) * us - c.wait_us) <= 1e-4 * us);
            moving += us > 0.0 && r.host_bytes > 0;
            hidden += r.hidden_share > 0.5;
        }
        ms_destroy(z.m);
    }
    assert_true(moving > 6 && hidden > 0);
}

static int no_callback(const ms_call *call) {
    (void)call;
    return 0;
}

static int no_update(const ms_update_args *args) {
    (void)args;
    return 0;
}

static void find_longest(const ms_event *event, void *user) {
    uint32_t *most = (uint32_t *)user;
    const bool moves = event->kind == MS_EVENT_COPY_IN || event->kind == MS_EVENT_COPY_OUT ||
                       event->kind == MS_EVENT_WAIT;
    assert_true(!moves || event->operand_count % 2 == 0);
    most[0] = moves && event->operand_count > most[0] ? event->operand_count : most[0];
    most[1] += event->kind == MS_EVENT_COPY_OUT && event->operand_count == 8;
}

/* On a slow link to the host one wait may be for more values than a layer can have. */
static void a_wait_may_be_for_any_number_of_copies(void **state) {
    (void)state;
    enum { LAYERS = 80, ROWS = 256, COLS = 16 };
    ms_hardware hardware = gpu_hardware(1000.0);
    ms_optimizer_desc optimizer;
    ms_config config = t_config();
    ms_model *m;
    t_text trace = {NULL, 0};
    uint32_t most[2] = {0, 0};
    hardware.to_host_gb_per_s = 1e-6;
    config.dry_run = true;
    assert_int_equal(ms_create(&config, &m), MS_RESULT_OK);
    memset(&optimizer, 0, sizeof optimizer);
    optimizer.kind = MS_OPTIMIZER_CUSTOM;
    optimizer.update = no_update;
    optimizer.state_count = MS_LIMIT_OPTIMIZER_STATE;
    ms_set_optimizer(m, &optimizer);
    ms_set_hardware(m, &hardware);
    ms_tensor x = ms_input(m, "x", MS_DTYPE_F32, ms_shape2(ROWS, COLS));
    for (int i = 0; i < LAYERS; ++i) {
        ms_layer_desc d;
        memset(&d, 0, sizeof d);
        d.name = "linear";
        d.forward = d.backward = no_callback;
        d.in[0] = x;
        d.param[0] = ms_param(m, "w", MS_DTYPE_F32, ms_shape2(COLS, COLS));
        d.out[0] = x = ms_activation(m, "y", MS_DTYPE_F32, ms_shape2(ROWS, COLS));
        ms_register_layer(m, &d);
        ms_set_tensor_technique(m, ms_optimizer_state(m, d.param[0], 0), MS_TECHNIQUE_OFFLOADING,
                                MS_SWITCH_ON);
    }
    ms_set_loss(m, x);
    t_ok(m, ms_wrap(m));
    t_ok(m, ms_visit_events(m, MS_PROGRAM_TRAIN, find_longest, most));
    assert_true(most[0] > MSI_MAX_VIEWS + 1);
    assert_int_equal(most[1], LAYERS); // all state of a param at once
    t_ok(m, ms_print_trace(m, t_append, &trace));
    assert_non_null(strstr(trace.data, "\"op\":\"copy out\""));
    assert_non_null(strstr(trace.data, "\"bytes\":4096")); // of four tensors of 1 KiB
    free(trace.data);
    ms_destroy(m);
}

typedef struct copies_of {
    const ms_model *model;
    char text[1024];
} copies_of;

/* Appends what a copy has, and how many runs of memory that is at either end. */
static void append_copy(const ms_event *event, void *user) {
    copies_of *c = (copies_of *)user;
    uint32_t runs = 1;
    if (event->kind != MS_EVENT_COPY_IN && event->kind != MS_EVENT_COPY_OUT) {
        return;
    }
    const char *begin = event->kind == MS_EVENT_COPY_IN ? "in" : "out";
    for (uint32_t k = 0; k < event->operand_count; k += 2) {
        const ms_event_operand *o = &event->operands[k];
        const size_t used = strlen(c->text);
        snprintf(c->text + used, sizeof c->text - used, "%s %s", k > 0 ? "" : begin,
                 ms_tensor_name(c->model, o->tensor));
        runs += k > 0 && (o[0].offset != o[-2].offset + o[-2].bytes ||
                          o[1].offset != o[-1].offset + o[-1].bytes);
    }
    const size_t used = strlen(c->text);
    snprintf(c->text + used, sizeof c->text - used, "%s", runs == 1 ? "; " : " (apart); ");
}

/* A dry model with AdamW, on a device that cannot use state on the host where it is. */
static ms_model *adamw_model(uint64_t budget_bytes) {
    ms_hardware hardware = gpu_hardware(1000.0);
    ms_optimizer_desc optimizer;
    ms_config config = t_config();
    ms_model *m;
    hardware.mapped_gb_per_s = 1e-3;
    config.dry_run = true;
    config.memory_budget_bytes = budget_bytes;
    assert_int_equal(ms_create(&config, &m), MS_RESULT_OK);
    ms_set_hardware(m, &hardware);
    memset(&optimizer, 0, sizeof optimizer);
    optimizer.kind = MS_OPTIMIZER_ADAMW;
    ms_set_optimizer(m, &optimizer);
    return m;
}

/* A layer that has these params, up to three, and reads some of them in backward. */
static ms_tensor layer_of(ms_model *m, ms_tensor x, const ms_tensor *params, uint32_t reads,
                          ms_switch early) {
    ms_layer_desc d;
    memset(&d, 0, sizeof d);
    d.name = "layer";
    d.forward = d.backward = no_callback;
    d.in[0] = x;
    memcpy(d.param, params, 3 * sizeof *params);
    d.out[0] = ms_activation(m, "y", MS_DTYPE_F32, ms_tensor_shape(m, x));
    d.backward_reads.in = 1;
    d.backward_reads.param = reads;
    ms_set_layer_technique(m, ms_register_layer(m, &d), MS_TECHNIQUE_EARLY_UPDATE, early);
    return d.out[0];
}

/* A param whose value has its home on the host, and perhaps its state. */
static ms_tensor moved_param(ms_model *m, const char *name, ms_shape shape, bool with_state) {
    const ms_tensor param = ms_param(m, name, MS_DTYPE_F32, shape);
    ms_set_tensor_technique(m, param, MS_TECHNIQUE_OFFLOADING, MS_SWITCH_ON);
    ms_set_tensor_technique(m, ms_gradient(m, param), MS_TECHNIQUE_OFFLOADING, MS_SWITCH_OFF);
    ms_set_tensor_technique(m, ms_optimizer_state(m, param, 0), MS_TECHNIQUE_OFFLOADING,
                            with_state ? MS_SWITCH_ON : MS_SWITCH_OFF);
    return param;
}

static void expect_copies(ms_model *m, const char *expected) {
    copies_of copies;
    memset(&copies, 0, sizeof copies);
    copies.model = m;
    t_ok(m, ms_visit_events(m, MS_PROGRAM_TRAIN, append_copy, &copies));
    assert_string_equal(copies.text, expected);
}

/* A norm and two matrix products, of whose params and state all is moved: what is in which copy. The
   copies of V and a for forward serve backward too, which reads V alone: they do not lie together,
   since V is there for longer. */
static void params_of_a_layer_move_in_one_copy(void **state) {
    (void)state;
    static const struct {
        int64_t width;
        bool early;        // updates inside backward, where the params are on the device already
        bool two_matrices; // the last layer has no bias, but one more matrix
        const char *copies;
    } cases[] = {
        {64, false, false,
         "in gamma beta; in V a (apart); in W b (apart); in gamma beta gamma gamma beta beta; "
         "in V a V V a a; out gamma beta gamma gamma beta beta; out V a V V a a; "
         "in W b W W b b; out W b W W b b; "},
        {64, true, false,
         "in gamma beta; in V a (apart); in W b (apart); in W W b b; out W; "
         "out b W W b b (apart); in V V a a; out V; out a V V a a (apart); "
         "in gamma gamma beta beta; out gamma beta; out gamma gamma beta beta; "},
        {60, false, false, // no multiple of 64 bytes
         "in gamma beta (apart); in V a (apart); in W b (apart); "
         "in gamma beta gamma gamma beta beta (apart); in V a V V a a (apart); "
         "out gamma beta gamma gamma beta beta (apart); out V a V V a a (apart); "
         "in W b W W b b (apart); out W b W W b b (apart); "},
        {192, false, true, // a matrix is not small
         "in gamma beta; in V a (apart); in W; in b; in gamma beta gamma gamma beta beta; "
         "in V a V V a a; out gamma beta gamma gamma beta beta; out V a V V a a; "
         "in W W W; out W W W; in b b b; out b b b; "},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; ++i) {
        static const char *const names[] = {"gamma", "beta", "V", "a", "W", "b"};
        const ms_shape row = ms_shape1(cases[i].width);
        const ms_shape matrix = ms_shape2(cases[i].width, cases[i].width);
        ms_model *m = adamw_model(0);
        ms_tensor x = ms_input(m, "x", MS_DTYPE_F32, ms_shape2(16, cases[i].width));
        for (int k = 0; k < 3; ++k) {
            const bool two = k == 2 && cases[i].two_matrices;
            const ms_tensor params[3] = {moved_param(m, names[2 * k], k == 0 ? row : matrix, true),
                                         moved_param(m, names[2 * k + 1], two ? matrix : row, true),
                                         {0}};
            x = layer_of(m, x, params, k == 0 ? 3 : 1,
                         cases[i].early ? MS_SWITCH_ON : MS_SWITCH_OFF);
        }
        ms_set_loss(m, x);
        t_ok(m, ms_wrap(m));
        expect_copies(m, cases[i].copies);
        ms_destroy(m);
    }
}

/* Appends who is updated, and what comes home. */
static void append_update(const ms_event *event, void *user) {
    copies_of *c = (copies_of *)user;
    const size_t used = strlen(c->text);
    if (event->kind == MS_EVENT_UPDATE) {
        snprintf(c->text + used, sizeof c->text - used, "%s; ",
                 ms_tensor_name(c->model, event->tensor));
    } else if (event->kind == MS_EVENT_COPY_OUT) {
        append_copy(event, user);
    }
}

/* An update of the trainer's own sees its param as a whole, and may fail: those before it are home by
   then. Others come in parts, or together. */
static void updates_of_the_trainers_own_come_whole_and_alone(void **state) {
    (void)state;
    static const struct {
        ms_optimizer_kind kind;
        uint64_t part_bytes;
        const char *updates;
    } cases[] = {
        {MS_OPTIMIZER_ADAMW, 1 << 20, "W; b; c; out W b c W W b b c c; "},
        {MS_OPTIMIZER_CUSTOM, 1 << 20,
         "W; out W W W (apart); b; out b b b (apart); c; out c c c (apart); "},
        {MS_OPTIMIZER_ADAMW, 8192,
         "W; out W W W (apart); W; out W W W (apart); b; c; out b c b b c c (apart); "},
        {MS_OPTIMIZER_CUSTOM, 8192,
         "W; out W W W (apart); b; out b b b (apart); c; out c c c (apart); "},
    };
    const uint64_t part_bytes = t_hook.part_bytes;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; ++i) {
        t_hook.part_bytes = cases[i].part_bytes;
        ms_model *m = adamw_model(0);
        ms_optimizer_desc optimizer;
        copies_of updates;
        memset(&updates, 0, sizeof updates);
        memset(&optimizer, 0, sizeof optimizer);
        updates.model = m;
        optimizer.kind = cases[i].kind;
        optimizer.update = cases[i].kind == MS_OPTIMIZER_CUSTOM ? no_update : NULL;
        optimizer.state_count = cases[i].kind == MS_OPTIMIZER_CUSTOM ? 2 : 0;
        ms_set_optimizer(m, &optimizer);
        const ms_tensor params[3] = {moved_param(m, "W", ms_shape2(64, 64), true),
                                     moved_param(m, "b", ms_shape1(64), true),
                                     moved_param(m, "c", ms_shape1(64), true)};
        ms_set_loss(m, layer_of(m, ms_input(m, "x", MS_DTYPE_F32, ms_shape2(16, 64)), params, 1,
                                MS_SWITCH_OFF));
        t_ok(m, ms_wrap(m));
        t_ok(m, ms_visit_events(m, MS_PROGRAM_TRAIN, append_update, &updates));
        assert_string_equal(updates.text, cases[i].updates);
        ms_destroy(m);
    }
    t_hook.part_bytes = part_bytes;
}

/* Of what comes together, each may serve another layer too: V is copied twice, not once for each
   use, and is on the device once. */
static void a_shared_param_is_copied_once(void **state) {
    (void)state;
    const ms_shape row = ms_shape1(256);
    ms_model *m = adamw_model(0);
    ms_memory_report report;
    ms_tensor x = ms_input(m, "x", MS_DTYPE_F32, ms_shape2(16, 256));
    const ms_tensor v = moved_param(m, "V", ms_shape2(256, 256), false);
    const ms_tensor first[3] = {v, moved_param(m, "a", row, true), {0}};
    const ms_tensor second[3] = {v, moved_param(m, "b", row, true), {0}};
    x = layer_of(m, x, first, 3, MS_SWITCH_OFF);
    x = layer_of(m, x, second, 3, MS_SWITCH_OFF);
    ms_set_loss(m, x);
    t_ok(m, ms_wrap(m));
    expect_copies(m, "in V a; in b; in V a a a; in b b b; out V a a a; out b b b; ");
    memset(&report, 0, sizeof report);
    t_ok(m, ms_report(m, &report));
    assert_int_equal(report.arena_bytes, 1133568);
    ms_destroy(m);
}

/* What is kept for a later use counts in the peak from where it would have ended, which may be
   sooner than where the other values end that came with it. */
static void what_is_kept_is_counted(void **state) {
    (void)state;
    const ms_shape matrix = ms_shape2(256, 256);
    ms_model *m = adamw_model(2000000);
    ms_memory_report report;
    ms_tensor x = ms_input(m, "x", MS_DTYPE_F32, ms_shape2(16, 256));
    const ms_tensor v = moved_param(m, "V", matrix, false);
    const ms_tensor first[3] = {v, {0}, {0}};
    const ms_tensor second[3] = {moved_param(m, "W", matrix, true), v,
                                 moved_param(m, "a", ms_shape1(256), true)};
    x = layer_of(m, x, first, 1, MS_SWITCH_ON);
    x = layer_of(m, x, second, 7, MS_SWITCH_ON);
    ms_set_loss(m, x);
    t_ok(m, ms_wrap(m));
    memset(&report, 0, sizeof report);
    t_ok(m, ms_report(m, &report));
    assert_int_equal(report.arena_bytes, 1888256); // 65 us is what the smallest plan takes
    assert_true(report.step_us < 14.0);
    ms_destroy(m);
}

enum { TIED_LAYERS = 4, TIED_PARAMS = 6, TIED_SLOTS = 3, TIED_PARTS = 3 };

/* A chain of layers whose params are tied at random, within a layer too, where everything is said: what
   is lent, moved, coded, and updated early. The parts of a param: value, gradient, state. */
typedef struct tied {
    ms_model *m;
    uint32_t param_of[TIED_LAYERS][TIED_SLOTS], user[TIED_PARAMS]; // the first layer that has it
    ms_tensor param[TIED_PARAMS];
    bool lent[TIED_PARAMS][TIED_PARTS], moved[TIED_PARAMS][TIED_PARTS];
    bool coded[TIED_PARAMS], early[TIED_PARAMS];
    float memory[TIED_PARAMS][TIED_PARTS + 1][128 * 128];
} tied;

static ms_switch on_or_off(bool on) {
    return on ? MS_SWITCH_ON : MS_SWITCH_OFF;
}

static ms_tensor tied_part(const tied *t, uint32_t p, int part) {
    return part == 0   ? t->param[p]
           : part == 1 ? ms_gradient(t->m, t->param[p])
                       : ms_optimizer_state(t->m, t->param[p], part - 2);
}

static void tied_say(tied *t, t_rng *rng, uint32_t p) {
    ms_set_tensor_technique(t->m, t->param[p], EARLY_UPDATE, on_or_off(t->early[p]));
    ms_set_tensor_technique(t->m, t->param[p], MS_TECHNIQUE_OPTIMIZER_8BIT, on_or_off(t->coded[p]));
    const bool moves = t_chance(rng, 0.5);
    for (int part = 0; part < TIED_PARTS; ++part) {
        t->lent[p][part] = !t->coded[p] && !(part == 1 && t->early[p]) && t_chance(rng, 0.3);
        t->moved[p][part] =
            moves && !t->lent[p][part] && !(part == 1 && t->early[p]) && t_chance(rng, 0.6);
        for (int k = part; k < TIED_PARTS + (part == 2); k += part == 2 ? 1 : TIED_PARTS) {
            const ms_tensor of = tied_part(t, p, k);
            if (t->lent[p][part]) {
                t_ok(t->m, ms_borrow(t->m, of, t->memory[p][k]));
            } else {
                ms_set_tensor_technique(t->m, of, OFFLOADING, on_or_off(t->moved[p][part]));
            }
        }
    }
}

static void tied_create(tied *t, t_rng *rng) {
    memset(t, 0, sizeof *t);
    t->m = adamw_model(0);
    ms_tensor x = ms_input(t->m, "x", MS_DTYPE_F32, ms_shape2(16, 16));
    for (uint32_t p = 0; p < TIED_PARAMS; ++p) {
        t->param[p] = ms_param(t->m, "w", MS_DTYPE_F32, ms_shape2(p % 2 ? 128 : 8 + p, 128));
        t->user[p] = UINT32_MAX;
        t->coded[p] = t_chance(rng, 0.3);
        t->early[p] = t_chance(rng, 0.5);
    }
    for (uint32_t i = 0; i < TIED_LAYERS; ++i) {
        ms_layer_desc d =
            zoo_layer("layer", x, ms_activation(t->m, "y", MS_DTYPE_F32, ms_shape2(16, 16)));
        for (uint32_t k = 0; k < TIED_SLOTS; ++k) {
            const bool again = k > 0 && t_chance(rng, 0.4);
            const uint32_t p = again ? t->param_of[i][t_below(rng, k)] : t_below(rng, TIED_PARAMS);
            t->param_of[i][k] = p;
            t->user[p] = t->user[p] == UINT32_MAX ? i : t->user[p];
            d.param[k] = t->param[p];
        }
        d.backward_reads.param = (1u << TIED_SLOTS) - 1;
        ms_register_layer(t->m, &d);
        x = d.out[0];
    }
    ms_set_loss(t->m, x);
    for (uint32_t p = 0; p < TIED_PARAMS; ++p) {
        if (t->user[p] == UINT32_MAX) {
            ms_set_frozen(t->m, t->param[p], true);
        } else {
            tied_say(t, rng, p);
        }
    }
    t_ok(t->m, ms_wrap(t->m));
}

/* Adds what the first layer that has a param tells of it. */
static void tied_add(const tied *t, uint32_t p, uint64_t *saved, uint64_t *refused) {
    const uint64_t value = msi_align(ms_tensor_bytes(t->m, t->param[p]));
    const uint64_t wide = 2 * value;
    const uint64_t coded = 2 * msi_align(msi_format_bytes(MSI_FORMAT_8BIT, value / 4));
    const bool *moved = t->moved[p];
    const bool any = moved[0] || moved[1] || moved[2];
    const uint64_t bytes[TIED_PARTS] = {value, value, t->coded[p] ? coded : wide};
    for (int part = 0; part < TIED_PARTS; ++part) {
        const bool is_there = !t->lent[p][part] && !(part == 1 && t->early[p]);
        saved[OFFLOADING] += moved[part] ? bytes[part] : 0;
        refused[OFFLOADING] += !any && is_there ? bytes[part] : 0;
    }
    saved[EARLY_UPDATE] += t->early[p] ? value : 0;
    refused[EARLY_UPDATE] += !t->early[p] && !t->lent[p][1] ? value : 0;
    const bool may = !t->lent[p][2] && !moved[2];
    saved[MS_TECHNIQUE_OPTIMIZER_8BIT] += t->coded[p] && may ? wide - coded : 0;
    refused[MS_TECHNIQUE_OPTIMIZER_8BIT] += !t->coded[p] && may ? wide - coded : 0;
}

/* What several layers have, and what one has in several slots, is told of once: at the first layer. */
static void tied_params_are_told_of_once(void **state) {
    (void)state;
    static tied t;
    t_rng rng = t_seed(1);
    uint32_t tied_once = 0;
    for (int turn = 0; turn < 12; ++turn) {
        decisions d;
        tied_create(&t, &rng);
        get_decisions(t.m, &d);
        for (uint32_t i = 0; i < TIED_LAYERS; ++i) {
            uint64_t saved[MS_TECHNIQUE_COUNT], refused[MS_TECHNIQUE_COUNT];
            memset(saved, 0, sizeof saved);
            memset(refused, 0, sizeof refused);
            for (uint32_t p = 0; p < TIED_PARAMS; ++p) {
                if (t.user[p] == i) {
                    tied_add(&t, p, saved, refused);
                }
            }
            for (uint32_t k = 1; k < TIED_SLOTS; ++k) {
                tied_once += t.param_of[i][k] == t.param_of[i][0];
            }
            for (int k = EARLY_UPDATE; k <= MS_TECHNIQUE_OPTIMIZER_8BIT; ++k) {
                if (d.at[i][k].saved_bytes != saved[k] || d.at[i][k].refused_bytes != refused[k]) {
                    fail_msg("turn %d, layer %u, %s: saved %llu, not %llu; refused %llu, not %llu",
                             turn, (unsigned)i, ms_technique_name((ms_technique)k),
                             (unsigned long long)d.at[i][k].saved_bytes,
                             (unsigned long long)saved[k],
                             (unsigned long long)d.at[i][k].refused_bytes,
                             (unsigned long long)refused[k]);
                }
            }
        }
        ms_destroy(t.m);
    }
    assert_true(tied_once > 5);
}

/* The row of a layer in a listing. */
static const char *row_of(const char *text, const char *name) {
    const char *table = strstr(text, "\nlayer ");
    const char *row = table ? strstr(table, name) : NULL;
    assert_non_null(row);
    return row;
}

static void has_refused_cell(const char *text, int i, const ms_decision *c) {
    char name[24], cell[96];
    snprintf(name, sizeof name, " act%d ", i);
    snprintf(cell, sizeof cell, "- checkpointing     %-15s%11s%8.20s", c->rule->id, "16.00 KiB",
             msi_time(c->refused_us).text);
    const char *row = row_of(text, name);
    assert_true(strstr(row, cell) != NULL && strstr(row, cell) < strchr(row, '\n'));
}

/* What is refused has the bytes that it would save, and the time that it would cost. */
static void refused_rows_have_numbers(void **state) {
    (void)state;
    zoo z;
    decisions d;
    t_text text = {NULL, 0};
    ms_config config = zoo_config();
    const uint64_t values = 256 * 16 * 4, weights = 16 * 16 * 4;
    zoo_create(&z, &config);
    ms_set_layer_technique(z.m, z.linear[0], MS_TECHNIQUE_CHECKPOINTING, MS_SWITCH_OFF);
    zoo_wrap(&z, 100); // one layer has another rule, so that each has a line
    get_decisions(z.m, &d);
    t_ok(z.m, ms_print_plan_full(z.m, t_append, &text));
    for (int i = 0; i < ZOO_BLOCKS - 1; ++i) {
        const ms_decision *of_act = decision_of(&d, z.act[i], CHECKPOINTING);
        has_refused_cell(text.data, i, of_act); // with its time, though nothing is applied
        assert_true(of_act->refused_bytes == values && of_act->refused_us > 0.0);
        const ms_decision *of_linear = decision_of(&d, z.linear[i], EARLY_UPDATE);
        const bool none = i == ZOO_SHARED || i == ZOO_FROZEN || i == ZOO_BORROWED;
        assert_true(of_linear->refused_bytes == (none ? 0 : weights));
        assert_true(decision_of(&d, z.linear[i], CHECKPOINTING)->refused_bytes == 0); // unread
    }
    assert_true(decision_of(&d, z.act[ZOO_BLOCKS - 1], CHECKPOINTING)->refused_bytes == 0);
    free(text.data);
    memset(&text, 0, sizeof text);
    zoo_wrap(&z, 80);
    get_decisions(z.m, &d);
    t_ok(z.m, ms_print_plan_full(z.m, t_append, &text));
    uint32_t refused = 0;
    for (int i = 0; i < ZOO_BLOCKS; ++i) {
        const ms_decision *c = decision_of(&d, z.act[i], CHECKPOINTING);
        if (strcmp(c->rule->id, "fits") == 0) {
            has_refused_cell(text.data, i, c);
            refused++;
        }
    }
    assert_true(refused > 0);
    free(text.data);
    ms_destroy(z.m);
}

/* A chain of `blocks` blocks of three layers, between two others. */
static ms_model *blocks_create(const char *name, int blocks, uint64_t budget, double slower) {
    static const char *const parts[] = {"norm", "product", "squash"};
    ms_config config = zoo_config();
    ms_model *m;
    config.memory_budget_bytes = budget;
    assert_int_equal(ms_create(&config, &m), MS_RESULT_OK);
    const ms_shape shape = ms_shape2(64, 16);
    ms_tensor x = ms_input(m, "x", MS_DTYPE_F32, shape);
    for (int i = 0; i < 3 * blocks + 2; ++i) {
        const int part = (i + 2) % 3;
        char text[64];
        const bool inner = i > 0 && i <= 3 * blocks;
        snprintf(text, sizeof text,
                 inner    ? "%s%d.%s"
                 : i == 0 ? "begin"
                          : "end",
                 name, (i - 1) / 3, parts[part]);
        ms_tensor y = ms_activation(m, text, MS_DTYPE_F32, shape);
        ms_layer_desc d = zoo_layer(text, x, y);
        if (part == 1) {
            d.param[0] = ms_param(m, text, MS_DTYPE_F32, ms_shape2(16, 16));
            d.backward_reads.in = d.backward_reads.param = 1;
        } else {
            d.backward_reads.out = 1;
        }
        const ms_layer_time time = {1.0, 2.0, i == 3 * blocks - 2 ? slower : 1.0};
        ms_set_layer_time(m, ms_register_layer(m, &d), &time);
        x = y;
    }
    ms_set_loss(m, x);
    t_ok(m, ms_wrap(m));
    return m;
}

static void equal_blocks_are_one_entry(void **state) {
    (void)state;
    t_text folded = {NULL, 0}, full = {NULL, 0};
    decisions d;
    ms_model *m = blocks_create("h", 12, (uint64_t)1 << 40, 1.5);
    get_decisions(m, &d);
    for (uint32_t i = 0; i < 38; ++i) {
        const bool first = i >= 1 && i <= 3;
        assert_int_equal(d.at[i][0].alike_count, first ? 12 : i == 0 || i == 37 ? 1 : 0);
        assert_true(!first || ms_layer_index(m, d.at[i][0].alike_last) == i + 33);
    }
    t_ok(m, ms_print_plan(m, t_append, &folded));
    t_ok(m, ms_print_plan_full(m, t_append, &full));
    t_text_has(folded.data, "\n    2  h0..11.product          12 ");
    t_text_has(folded.data, "\n   37  end ");
    t_text_has(folded.data, " 12  params               h0..11.product ");
    t_text_has(folded.data, "\ncount: ");
    t_text_has(folded.data, "\nkept: ");
    assert_null(strstr(folded.data, "h1."));
    assert_null(strstr(row_of(full.data, "name"), ".."));
    t_text_has(full.data, "\n   20  h6.product ");
    t_text_has(full.data, "\nevery value of a training step\n");
    ms_destroy(m);
    m = blocks_create("h", 12, (uint64_t)1 << 40, 3.0); // one layer takes much longer
    get_decisions(m, &d);
    assert_int_equal(d.at[1][0].alike_count, 11);
    assert_int_equal(d.at[35][0].alike_count, 1);
    ms_destroy(m);
    free(folded.data);
    free(full.data);
}

/* Layers that one stands for are decided alike, and by the same rules. */
static void what_is_one_entry_has_one_rule(void **state) {
    (void)state;
    for (int k = 0; k < MS_TECHNIQUE_COUNT; ++k) {
        decisions d;
        ms_model *m = blocks_create("h", 12, (uint64_t)1 << 40, 1.0);
        ms_set_layer_technique(m, msi_layer_handle(&m->graph, 20), (ms_technique)k, MS_SWITCH_OFF);
        t_ok(m, ms_wrap(m));
        get_decisions(m, &d);
        assert_string_equal(d.at[20][k].rule->id, "forbidden");
        for (uint32_t i = 0, covered = 0; i < 38; i += covered) {
            const uint32_t count = d.at[i][0].alike_count;
            const uint32_t last = ms_layer_index(m, d.at[i][0].alike_last);
            const uint32_t period = count > 1 ? (last - i) / (count - 1) : 1;
            assert_true(count > 0);
            covered = count * period;
            for (uint32_t j = period; j < covered; ++j) {
                for (int t = 0; t < MS_TECHNIQUE_COUNT; ++t) {
                    const ms_decision *a = &d.at[i + j % period][t], *b = &d.at[i + j][t];
                    assert_true(a->rule == b->rule && a->is_applied == b->is_applied);
                    assert_true(a->saved_bytes == b->saved_bytes && a->kept_bytes == b->kept_bytes);
                    assert_true(a->refused_bytes == b->refused_bytes && b->alike_count == 0);
                }
            }
        }
        ms_destroy(m);
    }
}

/* Rows of few kinds, with periods and without. Every row is one of its block, or of a block that
   another stands for; and there is no chance for quadratic time. */
static void blocks_are_found_anywhere(void **state) {
    (void)state;
    enum { MOST = 100000 };
    msi_alike *rows = (msi_alike *)malloc(MOST * sizeof *rows);
    assert_non_null(rows);
    for (uint64_t seed = 0; seed < 60; ++seed) {
        t_rng rng = t_seed(seed);
        const uint32_t count = seed < 4 ? (uint32_t)MOST : 1 + t_below(&rng, 300);
        const uint64_t kinds = seed == 0 ? 1 : 1 + t_next(&rng) % 3;
        const uint32_t period = 1 + (uint32_t)(t_next(&rng) % 40);
        uint32_t alone = 0, at = 0;
        for (uint32_t i = 0; i < count; ++i) {
            const bool again = i >= period && t_next(&rng) % 100 != 0;
            rows[i].key = again ? rows[i - period].key : t_next(&rng) % kinds;
            rows[i].us = 0.0;
            rows[i].count = rows[i].last = 0;
        }
        msi_find_alike(rows, count);
        while (at < count) {
            const uint32_t blocks = rows[at].count;
            uint32_t layers = 1;
            assert_true(blocks > 0);
            if (blocks > 1) {
                layers = (rows[at].last - at) / (blocks - 1);
            }
            for (uint32_t i = at; i < at + layers * blocks; ++i) {
                const uint32_t first = at + (i - at) % layers;
                assert_true(rows[i].key == rows[first].key);
                assert_int_equal(rows[i].count, i == first ? blocks : 0);
                assert_true(i != first || rows[i].last == i + (blocks - 1) * layers);
            }
            alone += blocks == 1;
            at += layers * blocks;
        }
        assert_true(at == count && (seed != 0 || rows[0].count == count));
        assert_true(seed >= 4 || alone < count / 2);
    }
    free(rows);
}

static void names_are_joined(void **state) {
    (void)state;
    static const struct {
        const char *first, *last, *joined;
    } cases[] = {{"h0.ln1", "h11.ln1", "h0..11.ln1"},
                 {"ln", "ln", "ln"},
                 {"7", "12", "7..12"},
                 {"", "", ""},
                 {"a9b8c", "a9b10c", "a9b8..10c"},
                 {"block 3", "block 03", "block 3..03"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; ++i) {
        t_text text = {NULL, 0};
        const msi_printer out = {t_append, &text};
        t_append("", 0, &text);
        assert_true(msi_mix_name(1, cases[i].first) == msi_mix_name(1, cases[i].last));
        assert_true(msi_print_names(NULL, cases[i].first, cases[i].last) ==
                    strlen(cases[i].joined));
        (void)msi_print_names(&out, cases[i].first, cases[i].last);
        assert_string_equal(text.data, cases[i].joined);
        free(text.data);
    }
    assert_true(msi_mix_name(1, "h1.a") != msi_mix_name(1, "h1.b"));
    assert_true(msi_mix_name(1, "h1") != msi_mix_name(1, "1h"));
    assert_true(msi_mix_name(1, "h") != msi_mix_name(1, "h1"));
}

/* Of more kinds of values than there is room for, the largest are listed, whatever their order. */
static void the_largest_kinds_are_listed(void **state) {
    (void)state;
    enum { KINDS = MSI_MOST_VALUES + 2 };
    for (int rising = 0; rising < 2; ++rising) {
        msi_peak_listing to;
        ms_lifetime l;
        memset(&to, 0, sizeof to);
        memset(&l, 0, sizeof l);
        l.name = "";
        l.is_at_peak = true;
        for (uint64_t pass = 0; pass < 2; ++pass) {
            for (uint64_t k = 1; k <= KINDS; ++k) {
                l.bytes = 64 * (rising ? k : KINDS + 1 - k);
                (pass == 0 ? msi_find_values : msi_sum_values)(&l, &to);
            }
            if (pass == 0) {
                msi_choose_values(&to);
            }
        }
        assert_int_equal(to.listed_count, MSI_LISTED_VALUES);
        for (uint64_t k = 0; k < MSI_LISTED_VALUES; ++k) {
            assert_true(to.listed[k].count == 1 && to.listed[k].bytes == 64 * (KINDS - k));
        }
        assert_true(to.bytes == (uint64_t)64 * KINDS * (KINDS + 1) / 2);
    }
}

/* A size that is needed can be typed in again; one that is there does not ask for more. */
static void sizes_can_be_typed_in_again(void **state) {
    (void)state;
    static const char units[] = "bKMGTPE";
    t_rng rng = t_seed(7);
    for (int i = 0; i < 20000; ++i) {
        const uint64_t bytes = i < 4096 ? (uint64_t)i : t_next(&rng) >> (14 + t_next(&rng) % 50);
        for (int up = 0; up < 2; ++up) {
            char *end;
            const msi_words text = up ? msi_size(bytes) : msi_size_down(bytes);
            double value = strtod(text.text, &end);
            const char *unit = strchr(units, end[1]);
            assert_true(*end == ' ' && unit != NULL && strlen(text.text) < 14);
            const double one = (double)((uint64_t)1 << 10 * (unit - units));
            const uint64_t typed = (uint64_t)(value * one);
            assert_true(up ? typed >= bytes : typed <= bytes);
            assert_true(fabs(value * one - (double)bytes) <= 0.011 * one);
        }
    }
    assert_string_equal(msi_size(2ull << 30).text, "2.00 GiB");
    assert_string_equal(msi_size((2ull << 30) + 1).text, "2.01 GiB");
    assert_string_equal(msi_size_down((2ull << 30) - 1).text, "1.99 GiB");
    assert_string_equal(msi_signed_size(-1536).text, "-1.50 KiB");
}

/* Where a predicted time is, is what it is predicted from. */
static void times_say_where_they_come_from(void **state) {
    (void)state;
    t_text text = {NULL, 0};
    zoo z;
    ms_config config = zoo_config();
    zoo_create(&z, &config);
    zoo_wrap(&z, 60);
    t_ok(z.m, ms_print_plan(z.m, t_append, &text));
    t_text_has(text.data, "predicted (roofline): a step ");
    free(text.data);
    text.data = NULL;
    text.length = 0;
    for (uint32_t i = 0; i < ZOO_LAYERS; ++i) {
        const ms_layer_time time = {1.0, 2.0, 1.0};
        ms_set_layer_time(z.m, msi_layer_handle(&z.m->graph, i), &time);
    }
    t_ok(z.m, ms_wrap(z.m));
    t_ok(z.m, ms_print_plan(z.m, t_append, &text));
    t_text_has(text.data, "predicted (measured): a step ");
    free(text.data);
    ms_destroy(z.m);
}

typedef struct told {
    uint32_t debug, info_rules, info_policy;
    char last[256];
    char all[8192];
} told;

static void tell(ms_log_level level, const char *tag, const char *text, void *user) {
    told *t = (told *)user;
    t->debug += level == MS_LOG_DEBUG;
    t->info_rules += level == MS_LOG_INFO && strcmp(tag, "rules") == 0;
    t->info_policy += level == MS_LOG_INFO && strcmp(tag, "policy") == 0;
    if (level == MS_LOG_INFO && strlen(t->all) + strlen(text) + 2 < sizeof t->all) {
        strcat(t->all, text);
        strcat(t->all, "\n");
    }
    snprintf(t->last, sizeof t->last, "%s", text);
}

static void the_log_is_told_why(void **state) {
    (void)state;
    zoo z;
    told t;
    ms_config config = zoo_config();
    memset(&t, 0, sizeof t);
    config.log = tell;
    config.log_user = &t;
    zoo_create(&z, &config);
    zoo_wrap(&z, 25);
    memset(&t, 0, sizeof t);
    ms_clear_hardware(z.m); // so that it plans again
    t_ok(z.m, ms_wrap(z.m));
    decisions d;
    uint32_t applied = 0;
    get_decisions(z.m, &d);
    for (uint32_t i = 0; i < d.count; ++i) {
        applied += d.at[i / MS_TECHNIQUE_COUNT][i % MS_TECHNIQUE_COUNT].is_applied;
    }
    assert_int_equal(t.debug, applied); // a line for each
    assert_int_equal(t.info_rules, 1 + MS_TECHNIQUE_COUNT);
    t_text_has(t.all, "mode BALANCED (rule), pressure ");
    t_text_has(t.all, "checkpointing: ");
    t_text_has(t.all, "tiling: 0 of ");
    ms_destroy(z.m);
}

// ------------------------------------------------------------------------------------------------
// where nothing fits

/* The number of rows that the text of an error says would fit; 0: not even one, -1: it says
   nothing. */
static long long rows_said(const char *text) {
    static const char words[] = "has room for at least ";
    const char *at = strstr(text, words);
    if (at != NULL) {
        return strtoll(at + strlen(words), NULL, 10);
    }
    return strstr(text, "Even 1 in ") != NULL ? 0 : -1;
}

typedef struct size_case {
    bool is_chain;
    int64_t largest; // of an axis; 0: none
    ms_switch checkpointing;
} size_case;

/* A model of so many rows, registered anew. */
static ms_result wrap_with(const size_case *c, int64_t rows, uint64_t budget, char *text) {
    ms_config config = zoo_config();
    ms_result result;
    config.memory_budget_bytes = budget;
    config.checkpointing = c->checkpointing;
    if (c->is_chain) {
        t_chain chain;
        assert_int_equal(t_chain_create(&chain, &config, 12, rows, 24), MS_RESULT_OK);
        result = ms_wrap(chain.model);
        snprintf(text, MSI_ERROR_BYTES, "%s", ms_last_error(chain.model));
        ms_destroy(chain.model);
    } else {
        zoo z;
        zoo_create_along(&z, &config, c->largest ? 1 : rows, 24, c->largest ? rows : 0);
        result = ms_wrap(z.m);
        snprintf(text, MSI_ERROR_BYTES, "%s", ms_last_error(z.m));
        ms_destroy(z.m);
    }
    return result;
}

/* What the text says fits, fits when it is registered anew, and one more does not. */
static void the_size_that_fits(void **state) {
    (void)state;
    static const size_case cases[] = {{true, 0, MS_SWITCH_DEFAULT},
                                      {true, 0, MS_SWITCH_OFF},
                                      {false, 0, MS_SWITCH_DEFAULT},
                                      {false, 1, MS_SWITCH_DEFAULT}};
    uint32_t some = 0, none = 0;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; ++i) {
        const int64_t rows = 300;
        char text[MSI_ERROR_BYTES], other[MSI_ERROR_BYTES];
        assert_int_equal(wrap_with(&cases[i], rows, 1, text), MS_RESULT_BUDGET);
        const char *at = strstr(text, "(");
        assert_non_null(at);
        const uint64_t smallest = strtoull(at + 1, NULL, 10);
        for (uint64_t percent = 30; percent < 100; percent += t_size(14, 7)) {
            const uint64_t budget = smallest * percent / 100;
            assert_int_equal(wrap_with(&cases[i], rows, budget, text), MS_RESULT_BUDGET);
            const long long said = rows_said(text);
            assert_true(said >= 0 && said < rows);
            some += said > 0;
            none += said == 0;
            if (said > 0) {
                assert_int_equal(wrap_with(&cases[i], said, budget, other), MS_RESULT_OK);
            }
            assert_int_equal(wrap_with(&cases[i], said + 1, budget, other), MS_RESULT_BUDGET);
            t_text_has(text, cases[i].largest ? "axis \"batch\"" : "first dim of input \"x\"");
        }
    }
    assert_true(some > 10 && none > 0);
}

/* A size whose smallest arena is exactly the budget fits. */
static void a_size_of_exactly_the_budget_fits(void **state) {
    (void)state;
    static const size_case cases[] = {{true, 0, MS_SWITCH_OFF}, {false, 1, MS_SWITCH_OFF}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; ++i) {
        for (int64_t rows = 1; rows < 60; rows += 24) {
            char text[MSI_ERROR_BYTES];
            assert_int_equal(wrap_with(&cases[i], rows, 1, text), MS_RESULT_BUDGET);
            const uint64_t smallest = strtoull(strstr(text, "(") + 1, NULL, 10);
            assert_int_equal(wrap_with(&cases[i], 60, smallest, text), MS_RESULT_BUDGET);
            const long long said = rows_said(text);
            assert_true(said >= rows);
            assert_int_equal(wrap_with(&cases[i], said + 1, smallest, text), MS_RESULT_BUDGET);
        }
    }
}

/* Wraps a model, which ends here, and copies its error. */
static ms_result wrap_once(ms_model *m, char *text) {
    const ms_result result = ms_wrap(m);
    snprintf(text, MSI_ERROR_BYTES, "%s", ms_last_error(m));
    ms_destroy(m);
    return result;
}

/* A perceptron whose shapes have the batch as a factor of their only dim. */
static ms_result wrap_flat(int64_t batch, uint64_t budget, char *text) {
    static const int64_t widths[] = {50, 300, 170, 400, 90, 130};
    ms_config config = zoo_config();
    ms_model *m = NULL;
    config.memory_budget_bytes = budget;
    assert_int_equal(ms_create(&config, &m), MS_RESULT_OK);
    ms_tensor last = ms_input(m, "x", MS_DTYPE_F32, ms_shape1(batch * 70));
    const ms_tensor truth = ms_input(m, "truth", MS_DTYPE_F32, ms_shape1(batch));
    for (int i = 0; i < 6; ++i) {
        const ms_tensor out = ms_activation(m, "h", MS_DTYPE_F32, ms_shape1(batch * widths[i]));
        ms_layer_desc d = zoo_layer("connected", last, out);
        d.param[0] = ms_param(m, "w", MS_DTYPE_F32, ms_shape1(8));
        ms_register_layer(m, &d);
        last = out;
    }
    const ms_tensor loss = ms_activation(m, "loss", MS_DTYPE_F32, ms_shape1(1));
    ms_layer_desc d = zoo_layer("loss", last, loss);
    d.in[1] = truth;
    ms_register_layer(m, &d);
    ms_set_loss(m, loss);
    return wrap_once(m, text);
}

/* Where the first dim is batch * n, what is computed from it shrinks with it all the same: the text
   says so, and the batch that it leaves room for fits. */
static void the_batch_is_a_factor_of_the_first_dim(void **state) {
    (void)state;
    const int64_t batch = 64;
    char text[MSI_ERROR_BYTES], other[MSI_ERROR_BYTES];
    assert_int_equal(wrap_flat(batch, 1, text), MS_RESULT_BUDGET);
    const uint64_t smallest = strtoull(strstr(text, "(") + 1, NULL, 10);
    for (uint64_t percent = 1; percent < 100; percent += 14) {
        const uint64_t budget = smallest * percent / 100;
        assert_int_equal(wrap_flat(batch, budget, text), MS_RESULT_BUDGET);
        t_text_has(text, ", if all that is computed from it shrinks in proportion, flops too");
        const int64_t fits = rows_said(text) / 70;
        if (fits > 0) {
            assert_int_equal(wrap_flat(fits, budget, other), MS_RESULT_OK);
        }
        assert_int_equal(wrap_flat(fits + 1, budget, other), MS_RESULT_BUDGET);
    }
    assert_int_equal(wrap_flat(batch, 10, text), MS_RESULT_BUDGET);
    t_text_has(text, "is too much for this budget, even if all that is computed from it shrinks");
}

enum { HEAVY_LAYERS = 4, HEAVY_COLS = 256, HEAVY_ROWS = 900 };

/* A perceptron whose params and their state, of 3 MiB, weigh as much as its values at 200 rows. */
static ms_result wrap_heavy(int64_t rows, ms_config config, uint64_t budget, bool lends,
                            char *text) {
    static float lent[HEAVY_LAYERS][HEAVY_COLS * HEAVY_COLS];
    const ms_shape shape = ms_shape2(rows, HEAVY_COLS);
    const ms_optimizer_desc adamw = t_optimizer(MS_OPTIMIZER_ADAMW, 1e-3f);
    ms_model *m = NULL;
    config.memory_budget_bytes = budget;
    assert_int_equal(ms_create(&config, &m), MS_RESULT_OK);
    ms_tensor last = ms_input(m, "x", MS_DTYPE_F32, shape);
    for (int i = 0; i < HEAVY_LAYERS; ++i) {
        const ms_tensor out = ms_activation(m, "h", MS_DTYPE_F32, shape);
        ms_layer_desc d = zoo_layer("connected", last, out);
        d.param[0] = ms_param(m, "w", MS_DTYPE_F32, ms_shape2(HEAVY_COLS, HEAVY_COLS));
        if (lends) {
            t_ok(m, ms_borrow(m, d.param[0], lent[i]));
        }
        ms_register_layer(m, &d);
        last = out;
    }
    const ms_tensor loss = ms_activation(m, "loss", MS_DTYPE_F32, ms_shape1(rows));
    const ms_layer_desc d = zoo_layer("loss", last, loss);
    ms_register_layer(m, &d);
    ms_set_loss(m, loss);
    ms_set_optimizer(m, &adamw);
    return wrap_once(m, text);
}

/* Params that exceed the budget alone as they are declared leave room for a batch all the same, where
   their state is in 8 bits, some of it is on a host with little memory, or they are the trainer's. */
static void a_batch_fits_beside_params_that_shrink(void **state) {
    (void)state;
    const uint64_t budget = (uint64_t)(2.8 * 1048576.0);
    ms_config configs[] = {zoo_config(), zoo_config(), zoo_config()};
    configs[0].optimizer_8bit = MS_SWITCH_ON;
    configs[1].offloading = MS_SWITCH_ON;
    configs[1].max_host_bytes = 1u << 20;
    for (int i = 0; i < 3; ++i) {
        char text[MSI_ERROR_BYTES];
        assert_int_equal(wrap_heavy(HEAVY_ROWS, configs[i], budget, i == 2, text),
                         MS_RESULT_BUDGET);
        const long long said = rows_said(text);
        assert_true(said > (i == 1 ? 5 : 100));
        assert_int_equal(wrap_heavy(said, configs[i], budget, i == 2, text), MS_RESULT_OK);
    }
}

enum { KEPT_TOKENS = 6, KEPT_COLS = 32, KEPT_BATCH = 48 };

/* A net in tiles whose rows stay together in fours or, if each token of a sequence is one, in those of
   two sequences. Its layers read a table as well, which is not of the batch. */
static ms_result wrap_kept(int64_t batch, bool along, uint32_t axes, uint64_t budget, char *text) {
    ms_config config = zoo_config();
    ms_model *m = NULL;
    ms_shape shape = ms_shape3(batch, KEPT_TOKENS, KEPT_COLS);
    const ms_shape of_table = ms_shape2(50, 2 * KEPT_COLS);
    config.memory_budget_bytes = budget;
    assert_int_equal(ms_create(&config, &m), MS_RESULT_OK);
    shape = along ? ms_along(shape, 0, ms_add_axis(m, "batch", batch, batch)) : shape;
    ms_tensor last = ms_input(m, "x", MS_DTYPE_F32, shape);
    const ms_tensor table = ms_input(m, "table", MS_DTYPE_F32, of_table);
    const ms_tensor turned = ms_activation(m, "turned", MS_DTYPE_F32, of_table);
    ms_layer_desc d = zoo_layer("turn", table, turned);
    ms_register_layer(m, &d);
    for (int i = 0; i < 4; ++i) {
        d = zoo_layer("rows", last, ms_activation(m, "h", MS_DTYPE_F32, shape));
        d.in[1] = turned;
        d.param[0] = ms_param(m, "w", MS_DTYPE_F32, ms_shape1(8));
        d.backward_reads.in = 3;
        d.tile.axes = axes;
        d.tile.whole_in = 2;
        d.tile.multiple = axes == 1 ? 4 : 2 * KEPT_TOKENS;
        ms_register_layer(m, &d);
        last = d.out[0];
    }
    const ms_tensor loss = ms_activation(m, "loss", MS_DTYPE_F32, ms_shape1(1));
    d = zoo_layer("loss", last, loss);
    ms_register_layer(m, &d);
    ms_set_loss(m, loss);
    return wrap_once(m, text);
}

/* The batch that has room is one whose rows stay together, as many as fit: of what is not of the batch
   nothing shrinks with it. */
static void sizes_keep_rows_together(void **state) {
    (void)state;
    uint32_t named = 0;
    for (int k = 0; k < 4; ++k) {
        const bool along = k % 2 == 1;
        const uint32_t axes = 1 + (uint32_t)k / 2;
        const int64_t unit = axes == 1 ? 4 : 2;
        char text[MSI_ERROR_BYTES], other[MSI_ERROR_BYTES];
        assert_int_equal(wrap_kept(KEPT_BATCH, along, axes, 1, text), MS_RESULT_BUDGET);
        const uint64_t smallest = strtoull(strstr(text, "(") + 1, NULL, 10);
        for (uint64_t percent = 35; percent < 100; percent += 13) {
            const uint64_t budget = smallest * percent / 100;
            assert_int_equal(wrap_kept(KEPT_BATCH, along, axes, budget, text), MS_RESULT_BUDGET);
            const long long said = rows_said(text);
            if (said > 0) {
                assert_true(said % unit == 0);
                assert_int_equal(wrap_kept(said, along, axes, budget, other), MS_RESULT_OK);
                assert_int_equal(wrap_kept(said + unit, along, axes, budget, other),
                                 MS_RESULT_BUDGET);
                named++;
            }
        }
    }
    assert_true(named > 10);
}

/* Whatever sizes are in force, a refusal is about the largest. */
static void a_refusal_is_about_the_largest_sizes(void **state) {
    (void)state;
    zoo largest, less;
    ms_config config = zoo_config();
    config.checkpointing = MS_SWITCH_OFF;
    zoo_create_along(&largest, &config, 200, 24, 200);
    zoo_create_along(&less, &config, 50, 24, 200);
    const uint64_t budget = budget_between(largest.m, 0) / 4 * 3;
    ms_set_budget(largest.m, budget);
    ms_set_budget(less.m, budget);
    t_error(largest.m, ms_wrap(largest.m), MS_RESULT_BUDGET);
    t_error(less.m, ms_wrap(less.m), MS_RESULT_BUDGET);
    assert_string_equal(ms_last_error(largest.m), ms_last_error(less.m));
    ms_destroy(largest.m);
    ms_destroy(less.m);
}

/* An axis of a later dim, or of a later input, says more than a first dim that has none. */
static void advice_names_the_foremost_axis(void **state) {
    (void)state;
    for (int second = 0; second < 2; ++second) {
        ms_config config = zoo_config();
        ms_model *m = NULL;
        config.memory_budget_bytes = 4096;
        assert_int_equal(ms_create(&config, &m), MS_RESULT_OK);
        const ms_axis length = ms_add_axis(m, "length", 64, 64);
        const ms_shape shape = ms_along(ms_shape2(8, 64), 1, length);
        const ms_tensor mask = ms_input(m, "mask", MS_DTYPE_F32, second ? ms_shape2(8, 4) : shape);
        const ms_tensor x = second ? ms_input(m, "x", MS_DTYPE_F32, shape) : mask;
        const ms_tensor out = ms_activation(m, "out", MS_DTYPE_F32, shape);
        ms_layer_desc d = zoo_layer("layer", x, out);
        d.param[0] = ms_param(m, "w", MS_DTYPE_F32, ms_shape1(8));
        d.in[1] = mask;
        ms_register_layer(m, &d);
        const ms_tensor loss = ms_activation(m, "loss", MS_DTYPE_F32, ms_shape1(1));
        d = zoo_layer("loss", out, loss);
        ms_register_layer(m, &d);
        ms_set_loss(m, loss);
        t_error(m, ms_wrap(m), MS_RESULT_BUDGET);
        t_text_has(ms_last_error(m), "in the axis \"length\", now 64");
        ms_destroy(m);
    }
}

/* Of several inputs the first that has an axis in the foremost dim tells the batch, whatever axes
   the others have; without one, the first that has a dim. */
static void the_first_foremost_axis_is_the_batch(void **state) {
    (void)state;
    enum { INPUTS = 3 };
    uint32_t later = 0;
    for (uint64_t seed = 1; seed <= 100; ++seed) {
        ms_config config = zoo_config();
        ms_model *m = NULL;
        t_rng rng = t_seed(seed);
        uint32_t input = MSI_NONE, axis = MSI_NONE, found_axis, of[INPUTS][MS_LIMIT_RANK];
        assert_int_equal(ms_create(&config, &m), MS_RESULT_OK);
        ms_axis axes[2];
        axes[0] = ms_add_axis(m, "batch", 8, 8);
        axes[1] = ms_add_axis(m, "length", 8, 8);
        memset(of, 0xff, sizeof of); // MSI_NONE
        for (uint32_t t = 0; t < INPUTS; ++t) {
            ms_shape shape = ms_shape4(8, 8, 8, 8);
            shape.rank = (int32_t)t_below(&rng, 5);
            for (int dim = 0; dim < shape.rank; ++dim) {
                of[t][dim] = t_chance(&rng, 0.3) ? t_below(&rng, 2) : MSI_NONE;
                shape = of[t][dim] == MSI_NONE ? shape : ms_along(shape, dim, axes[of[t][dim]]);
            }
            input = input == MSI_NONE && shape.rank > 0 ? t : input;
            (void)ms_activation(m, "no input", MS_DTYPE_F32, ms_along(ms_shape1(8), 0, axes[0]));
            (void)ms_input(m, "input", MS_DTYPE_F32, shape);
        }
        for (int dim = 0; dim < MS_LIMIT_RANK && axis == MSI_NONE; ++dim) {
            for (uint32_t t = 0; t < INPUTS && axis == MSI_NONE; ++t) {
                axis = of[t][dim];
                input = axis == MSI_NONE ? input : t;
            }
        }
        later += axis != MSI_NONE && input > 0;
        const uint32_t found = msi_find_batch(&m->graph, &found_axis);
        assert_true(found == (input == MSI_NONE ? MSI_NONE : 2 * input + 1) && found_axis == axis);
        ms_destroy(m);
    }
    assert_true(later > 20);
}

/* Neither the sizes nor the plan that was in force change by an error, nor does the next plan. */
static void an_error_changes_nothing(void **state) {
    (void)state;
    for (int along = 0; along < 2; ++along) {
        zoo z, fresh;
        ms_config config = zoo_config();
        ms_memory_report before, after;
        zoo_create_along(&z, &config, 100, 24, along ? 200 : 0);
        zoo_create_along(&fresh, &config, 100, 24, along ? 200 : 0);
        const uint64_t budget = budget_between(fresh.m, 40);
        ms_set_budget(fresh.m, budget);
        t_ok(fresh.m, ms_wrap(fresh.m));
        ms_set_budget(z.m, 10000); // not yet wrapped
        t_error(z.m, ms_wrap(z.m), MS_RESULT_BUDGET);
        assert_true(ms_tensor_shape(z.m, z.hidden[2]).dim[0] == 100);
        assert_true(ms_tensor_bytes(z.m, z.hidden[2]) == 100 * 24 * 4);
        ms_set_budget(z.m, budget);
        t_ok(z.m, ms_wrap(z.m));
        t_report(z.m, &before);
        t_report(fresh.m, &after);
        assert_true(before.plan_hash == after.plan_hash && before.arena_bytes == after.arena_bytes);
        t_text listings[2] = {{NULL, 0}, {NULL, 0}};
        t_ok(z.m, ms_print_plan(z.m, t_append, &listings[0]));
        ms_set_budget(z.m, 10000);
        t_error(z.m, ms_wrap(z.m), MS_RESULT_BUDGET);
        t_report(z.m, &after);
        assert_memory_equal(&before, &after, sizeof before);
        t_ok(z.m, ms_print_plan(z.m, t_append, &listings[1])); // times too
        assert_string_equal(listings[0].data, listings[1].data);
        for (uint32_t t = 0; t < z.m->graph.tensors.count; ++t) {
            const msi_tensor *a = &z.m->graph.tensors.items[t];
            const msi_tensor *b = &fresh.m->graph.tensors.items[t];
            assert_memory_equal(a->view.shape.dim, b->view.shape.dim, sizeof a->view.shape.dim);
            assert_true(a->bytes == b->bytes && a->largest_bytes == b->largest_bytes);
        }
        free(listings[0].data);
        free(listings[1].data);
        ms_destroy(z.m);
        ms_destroy(fresh.m);
    }
}

/* Bytes on the host of the smallest plan of a random graph, with what is forced there too. */
static uint64_t host_bytes_within(uint64_t seed, uint64_t limit, bool forced) {
    char failure[RD_TEXT] = "";
    const ms_hardware hardware = gpu_hardware(100.0);
    ms_config config = t_config();
    ms_memory_report report;
    t_rng rng = t_seed(seed);
    config.dry_run = config.force_optimize = true;
    config.max_host_bytes = limit;
    rd_graph *g = rd_generate(seed);
    rd_net *n = rd_net_create(g, &config, "limited", failure, true);
    ms_set_hardware(n->model, &hardware);
    if (forced) {
        rd_force_moves(n, &rng);
    }
    t_ok(n->model, ms_wrap(n->model));
    t_report(n->model, &report);
    rd_net_destroy(n);
    free(g);
    return report.host_bytes;
}

/* Nothing is moved beyond max_host_bytes, but for what is forced. */
static void the_limit_of_the_host_holds(void **state) {
    (void)state;
    const uint64_t end = 1 + t_sweep(12, 200);
    uint32_t limited = 0, kept = 0;
    for (uint64_t seed = 1; seed < end; ++seed) {
        const uint64_t least = host_bytes_within(seed, 1, false);
        const uint64_t most = host_bytes_within(seed, (uint64_t)1 << 40, false);
        const uint64_t limit = least + (most - least) / 2;
        if (most > least) {
            assert_in_range(host_bytes_within(seed, limit, false), least, limit);
            limited += 1;
        }
        kept += host_bytes_within(seed, 1, true) > 1;
    }
    assert_true(limited > 2 && kept > 2);
}

/* What is tried for the text of the error is not left in the config. */
static void an_error_leaves_the_config(void **state) {
    (void)state;
    for (int k = 0; k < 3; ++k) {
        ms_model *m;
        ms_config config = zoo_config();
        const ms_hardware hardware = gpu_hardware(100.0);
        config.offloading = k == 0 ? MS_SWITCH_ON : MS_SWITCH_DEFAULT;
        config.auto_policy = k == 1;
        config.checkpointing = k == 2 ? MS_SWITCH_OFF : MS_SWITCH_DEFAULT;
        config.max_host_bytes = 5000;
        config.memory_budget_bytes = 1000;
        assert_int_equal(ms_create(&config, &m), MS_RESULT_OK);
        ms_set_hardware(m, &hardware);
        ms_tensor x = ms_input(m, "x", MS_DTYPE_F32, ms_shape2(8, 32));
        for (int i = 0; i < 2; ++i) {
            const ms_tensor w = ms_param(m, "w", MS_DTYPE_F32, ms_shape2(32, 32));
            const ms_tensor params[3] = {w, {0}, {0}};
            x = layer_of(m, x, params, 1, MS_SWITCH_DEFAULT);
        }
        ms_set_loss(m, x);
        config = m->config;
        t_error(m, ms_wrap(m), MS_RESULT_BUDGET);
        assert_true(k == 2 || strstr(ms_last_error(m), "With max_host_bytes of ") != NULL);
        assert_memory_equal(&m->config, &config, sizeof config);
        ms_destroy(m);
    }
}

/* A text says all that it has to say, however long that is; but no cure that frees nothing. */
static void a_long_refusal_is_whole(void **state) {
    (void)state;
    zoo z;
    ms_config config = zoo_config();
    config.memory_budget_bytes = 1000;
    config.tiling = MS_SWITCH_OFF; // no layer can be in tiles
    zoo_create(&z, &config);
    t_error(z.m, ms_wrap(z.m), MS_RESULT_BUDGET);
    assert_null(strstr(ms_last_error(z.m), "With ON"));
    ms_destroy(z.m);
    config.tiling = MS_SWITCH_DEFAULT;
    config.mode = MS_MODE_CONSERVATIVE;
    config.checkpointing = config.mixed_precision = config.optimizer_8bit = MS_SWITCH_OFF;
    config.accumulation_steps = 2;
    config.max_host_bytes = 1;
    config.offloading = MS_SWITCH_ON;
    zoo_create(&z, &config);
    const ms_hardware hardware = gpu_hardware(100.0);
    ms_set_hardware(z.m, &hardware);
    ms_set_tensor_technique(z.m, z.hidden[1], CHECKPOINTING, MS_SWITCH_OFF);
    t_error(z.m, ms_wrap(z.m), MS_RESULT_BUDGET);
    const char *text = ms_last_error(z.m);
    t_text_has(text, "With max_host_bytes of ");
    t_text_has(text, "With ON for checkpointing");
    t_text_has(text, ". No early updates, since accumulation_steps is above 1. ");
    assert_string_equal(text + strlen(text) - strlen("are forbidden a technique"),
                        "are forbidden a technique");
    print_message("%zu characters: %s\n", strlen(text), text);
    ms_destroy(z.m);
}

/* A random net of 3 to 8 layers, in a mode that rounds. */
static ms_result plan_small_net(uint64_t seed, uint64_t budget, ms_memory_report *report,
                                uint64_t *least) {
    t_rng rng = t_seed(seed);
    ms_model *m;
    ms_config config = zoo_config();
    const ms_hardware hardware = gpu_hardware(100.0);
    const int layers = 3 + (int)t_below(&rng, 6);
    const int64_t rows = 16 << t_below(&rng, 4), cols = 64 << t_below(&rng, 2);
    config.dry_run = true;
    config.mode = MS_MODE_AGGRESSIVE;
    config.offloading = MS_SWITCH_OFF;
    config.memory_budget_bytes = budget;
    assert_int_equal(ms_create(&config, &m), MS_RESULT_OK);
    ms_set_hardware(m, &hardware);
    ms_tensor x = ms_input(m, "x", MS_DTYPE_F32, ms_shape2(rows, cols));
    for (int i = 0; i < layers; ++i) {
        const int64_t more = 16 * (int64_t)t_below(&rng, 8);
        const ms_tensor w = ms_param(m, "w", MS_DTYPE_F32, ms_shape2(cols + more, cols));
        const ms_tensor params[3] = {w, {0}, {0}};
        x = layer_of(m, x, params, 1, MS_SWITCH_DEFAULT);
    }
    ms_set_loss(m, x);
    const ms_result result = ms_wrap(m);
    if (result == MS_RESULT_OK) {
        t_report(m, report);
    }
    if (least != NULL) {
        t_ok(m, ms_smallest_budget(m, least));
    }
    ms_destroy(m);
    return result;
}

/* Of all budgets at which the plan changes, one at most is slower than one byte less: the least with
   which a plan fits that neither rounds nor recomputes. */
static void one_budget_may_be_slower_than_a_byte_less(void **state) {
    (void)state;
    const uint64_t end = 1 + t_sweep(6, 200);
    uint32_t steps = 0;
    for (uint64_t seed = 1; seed < end; ++seed) {
        ms_memory_report above, below;
        uint64_t least;
        uint32_t slower = 0;
        assert_int_equal(plan_small_net(seed, (uint64_t)1 << 40, &above, &least), MS_RESULT_OK);
        while (above.arena_bytes > least) {
            assert_int_equal(plan_small_net(seed, above.arena_bytes - 1, &below, NULL),
                             MS_RESULT_OK);
            assert_true(below.arena_bytes < above.arena_bytes);
            if (below.step_us < above.step_us) {
                assert_string_equal(above.found_by, "base");
                assert_int_equal(above.recompute_count, 0);
                slower++;
            }
            above = below;
        }
        assert_true(slower <= 1);
        steps += slower;
    }
    print_message("%u budgets are slower than a byte less\n", (unsigned)steps);
    assert_true(steps > 0);
}

enum { HOST_ROWS = 64, HOST_COLS = 64, HOST_LAYERS = 4 };

/* A model on a GPU, for so much on the device and on the host. */
static ms_model *host_model(ms_config config, uint64_t budget, uint64_t host_bytes) {
    ms_model *m;
    const ms_hardware hardware = gpu_hardware(100.0);
    config.max_host_bytes = host_bytes;
    config.memory_budget_bytes = budget;
    assert_int_equal(ms_create(&config, &m), MS_RESULT_OK);
    ms_set_hardware(m, &hardware);
    return m;
}

/* Plans a net whose params are most of its memory for so much on the device and on the host. */
static ms_result plan_with_host(uint64_t budget, uint64_t host_bytes, char *error,
                                ms_memory_report *report) {
    ms_config config = zoo_config();
    config.dry_run = true;
    ms_model *m = host_model(config, budget, host_bytes);
    ms_tensor x = ms_input(m, "x", MS_DTYPE_F32, ms_shape2(HOST_ROWS, HOST_COLS));
    for (int i = 0; i < HOST_LAYERS; ++i) {
        const ms_tensor w =
            ms_param(m, "w", MS_DTYPE_F32, ms_shape2(HOST_COLS + 16 * i, HOST_COLS));
        const ms_tensor params[3] = {w, {0}, {0}};
        x = layer_of(m, x, params, 1, MS_SWITCH_DEFAULT);
    }
    ms_set_loss(m, x);
    const ms_result result = ms_wrap(m);
    memset(report, 0, sizeof *report);
    if (result == MS_RESULT_OK) {
        t_report(m, report);
    }
    snprintf(error, 1024, "%s", ms_last_error(m));
    ms_destroy(m);
    return result;
}

/* The error of a plan for which the host is too small names what is enough for its budget, and two
   thirds of that are not. */
static void enough_host_memory_is_named(void **state) {
    (void)state;
    char error[1024];
    ms_memory_report plain, report;
    uint32_t named = 0;
    assert_int_equal(plan_with_host((uint64_t)1 << 40, 1, error, &plain), MS_RESULT_OK);
    for (uint64_t percent = 40; percent <= 80; percent += 20) {
        const uint64_t budget = plain.arena_bytes * percent / 100;
        if (plan_with_host(budget, (uint64_t)1 << 40, error, &report) != MS_RESULT_OK) {
            continue;
        }
        for (uint64_t part = 1; part < 4; ++part) {
            const uint64_t most = 1 + report.host_bytes * part / 4;
            ms_memory_report other;
            if (plan_with_host(budget, most, error, &other) == MS_RESULT_OK) {
                assert_true(other.host_bytes <= most);
                continue;
            }
            const char *text = strstr(error, "With max_host_bytes of ");
            assert_non_null(text);
            assert_non_null(strstr(text, ", this budget is enough"));
            const uint64_t least = strtoull(strchr(text, '(') + 1, NULL, 10);
            assert_true(least > most);
            assert_int_equal(plan_with_host(budget, least, error, &other), MS_RESULT_OK);
            assert_int_equal(plan_with_host(budget, least / 3 * 2, error, &other),
                             MS_RESULT_BUDGET);
            named++;
        }
    }
    print_message("%u limits were named\n", (unsigned)named);
    assert_true(named > 2);
}

/* A chain whose values can be moved but not dropped, with its params on the host or on the device. */
static ms_result wrap_on_host(int64_t rows, ms_switch early, uint64_t budget, uint64_t host_bytes,
                              char *text) {
    ms_config config = zoo_config();
    config.checkpointing = MS_SWITCH_OFF;
    config.early_update = early;
    ms_model *m = host_model(config, budget, host_bytes);
    ms_tensor x = ms_input(m, "x", MS_DTYPE_F32, ms_shape2(rows, 32));
    for (int i = 0; i < 3; ++i) {
        const ms_tensor w = ms_param(m, "w", MS_DTYPE_F32, ms_shape2(32, 32));
        const ms_tensor params[3] = {w, {0}, {0}};
        x = layer_of(m, x, params, 1, MS_SWITCH_DEFAULT);
    }
    ms_set_loss(m, x);
    return wrap_once(m, text);
}

/* Where values of a large batch take all the room on the host, those of a smaller one leave it to
   params: what is said to be too much for any size is refused for one row. */
static void a_smaller_batch_leaves_the_host_to_params(void **state) {
    (void)state;
    uint32_t some = 0, none = 0;
    for (uint64_t host = 8192; host <= 16384; host += 8192) {
        char text[MSI_ERROR_BYTES];
        assert_int_equal(wrap_on_host(64, MS_SWITCH_DEFAULT, 1, host, text), MS_RESULT_BUDGET);
        const uint64_t smallest = strtoull(strstr(text, "(") + 1, NULL, 10);
        for (uint64_t percent = 12; percent < 100; percent += t_size(24, 12)) {
            const uint64_t budget = smallest * percent / 100;
            assert_int_equal(wrap_on_host(64, MS_SWITCH_DEFAULT, budget, host, text),
                             MS_RESULT_BUDGET);
            const long long said = rows_said(text);
            assert_true(said >= 0);
            assert_int_equal(
                wrap_on_host(said > 0 ? said : 1, MS_SWITCH_DEFAULT, budget, host, text),
                said > 0 ? MS_RESULT_OK : MS_RESULT_BUDGET);
            some += said > 0;
            none += said == 0;
        }
    }
    assert_true(some > 4 && none > 0);
}

enum { WAITING_LAYERS = 9 };

/* A chain in tiles whose gradients wait for the norm of all of them: their memory on the host is that of
   values which have come back by then, so that less is used there than all that moves adds up to. */
static ms_result wrap_waiting(uint64_t seed, uint64_t budget, uint64_t host_bytes, char *text) {
    ms_config config = zoo_config();
    ms_optimizer_desc optimizer = ms_optimizer_defaults(MS_OPTIMIZER_ADAMW);
    t_rng rng = t_seed(seed);
    config.checkpointing = MS_SWITCH_OFF;
    config.offloading = config.tiling = MS_SWITCH_ON;
    ms_model *m = host_model(config, budget, host_bytes);
    optimizer.grad_clip_norm = 0.5f;
    ms_set_optimizer(m, &optimizer);
    ms_tensor last = ms_input(m, "x", MS_DTYPE_F32, ms_shape2(4, 32));
    for (int i = 0; i < WAITING_LAYERS; ++i) {
        const int64_t rows = 8 + 8 * (int64_t)t_below(&rng, 16);
        const int64_t cols = 16 + 16 * (int64_t)t_below(&rng, 8);
        const ms_tensor out = ms_activation(m, "y", MS_DTYPE_F32, ms_shape2(4, cols));
        ms_layer_desc d = zoo_layer("layer", last, out);
        d.param[0] = ms_param(m, "w", MS_DTYPE_F32, ms_shape2(rows, 32));
        d.backward_reads.in = d.backward_reads.param = 1;
        d.tile.axes = 1;
        ms_register_layer(m, &d);
        last = out;
    }
    ms_set_loss(m, last);
    return wrap_once(m, text);
}

/* A second ms_wrap with the limit and the budget that a refusal names has a plan. Often a tenth less of
   the host is enough as well, but not three quarters of it. */
static void what_is_named_of_the_host_suffices(void **state) {
    (void)state;
    for (uint64_t seed = 1; seed <= t_sweep(3, 40); ++seed) {
        char text[MSI_ERROR_BYTES], other[MSI_ERROR_BYTES];
        assert_int_equal(wrap_waiting(seed, 1, 1, text), MS_RESULT_BUDGET);
        const char *at = strstr(text, "With max_host_bytes of ");
        assert_non_null(at);
        const uint64_t host = strtoull(strchr(at, '(') + 1, NULL, 10);
        const char *size = strstr(strchr(at, ')'), ": ");
        const uint64_t bytes = strtoull(strchr(size, '(') + 1, NULL, 10);
        assert_int_equal(wrap_waiting(seed, bytes, host, other), MS_RESULT_OK);
        assert_int_equal(wrap_waiting(seed, bytes, host / 4 * 3, other), MS_RESULT_BUDGET);
    }
}

/* Plans a random graph; fills in the report of a plan. */
static ms_result plan_random(uint64_t seed, ms_mode mode, uint64_t budget, uint64_t host_bytes,
                             char *error, ms_memory_report *report) {
    char failure[RD_TEXT] = "";
    const ms_hardware hardware = gpu_hardware(100.0);
    ms_config config = t_config();
    config.dry_run = true;
    config.mode = mode;
    config.memory_budget_bytes = budget;
    config.max_host_bytes = host_bytes;
    rd_graph *g = rd_generate(seed);
    rd_net *n = rd_net_create(g, &config, "refused", failure, true);
    ms_set_hardware(n->model, &hardware);
    const ms_result result = ms_wrap(n->model);
    snprintf(error, MSI_ERROR_BYTES, "%s", ms_last_error(n->model));
    if (report != NULL) {
        t_report(n->model, report);
    }
    rd_net_destroy(n);
    free(g);
    return result;
}

/* A size as it is printed, such as "1.25 MiB". */
static uint64_t size_said(const char *text) {
    char *end;
    const double size = strtod(text, &end);
    const double unit = strncmp(end, " KiB", 4) == 0   ? 1024.0
                        : strncmp(end, " MiB", 4) == 0 ? 1048576.0
                                                       : 1.0;
    return (uint64_t)(size * unit + 0.5);
}

/* Does what the text of a refusal names. Returns how many things were named. */
static uint32_t do_as_said(uint64_t seed, ms_mode mode, uint64_t budget, uint64_t host_bytes,
                           const char *text) {
    static const char words[] = "no more than ", host[] = "With max_host_bytes of ";
    char error[MSI_ERROR_BYTES];
    uint32_t named = 1;
    const uint64_t smallest = strtoull(strchr(text, '(') + 1, NULL, 10);
    assert_int_equal(plan_random(seed, mode, smallest, host_bytes, error, NULL), MS_RESULT_OK);
    assert_int_equal(plan_random(seed, mode, smallest - 1, host_bytes, error, NULL),
                     MS_RESULT_BUDGET);
    for (const char *at = strstr(text, words); at != NULL; at = strstr(at + 1, words)) {
        const char *name = strstr(at, "in mode ") + strlen("in mode ");
        ms_mode other = (ms_mode)0;
        while (strncmp(name, msi_mode_names[other], strlen(msi_mode_names[other])) != 0) {
            other = (ms_mode)(other + 1);
        }
        const uint64_t bytes = size_said(at + strlen(words));
        assert_int_equal(plan_random(seed, other, bytes, host_bytes, error, NULL), MS_RESULT_OK);
        named++;
    }
    const char *at = strstr(text, host);
    if (at != NULL) {
        const char *after = strchr(at, ')') + 1;
        const char *size = strstr(after, ": ");
        const bool enough = strstr(after, ", this budget is enough") != NULL;
        const uint64_t bytes = enough ? budget : strtoull(strchr(size, '(') + 1, NULL, 10);
        const uint64_t more = strtoull(strchr(at, '(') + 1, NULL, 10);
        assert_true(more > host_bytes && bytes < smallest);
        assert_int_equal(plan_random(seed, mode, bytes, more, error, NULL), MS_RESULT_OK);
        named++;
    }
    return named;
}

/* What a refusal names fits, in every mode, refused by the budget, by that of the host, which may be what
   the smallest plan has there, or by both. */
static void what_a_refusal_names_works(void **state) {
    (void)state;
    const uint64_t end = MS_MODE_COUNT * (1 + t_sweep(3, 200)), no_limit = (uint64_t)1 << 40;
    uint32_t named = 0, refused = 0;
    for (uint64_t i = MS_MODE_COUNT; i < end; ++i) {
        const uint64_t seed = i / MS_MODE_COUNT;
        const ms_mode mode = (ms_mode)(i % MS_MODE_COUNT);
        char text[MSI_ERROR_BYTES];
        ms_memory_report report;
        assert_int_equal(plan_random(seed, mode, 1, no_limit, text, NULL), MS_RESULT_BUDGET);
        const uint64_t least = strtoull(strchr(text, '(') + 1, NULL, 10);
        assert_int_equal(plan_random(seed, mode, least, no_limit, text, &report), MS_RESULT_OK);
        const uint64_t hosts[] = {no_limit, 4096, 1, report.host_bytes};
        for (int k = 0; k < (report.host_bytes > 0 ? 4 : 3); ++k) {
            const uint64_t budget = k == 1 ? least + least / 50 : least - least / 20;
            if (plan_random(seed, mode, budget, hosts[k], text, NULL) == MS_RESULT_BUDGET) {
                named += do_as_said(seed, mode, budget, hosts[k], text);
                assert_null(strstr(text, "now 1 bytes"));
                refused++;
            }
        }
    }
    print_message("%u refusals named %u things\n", (unsigned)refused, (unsigned)named);
    assert_true(refused > 10 && named > refused);
}

static uint64_t least_with(ms_switch checkpointing, ms_switch early_update) {
    zoo z;
    uint64_t bytes = 0;
    ms_config config = zoo_config();
    config.checkpointing = checkpointing;
    config.early_update = early_update;
    zoo_create(&z, &config);
    t_ok(z.m, ms_smallest_budget(z.m, &bytes));
    ms_destroy(z.m);
    return bytes;
}

static void what_else_would_help(void **state) {
    (void)state;
    zoo z;
    char text[128];
    ms_optimizer_desc optimizer;
    ms_config config = zoo_config();
    config.memory_budget_bytes = 1000;
    zoo_create(&z, &config);
    t_error(z.m, ms_wrap(z.m), MS_RESULT_BUDGET);
    t_text_has(ms_last_error(z.m), "in mode BALANCED");
    assert_null(strstr(ms_last_error(z.m), "no more than")); // in another mode
    assert_null(strstr(ms_last_error(z.m), "the same in every mode"));
    assert_null(strstr(ms_last_error(z.m), "With ON"));
    ms_set_layer_technique(z.m, z.act[1], CHECKPOINTING, MS_SWITCH_OFF);
    t_error(z.m, ms_wrap(z.m), MS_RESULT_BUDGET);
    t_text_has(ms_last_error(z.m), "1 tensors are forbidden");
    ms_destroy(z.m);
    for (int off = 1; off < 4; ++off) { // what the switches cost, by other models
        config.checkpointing = off & 1 ? MS_SWITCH_OFF : MS_SWITCH_DEFAULT;
        config.early_update = off & 2 ? MS_SWITCH_OFF : MS_SWITCH_DEFAULT;
        zoo_create(&z, &config);
        t_error(z.m, ms_wrap(z.m), MS_RESULT_BUDGET);
        snprintf(text, sizeof text, "(%llu bytes",
                 (unsigned long long)least_with(config.checkpointing, config.early_update));
        t_text_has(ms_last_error(z.m), text);
        snprintf(text, sizeof text, "With ON for %s: %.20s",
                 off == 1   ? "checkpointing"
                 : off == 2 ? "early_update"
                            : "checkpointing and early_update",
                 msi_size(least_with(MS_SWITCH_DEFAULT, MS_SWITCH_DEFAULT)).text);
        t_text_has(ms_last_error(z.m), text);
        ms_destroy(z.m);
    }
    config.offloading = MS_SWITCH_OFF; // which is none on the CPU
    config.accumulation_steps = 2;     // and no params can be updated early
    zoo_create(&z, &config);
    t_error(z.m, ms_wrap(z.m), MS_RESULT_BUDGET);
    t_text_has(ms_last_error(z.m), "With ON for checkpointing: ");
    ms_destroy(z.m);
    config.offloading = MS_SWITCH_DEFAULT;
    config.accumulation_steps = 1;
    config.checkpointing = config.early_update = MS_SWITCH_DEFAULT;
    config.mode = MS_MODE_CONSERVATIVE;
    memset(&optimizer, 0, sizeof optimizer);
    optimizer.grad_clip_norm = 1.0f;
    zoo_create(&z, &config);
    ms_set_optimizer(z.m, &optimizer);
    t_error(z.m, ms_wrap(z.m), MS_RESULT_BUDGET);
    t_text_has(ms_last_error(z.m), "in mode CONSERVATIVE");
    t_text_has(ms_last_error(z.m), "No early updates, since grad_clip_norm");
    assert_true(strlen(ms_last_error(z.m)) < MSI_ERROR_BYTES - 1);
    ms_destroy(z.m);
}

/* The size after a part of a text, such as 1.59 GiB, in bytes. */
static uint64_t size_after(const char *text, const char *part) {
    static const char *const units[] = {"bytes", "KiB", "MiB", "GiB"};
    const char *at = strstr(text, part);
    char *end;
    assert_non_null(at);
    double value = strtod(at + strlen(part), &end);
    for (int i = 0; i < 4; i++, value *= 1024.0) {
        if (strncmp(end + 1, units[i], strlen(units[i])) == 0) {
            return (uint64_t)value;
        }
    }
    fail();
    return 0;
}

/* Who types the sizes of the error in again, as budgets, has a plan. */
static void sizes_of_the_error_are_enough(void **state) {
    (void)state;
    zoo z;
    ms_memory_report report;
    ms_config config = zoo_config();
    uint64_t least = 0;
    uint32_t rounded = 0;
    for (int64_t rows = 100; rows < 2000; rows += 190) {
        zoo_create_along(&z, &config, rows, 48, 0);
        ms_set_budget(z.m, 1000);
        t_error(z.m, ms_wrap(z.m), MS_RESULT_BUDGET);
        const uint64_t plain = size_after(ms_last_error(z.m), "the plain plan needs ");
        const uint64_t said = size_after(ms_last_error(z.m), "in mode BALANCED is ");
        t_ok(z.m, ms_smallest_budget(z.m, &least));
        rounded += said > least;
        assert_in_range(said, least, least + least / 100);
        ms_set_budget(z.m, said);
        t_ok(z.m, ms_wrap(z.m));
        t_report(z.m, &report);
        assert_true(plain >= report.plain_bytes);
        ms_destroy(z.m);
    }
    assert_true(rounded >= 5);
}

/* And who turns on what the error says has one with the size after it. */
static void a_switch_that_is_named_helps(void **state) {
    (void)state;
    zoo z;
    ms_config config = zoo_config();
    const ms_hardware hardware = gpu_hardware(100.0);
    uint64_t least = 0;
    for (int64_t rows = 100; rows < 2000; rows += 190) {
        config.offloading = MS_SWITCH_OFF;
        zoo_create_along(&z, &config, rows, 48, 0);
        ms_set_hardware(z.m, &hardware);
        ms_set_budget(z.m, 1000);
        t_error(z.m, ms_wrap(z.m), MS_RESULT_BUDGET);
        const uint64_t said =
            size_after(ms_last_error(z.m), ". With ON for offloading: no more than ");
        ms_destroy(z.m);
        config.offloading = MS_SWITCH_DEFAULT;
        zoo_create_along(&z, &config, rows, 48, 0);
        ms_set_hardware(z.m, &hardware);
        t_ok(z.m, ms_smallest_budget(z.m, &least));
        assert_in_range(said, least, least + least / 2);
        ms_set_budget(z.m, said);
        t_ok(z.m, ms_wrap(z.m));
        ms_destroy(z.m);
    }
}

// ------------------------------------------------------------------------------------------------
// policies

typedef struct asked {
    uint32_t calls, answer;
    ms_policy_args args;
    ms_strategy strategies[MS_MODE_COUNT];
} asked;

static uint32_t answer(const ms_policy_args *args) {
    asked *a = (asked *)args->user;
    a->calls += 1;
    a->args = *args;
    assert_int_equal(args->strategy_count, MS_MODE_COUNT);
    assert_non_null(args->hardware);
    assert_true(args->hardware->name[0] != 0 && args->hardware->memory_gb_per_s > 0.0);
    memcpy(a->strategies, args->strategies, sizeof a->strategies);
    return a->answer;
}

static void a_policy_chooses_the_mode(void **state) {
    (void)state;
    static const ms_mode modes[] = {MS_MODE_CONSERVATIVE, MS_MODE_BALANCED, MS_MODE_AGGRESSIVE};
    zoo z;
    asked a;
    told t;
    ms_memory_report report, plain;
    ms_config config = zoo_config();
    memset(&a, 0, sizeof a);
    memset(&t, 0, sizeof t);
    config.auto_policy = true;
    config.policy = answer;
    config.policy_user = &a;
    config.mode = MS_MODE_AGGRESSIVE;
    config.log = tell;
    config.log_user = &t;
    zoo_create(&z, &config);
    t_ok(z.m, ms_wrap(z.m));
    t_report(z.m, &plain);
    const uint64_t budget = budget_between(z.m, 40);
    ms_set_budget(z.m, budget);
    for (uint32_t i = 0; i < MS_MODE_COUNT + 2; ++i) {
        a.calls = 0;
        a.answer = i < MS_MODE_COUNT ? i : i == MS_MODE_COUNT ? i : UINT32_MAX;
        memset(&t, 0, sizeof t);
        t_ok(z.m, ms_wrap(z.m));
        t_report(z.m, &report);
        assert_int_equal(a.calls, 1);
        assert_true(a.args.budget_bytes == budget && a.args.plain_bytes == plain.plain_bytes);
        const bool left = i >= MS_MODE_COUNT; // to the config
        assert_int_equal(report.mode, left ? MS_MODE_AGGRESSIVE : modes[i]);
        assert_int_equal(report.decision_source,
                         left ? MS_DECISION_SOURCE_USER_CONFIG : MS_DECISION_SOURCE_POLICY);
        assert_true(report.arena_bytes <= budget);
        for (uint32_t k = 0; k < MS_MODE_COUNT; ++k) {
            const ms_strategy *s = &a.strategies[k];
            assert_int_equal(s->mode, modes[k]);
            const bool aggressive = s->mode == MS_MODE_AGGRESSIVE;
            const bool mixed = aggressive && z.m->costs.hardware.bf16;
            assert_int_equal(s->techniques,
                             1u << CHECKPOINTING | 1u << EARLY_UPDATE |
                                 (uint32_t)aggressive << MS_TECHNIQUE_TILING |
                                 (uint32_t)mixed << MS_TECHNIQUE_MIXED_PRECISION |
                                 (uint32_t)aggressive << MS_TECHNIQUE_OPTIMIZER_8BIT);
            assert_true(s->fits && s->arena_bytes <= budget && s->step_us > 0.0);
        }
        const ms_strategy *chosen = &a.strategies[left ? 2 : i];
        assert_true(chosen->arena_bytes == report.arena_bytes);
        assert_true(chosen->step_us >= report.step_us && chosen->step_us <= report.step_us);
        expect_rule(z.m, z.act[2], MS_TECHNIQUE_TILING,
                    report.mode == MS_MODE_AGGRESSIVE ? "no-rows" : "mode");
        assert_int_equal(t.info_policy, MS_MODE_COUNT + 1);
        t_text_has(t.all, ms_mode_name(report.mode));
    }
    a.answer = 0;
    ms_set_budget(z.m, 1000); // a policy cannot make what there is not
    const uint64_t hash = report.plan_hash;
    t_error(z.m, ms_wrap(z.m), MS_RESULT_BUDGET);
    t_text_has(ms_last_error(z.m), "in mode CONSERVATIVE");
    assert_true(!a.strategies[0].fits && a.strategies[0].arena_bytes > 1000);
    t_report(z.m, &report); // as it was
    assert_true(report.plan_hash == hash && report.mode == MS_MODE_AGGRESSIVE);
    assert_int_equal(report.decision_source, MS_DECISION_SOURCE_USER_CONFIG);
    a.calls = 0;
    t_ok(z.m, ms_detach(z.m)); // nobody is asked
    t_ok(z.m, ms_smallest_budget(z.m, &report.budget_bytes));
    assert_true(a.calls == 0 && report.budget_bytes == a.strategies[0].arena_bytes);
    ms_destroy(z.m);
}

/* Whatever is chosen, the policy was told what the report says: of a step of several micro-batches. */
static void a_policy_sees_whole_steps(void **state) {
    (void)state;
    for (uint32_t micro_count = 1; micro_count <= 4; micro_count += 3) {
        zoo z;
        asked a;
        ms_memory_report report;
        ms_config config = zoo_config();
        memset(&a, 0, sizeof a);
        config.auto_policy = true;
        config.policy = answer;
        config.policy_user = &a;
        config.accumulation_steps = micro_count;
        zoo_create(&z, &config);
        ms_set_budget(z.m, budget_between(z.m, 30));
        for (a.answer = 0; a.answer < MS_MODE_COUNT; ++a.answer) {
            t_ok(z.m, ms_wrap(z.m));
            t_report(z.m, &report);
            const ms_strategy *s = &a.strategies[a.answer];
            assert_true(s->step_us >= report.step_us && s->step_us <= report.step_us);
            assert_true(s->mode == report.mode && s->arena_bytes == report.arena_bytes);
        }
        ms_destroy(z.m);
    }
}

static void the_built_in_policy(void **state) {
    (void)state;
    zoo z, other;
    ms_memory_report report, expected;
    ms_config config = zoo_config();
    zoo_create(&other, &config);
    config.auto_policy = true;
    zoo_create(&z, &config);
    for (uint64_t percent = 0; percent <= 100; percent += 50) {
        zoo_wrap(&z, percent);
        zoo_wrap(&other, percent);
        t_report(z.m, &report);
        t_report(other.m, &expected);
        assert_int_equal(report.decision_source, MS_DECISION_SOURCE_POLICY);
        assert_int_equal(report.mode, MS_MODE_CONSERVATIVE); // of equal ones, the most careful
        assert_true(report.plan_hash == expected.plan_hash);
    }
    ms_destroy(z.m);
    ms_destroy(other.m);
    static const struct { // by hand
        ms_strategy of[3];
        uint32_t best;
    } cases[] = {{{{MS_MODE_CONSERVATIVE, 0, 10, 5.0, true},
                   {MS_MODE_BALANCED, 0, 10, 4.0, true},
                   {MS_MODE_AGGRESSIVE, 0, 10, 3.0, false}},
                  1},
                 {{{MS_MODE_CONSERVATIVE, 0, 10, 5.0, true},
                   {MS_MODE_BALANCED, 0, 9, 5.0, true},
                   {MS_MODE_AGGRESSIVE, 0, 8, 5.0, true}},
                  0},
                 {{{MS_MODE_CONSERVATIVE, 0, 10, 1.0, false},
                   {MS_MODE_BALANCED, 0, 9, 2.0, false},
                   {MS_MODE_AGGRESSIVE, 0, 9, 3.0, false}},
                  1},
                 {{{MS_MODE_CONSERVATIVE, 0, 10, 1.0, false},
                   {MS_MODE_BALANCED, 0, 9, 2.0, false},
                   {MS_MODE_AGGRESSIVE, 0, 9, 9.0, true}},
                  2}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; ++i) {
        ms_policy_args args;
        memset(&args, 0, sizeof args);
        args.strategies = cases[i].of;
        args.strategy_count = 3;
        assert_int_equal(msi_fastest(&args), cases[i].best);
    }
}

// ------------------------------------------------------------------------------------------------
// where a rule with a number begins to hold

/* Four layers for one case: the first has a param of `shape`, the second reads in backward what the
   first has made, and the third takes some time in between; on a discrete GPU that copies a byte in
   a nanosecond. */
typedef struct bordered {
    ms_config config;
    ms_hardware hardware;
    ms_optimizer_desc optimizer;
    ms_shape shape;
    ms_layer_time between;
    ms_layer_tile tile;
    int64_t rows;
    bool freezes; // the param, which is forced to be on the host
    ms_model *m;
    ms_layer layer[4];
    ms_tensor p;
    double passed_us[2]; // when the second layer's forward ends, and its backward begins
} bordered;

static bordered border_begin(void) {
    bordered b;
    memset(&b, 0, sizeof b);
    b.config = zoo_config();
    b.hardware = gpu_hardware(1.0);
    b.hardware.memory_gb_per_s = 1.0;
    b.hardware.launch_us = 0.5;
    b.optimizer = t_optimizer(MS_OPTIMIZER_ADAMW, 0.01f);
    b.shape = ms_shape2(64, 64);
    b.between.forward_us = b.between.backward_us = b.between.recompute_us = 1.0;
    b.rows = 512; // its values are smaller than the param
    return b;
}

static void note_passing(const ms_event *event, void *user) {
    bordered *b = (bordered *)user;
    if (event->layer.id == b->layer[1].id && event->kind == MS_EVENT_FORWARD) {
        b->passed_us[0] = event->start_us + event->duration_us;
    } else if (event->layer.id == b->layer[1].id && event->kind == MS_EVENT_BACKWARD) {
        b->passed_us[1] = event->start_us;
    }
}

static void border_wrap(bordered *b) {
    assert_int_equal(ms_create(&b->config, &b->m), MS_RESULT_OK);
    ms_set_hardware(b->m, &b->hardware);
    ms_set_optimizer(b->m, &b->optimizer);
    ms_tensor last = ms_input(b->m, "x", MS_DTYPE_F32, ms_shape2(b->rows, 4));
    const ms_layer_time time = {1.0, 1.0, 1.0};
    b->p = ms_param(b->m, "p", MS_DTYPE_F32, b->shape);
    for (int i = 0; i < 4; ++i) {
        const ms_shape shape = i < 3 ? ms_shape2(b->rows, 4) : ms_shape1(b->rows);
        ms_layer_desc d = zoo_layer("layer", last, ms_activation(b->m, "y", MS_DTYPE_F32, shape));
        d.backward_reads.in = i == 1;
        d.backward_reads.out = i == 3;
        d.param[0].id = i == 0 ? b->p.id : 0;
        d.backward_reads.param = i == 0;
        if (i == 2 && b->freezes) { // something has to learn
            d.param[0] = ms_param(b->m, "q", MS_DTYPE_F32, ms_shape1(4096));
        }
        if (i < 3) {
            d.tile = b->tile;
        }
        b->layer[i] = ms_register_layer(b->m, &d);
        ms_set_layer_time(b->m, b->layer[i], i == 2 ? &b->between : &time);
        last = d.out[0];
    }
    ms_set_loss(b->m, last);
    if (b->freezes) {
        ms_set_frozen(b->m, b->p, true);
        ms_set_tensor_technique(b->m, b->p, OFFLOADING, MS_SWITCH_ON);
    }
    t_ok(b->m, ms_wrap(b->m));
    t_ok(b->m, ms_visit_events(b->m, MS_PROGRAM_TRAIN, note_passing, b));
}

/* Whether a rule has decided; the model ends. */
static bool border_ends(bordered *b, int layer, ms_technique technique, const char *rule) {
    decisions d;
    get_decisions(b->m, &d);
    const bool holds = strcmp(decision_of(&d, b->layer[layer], technique)->rule->id, rule) == 0;
    ms_destroy(b->m);
    return holds;
}

/* Each function below plans a case for a number x, and says whether the rule decides in it, and
   what the rule compares with its limit. */
typedef bool (*border_fn)(double x, double *compared);

static bool is_small(double elements, double *compared) {
    bordered b = border_begin();
    b.config.optimizer_8bit = MS_SWITCH_ON;
    b.shape = ms_shape2(1, (int64_t)elements);
    *compared = elements;
    border_wrap(&b);
    return border_ends(&b, 0, MS_TECHNIQUE_OPTIMIZER_8BIT, "small");
}

static bool is_vector(double rank, double *compared) {
    bordered b = border_begin();
    b.config.optimizer_8bit = MS_SWITCH_ON;
    b.shape = rank < 2.0 ? ms_shape1(8192) : rank < 3.0 ? ms_shape2(64, 128) : ms_shape3(2, 64, 64);
    *compared = rank;
    border_wrap(&b);
    return border_ends(&b, 0, MS_TECHNIQUE_OPTIMIZER_8BIT, "vector");
}

static bool has_no_rows(double groups, double *compared) {
    bordered b = border_begin();
    b.config.tiling = MS_SWITCH_ON;
    b.tile.axes = 1;
    b.tile.multiple = 512;
    b.rows = 512 * (int64_t)groups;
    *compared = groups;
    border_wrap(&b);
    return border_ends(&b, 1, MS_TECHNIQUE_TILING, "no-rows");
}

static bool is_skipped(double spare_bytes, double *compared) {
    bordered b = border_begin();
    ms_memory_report report;
    border_wrap(&b);
    t_report(b.m, &report);
    ms_set_budget(b.m, (uint64_t)((double)report.plain_bytes + spare_bytes));
    *compared = ((double)report.plain_bytes + spare_bytes) / (double)report.plain_bytes;
    t_ok(b.m, ms_wrap(b.m));
    return border_ends(&b, 1, CHECKPOINTING, "smart-skip");
}

/* Without a budget, 85 % of the free memory are one. */
static bool is_skipped_by_share(double free_bytes, double *compared) {
    bordered b = border_begin();
    ms_memory_report report;
    border_wrap(&b);
    t_report(b.m, &report);
    ms_destroy(b.m);
    b.config.memory_budget_bytes = 0;
    b.hardware.free_bytes = (uint64_t)free_bytes;
    *compared = (double)report.plain_bytes / free_bytes;
    border_wrap(&b);
    return border_ends(&b, 1, CHECKPOINTING, "smart-skip");
}

static bool is_too_small(double launch_us, double *compared) {
    bordered b = border_begin();
    b.config.offloading = MS_SWITCH_ON;
    b.hardware.launch_us = launch_us;
    *compared = (launch_us + 64 * 64 * 4 * 1e-3) / launch_us;
    border_wrap(&b);
    return border_ends(&b, 0, OFFLOADING, "too-small");
}

/* The largest of what could be moved of the param is its state. */
static bool is_full(double host_bytes, double *compared) {
    bordered b = border_begin();
    b.config.offloading = MS_SWITCH_ON;
    b.config.max_host_bytes = (uint64_t)host_bytes;
    *compared = host_bytes;
    border_wrap(&b);
    return border_ends(&b, 0, OFFLOADING, "host-full");
}

static bool is_full_by_share(double free_bytes, double *compared) {
    bordered b = border_begin();
    b.config.offloading = MS_SWITCH_ON;
    b.hardware.host_free_bytes = (uint64_t)free_bytes;
    *compared = free_bytes * 0.85;
    border_wrap(&b);
    return border_ends(&b, 0, OFFLOADING, "host-full");
}

/* The value that the first layer makes lies idle from the second layer's forward to its backward.
   */
static bool is_needed_at_once(double between_us, double *compared) {
    bordered b = border_begin();
    b.config.offloading = MS_SWITCH_ON;
    b.config.checkpointing = MS_SWITCH_OFF;
    b.between.forward_us = between_us;
    b.shape = ms_shape2(8, 8); // smaller than the value
    border_wrap(&b);
    *compared = (b.passed_us[1] - b.passed_us[0]) / (2.0 * (0.5 + 512 * 4 * 4 * 1e-3));
    return border_ends(&b, 0, OFFLOADING, "needed-at-once");
}

/* The copies of a frozen param that is forced to be on the host, beside all else that a step does:
   the third layer has one that could be moved too. */
static bool is_saturated(double between_us, double *compared) {
    bordered b = border_begin();
    ms_memory_report report;
    b.config.offloading = MS_SWITCH_ON;
    b.hardware.memory_gb_per_s = 500.0;
    b.freezes = true;
    b.shape = ms_shape2(256, 256);
    b.between.forward_us = between_us;
    border_wrap(&b);
    t_report(b.m, &report);
    const double to = report.to_device_us, from = report.to_host_us;
    *compared = (to > from ? to : from) / report.step_us;
    return border_ends(&b, 2, OFFLOADING, "link-saturated");
}

/* The border between cases where a rule decides and others is where its text says: to the whole
   number, or, of what it compares, nearly. */
static void numbers_of_rules_are_exact(void **state) {
    (void)state;
    static const struct {
        const char *rule;
        border_fn decides;
        double in, out, step; // numbers where it decides and where not, and how near these come
        double last;          // number where it decides; 0: what it compares is at the limit there
        double limit;
    } borders[] = {{"small", is_small, 1, 10000, 1, 4095, 0},
                   {"vector", is_vector, 1, 3, 1, 1, 0},
                   {"no-rows", has_no_rows, 1, 4, 1, 1, 0},
                   {"smart-skip", is_skipped, 5000, -5000, 1, 0, 1},
                   {"smart-skip by a share", is_skipped_by_share, 1e7, 110000, 1, 0, 0.85},
                   {"too-small", is_too_small, 1000, 1, 1e-5, 0, 2},
                   {"host-full", is_full, 1, 1e6, 1, 2 * 64 * 64 * 4 - 1, 0},
                   {"host-full by a share", is_full_by_share, 10, 1e6, 1, 0, 2 * 64 * 64 * 4},
                   {"needed-at-once", is_needed_at_once, 1, 1000, 1e-5, 0, 1},
                   {"link-saturated", is_saturated, 1, 5000, 1e-4, 0, 0.9}};
    for (size_t i = 0; i < sizeof borders / sizeof *borders; ++i) {
        double in = borders[i].in, out = borders[i].out, of_in, of_out;
        if (!borders[i].decides(in, &of_in) || borders[i].decides(out, &of_out)) {
            fail_msg("%s does not decide where it should, or does elsewhere", borders[i].rule);
        }
        while (fabs(in - out) > 1.5 * borders[i].step) {
            const double half = 0.5 * (in + out), x = borders[i].step < 1.0 ? half : floor(half);
            double compared;
            const bool decides = borders[i].decides(x, &compared);
            *(decides ? &in : &out) = x;
            *(decides ? &of_in : &of_out) = compared;
        }
        const double far = fmax(fabs(of_in - borders[i].limit), fabs(of_out - borders[i].limit));
        if (borders[i].last > 0.0 ? in != borders[i].last : far > 3e-5 * borders[i].limit) {
            fail_msg("%s decides up to %.9g and not at %.9g; it compares %.9g and %.9g",
                     borders[i].rule, in, out, of_in, of_out);
        }
    }
}

// ------------------------------------------------------------------------------------------------
// no memory

typedef ms_result (*try_fn)(zoo *z);

static ms_result try_wrap(zoo *z) {
    return ms_wrap(z->m);
}

static void ignore_text(const char *text, size_t length, void *user) {
    (void)text, (void)length, (void)user;
}

static ms_result try_print(zoo *z) {
    const ms_result result = ms_print_plan(z->m, ignore_text, NULL);
    return result == MS_RESULT_OK ? ms_print_plan_full(z->m, ignore_text, NULL) : result;
}

static ms_result try_program(zoo *z) {
    t_text text = {NULL, 0};
    const ms_result result = ms_print_program(z->m, MS_PROGRAM_TRAIN, t_append, &text);
    assert_true((result == MS_RESULT_OK) == (text.length > 0));
    free(text.data);
    return result;
}

static ms_result try_trace(zoo *z) {
    t_text text = {NULL, 0};
    const ms_result result = ms_print_trace(z->m, t_append, &text);
    assert_true((result == MS_RESULT_OK) == (strstr(text.data, "\"ph\":\"X\"") != NULL));
    free(text.data);
    return result;
}

static void ignore_decision(const ms_decision *decision, void *user) {
    (void)decision, (void)user;
}

static ms_result try_visit(zoo *z) {
    return ms_visit_decisions(z->m, ignore_decision, NULL);
}

/* Every allocation fails once, with nothing lost and nothing changed. */
static uint64_t fail_each(const ms_config *given, uint64_t budget, try_fn run, ms_result expected) {
    t_heap heap;
    zoo z;
    told t;
    ms_config config = *given;
    ms_memory_report before, after;
    memset(&heap, 0, sizeof heap);
    memset(&t, 0, sizeof t);
    config.allocator = t_heap_allocator(&heap);
    config.log = tell;
    config.log_user = &t;
    zoo_create_along(&z, &config, 64, 16, 128);
    t_ok(z.m, ms_wrap(z.m));
    t_report(z.m, &before);
    ms_set_budget(z.m, budget);
    t_failing f = t_failing_heap(&heap);
    f.heap = NULL;
    f.success = expected;
    while (t_next_failure(&f, f.error_count > 10 ? t_size(17, t_stride(5)) : 1)) {
        const uint64_t live = heap.live_bytes;
        t_arm(&f);
        const ms_result result = run(&z);
        if (t_failed(&f, run == try_wrap ? z.m : NULL, result)) { // others cannot keep a text
            t_report(z.m, &after);
            assert_true(before.plan_hash == after.plan_hash && before.mode == after.mode);
            assert_true(heap.live_bytes == live);
            assert_true(ms_tensor_shape(z.m, z.x).dim[0] == 64);
        }
    }
    ms_destroy(z.m);
    assert_true(heap.live_count == 0 && heap.wrong_releases == 0);
    return f.error_count;
}

static void every_allocation_fails_once(void **state) {
    (void)state;
    ms_config config = zoo_config();
    zoo z;
    zoo_create_along(&z, &config, 64, 16, 128);
    const uint64_t budget = budget_between(z.m, 50);
    ms_destroy(z.m);
    assert_true(fail_each(&config, 0, try_print, MS_RESULT_OK) > 0);
    assert_true(fail_each(&config, 0, try_program, MS_RESULT_OK) > 0);
    assert_true(fail_each(&config, 0, try_trace, MS_RESULT_OK) > 0);
    assert_true(fail_each(&config, 0, try_visit, MS_RESULT_OK) > 0);
    assert_true(fail_each(&config, budget, try_wrap, MS_RESULT_OK) > 3);
    config.auto_policy = true;
    assert_true(fail_each(&config, budget, try_wrap, MS_RESULT_OK) > 3);
    config.auto_policy = false;
    config.checkpointing = MS_SWITCH_OFF;
    assert_true(fail_each(&config, 100000, try_wrap, MS_RESULT_BUDGET) > 10);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rules_of_a_budget),
        cmocka_unit_test(rules_of_early_updates),
        cmocka_unit_test(updates_that_may_wait),
        cmocka_unit_test(rules_of_the_user),
        cmocka_unit_test(rules_of_two_outputs),
        cmocka_unit_test(rules_of_the_device),
        cmocka_unit_test(rules_of_offloading),
        cmocka_unit_test(what_fits_is_left_alone),
        cmocka_unit_test(what_is_lent_stays_where_it_is),
        cmocka_unit_test(what_is_moved_is_told_by_category),
        cmocka_unit_test(listings_show_what_is_moved),
        cmocka_unit_test(modes_allow_what_they_say),
        cmocka_unit_test(wrong_configs_are_refused),
        cmocka_unit_test(tiles_need_rows),
        cmocka_unit_test(layers_of_f32_stay_so),
        cmocka_unit_test(techniques_have_their_tensors),
        cmocka_unit_test(names_of_enums),
        cmocka_unit_test(who_has_decided),
        cmocka_unit_test(decisions_are_those_of_the_program),
        cmocka_unit_test(decisions_of_random_graphs),
        cmocka_unit_test(what_is_taken_over_at_the_peak_counts_once),
        cmocka_unit_test(gradients_are_scaled_for_own_optimizers_only),
        cmocka_unit_test(copies_without_streams_are_waited_for),
        cmocka_unit_test(what_a_recomputation_reads),
        cmocka_unit_test(rules_are_listed_once_each),
        cmocka_unit_test(rules_are_documented),
        cmocka_unit_test(the_listing_explains),
        cmocka_unit_test(techniques_have_what_the_plan_would_lose),
        cmocka_unit_test(what_is_freed_counts_the_peak_of_eval),
        cmocka_unit_test(other_sizes_keep_to_the_memory_there_is),
        cmocka_unit_test(the_host_memory_of_a_model_counts_as_free),
        cmocka_unit_test(a_refusal_scales_the_loss_where_it_must),
        cmocka_unit_test(reports_tell_what_is_moved),
        cmocka_unit_test(a_wait_may_be_for_any_number_of_copies),
        cmocka_unit_test(params_of_a_layer_move_in_one_copy),
        cmocka_unit_test(updates_of_the_trainers_own_come_whole_and_alone),
        cmocka_unit_test(a_shared_param_is_copied_once),
        cmocka_unit_test(what_is_kept_is_counted),
        cmocka_unit_test(tied_params_are_told_of_once),
        cmocka_unit_test(refused_rows_have_numbers),
        cmocka_unit_test(equal_blocks_are_one_entry),
        cmocka_unit_test(what_is_one_entry_has_one_rule),
        cmocka_unit_test(blocks_are_found_anywhere),
        cmocka_unit_test(names_are_joined),
        cmocka_unit_test(the_largest_kinds_are_listed),
        cmocka_unit_test(sizes_can_be_typed_in_again),
        cmocka_unit_test(times_say_where_they_come_from),
        cmocka_unit_test(the_log_is_told_why),
        cmocka_unit_test(the_size_that_fits),
        cmocka_unit_test(a_size_of_exactly_the_budget_fits),
        cmocka_unit_test(the_batch_is_a_factor_of_the_first_dim),
        cmocka_unit_test(a_batch_fits_beside_params_that_shrink),
        cmocka_unit_test(sizes_keep_rows_together),
        cmocka_unit_test(a_refusal_is_about_the_largest_sizes),
        cmocka_unit_test(advice_names_the_foremost_axis),
        cmocka_unit_test(the_first_foremost_axis_is_the_batch),
        cmocka_unit_test(an_error_changes_nothing),
        cmocka_unit_test(the_limit_of_the_host_holds),
        cmocka_unit_test(an_error_leaves_the_config),
        cmocka_unit_test(enough_host_memory_is_named),
        cmocka_unit_test(a_smaller_batch_leaves_the_host_to_params),
        cmocka_unit_test(what_is_named_of_the_host_suffices),
        cmocka_unit_test(what_a_refusal_names_works),
        cmocka_unit_test(one_budget_may_be_slower_than_a_byte_less),
        cmocka_unit_test(what_else_would_help),
        cmocka_unit_test(a_long_refusal_is_whole),
        cmocka_unit_test(sizes_of_the_error_are_enough),
        cmocka_unit_test(a_switch_that_is_named_helps),
        cmocka_unit_test(a_policy_chooses_the_mode),
        cmocka_unit_test(a_policy_sees_whole_steps),
        cmocka_unit_test(the_built_in_policy),
        cmocka_unit_test(numbers_of_rules_are_exact),
        cmocka_unit_test(every_allocation_fails_once)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
