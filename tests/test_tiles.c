/*  test_tiles.c - layers that are computed in tiles of rows: random graphs of whole numbers, whose
    plans in tiles give the bits of the plain one. MEMSCALE_TEST_DAGS sets how many graphs there are,
    MEMSCALE_TEST_SEED which is the first. */
#include "private.h"
#include "toy_layers.h"
#include "random_tiles.h"
#include "slices.h"
#include "virtual.h"

enum { QUICK_GRAPHS = 120, GRAPHS = 20000 };

static uint64_t first_seed(void) {
    return t_environment("MEMSCALE_TEST_SEED", 1);
}

static uint64_t end_seed(uint64_t quick, uint64_t full) {
    return first_seed() + t_environment("MEMSCALE_TEST_DAGS", t_sweep(quick, full));
}

// ------------------------------------------------------------------------------------------------
// random graphs: the bits of the plain plan

typedef struct tally {
    uint32_t graphs, tiled, sweeps, again, moved, half;
} tally;

static void same_tensor(const rt_graph *g, const char *what, uint32_t value, ms_model *plain,
                        ms_tensor a, ms_model *tiled, ms_tensor b) {
    static float x[RT_ELEMENTS], y[RT_ELEMENTS];
    const ms_result of_plain = ms_read(plain, a, x), of_tiled = ms_read(tiled, b, y);
    const size_t bytes = (size_t)ms_tensor_bytes(plain, ms_tensor_of(plain, a));
    if (of_tiled == MS_RESULT_ORDER && strcmp(what, "gradient") == 0) {
        return; // gone by an early update
    }
    if (of_plain != of_tiled || (of_plain == MS_RESULT_OK && memcmp(x, y, bytes) != 0)) {
        size_t i = 0;
        while (i + 1 < bytes / sizeof(float) && memcmp(&x[i], &y[i], sizeof(float)) == 0) {
            ++i;
        }
        fail_msg("MEMSCALE_TEST_SEED=%llu: %s of v%u differs: %s, %s (%s); element %u: %g, %g",
                 (unsigned long long)g->seed, what, (unsigned)value, ms_result_name(of_plain),
                 ms_result_name(of_tiled), ms_last_error(tiled), (unsigned)i, (double)x[i],
                 (double)y[i]);
    }
}

static void same_gradients(const rt_graph *g, const rt_net *plain, const rt_net *tiled) {
    for (uint32_t v = 0; v < g->value_count; ++v) {
        if (g->value[v].role == RT_TRAINED) {
            same_tensor(g, "gradient", v, plain->model, ms_gradient(plain->model, plain->handle[v]),
                        tiled->model, ms_gradient(tiled->model, tiled->handle[v]));
        }
    }
}

static void same_values(const rt_graph *g, const rt_net *plain, const rt_net *tiled) {
    for (uint32_t v = 0; v < g->value_count; ++v) {
        const bool kept = g->value[v].is_output || g->value[v].role == RT_TRAINED ||
                          v == g->layer[g->layer_count - 1].out[0];
        if (kept) {
            same_tensor(g, "value", v, plain->model, plain->handle[v], tiled->model,
                        tiled->handle[v]);
        }
        if (g->value[v].role == RT_TRAINED && g->optimizer.kind == MS_OPTIMIZER_ADAMW) {
            same_tensor(g, "state", v, plain->model,
                        ms_optimizer_state(plain->model, plain->handle[v], 0), tiled->model,
                        ms_optimizer_state(tiled->model, tiled->handle[v], 0));
        }
    }
}

static void ok(const rt_graph *g, const rt_net *n, ms_result result, const char *what) {
    if (result != MS_RESULT_OK || n->fault) {
        fail_msg("MEMSCALE_TEST_SEED=%llu: %s: %s: %s; layer %u: %s", (unsigned long long)g->seed,
                 what, ms_result_name(result), ms_last_error(n->model), (unsigned)n->fault_layer,
                 n->fault ? n->fault : "no fault");
    }
}

#define OK(n, call) ok((n)->graph, n, call, #call)

static void one_step(const rt_graph *g, rt_net *const *nets, uint64_t round, bool at_once) {
    double loss[2];
    for (uint32_t micro = 0; micro < g->micro_count; ++micro) {
        for (int k = 0; k < 2; ++k) {
            rt_net_write(nets[k], round * 8 + micro, micro == 0);
            if (at_once) {
                OK(nets[k], s_step(nets[k]->model, &loss[k]));
            } else {
                OK(nets[k], ms_forward(nets[k]->model, &loss[k]));
                OK(nets[k], ms_backward(nets[k]->model));
            }
            OK(nets[k], ms_synchronize(nets[k]->model));
        }
        assert_memory_equal(&loss[0], &loss[1], sizeof loss[0]);
    }
    if (!at_once) {
        same_gradients(g, nets[0], nets[1]);
        for (int k = 0; k < 2; ++k) {
            OK(nets[k], ms_update(nets[k]->model));
            OK(nets[k], ms_synchronize(nets[k]->model));
        }
    }
    same_values(g, nets[0], nets[1]);
    for (int k = 0; k < 2; ++k) {
        rt_net_write(nets[k], round * 8 + 7, true);
        OK(nets[k], ms_eval(nets[k]->model, &loss[k]));
    }
    assert_memory_equal(&loss[0], &loss[1], sizeof loss[0]);
}

