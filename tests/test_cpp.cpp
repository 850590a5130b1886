/*  test_cpp.cpp - the part of memscale.h for C++: models that move, lambdas, spans; compiled without
    exceptions and RTTI, and with them, against an implementation in C. */
#include "../memscale.h"

#include <array>
#include <cstring>
#include <vector>

extern "C" {
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
}

enum { ROWS = 8, COLS = 4 };

static ms_config config_of(ms_allocator allocator = ms_allocator()) {
    ms_config config = ms_config();
    config.memory_budget_bytes = 1u << 30;
    config.allocator = allocator;
    return config;
}

/* y = p x, a loss of (y - target)^2 / 2 for each row, by lambdas that keep what they need. */
struct net {
    ms::model model;
    ms_tensor x, p, target, loss;
    int *calls;
};

static net make_net(int *calls, const ms_config &config) {
    net n = {ms::model(config), {0}, {0}, {0}, {0}, calls};
    n.x = ms_input(n.model, "x", MS_DTYPE_F32, ms_shape2(ROWS, COLS));
    n.target = ms_input(n.model, "target", MS_DTYPE_F32, ms_shape1(ROWS));
    n.p = ms_param(n.model, "p", MS_DTYPE_F32, ms_shape1(COLS));
    const ms_tensor y = ms_activation(n.model, "y", MS_DTYPE_F32, ms_shape1(ROWS));
    n.loss = ms_activation(n.model, "loss", MS_DTYPE_F32, ms_shape1(ROWS));
    ms_layer_desc d = ms_layer_desc();
    d.name = "product";
    d.in[0] = n.x;
    d.param[0] = n.p;
    d.out[0] = y;
    std::vector<int> counted(1, 0); // copied into the callbacks, and freed with the model
    n.model.layer(
        d,
        [calls, counted](const ms_call &call) mutable {
            const ms::span<float> from = ms::values<float>(call.in[0]);
            const ms::span<float> with = ms::values<float>(call.param[0]);
            const ms::span<float> to = ms::values<float>(call.out[0]);
            for (size_t r = 0; r < to.size(); r++) {
                to[r] = 0.0f;
                for (size_t c = 0; c < with.size(); c++) {
                    to[r] += from[r * with.size() + c] * with[c];
                }
            }
            counted[0]++;
            *calls = counted[0];
            return 0;
        },
        [](const ms_call &call) {
            const ms::span<float> from = ms::values<float>(call.in[0]);
            const ms::span<float> of = ms::values<float>(call.grad_out[0]);
            const ms_view &gradient = call.grad_param[0];
            const ms::span<float> to = ms::values<float>(gradient);
            for (size_t c = 0; c < to.size(); c++) {
                float sum = gradient.beta != 0.0f ? to[c] : 0.0f;
                for (size_t r = 0; r < of.size(); r++) {
                    sum += from[r * to.size() + c] * of[r];
                }
                to[c] = sum;
            }
            return 0;
        });
    d = ms_layer_desc();
    d.name = "loss";
    d.in[0] = y;
    d.in[1] = n.target;
    d.out[0] = n.loss;
    n.model.layer(
        d,
        [](const ms_call &call) {
            for (size_t r = 0; r < ms::values<float>(call.out[0]).size(); r++) {
                const float off =
                    ms::values<float>(call.in[0])[r] - ms::values<float>(call.in[1])[r];
                ms::values<float>(call.out[0])[r] = 0.5f * off * off;
            }
            return 0;
        },
        [](const ms_call &call) {
            const ms::span<float> to = ms::values<float>(call.grad_in[0]);
            for (size_t r = 0; r < to.size(); r++) {
                const float off =
                    ms::values<float>(call.in[0])[r] - ms::values<float>(call.in[1])[r];
                to[r] = ms::values<float>(call.grad_out[0])[r] * off +
                        (call.grad_in[0].beta != 0.0f ? to[r] : 0.0f);
            }
            return 0;
        });
    ms_set_loss(n.model, n.loss);
    ms_optimizer_desc sgd = ms_optimizer_desc();
    sgd.kind = MS_OPTIMIZER_SGD;
    sgd.learning_rate = 0.1f;
    ms_set_optimizer(n.model, &sgd);
    return n;
}

/* Trains until p is what the targets were made with. */
static void lambdas_train(void **) {
    int calls = 0;
    net first = make_net(&calls, config_of());
    net n = {
        static_cast<ms::model &&>(first.model), first.x, first.p, first.target, first.loss, &calls};
    assert_null(static_cast<ms_model *>(first.model));
    const float wanted[COLS] = {1.0f, -2.0f, 0.5f, 3.0f};
    std::vector<float> x(ROWS * COLS), target(ROWS);
    for (int i = 0; i < ROWS * COLS; i++) {
        x[static_cast<size_t>(i)] = static_cast<float>((i * 7 + i / COLS * 3) % 11 - 5) / 5.0f;
        target[static_cast<size_t>(i / COLS)] += x[static_cast<size_t>(i)] * wanted[i % COLS];
    }
    assert_int_equal(ms_wrap(n.model), MS_RESULT_OK);
    const std::array<float, COLS> zeros = {{0.0f, 0.0f, 0.0f, 0.0f}};
    assert_int_equal(n.model.write(n.p, zeros), MS_RESULT_OK);
    double loss = 0.0;
    for (int step = 0; step < 2000; step++) {
        assert_int_equal(n.model.write(n.x, x), MS_RESULT_OK);
        assert_int_equal(n.model.write(n.target, target), MS_RESULT_OK);
        assert_int_equal(ms_step_slice(n.model, UINT64_MAX, &loss), MS_RESULT_OK);
    }
    float p[COLS];
    assert_int_equal(n.model.read(n.p, p), MS_RESULT_OK);
    for (int i = 0; i < COLS; i++) {
        assert_true(p[i] - wanted[i] < 1e-3f && wanted[i] - p[i] < 1e-3f);
    }
    assert_int_equal(calls, 2000);
    assert_true(loss < 1e-6);
}

