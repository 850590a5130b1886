/*  test_shapes.c - shapes that change between steps: the numbers of a fresh model, inside the
    memory that was allocated for the largest shape. Nearly every test runs twice, the second
    time with ms_config.debug. */
#include "private.h"
#include "toy_layers.h"

enum { ROWS = T_NET_ROWS, COLS = T_NET_COLS, COUNT = ROWS * COLS };

// ------------------------------------------------------------------------------------------------
// other shapes

typedef struct shaped {
    t_net n;
    t_device device;
    ms_tensor p, buffer;
} shaped;

static void shaped_create(shaped *s, int64_t rows, bool tight) {
    t_net_begin(&s->n);
    s->n.rows = rows;
    s->n.largest = 3 * ROWS;
    s->n.config.backend = t_device_backend(&s->device);
    s->n.config.force_optimize = tight;
    t_net_create(&s->n);
    t_net_optimizer(&s->n, MS_OPTIMIZER_SGD, 0.001f);
    s->p = t_net_param(&s->n, "p");
    s->buffer = ms_buffer(s->n.m, "buffer", MS_DTYPE_F32, ms_shape1(3));
    t_net_loss(&s->n, t_net_pairs(&s->n, s->n.x, s->p, 3), 0.125f);
}

static void check_reshape(bool tight) {
    static const int64_t sizes[] = {1, 2 * ROWS, 3 * ROWS, ROWS, 5, 3 * ROWS, 1, ROWS};
    static const float kept[3] = {1.0f, 2.0f, 3.0f};
    shaped s;
    float data[3];
    shaped_create(&s, ROWS, tight);
    t_net_start(&s.n);
    t_net_write_param(&s.n, s.p, 0.0f);
    t_ok(s.n.m, ms_write(s.n.m, s.buffer, kept));
    uint64_t allocations = s.device.allocations, live = s.device.live_bytes;
    for (int turn = 0; turn < 2; ++turn) {
        for (int i = 0; i < 8; ++i) {
            uint64_t calls = s.n.heap.calls;
            float before[COLS];
            double losses[2];
            ms_memory_report report;
            t_ok(s.n.m, ms_read(s.n.m, s.p, before));
            t_ok(s.n.m, ms_reshape(s.n.m, &sizes[i]));
            assert_int_equal((int)ms_tensor_shape(s.n.m, s.n.x).dim[0], (int)sizes[i]);
            assert_true(ms_tensor_count(s.n.m, s.n.x) == (uint64_t)sizes[i] * COLS);
            t_net_write_x(&s.n);
            t_ok(s.n.m, ms_step(s.n.m, &losses[0]));
            if (turn == 1 || i > 4) { // a shape that has been before
                assert_true(s.n.heap.calls == calls);
            }
            shaped fresh;
            shaped_create(&fresh, sizes[i], tight);
            t_net_start(&fresh.n);
            t_ok(fresh.n.m, ms_write(fresh.n.m, fresh.p, before));
            t_ok(fresh.n.m, ms_step(fresh.n.m, &losses[1]));
            assert_true(losses[0] == losses[1]);
            t_net_same(&s.n, s.p, &fresh.n, fresh.p);
            t_report(s.n.m, &report);
            assert_true(report.arena_bytes <= live);
            t_net_end(&fresh.n);
        }
    }
    assert_true(s.device.allocations == allocations && s.device.live_bytes == live);
    t_ok(s.n.m, ms_read(s.n.m, s.buffer, data));
    assert_memory_equal(data, kept, sizeof kept);
    t_net_end(&s.n);
    assert_true(s.device.live_count == 0 && s.device.wrong_releases == 0);
}

static void shapes_change_between_steps(void **state) {
    (void)state;
    check_reshape(false);
    check_reshape(true);
}

enum { GUARD = 8192 };

/* t_heap, with a strip after each block that nobody may write. */
typedef struct guarded {
    t_heap heap;
    uint64_t spoiled;
} guarded;