/* Forces random things on the net with tiles. */
static void force(rt_net *n, uint64_t seed, tally *t) {
    const rt_graph *g = n->graph;
    t_rng rng = t_seed(seed + 77);
    const bool moves = t_chance(&rng, 0.5);
    const bool half = g->layer[0].desc.dtypes.accepts != 0 && t_chance(&rng, 0.4);
    for (uint32_t i = 0; i < g->layer_count; ++i) {
        if (g->layer[i].tiled) {
            ms_set_layer_technique(n->model, n->layer[i], MS_TECHNIQUE_TILING, MS_SWITCH_ON);
        }
    }
    for (uint32_t v = 0; v < g->value_count; ++v) {
        const rt_value *value = &g->value[v];
        if (moves && value->role != RT_INPUT && t_chance(&rng, 0.5)) {
            ms_set_tensor_technique(n->model, n->handle[v], MS_TECHNIQUE_OFFLOADING, MS_SWITCH_ON);
            t->moved++;
        } else if (value->role >= RT_MADE && t_chance(&rng, 0.2)) {
            ms_set_tensor_technique(n->model, n->handle[v], MS_TECHNIQUE_CHECKPOINTING,
                                    MS_SWITCH_OFF);
        }
        if (half && value->role >= RT_MADE && value->shape != RT_TABLE && t_chance(&rng, 0.6)) {
            ms_set_tensor_technique(n->model, n->handle[v], MS_TECHNIQUE_MIXED_PRECISION,
                                    MS_SWITCH_ON);
            t->half++;
        }
    }
}

/* Un-forces layers whose rows cannot be parted: those say so. */
static void wrap(rt_net *n) {
    ms_result result = ms_wrap(n->model);
    for (uint32_t i = 0; i < n->graph->layer_count && result == MS_RESULT_INVALID; ++i) {
        ms_set_layer_technique(n->model, n->layer[i], MS_TECHNIQUE_TILING, MS_SWITCH_DEFAULT);
        result = ms_wrap(n->model);
    }
    OK(n, result);
}

static void count(const rt_net *n, tally *t) {
    const msi_program *p = &n->model->run.plan->train;
    bool tiled = false, again = false, sweeps = false;
    for (uint32_t i = 0; i < p->instructions.count; ++i) {
        const msi_instruction *at = &p->instructions.items[i];
        tiled |= at->rows.of > 0 && at->rows.count < at->rows.of;
        again |= at->rows.of > 0 && msi_is_again((msi_op)at->op);
        sweeps |= at->rows.of > 0 && i < p->forward_end && at->op == MSI_OP_BACKWARD;
    }
    t->graphs++;
    t->tiled += tiled;
    t->again += again;
    t->sweeps += sweeps;
}

/* Runs a graph by the plain plan, and in tiles by this config. */
static void expect_same_bits(rt_graph *g, const ms_config *config,
                             ms_layer_desc (*move)(void *, uint32_t, const ms_layer_desc *),
                             void *mover, tally *t) {
    ms_config plain = t_config();
    plain.checkpointing = plain.early_update = MS_SWITCH_OFF;
    for (uint32_t i = 0; i < g->layer_count; ++i) {
        g->layer[i].desc.dtypes.accepts = g->seed % 3 ? 1u << MS_DTYPE_BF16 : 0;
    }
    t_heap heap;
    ms_config tiled = *config;
    memset(&heap, 0, sizeof heap);
    tiled.allocator = t_heap_allocator(&heap);
    if (g->seed % 4 < 3) {
        s_slice(&tiled, g->seed);
    }
    rt_net *const nets[] = {rt_net_create(g, &plain, NULL, NULL),
                            rt_net_create(g, &tiled, move, mover)};
    OK(nets[0], ms_wrap(nets[0]->model));
    force(nets[1], g->seed, t);
    wrap(nets[1]);
    count(nets[1], t);
    for (uint64_t round = 0; round < 2; ++round) {
        one_step(g, nets, round, (g->seed + round) % 2 == 0);
    }
    if (g->has_axis) {
        const int64_t sizes[MS_LIMIT_AXES] = {g->batch > 1 ? g->batch - 1 : g->batch + 1};
        g->batch = sizes[0];
        for (int k = 0; k < 2; ++k) {
            OK(nets[k], ms_reshape(nets[k]->model, sizes));
        }
        one_step(g, nets, 3, false);
    }
    for (int k = 0; k < 2; ++k) {
        rt_net_destroy(nets[k]);
    }
    assert_int_equal(heap.live_count, 0);
    assert_int_equal(heap.wrong_releases, 0);
    free(g);
}

static ms_config random_config(uint64_t seed) {
    ms_config config = t_config();
    config.master_weights = seed % 5 == 0 ? MS_SWITCH_OFF : MS_SWITCH_DEFAULT;
    config.force_optimize = seed % 4 == 0;
    config.offloading = seed % 8 == 0 ? MS_SWITCH_ON : MS_SWITCH_DEFAULT;
    config.tiling = seed % 8 == 4 ? MS_SWITCH_ON : MS_SWITCH_DEFAULT;
    config.debug = seed % 5 == 3;
    return config;
}

