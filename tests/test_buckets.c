/*  test_buckets.c - gradients that ranks sum together: which plans have them in one collective, that
    each is summed once and before it is used, and that the plan takes the number of bytes that is the
    fastest. Dry runs; that sums have the right bits is tested where ranks run (test_ranks.c).
    MEMSCALE_TEST_DAGS sets how many random graphs are planned. */
#include "private.h"
#include "testing.h"
#include "toy_layers.h"
#include "random_dag.h"
#include "files.h"
#include "../bench/nets.h"

enum { LAYERS = 24, GRAPHS = 200 };

static ms_config config_of_ranks(uint32_t count) {
    ms_config config = t_config();
    config.dry_run = true;
    config.memory_budget_bytes = (uint64_t)1 << 40;
    config.comm.size = sizeof config.comm;
    config.comm.name = "dry";
    config.comm.count = count;
    config.comm.on_device = true; // as that of NCCL
    return config;
}

/* A chain of layers that take so long, each with a weight and a bias; its plan is from a file, or NULL. */
static ms_model *chain(const ms_config *config, double layer_us, double network_us,
                       const ms_source *plan) {
    ms_hardware device = *ms_hardware_find("RTX 3090");
    ms_model *m;
    net_builder b;
    memset(&b, 0, sizeof b);
    assert_int_equal(ms_create(config, &m), MS_RESULT_OK);
    b.model = m;
    ms_tensor x = ms_input(m, "x", MS_DTYPE_F32, ms_shape2(4, 1024));
    for (uint32_t i = 0; i < LAYERS; ++i) {
        ms_layer_desc d;
        memset(&d, 0, sizeof d);
        d.name = "layer";
        d.in[0] = x;
        d.param[0] = ms_param(m, "weight", MS_DTYPE_F32, ms_shape1(i % 4 == 3 ? 1000000 : 2000));
        d.param[1] = ms_param(m, "bias", MS_DTYPE_F32, ms_shape1(100));
        d.out[0] = x = net_value(&b, 4);
        d.backward_reads.in = d.backward_reads.param = 1;
        (void)net_layer(&b, &d, layer_us / 8.0);
    }
    ms_set_loss(m, x);
    device.launch_us = 1.0;
    device.network_gb_per_s = 10.0;
    device.network_us = network_us;
    ms_set_hardware(m, &device);
    if (plan != NULL) {
        t_ok(m, ms_plan_load(m, plan));
    }
    t_ok(m, ms_wrap(m));
    return m;
}

static uint8_t bits_of(const ms_model *m) {
    return m->run.plan->decisions[m->graph.tensors.count].bucket;
}

/* What is summed over ranks by a program. */
typedef struct sums {
    uint32_t collectives, gradients, most;
    uint32_t layers; // most, of one collective
    uint32_t early;  // updates inside backward
} sums;

/* Counts what is summed; checks that each gradient is summed once, before it is used, and that no
   bucket was full before its last. */
static sums sums_of(const ms_model *m) {
    const msi_plan *plan = m->run.plan;
    const msi_program *p = &plan->train;
    const uint32_t bits = bits_of(m);
    bool *summed = (bool *)calloc(p->code.ranges.count, sizeof *summed);
    bool *used = (bool *)calloc(p->code.ranges.count, sizeof *used);
    sums s = {0, 0, 0, 0, 0};
    for (uint32_t now = 0; now < p->code.instructions.count; ++now) {
        const msi_instruction *i = &p->code.instructions.items[now];
        const msi_operand *operands = p->code.operands.items + i->operand_first;
        const uint32_t pairs = i->operand_count / 2u;
        uint64_t bytes = 0;
        uint32_t layers = 0, last = MSI_NONE;
        for (uint32_t k = 0; k < i->operand_count && operands[k].range != MSI_NONE; ++k) {
            used[operands[k].range] |= i->op == MSI_OP_NORM || i->op == MSI_OP_UPDATE;
            s.early += k == 1 && i->op == MSI_OP_UPDATE && now < p->code.backward_end;
        }
        for (uint32_t k = pairs; i->op == MSI_OP_REDUCE && k-- > 0;) { // the last one comes first
            const uint32_t range = operands[2 * k].range;
            const uint32_t t = p->code.ranges.items[range].tensor;
            const uint32_t layer = m->graph.tensors.items[t].last_gradient;
            assert_int_equal(operands[2 * k + 1].range, range);
            assert_true(!summed[range] && !used[range]);
            assert_true(k + 1 == pairs || (bits > 0 && bytes >> bits == 0));
            summed[range] = true;
            bytes += m->graph.tensors.items[t].bytes;
            layers += layer != last;
            last = layer;
            ++s.gradients;
        }
        if (i->op == MSI_OP_REDUCE) {
            ++s.collectives;
            s.most = pairs > s.most ? pairs : s.most;
            s.layers = layers > s.layers ? layers : s.layers;
        }
    }
    free(summed);
    free(used);
    return s;
}