static void *guarded_alloc(uint64_t bytes, void *user) {
    return t_heap_alloc(bytes + GUARD, &((guarded *)user)->heap); // filled with 0xa5
}

static void guarded_release(void *memory, uint64_t bytes, void *user) {
    guarded *g = (guarded *)user;
    for (uint64_t i = 0; memory != NULL && i < GUARD; ++i) {
        g->spoiled += ((const uint8_t *)memory)[bytes + i] != 0xa5;
    }
    t_heap_release(memory, memory != NULL ? bytes + GUARD : 0, &g->heap);
}

static uint32_t fits_in_place;

/* z = y / 2 as far as y goes, then 1: right in place of y where both have one size. */
static int fit_forward(const ms_call *call) {
    int error = t_enter(call);
    int64_t from = t_rows(&call->in[0]) * t_cols(&call->in[0]);
    fits_in_place += call->in[0].data == call->out[0].data;
    for (int64_t i = 0; i < t_rows(&call->out[0]) * t_cols(&call->out[0]) && error == 0; ++i) {
        t_data(&call->out[0])[i] = i < from ? 0.5f * t_data(&call->in[0])[i] : 1.0f;
    }
    return error;
}

static int fit_backward(const ms_call *call) {
    int error = t_enter(call);
    int64_t to = t_rows(&call->grad_out[0]) * t_cols(&call->grad_out[0]);
    for (int64_t i = 0; i < t_rows(&call->in[0]) * t_cols(&call->in[0]) && error == 0; ++i) {
        t_contribute(&call->grad_in[0], i, i < to ? 0.5f * t_grad_out(call, 0, i) : 0.0f);
    }
    return error;
}

typedef struct two_axes {
    t_net n;
    guarded memory;
    ms_tensor p[T_NET_OPS];
    bool bulges;
    ms_shape shape[2];
} two_axes;

static ms_tensor add_fit(t_net *n, ms_tensor y, ms_shape shape) {
    const ms_tensor z = ms_activation(n->m, "z", MS_DTYPE_F32, shape);
    ms_layer_desc desc = t_net_own(n, fit_forward, fit_backward, "fit", y, z);
    desc.backward_reads.nothing = true;
    desc.in_place[0] = 1;
    desc.grad_in_place[0].grad_out = 1;
    t_net_register(n, &desc);
    return desc.out[0];
}

/* x -> [scale, square, fit to the other shape] twice. */
static ms_tensor two_axes_deep(two_axes *t) {
    t_net *n = &t->n;
    ms_tensor last = n->x;
    for (int i = 0; i < 2; ++i) {
        t->p[i] = ms_param(n->m, "p", MS_DTYPE_F32, ms_shape1(t->shape[i].dim[1]));
        last = add_fit(n, t_net_pairs(n, last, t->p[i], 1), t->shape[1 - i]);
    }
    return last;
}

/* x -> fit to one shape, to the other, and to a row -> scale twice: the peak is where one of the
   shapes is in place of the other, or both are there. */
static ms_tensor two_axes_bulge(two_axes *t) {
    t_net *n = &t->n;
    const ms_shape row = ms_shape2(1, COLS);
    ms_tensor last = add_fit(n, add_fit(n, n->x, t->shape[0]), t->shape[1]);
    last = add_fit(n, last, row);
    for (int i = 0; i < 2; ++i) {
        t->p[i] = t_net_param(n, "p");
        last = t_net_scale(n, "scale", last, 0.0f, t->p[i]);
    }
    return last;
}