static void expect_coverage(const tally *t) {
    print_message("%u graphs: %u in tiles, %u recompute tiles, %u sweep; %u values moved, %u in 16 "
                  "bits\n",
                  (unsigned)t->graphs, (unsigned)t->tiled, (unsigned)t->again, (unsigned)t->sweeps,
                  (unsigned)t->moved, (unsigned)t->half);
    assert_true(t->graphs < 100 || (t->tiled * 2 > t->graphs && t->again * 10 > t->graphs &&
                                    t->sweeps * 10 > t->graphs && t->moved > 0 && t->half > 0));
}

static void tiles_change_no_sum(void **state) {
    (void)state;
    const uint64_t end = end_seed(QUICK_GRAPHS, GRAPHS);
    tally t;
    memset(&t, 0, sizeof t);
    for (uint64_t seed = first_seed(); seed < end; ++seed) {
        const ms_config config = random_config(seed);
        expect_same_bits(rt_generate(seed), &config, NULL, NULL, &t);
    }
    expect_coverage(&t);
}

/* ms_verify finds no difference, and ms_find_nonfinite nothing, in random plans in tiles. */
static void tiles_are_verified(void **state) {
    (void)state;
    const uint64_t end = end_seed(QUICK_GRAPHS / 4, GRAPHS / 4);
    uint32_t found = 0;
    for (uint64_t seed = first_seed(); seed < end; ++seed) {
        ms_config config = random_config(seed);
        rt_graph *g = rt_generate(seed);
        config.debug = false;
        tally t;
        memset(&t, 0, sizeof t);
        rt_net *n = rt_net_create(g, &config, NULL, NULL);
        for (uint32_t i = 0; i < g->layer_count; ++i) {
            g->layer[i].desc.dtypes.accepts = 0;
        }
        force(n, seed, &t);
        wrap(n);
        rt_net_write(n, 3, true);
        ms_verify_report report;
        ms_nonfinite nonfinite;
        OK(n, ms_verify(n->model, NULL, NULL, &report));
        if (report.differ_count != 0 || report.plain_loss != report.wrapped_loss) {
            fail_msg("MEMSCALE_TEST_SEED=%llu: %u tensors differ", (unsigned long long)seed,
                     (unsigned)report.differ_count);
        }
        OK(n, ms_find_nonfinite(n->model, &nonfinite));
        assert_int_equal(nonfinite.count, 0);
        uint32_t input = 0; // NaN in the last element of the first input
        while (g->value[input].role != RT_INPUT) {
            ++input;
        }
        static float data[RT_ELEMENTS];
        const uint64_t count = ms_tensor_count(n->model, n->handle[input]);
        memset(data, 0, sizeof data);
        data[count - 1] = NAN;
        OK(n, ms_write(n->model, n->handle[input], data));
        OK(n, ms_find_nonfinite(n->model, &nonfinite));
        found += nonfinite.count > 0;
        if (nonfinite.count > 0 && nonfinite.is_read &&
            ms_tensor_of(n->model, nonfinite.tensor).id == n->handle[input].id) {
            assert_int_equal(nonfinite.element, count - 1);
        }
        rt_net_destroy(n);
        free(g);
    }
    assert_true(found > 0);
}

static ms_layer_desc run_late(void *layers, uint32_t layer, const ms_layer_desc *desc) {
    return v_wrap(desc, (v_layer *)layers + layer);
}

static void expect_waits(uint64_t seed, tally *t) {
    static v_layer layers[RT_LAYERS];
    v_device device;
    ms_config config = random_config(seed);
    config.debug = false;
    v_open(&device, seed);
    config.backend = v_backend(&device);
    expect_same_bits(rt_generate(seed), &config, run_late, layers, t);
    assert_int_equal(device.callback_error, 0);
    assert_int_equal(device.overtaken, 0);
    v_close(&device);
}

static void tiles_wait_for_all_they_need(void **state) {
    (void)state;
    const uint64_t end = end_seed(QUICK_GRAPHS, GRAPHS);
    tally t;
    memset(&t, 0, sizeof t);
    for (uint64_t seed = first_seed(); seed < end; ++seed) {
        expect_waits(seed, &t);
    }
    expect_coverage(&t);
}

/* At sizes with fewer rows the last tile may have none; its wait is for copies of others too. */
static void tiles_without_rows_wait_for_others(void **state) {
    (void)state;
    static const uint64_t seeds[] = {127, 378}; // wrong without it
    tally t;
    memset(&t, 0, sizeof t);
    for (size_t k = 0; k < sizeof seeds / sizeof seeds[0]; ++k) {
        expect_waits(seeds[k], &t);
    }
}

// ------------------------------------------------------------------------------------------------
// a head with a loss: products, and a loss for each row

enum { HEAD_ROWS = 24, HEAD_IN = 4, HEAD_OUT = 64, HEAD_WIDE = HEAD_ROWS * HEAD_OUT };