/* The step of the plan in force with another number of bytes in a bucket. */
static double step_us(ms_model *m, uint8_t bits) {
    msi_lowering lowering;
    msi_shortage shortage;
    msi_scorer scorer;
    msi_plan *plan = msi_new_plan(m);
    assert_non_null(plan);
    assert_true(msi_scorer_init(&scorer, m, m->run.store, plan, &lowering, &shortage));
    memcpy(plan->decisions, m->run.plan->decisions, msi_decisions_bytes(&m->graph));
    plan->decisions[m->graph.tensors.count].bucket = bits;
    const double us = msi_score_of(&scorer, plan->decisions).us;
    msi_lowering_free(&lowering);
    msi_plan_free(m, plan);
    return us;
}

static void the_plan_chooses(void **state) {
    (void)state;
    for (int k = 0; k < 4; ++k) {
        const bool quick = k % 2 == 0; // layers, so that the network is what takes long
        const double network_us = k < 2 ? 100.0 : 0.01;
        const ms_config config = config_of_ranks(4);
        ms_model *m = chain(&config, quick ? 20.0 : 5000.0, network_us, NULL);
        const uint8_t bits = bits_of(m);
        const sums s = sums_of(m);
        assert_int_equal(s.gradients, 2 * LAYERS);
        for (int other = 0; other < 3 && k < 2; ++other) {
            static const uint8_t tried[] = {0, 19,
                                            22}; // 10^6 bytes are sent while the network waits
            assert_true(step_us(m, bits) <= step_us(m, tried[other]) * (1.0 + 1e-12));
        }
        if (k == 0) {
            assert_true(bits > 0 && s.layers > 2 && s.most <= MSI_MOST_TOGETHER);
            assert_true(s.collectives * 3 < s.gradients);
            assert_true(step_us(m, bits) < 0.8 * step_us(m, 0));
        }
        if (k == 3) { // the network hardly waits
            assert_true(step_us(m, bits) > 0.999 * step_us(m, 0));
        }
        ms_destroy(m);
    }
}

static int sum_nothing(void *user, const ms_collective *c) {
    (void)user;
    (void)c;
    return 0;
}

static int begin_nothing(void *user) {
    (void)user;
    return 0;
}

/* A comm that cannot group sums each gradient by itself, and is expected to wait for each; one rank sums
   nothing. */
static void nothing_goes_together_without_groups(void **state) {
    (void)state;
    msi_costs c;
    msi_program p;
    msi_instruction i;
    memset(&c, 0, sizeof c);
    memset(&p, 0, sizeof p);
    memset(&i, 0, sizeof i);
    c.rank_count = 2;
    c.hardware.network_us = 10.0;
    c.hardware.network_gb_per_s = 1.0;
    i.op = (uint8_t)MSI_OP_REDUCE;
    i.operand_count = 6;
    for (int k = 0; k < 2; ++k) {
        c.has_groups = k == 1;
        const double us = msi_network_us(&c, &p, &i, 4000.0);
        assert_true(fabs(us - ((k == 1 ? 10.0 : 30.0) + 2.0)) < 1e-9);
    }
    for (int k = 0; k < 3; ++k) { // a dry run plans as the run will that has this comm
        ms_config config = config_of_ranks(4);
        config.comm.on_device = k > 0;
        config.comm.all_reduce = sum_nothing;
        config.comm.group_begin = config.comm.group_end = k == 2 ? begin_nothing : NULL;
        ms_model *m = chain(&config, 20.0, 100.0, NULL);
        assert_true((bits_of(m) > 0) == (k == 2));
        ms_destroy(m);
    }
    const ms_config config = config_of_ranks(1);
    ms_model *m = chain(&config, 20.0, 100.0, NULL);
    assert_int_equal(sums_of(m).gradients, 0);
    assert_int_equal(bits_of(m), 0);
    ms_destroy(m);
}