static void two_axes_create(two_axes *t, const int64_t *sizes, const int64_t *largest,
                            const int64_t *cols, bool smallest, bool bulges) {
    memset(t, 0, sizeof *t);
    t->bulges = bulges;
    t_net *n = &t->n;
    t_net_begin(n);
    n->config.force_optimize = smallest;
    n->config.allocator.alloc = guarded_alloc;
    n->config.allocator.release = guarded_release;
    n->config.allocator.user = &t->memory;
    assert_int_equal(ms_create(&n->config, &n->m), MS_RESULT_OK);
    ms_axis axes[2];
    axes[0] = ms_add_axis(n->m, "a", sizes[0], largest[0]);
    axes[1] = largest[1] != 0 ? ms_add_axis(n->m, "b", sizes[1], largest[1]) : axes[0];
    for (int i = 0; i < 2; ++i) {
        const int64_t rows = largest[1] != 0 ? sizes[i] : sizes[0];
        t->shape[i] = ms_along(ms_shape2(rows, cols[i]), 0, axes[i]);
    }
    n->x = ms_input(n->m, "x", MS_DTYPE_F32, bulges ? ms_shape2(1, COLS) : t->shape[0]);
    t_net_optimizer(n, MS_OPTIMIZER_SGD, 0.001f);
    t_net_loss(n, bulges ? two_axes_bulge(t) : two_axes_deep(t), 0.125f);
    t_net_start(n);
    for (int i = 0; i < 2; ++i) {
        t_net_write_param(n, t->p[i], 0.0f);
    }
}

static void two_axes_end(two_axes *t) {
    t_net_end(&t->n);
    assert_true(t->memory.heap.live_count == 0 && t->memory.heap.wrong_releases == 0);
    assert_true(t->memory.spoiled == 0);
}

/* Reshaped again and again, with the numbers of a fresh model, inside of what was allocated. */
static void check_two_axes(const int64_t *largest, const int64_t *cols, bool smallest,
                           bool bulges) {
    two_axes t;
    two_axes_create(&t, largest, largest, cols, smallest, bulges);
    ms_memory_report report;
    t_report(t.n.m, &report);
    const uint64_t room = report.arena_bytes;
    const int64_t count = 2 * largest[0] * (largest[1] != 0 ? largest[1] : 1);
    for (int64_t i = 0; i < count; ++i) { // larger ones after smaller ones, then smaller ones
        const int64_t sizes[2] = {1 + i % largest[0],
                                  1 + i / largest[0] % (largest[1] != 0 ? largest[1] : 1)};
        two_axes fresh;
        double losses[2];
        t_ok(t.n.m, ms_reshape(t.n.m, sizes));
        t_report(t.n.m, &report);
        assert_true(report.arena_bytes >= report.lower_bound_bytes && report.arena_bytes <= room);
        two_axes_create(&fresh, sizes, largest, cols, smallest, bulges);
        t_net_write_x(&t.n);
        for (int k = 0; k < 2; ++k) {
            t_net_write_param(&t.n, t.p[k], 0.0f);
        }
        for (int step = 0; step < 2; ++step) {
            t_ok(t.n.m, ms_step(t.n.m, &losses[0]));
            t_ok(fresh.n.m, ms_step(fresh.n.m, &losses[1]));
            assert_true(losses[0] == losses[1]);
            t_ok(t.n.m, ms_eval(t.n.m, &losses[0]));
            t_ok(fresh.n.m, ms_eval(fresh.n.m, &losses[1]));
            assert_true(losses[0] == losses[1]);
        }
        for (int k = 0; k < 2; ++k) {
            t_net_same(&t.n, t.p[k], &fresh.n, fresh.p[k]);
        }
        two_axes_end(&fresh);
    }
    two_axes_end(&t);
}