/* What a layer of the head does wrong. */
typedef enum lie {
    TELLS_TRUTH,
    READS_NEXT_ROW,  // beyond its tile
    KEEPS_SIZES,     // of the whole layer, in place of those of the views
    COUNTS_FROM_0,   // numbers its rows without row_begin
    IS_A_MEAN,       // over all rows
    DROPS_OTHER_SUMS // of the gradient of its param: sets it where beta is 1
} lie;

typedef struct head {
    ms_model *model;
    ms_tensor in, mid, logits, loss, target, w0, w1;
    ms_layer first, second, last;
    lie tells;
} head;

/* out = in W, and, of the second layer, what the lie adds to it. */
static int head_product(const ms_call *call) {
    const head *h = (const head *)call->user;
    const ms_matrix in = ms_matrix_of(&call->in[0]), out = ms_matrix_of(&call->out[0]);
    const float *x = t_data(&call->in[0]), *w = t_data(&call->param[0]);
    const bool wide = out.cols == HEAD_OUT;
    const int64_t rows = wide && h->tells == KEEPS_SIZES ? (int64_t)HEAD_ROWS : out.rows;
    float sum = 0.0f;
    for (int64_t i = 0; i < in.rows * in.cols; ++i) {
        sum += x[i];
    }
    for (int64_t r = 0; r < rows; ++r) {
        for (int64_t c = 0; c < out.cols; ++c) {
            float y = 0.0f;
            for (int64_t k = 0; k < in.cols; ++k) {
                const int64_t row = wide && h->tells == READS_NEXT_ROW ? (r + 1) % HEAD_ROWS : r;
                y += x[row * in.cols + k] * w[k * out.cols + c];
            }
            y += wide && h->tells == COUNTS_FROM_0 ? (float)r : 0.0f;
            y += wide && h->tells == IS_A_MEAN ? sum / (float)in.rows : 0.0f;
            t_data(&call->out[0])[r * out.cols + c] = y;
        }
    }
    return 0;
}

static int head_product_backward(const ms_call *call) {
    const head *h = (const head *)call->user;
    const ms_matrix in = ms_matrix_of(&call->in[0]), dy = ms_matrix_of(&call->grad_out[0]);
    const float *x = t_data(&call->in[0]), *w = t_data(&call->param[0]);
    const float *d = t_data(&call->grad_out[0]);
    const bool forgets = dy.cols == HEAD_OUT && h->tells == DROPS_OTHER_SUMS;
    for (int64_t k = 0; k < in.cols; ++k) {
        for (int64_t c = 0; c < dy.cols; ++c) {
            float sum = 0.0f;
            for (int64_t r = 0; r < dy.rows; ++r) {
                sum += x[r * in.cols + k] * d[r * dy.cols + c];
            }
            if (forgets) {
                t_data(&call->grad_param[0])[k * dy.cols + c] = sum;
            } else {
                t_contribute(&call->grad_param[0], k * dy.cols + c, sum);
            }
        }
    }
    for (int64_t r = 0; r < dy.rows; ++r) {
        for (int64_t k = 0; k < in.cols; ++k) {
            float sum = 0.0f;
            for (int64_t c = 0; c < dy.cols; ++c) {
                sum += d[r * dy.cols + c] * w[k * dy.cols + c];
            }
            t_contribute(&call->grad_in[0], r * in.cols + k, sum);
        }
    }
    return 0;
}

/* The loss of a row: the squares of its elements, less the target. */
static int head_loss(const ms_call *call) {
    const ms_matrix in = ms_matrix_of(&call->in[0]);
    for (int64_t r = 0; r < in.rows; ++r) {
        float sum = 0.0f;
        for (int64_t c = 0; c < in.cols; ++c) {
            const float x = t_data(&call->in[0])[r * in.cols + c] - t_data(&call->in[1])[r];
            sum += 0.5f * x * x;
        }
        t_data(&call->out[0])[r] = sum;
    }
    return 0;
}

static int head_loss_backward(const ms_call *call) {
    const ms_matrix in = ms_matrix_of(&call->in[0]);
    for (int64_t r = 0; r < in.rows; ++r) {
        for (int64_t c = 0; c < in.cols; ++c) {
            const int64_t i = r * in.cols + c;
            const float x = t_data(&call->in[0])[i] - t_data(&call->in[1])[r];
            t_contribute(&call->grad_in[0], i, x * t_data(&call->grad_out[0])[r]);
        }
    }
    return 0;
}