static void sizes_are_checked(void **) {
    int calls = 0;
    net n = make_net(&calls, config_of());
    std::vector<float> few(3), p(COLS);
    std::vector<double> wide(COLS);
    assert_int_equal(ms_wrap(n.model), MS_RESULT_OK);
    assert_int_equal(n.model.write(n.p, few), MS_RESULT_INVALID);
    assert_non_null(strstr(n.model.error(), "bytes, but what was passed has"));
    assert_int_equal(n.model.write(n.p, wide), MS_RESULT_INVALID);
    assert_int_equal(n.model.read(n.p, few), MS_RESULT_INVALID);
    assert_int_equal(n.model.write(n.p, p), MS_RESULT_OK);
    assert_int_equal(n.model.read(n.p, ms::span<float>(p)), MS_RESULT_OK);
    assert_int_equal(n.model.read(n.p, ms::span<float>()), MS_RESULT_INVALID);
}

static void a_config_that_is_wrong(void **) {
    ms_config config = config_of();
    config.target_utilization = 7.0;
    ms::model m(config);
    assert_int_equal(ms_wrap(m), MS_RESULT_INVALID);
    float p[COLS];
    assert_int_equal(m.read(ms_tensor(), p), MS_RESULT_INVALID);
    assert_non_null(strstr(m.error(), "target_utilization"));
    ms::model none;
    assert_int_equal(ms_wrap(none), MS_RESULT_INVALID);
    m = static_cast<ms::model &&>(none);
    assert_null(static_cast<ms_model *>(m));
}

/* What a lambda has captured ends once, with the model; so does what the model owns. */
struct tally {
    int *alive;
    explicit tally(int *of) : alive(of) {
        ++*alive;
    }
    tally(const tally &other) : alive(other.alive) {
        ++*alive;
    }
    tally &operator=(const tally &) = delete;
    ~tally() {
        --*alive;
    }
};

static int ends;
static void note_end(void *memory) {
    assert_int_equal(*static_cast<int *>(memory), ++ends == 1 ? 2 : 1); // the last one first
}

static void callbacks_end_with_the_model(void **) {
    int alive = 0;
    {
        const tally t(&alive);
        ms::model m(config_of());
        ms_layer_desc d = ms_layer_desc();
        d.in[0] = ms_input(m, "x", MS_DTYPE_F32, ms_shape1(4));
        d.out[0] = ms_activation(m, "y", MS_DTYPE_F32, ms_shape1(4));
        const ms_layer made = m.layer(d, [t](const ms_call &) { return *t.alive > 0 ? 0 : 1; });
        assert_true(made.id != 0 && alive == 2);
        for (int i = 1; i <= 2; i++) {
            int *owned = static_cast<int *>(ms_model_alloc(m, sizeof(int), note_end));
            assert_int_equal(*owned, 0);
            *owned = i;
        }
        assert_null(ms_model_alloc(m, UINT64_MAX - 3, nullptr));
        assert_null(ms_model_alloc(nullptr, 4, nullptr));
    }
    assert_int_equal(alive, 0);
    assert_int_equal(ends, 2);
}

#ifdef __cpp_exceptions
/* A callback that counts its copies that live, and whose copy may throw. */
struct fragile {
    int *live;
    bool throws;
    fragile(int *count, bool breaks) : live(count), throws(breaks) {
        ++*live;
    }
    fragile(const fragile &other) : live(other.live), throws(other.throws) {
        if (throws) {
            throw 5;
        }
        ++*live;
    }
    fragile &operator=(const fragile &) = delete;
    ~fragile() {
        --*live;
    }
    int operator()(const ms_call &) const {
        return 0;
    }
};

/* Wherever a copy throws, what was copied ends once, and the model is as before. */
static void copies_that_throw_end_once(void **) {
    int live = 0;
    for (int which = 0; which < 2; which++) {
        ms::model model(config_of());
        const fragile forward(&live, which == 0), backward(&live, which == 1);
        bool thrown = false;
        try {
            model.layer(ms_layer_desc(), forward, backward);
        } catch (int) {
            thrown = true;
        }
        assert_true(thrown && live == 2);
    }
    assert_int_equal(live, 0);
}
#endif

int main() {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(lambdas_train),
        cmocka_unit_test(sizes_are_checked),
        cmocka_unit_test(a_config_that_is_wrong),
        cmocka_unit_test(callbacks_end_with_the_model),
#ifdef __cpp_exceptions
        cmocka_unit_test(copies_that_throw_end_once),
#endif
    };
    return cmocka_run_group_tests(tests, nullptr, nullptr);
}
