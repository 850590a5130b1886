/*  test_cuda_broken.c - a device that breaks for good in the middle of its work, at every operation
    of a model's life: the error is told, nothing crashes, and all that was held is given back. It
    asks the emulation. */
#include "testing_cuda.h"

#ifdef CUDART_EMULATION

enum { STEPS = 4 };

static ms_result live(cn_net *net, const cn_how *how) {
    ms_result result = cn_create(net, how);
    result = result == MS_RESULT_OK ? net->model->errors.sticky : result;
    result = result == MS_RESULT_OK ? ms_wrap(net->model) : result;
    result = result == MS_RESULT_OK ? cn_write_params(net) : result;
    for (uint64_t i = 0; i < STEPS && result == MS_RESULT_OK; i++) {
        double loss = 0.0;
        result = cn_feed(net, i);
        if (result == MS_RESULT_OK) {
            result = ms_step(net->model, i % 2 != 0 ? &loss : NULL);
        }
    }
    return result == MS_RESULT_OK ? ms_synchronize(net->model) : result;
}

static void check_nothing_left(uint64_t operation) {
    const emulation_counts left = emulation_count();
    if (left.device_bytes + left.pinned_bytes + left.streams + left.events + left.graphs +
            left.graph_execs + left.handles !=
        0) {
        fail_msg("operation %u: something is left behind", (unsigned)operation);
    }
}

/* Operations until a whole life goes by before its turn comes. */
static uint64_t break_everywhere(const cn_how *how) {
    for (uint64_t n = 1;; n++) {
        cn_net net;
        memset(&net, 0, sizeof net);
        emulation_reset(n % 17);
        emulation_break(n);
        const ms_result result = live(&net, how);
        const bool broken = emulation_is_broken();
        assert_int_equal(result, broken ? MS_RESULT_BACKEND : MS_RESULT_OK);
        if (broken) {
            double loss = 0.0;
            assert_non_null(strstr(ms_last_error(net.model), "illegal memory access"));
            assert_int_not_equal(ms_step(net.model, &loss), MS_RESULT_OK);
        }
        cn_destroy(&net);
        check_nothing_left(n);
        if (!broken) {
            emulation_reset(1);
            return n - 1;
        }
    }
}

static void a_broken_device_is_told_and_leaks_nothing(void **state) {
    (void)state;
    for (int i = 0; i < 3; i++) {
        cn_how how;
        memset(&how, 0, sizeof how);
        how.cuda = true;
        how.clip = i == 1 ? 0.1f : 0.0f;
        how.graph = i == 2;
        const uint64_t operations = break_everywhere(&how);
        print_message("%u operations, each of which broke the device\n", (unsigned)operations);
        assert_true(operations > 100);
    }
}

#else

static void a_broken_device_is_told_and_leaks_nothing(void **state) {
    (void)state;
    CN_SKIP_ON_GPU();
}

#endif

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(a_broken_device_is_told_and_leaks_nothing)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