static void head_create(head *h, const ms_config *config, lie told) {
    memset(h, 0, sizeof *h);
    h->tells = told;
    t_ok(h->model, ms_create(config, &h->model));
    ms_model *m = h->model;
    ms_layer_desc d;
    memset(&d, 0, sizeof d);
    h->in = ms_input(m, "x", MS_DTYPE_F32, ms_shape2(HEAD_ROWS, HEAD_IN));
    h->target = ms_input(m, "target", MS_DTYPE_F32, ms_shape1(HEAD_ROWS));
    h->w0 = ms_param(m, "w0", MS_DTYPE_F32, ms_shape2(HEAD_IN, HEAD_IN));
    h->w1 = ms_param(m, "w1", MS_DTYPE_F32, ms_shape2(HEAD_IN, HEAD_OUT));
    h->mid = ms_activation(m, "mid", MS_DTYPE_F32, ms_shape2(HEAD_ROWS, HEAD_IN));
    h->logits = ms_activation(m, "logits", MS_DTYPE_F32, ms_shape2(HEAD_ROWS, HEAD_OUT));
    h->loss = ms_activation(m, "loss", MS_DTYPE_F32, ms_shape1(HEAD_ROWS));
    d.user = h;
    d.name = "body";
    d.forward = head_product;
    d.backward = head_product_backward;
    d.backward_reads.in = d.backward_reads.param = 1;
    d.in[0] = h->in;
    d.param[0] = h->w0;
    d.out[0] = h->mid;
    h->first = ms_register_layer(m, &d);
    d.name = "head";
    d.tile.axes = 1;
    d.tile.preferred = 4;
    d.in[0] = h->mid;
    d.param[0] = h->w1;
    d.out[0] = h->logits;
    h->second = ms_register_layer(m, &d);
    memset(&d, 0, sizeof d);
    d.user = h;
    d.name = "loss";
    d.tile.axes = 1;
    d.tile.preferred = 4;
    d.forward = head_loss;
    d.backward = head_loss_backward;
    d.in[0] = h->logits;
    d.in[1] = h->target;
    d.out[0] = h->loss;
    d.grad_in_place[0].in = 1;
    h->last = ms_register_layer(m, &d);
    ms_set_loss(m, h->loss);
    const ms_optimizer_desc sgd = t_optimizer(MS_OPTIMIZER_SGD, 0.01f);
    ms_set_optimizer(m, &sgd);
}

static void head_force(head *h) {
    ms_set_layer_technique(h->model, h->second, MS_TECHNIQUE_TILING, MS_SWITCH_ON);
    ms_set_layer_technique(h->model, h->last, MS_TECHNIQUE_TILING, MS_SWITCH_ON);
}

static void head_write(head *h, uint64_t seed) {
    float values[HEAD_WIDE];
    t_rng rng = t_seed(seed);
    const ms_tensor all[] = {h->in, h->target, h->w0, h->w1};
    for (int k = 0; k < 4; ++k) {
        t_fill(&rng, values, ms_tensor_count(h->model, all[k]), 1.0f);
        t_ok(h->model, ms_write(h->model, all[k], values));
    }
}

/* Six tiles of four rows: what the head hands to the loss has memory for one of them, and the group
   recomputes nothing. Its gradients are those of the plain plan up to rounding. */
static void a_group_that_ends_in_the_loss_sweeps(void **state) {
    (void)state;
    head plain, tiled;
    ms_config config = t_config();
    ms_memory_report a, b;
    head_create(&plain, &config, TELLS_TRUTH);
    head_create(&tiled, &config, TELLS_TRUTH);
    head_force(&tiled);
    t_ok(plain.model, ms_wrap(plain.model));
    t_ok(tiled.model, ms_wrap(tiled.model));
    t_report(plain.model, &a);
    t_report(tiled.model, &b);
    const uint64_t logits = HEAD_WIDE * sizeof(float);
    assert_int_equal(b.recompute_count, 0);
    assert_true(b.arena_bytes < a.arena_bytes - logits * 3 / 4);
    const msi_program *p = &tiled.model->run.plan->train;
    for (uint32_t k = 0; k < p->ranges.count; ++k) { // values, and gradients in their place
        const bool of_logits =
            p->ranges.items[k].tensor == msi_index(&tiled.model->graph, tiled.logits);
        assert_true(!of_logits || p->ranges.items[k].role == MSI_ROLE_WORKSPACE ||
                    p->ranges.items[k].bytes == logits / 6);
    }
    double x, y;
    for (uint64_t step = 0; step < 3; ++step) {
        head_write(&plain, step);
        head_write(&tiled, step);
        t_ok(plain.model, ms_forward(plain.model, &x));
        t_ok(tiled.model, ms_forward(tiled.model, &y));
        assert_true(x == y); // rows are not summed within a tile
        t_ok(plain.model, ms_backward(plain.model));
        t_ok(tiled.model, ms_backward(tiled.model));
        float g0[HEAD_WIDE], g1[HEAD_WIDE];
        t_ok(plain.model, ms_read(plain.model, ms_gradient(plain.model, plain.w1), g0));
        t_ok(tiled.model, ms_read(tiled.model, ms_gradient(tiled.model, tiled.w1), g1));
        for (int i = 0; i < HEAD_IN * HEAD_OUT; ++i) {
            assert_true(fabsf(g0[i] - g1[i]) <= 1e-5f * (1.0f + fabsf(g0[i])));
        }
        t_ok(plain.model, ms_update(plain.model));
        t_ok(tiled.model, ms_update(tiled.model));
    }
    ms_verify_report verified;
    t_ok(tiled.model, ms_verify(tiled.model, NULL, NULL, &verified));
    assert_true(verified.absolute < 1e-4 && verified.plain_loss == verified.wrapped_loss);
    ms_destroy(plain.model);
    ms_destroy(tiled.model);
}