/* Two shapes that are equal at some sizes of their axes only, by chance or by rounding. */
static void aliases_hold_at_all_sizes(void **state) {
    (void)state;
    static const int64_t squares[] = {4, 4}, uneven[] = {2, 4}, one[] = {3, 0};
    static const int64_t equal[] = {16, 16}, twice[] = {16, 8};
    static const int64_t longer[] = {8, 9}, shorter[] = {9, 8}; // 96 and 108 bytes of 128
    static const int64_t wide[] = {512, 512}, wide_twice[] = {512, 256};
    static const int64_t wide_longer[] = {504, 505}, wide_shorter[] = {505, 504};
    for (int smallest = 0; smallest < 2; ++smallest) {
        check_two_axes(squares, equal, smallest != 0, false);
        check_two_axes(uneven, twice, smallest != 0, false);
        check_two_axes(one, longer, smallest != 0, false);
        check_two_axes(one, shorter, smallest != 0, false);
        check_two_axes(one, equal, smallest != 0, false);
        check_two_axes(squares, wide, smallest != 0, true);
        check_two_axes(uneven, wide_twice, smallest != 0, true);
        check_two_axes(one, wide_longer, smallest != 0, true);
        check_two_axes(one, wide_shorter, smallest != 0, true);
        check_two_axes(one, wide, smallest != 0, true);
    }
}

/* Along one axis both have one size always: then it is done in place, whatever the size. */
static void aliases_along_one_axis(void **state) {
    (void)state;
    static const int64_t largest[] = {4, 0}, cols[] = {16, 16};
    for (int smallest = 0; smallest < 2; ++smallest) {
        two_axes t;
        two_axes_create(&t, largest, largest, cols, smallest != 0, false);
        for (int64_t rows = 1; rows <= 4; ++rows) {
            t_ok(t.n.m, ms_reshape(t.n.m, &rows));
            t_write_zeros(t.n.m);
            fits_in_place = 0;
            t_ok(t.n.m, ms_forward(t.n.m, NULL));
            assert_int_equal(fits_in_place, 2);
            t_ok(t.n.m, ms_eval(t.n.m, NULL));
            assert_int_equal(fits_in_place, 4);
        }
        two_axes_end(&t);
    }
}

enum { MANY_SHAPES = 70 };

typedef struct many_shapes {
    t_net n;
    ms_tensor p;
} many_shapes;

static void many_shapes_create(many_shapes *s, int64_t rows) {
    t_net_begin(&s->n);
    s->n.rows = rows;
    s->n.largest = MANY_SHAPES;
    t_net_create(&s->n);
    t_net_optimizer(&s->n, MS_OPTIMIZER_SGD, 0.0078125f);
    s->p = t_net_param(&s->n, "p");
    t_net_loss(&s->n, t_net_pairs(&s->n, s->n.x, s->p, 1), 0.015625f);
    t_net_start(&s->n);
    t_net_write_param(&s->n, s->p, 0.0f);
}

/* There and back through more shapes than plans are kept; their number stays bounded. */
static void more_shapes_than_plans_are_kept(void **state) {
    (void)state;
    many_shapes s;
    double losses[MANY_SHAPES];
    uint64_t live = 0;
    many_shapes_create(&s, MANY_SHAPES);
    for (int turn = 0; turn < 4; ++turn) {
        for (int i = 0; i < MANY_SHAPES; ++i) {
            int64_t rows = turn % 2 != 0 ? MANY_SHAPES - i : i + 1;
            double loss;
            t_ok(s.n.m, ms_reshape(s.n.m, &rows));
            t_net_write_x(&s.n);
            t_ok(s.n.m, ms_eval(s.n.m, &loss));
            if (turn == 0) {
                many_shapes fresh;
                many_shapes_create(&fresh, rows);
                t_ok(fresh.n.m, ms_eval(fresh.n.m, &losses[rows - 1]));
                t_net_end(&fresh.n);
            }
            assert_true(loss == losses[rows - 1]);
            t_ok(s.n.m, ms_forward(s.n.m, &loss)); // by the other program
            assert_true(loss == losses[rows - 1]);
            t_ok(s.n.m, ms_backward(s.n.m));
            live = turn == 0 && i < 64 ? s.n.heap.live_count : live;
            assert_true(s.n.heap.live_count <= live); // 64 plans, or what they took
        }
    }
    int64_t largest = MANY_SHAPES, other = 1;
    t_ok(s.n.m, ms_reshape(s.n.m, &other));
    uint64_t calls = s.n.heap.calls;
    t_ok(s.n.m, ms_reshape(s.n.m, &largest)); // is never forgotten
    assert_true(s.n.heap.calls == calls);
    t_net_write_x(&s.n);
    t_ok(s.n.m, ms_step(s.n.m, NULL));
    t_net_end(&s.n);
}