/* What is updated inside backward is summed before that, along with what can still come before it. */
static void updates_do_not_wait(void **state) {
    (void)state;
    ms_config config = config_of_ranks(4);
    config.early_update = MS_SWITCH_ON;
    ms_model *m = chain(&config, 20.0, 100.0, NULL);
    const sums s = sums_of(m);
    assert_int_equal(s.gradients, 2 * LAYERS);
    assert_true(s.early > LAYERS && s.collectives < s.gradients / 2);
    ms_destroy(m);
}

/* A plan in a file has it, also where another would be chosen. */
static void files_have_it(void **state) {
    (void)state;
    static t_file file;
    const ms_config config = config_of_ranks(4);
    ms_model *m = chain(&config, 20.0, 100.0, NULL);
    ms_memory_report made, loaded;
    ms_sink sink;
    ms_source source;
    t_file_clear(&file);
    sink.write = t_file_write;
    sink.user = source.user = &file;
    source.read = t_file_read;
    t_ok(m, ms_plan_save(m, &sink));
    source.size = file.bytes;
    t_ok(m, ms_report(m, &made));
    const uint8_t bits = bits_of(m);
    ms_destroy(m);
    m = chain(&config, 20.0, 0.01, NULL);
    assert_int_not_equal(bits_of(m), bits);
    ms_destroy(m);
    m = chain(&config, 20.0, 0.01, &source);
    t_ok(m, ms_report(m, &loaded));
    assert_int_equal(bits_of(m), bits);
    assert_true(made.plan_hash == loaded.plan_hash);
    ms_destroy(m);
}

static void random_graphs(void **state) {
    (void)state;
    const uint64_t graphs = t_environment("MEMSCALE_TEST_DAGS", GRAPHS);
    uint32_t collectives = 0, gradients = 0, early = 0;
    for (uint64_t seed = 1; seed <= graphs; ++seed) {
        char failure[RD_TEXT] = "";
        rd_graph *g = rd_generate(seed);
        ms_config config = config_of_ranks(2 + (uint32_t)seed % 3);
        config.mode = (ms_mode)(seed % 3);
        config.sharding = seed % 2 ? MS_SWITCH_OFF : MS_SWITCH_DEFAULT;
        if (seed / 4 % 2) {
            g->accumulation = 1;
            g->optimizer.grad_clip_norm = 0.0f;
        }
        rd_net *n = rd_net_create(g, &config, "buckets", failure, false);
        for (uint32_t i = 0; i < g->value_count && seed / 4 % 2; ++i) {
            if (g->value[i].role == RD_PARAM) {
                ms_set_tensor_technique(n->model, n->handle[i], MS_TECHNIQUE_EARLY_UPDATE,
                                        MS_SWITCH_ON);
            }
        }
        if (ms_wrap(n->model) != MS_RESULT_OK) { // with a norm, none can be updated early
            rd_net_destroy(n);
            n = rd_net_create(g, &config, "buckets", failure, false);
            t_ok(n->model, ms_wrap(n->model));
        }
        sums s = sums_of(n->model);
        collectives += s.collectives;
        gradients += s.gradients;
        early += s.early;
        ms_set_budget(n->model, n->model->run.plan->plain_bytes * (4 + seed % 5) / 10);
        if (ms_wrap(n->model) == MS_RESULT_OK) {
            (void)sums_of(n->model);
        }
        rd_net_destroy(n);
        free(g);
    }
    print_message("%u gradients in %u collectives, %u updates inside backward\n",
                  (unsigned)gradients, (unsigned)collectives, (unsigned)early);
    assert_true(collectives * 5 < gradients * 4 && (early > 0 || graphs < GRAPHS));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_plan_chooses),
        cmocka_unit_test(nothing_goes_together_without_groups),
        cmocka_unit_test(updates_do_not_wait),
        cmocka_unit_test(files_have_it),
        cmocka_unit_test(random_graphs),
    };
    return cmocka_run_group_tests_name("buckets", tests, NULL, NULL);
}