/* A forward of a later micro-batch that no backward follows has added to the gradients. */
static void a_forward_given_up_is_told(void **state) {
    (void)state;
    head h;
    double loss;
    ms_config config = t_config();
    config.accumulation_steps = 3;
    head_create(&h, &config, TELLS_TRUTH);
    head_force(&h);
    t_ok(h.model, ms_wrap(h.model));
    head_write(&h, 1);
    t_ok(h.model, ms_forward(h.model, &loss));
    t_ok(h.model, ms_forward(h.model, &loss)); // the first begins anew
    t_ok(h.model, ms_backward(h.model));
    t_ok(h.model, ms_forward(h.model, &loss));
    head_write(&h, 2); // ends it
    t_error(h.model, ms_forward(h.model, &loss), MS_RESULT_ORDER);
    t_text_has(ms_last_error(h.model), "begins anew");
    float gradient[HEAD_WIDE], expected[HEAD_WIDE];
    t_ok(h.model, ms_forward(h.model, &loss));
    t_ok(h.model, ms_backward(h.model));
    t_ok(h.model, ms_forward(h.model, &loss));
    t_ok(h.model, ms_eval(h.model, &loss)); // ends the forward too
    t_error(h.model, ms_forward(h.model, &loss), MS_RESULT_ORDER);
    for (int micro = 0; micro < 3; ++micro) { // the step that follows is as if nothing had been
        t_ok(h.model, ms_forward(h.model, &loss));
        t_ok(h.model, ms_backward(h.model));
    }
    t_ok(h.model, ms_read(h.model, ms_gradient(h.model, h.w1), gradient));
    head other;
    head_create(&other, &config, TELLS_TRUTH);
    head_force(&other);
    t_ok(other.model, ms_wrap(other.model));
    head_write(&other, 2);
    for (int micro = 0; micro < 3; ++micro) {
        t_ok(other.model, ms_forward(other.model, &loss));
        t_ok(other.model, ms_backward(other.model));
    }
    t_ok(other.model, ms_read(other.model, ms_gradient(other.model, other.w1), expected));
    assert_memory_equal(gradient, expected, HEAD_IN * HEAD_OUT * sizeof(float));
    ms_destroy(other.model);
    ms_destroy(h.model);
}

/* Debug mode names a layer whose rows are not independent, whatever the plan. */
static void layers_that_lie_about_rows_are_named(void **state) {
    (void)state;
    static const struct {
        lie told;
        const char *text;
    } lies[] = {{READS_NEXT_ROW, "out[0]"},
                {KEEPS_SIZES, ""},
                {COUNTS_FROM_0, "makes other numbers in tiles of"},
                {IS_A_MEAN, "makes other numbers in tiles of"},
                {DROPS_OTHER_SUMS, "grad_param[0]"}};
    for (size_t k = 0; k < sizeof lies / sizeof lies[0]; ++k) {
        for (int forced = 0; forced < 2; ++forced) {
            head h;
            ms_config config = t_config();
            config.debug = true;
            head_create(&h, &config, lies[k].told);
            if (forced && lies[k].told != KEEPS_SIZES) {
                ms_set_layer_technique(h.model, h.last, MS_TECHNIQUE_TILING, MS_SWITCH_ON);
            }
            t_ok(h.model, ms_wrap(h.model));
            head_write(&h, 5);
            double loss;
            const ms_result result = ms_step(h.model, &loss);
            assert_int_equal(result, MS_RESULT_CONTRACT);
            t_text_has(ms_last_error(h.model), "\"head\"");
            t_text_has(ms_last_error(h.model), lies[k].text);
            ms_destroy(h.model);
        }
    }
}

static void honest_layers_pass_debug_mode(void **state) {
    (void)state;
    for (int forced = 0; forced < 2; ++forced) {
        head h;
        double loss;
        ms_config config = t_config();
        config.debug = true;
        head_create(&h, &config, TELLS_TRUTH);
        if (forced) {
            head_force(&h);
        }
        t_ok(h.model, ms_wrap(h.model));
        for (uint64_t step = 0; step < 2; ++step) {
            head_write(&h, step);
            t_ok(h.model, ms_step(h.model, &loss));
        }
        ms_destroy(h.model);
    }
}

// ------------------------------------------------------------------------------------------------
// what plans say, and what is refused

typedef struct seen {
    uint32_t tiles, groups, events, rows;
} seen;

static void see_decision(const ms_decision *d, void *user) {
    seen *s = (seen *)user;
    if (d->technique == MS_TECHNIQUE_TILING && d->is_applied) {
        s->tiles += d->tile_count == 6 && d->tile_rows == 4;
        s->groups += d->group_first.id == d->layer.id;
        assert_string_equal(d->rule->id, "forced");
    }
}

static void see_event(const ms_event *event, void *user) {
    seen *s = (seen *)user;
    if (event->row_total > 0 && event->layer.id) {
        s->events++;
        s->rows += (uint32_t)event->row_count;
        assert_int_equal(event->row_total, HEAD_ROWS);
        for (uint32_t k = 0; k < event->operand_count; ++k) {
            const ms_event_operand *o = &event->operands[k];
            const bool param = o->kind == MS_OPERAND_PARAM || o->kind == MS_OPERAND_GRAD_PARAM;
            assert_true(o->tensor.id == 0 || o->is_part == !param);
        }
    }
}