/* Plans that were kept for another budget may lack the present shape: whatever budget and shape are
   now, a plan is for both. */
static void shapes_change_with_budgets(void **state) {
    (void)state;
    static const int64_t sizes[] = {ROWS, 3 * ROWS, 5};
    uint64_t budgets[3];
    double losses[3];
    shaped s;
    ms_memory_report report;
    t_rng rng = t_seed(3);
    for (int i = 0; i < 3; ++i) {
        shaped fresh;
        shaped_create(&fresh, sizes[i], false);
        t_net_start(&fresh.n);
        t_net_write_param(&fresh.n, fresh.p, 0.0f);
        t_ok(fresh.n.m, ms_eval(fresh.n.m, &losses[i]));
        t_net_end(&fresh.n);
    }
    shaped_create(&s, ROWS, false);
    t_net_start(&s.n);
    t_net_write_param(&s.n, s.p, 0.0f);
    t_report(s.n.m, &report);
    for (int i = 0; i < 3; ++i) {
        budgets[i] = report.arena_bytes + (uint64_t)i * 4096;
    }
    for (int turn = 0; turn < 40; ++turn) {
        const uint32_t size = t_below(&rng, 3);
        double loss;
        t_ok(s.n.m, ms_reshape(s.n.m, &sizes[size]));
        ms_set_budget(s.n.m, budgets[t_below(&rng, 3)]);
        t_ok(s.n.m, ms_wrap(s.n.m));
        assert_int_equal((int)s.n.m->run.plan->sizes[0], (int)sizes[size]);
        t_net_write_x(&s.n);
        t_ok(s.n.m, ms_eval(s.n.m, &loss));
        assert_true(loss == losses[size]);
    }
    t_net_end(&s.n);
}

/* A new shape after a change that asks for a new plan: refused until ms_wrap. */
static void a_reshape_after_a_change_waits_for_a_wrap(void **state) {
    (void)state;
    shaped s, fresh;
    int64_t more = ROWS + 1, first = ROWS;
    double losses[2];
    shaped_create(&s, ROWS, false);
    t_net_start(&s.n);
    t_net_write_param(&s.n, s.p, 0.0f);
    ms_set_frozen(s.n.m, s.p, true); // takes effect at ms_wrap
    t_error(s.n.m, ms_reshape(s.n.m, &more), MS_RESULT_ORDER);
    t_text_has(ms_last_error(s.n.m), "ms_reshape");
    t_text_has(ms_last_error(s.n.m), "ms_wrap");
    assert_int_equal((int)ms_tensor_shape(s.n.m, s.n.x).dim[0], ROWS);
    t_ok(s.n.m, ms_reshape(s.n.m, &first)); // a plan that is there
    shaped_create(&fresh, ROWS, false);
    t_net_start(&fresh.n);
    t_net_write_param(&fresh.n, fresh.p, 0.0f);
    for (int turn = 0; turn < 2; ++turn) {
        t_ok(s.n.m, ms_step(s.n.m, &losses[0]));
        t_ok(fresh.n.m, ms_step(fresh.n.m, &losses[1]));
        assert_true(losses[0] == losses[1]);
        t_net_same(&s.n, s.p, &fresh.n, fresh.p);
        if (turn == 0) {
            ms_set_frozen(s.n.m, s.p, false);
            t_ok(s.n.m, ms_wrap(s.n.m));
            t_ok(s.n.m, ms_reshape(s.n.m, &more));
            t_ok(fresh.n.m, ms_reshape(fresh.n.m, &more));
            t_net_write_x(&s.n);
            t_net_write_x(&fresh.n);
        }
    }
    t_net_end(&s.n);
    t_net_end(&fresh.n);
}