static void plans_say_what_is_in_tiles(void **state) {
    (void)state;
    head h;
    seen s;
    const ms_config config = t_config();
    memset(&s, 0, sizeof s);
    head_create(&h, &config, TELLS_TRUTH);
    head_force(&h);
    t_ok(h.model, ms_wrap(h.model));
    t_ok(h.model, ms_visit_decisions(h.model, see_decision, &s));
    assert_int_equal(s.tiles, 2);
    assert_int_equal(s.groups, 1);
    t_ok(h.model, ms_visit_events(h.model, MS_PROGRAM_TRAIN, see_event, &s));
    assert_int_equal(s.events, 4 * 6); // both layers, forward and backward
    assert_int_equal(s.rows, 4 * HEAD_ROWS);
    t_text text;
    memset(&text, 0, sizeof text);
    t_ok(h.model, ms_print_plan(h.model, t_append, &text));
    t_text_has(text.data, "6 x 4");
    t_text_has(text.data, "^6 x 4");
    t_ok(h.model, ms_print_program(h.model, MS_PROGRAM_TRAIN, t_append, &text));
    t_text_has(text.data, "rows 20+4 of 24");
    free(text.data);
    ms_destroy(h.model);
}

static void wrong_declarations_are_refused(void **state) {
    (void)state;
    static const char *const texts[] = {
        "tile.axes is 0",    "larger than the rank",      "numbers of rows", "a layer with state",
        "not a multiple of", "cannot be cut into 8 rows", "whole_in",        "names slot"};
    for (size_t k = 0; k < sizeof texts / sizeof texts[0]; ++k) {
        ms_model *m;
        ms_config config = t_config();
        ms_layer_desc d;
        config.dry_run = true;
        t_ok(m, ms_create(&config, &m));
        memset(&d, 0, sizeof d);
        d.in[0] = ms_input(m, "x", MS_DTYPE_F32, ms_shape2(k == 5 ? 3 : 8, 4));
        d.in[1] = ms_input(m, "y", MS_DTYPE_F32, ms_shape2(8, 4));
        d.out[0] = ms_activation(m, "out", MS_DTYPE_F32, ms_shape2(8, 4));
        d.tile.axes = k == 0 ? 0 : k == 1 ? 3 : 1;
        d.tile.multiple = k == 0 ? 2 : k == 4 ? 3 : 0;
        d.tile.smallest = k == 2 ? -1 : 0;
        d.state[0] = k == 3 ? ms_buffer(m, "state", MS_DTYPE_F32, ms_shape1(4)) : d.state[0];
        d.must_in_place = k == 6;
        d.in_place[0] = k == 6 ? 2 : 0;
        d.tile.whole_in = k == 6 ? 2 : k == 7 ? 8 : 0;
        ms_register_layer(m, &d);
        t_text_has(ms_last_error(m), texts[k]);
        ms_destroy(m);
    }
}

/* Layers of rows that take 10 us each way for each row, and make zeros. */
typedef struct timed_net {
    ms_model *model;
    ms_layer layers[3];
    double now_us;
} timed_net;

enum { TIMED_ROWS = 32, TIMED_COLS = 8 };

static double timed_clock(void *user) {
    return ((const timed_net *)user)->now_us;
}

static void make_zeros(const ms_view *view) {
    if (view->data != NULL) {
        memset(view->data, 0, (size_t)((uint64_t)t_count(view) * ms_dtype_bytes(view->dtype)));
    }
}

static int timed_call(const ms_call *call) {
    const bool backward = call->phase == MS_PHASE_BACKWARD;
    ((timed_net *)call->user)->now_us += 10.0 * (double)call->row_count;
    make_zeros(backward ? &call->grad_in[0] : &call->out[0]);
    if (backward) {
        make_zeros(&call->grad_param[0]);
    }
    return 0;
}

static void timed_start(timed_net *n, const ms_config *with, int64_t smallest) {
    ms_config config = *with;
    memset(n, 0, sizeof *n);
    config.clock = timed_clock;
    config.clock_user = n;
    t_ok(n->model, ms_create(&config, &n->model));
    ms_tensor in = ms_input(n->model, "in", MS_DTYPE_F32, ms_shape2(TIMED_ROWS, TIMED_COLS));
    for (int i = 0; i < 3; ++i) {
        const int64_t rows = i == 1 ? TIMED_ROWS / 4 : TIMED_ROWS; // of one group, in other shapes
        ms_layer_desc d;
        memset(&d, 0, sizeof d);
        d.user = n;
        d.forward = d.backward = timed_call;
        d.in[0] = in;
        d.param[0] = ms_param(n->model, "w", MS_DTYPE_F32, ms_shape2(TIMED_COLS, TIMED_COLS));
        d.out[0] = in = ms_activation(n->model, "out", MS_DTYPE_F32,
                                      i == 2 ? ms_shape1(rows)
                                             : ms_shape2(rows, TIMED_COLS * TIMED_ROWS / rows));
        d.tile.axes = 1;
        d.tile.multiple = 1 + (i == 1);
        d.tile.smallest = i == 1 ? smallest : 0;
        d.dtypes.accepts = i < 2 ? 1u << MS_DTYPE_BF16 : 0;
        n->layers[i] = ms_register_layer(n->model, &d);
    }
    ms_set_loss(n->model, in);
    const ms_optimizer_desc sgd = t_optimizer(MS_OPTIMIZER_SGD, 0.01f);
    ms_set_optimizer(n->model, &sgd);
}