/* An impossible budget or a lack of memory between steps: plan, sizes and values stay, and what can
   be done with them. */
static void a_failing_wrap_leaves_the_model_as_it_was(void **state) {
    (void)state;
    static const int64_t sizes[] = {ROWS, 1, 3 * ROWS, 5, ROWS};
    for (int tight = 0; tight < 2; ++tight) {
        shaped s, twin;
        shaped *const both[] = {&s, &twin};
        for (int i = 0; i < 2; ++i) {
            shaped_create(both[i], ROWS, tight != 0);
            t_net_start(&both[i]->n);
            t_net_write_param(&both[i]->n, both[i]->p, 0.0f);
        }
        for (int k = 0; k < 5; ++k) {
            ms_memory_report before, after;
            double losses[2];
            for (int i = 0; i < 2; ++i) {
                t_ok(both[i]->n.m, ms_reshape(both[i]->n.m, &sizes[k]));
                t_net_write_x(&both[i]->n);
            }
            t_report(s.n.m, &before);
            uint64_t live = s.n.heap.live_bytes, allocations = s.device.allocations;
            void *const of_p = ms_data(s.n.m, s.p);
            ms_set_budget(s.n.m, 1);
            s.n.heap.fail_at = tight != 0 ? s.n.heap.calls + 5 : 0;
            t_error(s.n.m, ms_wrap(s.n.m), tight != 0 ? MS_RESULT_OUT_OF_MEMORY : MS_RESULT_BUDGET);
            t_report(s.n.m, &after);
            assert_memory_equal(&before, &after, sizeof before);
            assert_true(s.n.heap.live_bytes == live && s.device.allocations == allocations);
            assert_ptr_equal(ms_data(s.n.m, s.p), of_p);
            assert_int_equal((int)ms_tensor_shape(s.n.m, s.n.x).dim[0], (int)sizes[k]);
            t_ok(s.n.m, ms_step(s.n.m, &losses[0]));
            t_ok(twin.n.m, ms_step(twin.n.m, &losses[1]));
            assert_true(losses[0] == losses[1]);
            t_net_same(&s.n, s.p, &twin.n, twin.p);
        }
        ms_set_budget(s.n.m, s.n.config.memory_budget_bytes);
        t_ok(s.n.m, ms_wrap(s.n.m));
        t_net_end(&s.n);
        t_net_end(&twin.n);
    }
}

/* Sizes and budgets change in any order: whichever plans are kept for a budget, the one in force is for
   the present sizes. */
static void budgets_return_at_other_sizes(void **state) {
    (void)state;
    static const int64_t sizes[] = {1, 3, ROWS, 3 * ROWS};
    t_rng rng = t_seed(1);
    uint64_t budgets[3], least;
    uint32_t returns = 0;
    shaped s, twin;
    shaped_create(&s, ROWS, false);
    shaped_create(&twin, ROWS, false);
    t_net_start(&s.n);
    t_net_start(&twin.n);
    t_ok(s.n.m, ms_smallest_budget(s.n.m, &least));
    for (uint64_t k = 0; k < 3; ++k) {
        budgets[k] = least + k * least / 2;
    }
    for (int turn = 0; turn < 40; ++turn) {
        double losses[2];
        const int64_t rows = sizes[t_below(&rng, 4)];
        const uint64_t calls = s.n.heap.calls;
        if (t_chance(&rng, 0.5)) {
            t_ok(s.n.m, ms_reshape(s.n.m, &rows));
            t_ok(twin.n.m, ms_reshape(twin.n.m, &rows));
        } else {
            ms_set_budget(s.n.m, budgets[t_below(&rng, 3)]);
            t_ok(s.n.m, ms_wrap(s.n.m));
            returns += s.n.heap.calls == calls;
        }
        const msi_plan *plan = s.n.m->run.plan;
        assert_true(plan->sizes[0] == ms_tensor_shape(s.n.m, s.n.x).dim[0]);
        t_net_write_x(&s.n);
        t_net_write_x(&twin.n);
        t_net_write_param(&s.n, s.p, 0.0f);
        t_net_write_param(&twin.n, twin.p, 0.0f);
        t_ok(s.n.m, ms_step(s.n.m, &losses[0]));
        t_ok(twin.n.m, ms_step(twin.n.m, &losses[1]));
        assert_true(losses[0] == losses[1]);
        t_net_same(&s.n, s.p, &twin.n, twin.p);
    }
    assert_true(returns > 0);
    t_net_end(&s.n);
    t_net_end(&twin.n);
}

static int set_to_zero(const ms_call *call) {
    t_data(&call->out[0])[0] = 0.0f;
    return 0;
}

/* Inputs along any of three axes, in any dim: what has another shape is written anew, and that alone. */
static void only_inputs_of_another_shape_are_forgotten(void **state) {
    (void)state;
    enum { AXES = 3, MASKS = 1 << AXES, INPUTS = 2 * MASKS };
    static const int64_t largest[AXES] = {2, 2, 2};
    static float zeros[MASKS];
    ms_config config = t_config();
    ms_model *m;
    ms_axis axes[AXES];
    ms_tensor input[INPUTS];
    ms_layer_desc d;
    memset(&d, 0, sizeof d);
    assert_int_equal(ms_create(&config, &m), MS_RESULT_OK);
    for (int a = 0; a < AXES; ++a) {
        axes[a] = ms_add_axis(m, "axis", 2, largest[a]);
    }
    for (int i = 0; i < INPUTS; ++i) {
        ms_shape shape = ms_shape3(2, 2, 2);
        for (int a = 0; a < AXES; ++a) {
            const int dim = i < MASKS ? a : AXES - 1 - a;
            shape = i >> a & 1 ? ms_along(shape, dim, axes[a]) : shape;
        }
        d.in[i] = input[i] = ms_input(m, "input", MS_DTYPE_F32, shape);
    }
    d.name = "none";
    d.forward = set_to_zero;
    d.backward = t_nothing;
    d.param[0] = ms_param(m, "p", MS_DTYPE_F32, ms_shape1(1));
    d.out[0] = ms_activation(m, "loss", MS_DTYPE_F32, ms_shape1(1));
    ms_register_layer(m, &d);
    ms_set_loss(m, d.out[0]);
    t_ok(m, ms_wrap(m));
    for (int changed = 0; changed < MASKS; ++changed) {
        for (int left = 0; left < INPUTS; ++left) { // all others are written
            int64_t sizes[AXES];
            t_ok(m, ms_reshape(m, largest));
            t_write_zeros(m);
            for (int a = 0; a < AXES; ++a) {
                sizes[a] = largest[a] - (changed >> a & 1);
            }
            t_ok(m, ms_reshape(m, sizes));
            for (int i = 0; i < INPUTS; ++i) {
                if (i != left) {
                    t_ok(m, ms_write(m, input[i], zeros));
                }
            }
            t_error(m, ms_eval(m, NULL), left & changed ? MS_RESULT_ORDER : MS_RESULT_OK);
        }
    }
    ms_destroy(m);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        T_TWICE(shapes_change_between_steps),
        T_TWICE(aliases_hold_at_all_sizes),
        cmocka_unit_test(aliases_along_one_axis),
        T_TWICE(more_shapes_than_plans_are_kept),
        T_TWICE(shapes_change_with_budgets),
        T_TWICE(a_reshape_after_a_change_waits_for_a_wrap),
        T_TWICE(a_failing_wrap_leaves_the_model_as_it_was),
        T_TWICE(budgets_return_at_other_sizes),
        cmocka_unit_test(only_inputs_of_another_shape_are_forgotten),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