static void timed_force(timed_net *n, ms_technique technique) {
    for (int i = 0; i < 2; ++i) {
        ms_set_layer_technique(n->model, n->layers[i], technique, MS_SWITCH_ON);
    }
}

/* What is measured of calls in 16 bits is kept as if of one call in F32, however many tiles there
   are; so a call in 16 bits is predicted to take what it took. */
static void times_that_are_measured_in_tiles_are_scaled_once(void **state) {
    (void)state;
    double forward_us[2][2];
    for (int in_tiles = 0; in_tiles < 2; ++in_tiles) {
        timed_net n;
        ms_config config = t_config();
        double loss;
        config.empirical_profiling = MS_SWITCH_ON;
        config.mixed_precision = MS_SWITCH_ON;
        timed_start(&n, &config, 0);
        timed_force(&n, MS_TECHNIQUE_MIXED_PRECISION);
        if (in_tiles) {
            timed_force(&n, MS_TECHNIQUE_TILING);
        }
        t_ok(n.model, ms_wrap(n.model));
        const msi_program *p = &n.model->run.plan->train;
        uint32_t tiles = 0;
        for (uint32_t k = 0; k < p->instructions.count; ++k) {
            const msi_instruction *i = &p->instructions.items[k];
            tiles += i->op == MSI_OP_FORWARD && i->target == 1;
            assert_true(i->op != MSI_OP_FORWARD || i->target == 2 ||
                        msi_is_half((ms_state_format)i->format));
        }
        assert_true(in_tiles ? tiles > 1 : tiles == 1);
        t_write_zeros(n.model);
        for (int step = 0; step < 6; ++step) {
            t_ok(n.model, ms_step(n.model, &loss));
        }
        for (int i = 0; i < 2; ++i) {
            const msi_layer *l = &n.model->graph.layers.items[i];
            const double rows = i == 1 ? TIMED_ROWS / 4 : TIMED_ROWS;
            forward_us[in_tiles][i] = l->measured.forward_us;
            assert_true(forward_us[in_tiles][i] > 0.0);
            assert_true(fabs(l->half.forward_us / (10.0 * rows) - 1.0) < 1e-9);
            assert_true(fabs(l->half.backward_us / (10.0 * rows) - 1.0) < 1e-9);
        }
        ms_destroy(n.model);
    }
    for (int i = 0; i < 2; ++i) {
        assert_true(fabs(forward_us[1][i] / forward_us[0][i] - 1.0) < 1e-9);
    }
}

/* A layer that wants more rows in a tile than there are is in no more tiles for that. */
static void tiles_of_more_rows_than_there_are(void **state) {
    (void)state;
    static const int64_t smallest[] = {TIMED_ROWS / 4, TIMED_ROWS, (int64_t)1 << 62, INT64_MAX};
    for (size_t k = 0; k < sizeof smallest / sizeof smallest[0]; ++k) {
        timed_net n;
        ms_config config = t_config();
        config.dry_run = true;
        timed_start(&n, &config, smallest[k]);
        timed_force(&n, MS_TECHNIQUE_TILING);
        assert_int_equal(msi_most_tiles(&n.model->graph, 0, 2), 1);
        t_ok(n.model, ms_wrap(n.model));
        ms_destroy(n.model);
    }
}

/* Every allocation of ms_wrap fails once: it says so, and what comes after is as if it had not been
   called. */
static void plans_in_tiles_fail_cleanly(void **state) {
    (void)state;
    t_heap heap;
    t_failing f = t_failing_heap(&heap);
    memset(&heap, 0, sizeof heap);
    while (t_next_failure(&f, 1 + f.at / 64)) { // all of the first, some of many
        head h;
        double loss;
        ms_config config = t_config();
        config.allocator = t_heap_allocator(&heap);
        config.tiling = MS_SWITCH_ON;
        config.force_optimize = true;
        head_create(&h, &config, TELLS_TRUTH);
        t_arm(&f);
        const ms_result result = ms_wrap(h.model);
        t_failed(&f, h.model, result);
        t_ok(h.model, ms_wrap(h.model));
        head_write(&h, 1);
        t_ok(h.model, ms_step(h.model, &loss));
        ms_destroy(h.model);
    }
    assert_true(f.error_count > 20);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tiles_change_no_sum),
        cmocka_unit_test(tiles_wait_for_all_they_need),
        cmocka_unit_test(tiles_without_rows_wait_for_others),
        cmocka_unit_test(tiles_are_verified),
        cmocka_unit_test(a_group_that_ends_in_the_loss_sweeps),
        cmocka_unit_test(a_forward_given_up_is_told),
        cmocka_unit_test(layers_that_lie_about_rows_are_named),
        cmocka_unit_test(honest_layers_pass_debug_mode),
        cmocka_unit_test(plans_say_what_is_in_tiles),
        cmocka_unit_test(wrong_declarations_are_refused),
        cmocka_unit_test(times_that_are_measured_in_tiles_are_scaled_once),
        cmocka_unit_test(tiles_of_more_rows_than_there_are),
        cmocka_unit_test(plans_in_tiles_fail_cleanly),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
