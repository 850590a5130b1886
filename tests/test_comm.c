/*  test_comm.c - collectives, each by itself: of threads (threads_comm.h), and of NCCL as
    emulation/nccl.cpp imitates it, against loops in float64. Those of MPI are in mpi_comm.c. */
#ifndef _XOPEN_SOURCE
#define _XOPEN_SOURCE 700
#endif
#include "private.h"
#include "testing.h"
#include "threads_comm.h"
#include "comm_checks.h"

// ------------------------------------------------------------------------------------------------
// threads

static void *threads_check(uint32_t rank, void *argument) {
    tc_world *w = (tc_world *)argument;
    return (void *)(uintptr_t)cc_check_all(&w->ranks[rank].comm, NULL);
}

static void test_threads(void **state) {
    (void)state;
    tc_world *w = (tc_world *)meeting_shared(sizeof *w);
    assert_non_null(w);
    for (uint32_t ranks = 1; ranks <= 6; ++ranks) {
        tc_open(w, ranks < 6 ? ranks : 3);
        w->forks = ranks == 6;
        assert_true(tc_run(w, threads_check, w));
        for (uint32_t r = 0; r < w->count; ++r) {
            assert_int_equal(w->ranks[r].error, TC_OK);
            assert_true(w->ranks[r].calls > 100 && w->ranks[r].calls == w->ranks[0].calls);
        }
        tc_close(w);
    }
    munmap(w, sizeof *w);
}

/* Each rank sums up until something ends that; which call was the last, and what it returned. */
typedef struct until {
    tc_world world;
    double timeout_s;
    bool aborts;
    int errors[TC_MOST_RANKS];
    uint32_t calls[TC_MOST_RANKS];
} until;

static void *sum_until(uint32_t rank, void *argument) {
    until *u = (until *)argument;
    const ms_comm *comm = &u->world.ranks[rank].comm;
    float x = 1.0f;
    ms_collective c;
    memset(&c, 0, sizeof c);
    c.send = c.receive = &x;
    c.count = 1;
    c.timeout_s = u->timeout_s;
    while (u->errors[rank] == 0 && u->calls[rank] < 10) {
        u->errors[rank] = comm->all_reduce(comm->user, &c);
        u->calls[rank] += 1;
    }
    if (u->errors[rank] != 0 && u->aborts) {
        comm->abort(comm->user);
    }
    return NULL;
}

static void check_until(until *u, uint32_t calls, int of_rank_1, int of_others) {
    assert_true(tc_run(&u->world, sum_until, u));
    for (uint32_t r = 0; r < u->world.count; ++r) {
        assert_int_equal(u->calls[r], calls);
        assert_int_equal(u->errors[r], r == 1 ? of_rank_1 : of_others);
        assert_int_equal(u->world.ranks[r].calls_of[TC_ALL_REDUCE], calls);
        assert_int_equal(u->world.ranks[r].bytes_of[TC_ALL_REDUCE], calls * 4);
    }
    tc_close(&u->world);
}

static until *new_until(double timeout_s, bool aborts) {
    until *u = (until *)calloc(1, sizeof *u);
    assert_non_null(u);
    tc_open(&u->world, 3);
    u->timeout_s = timeout_s;
    u->aborts = aborts;
    return u;
}

static void test_threads_faults(void **state) {
    (void)state;
    until *u = new_until(0.1, false); // the others wait for as long as they may
    u->world.ranks[1].fail_at = 4;
    check_until(u, 4, TC_ERROR_INJECTED, TC_ERROR_TIMEOUT);
    free(u);

    u = new_until(0.0, true); // without a limit, until rank 1 calls abort
    u->world.ranks[1].fail_at = 1;
    check_until(u, 1, TC_ERROR_INJECTED, TC_ERROR_ABORTED);
    free(u);

    u = new_until(0.1, true);
    u->world.keeps_aborts = true;
    u->world.ranks[1].fail_at = 2;
    check_until(u, 2, TC_ERROR_INJECTED, TC_ERROR_TIMEOUT);
    assert_int_equal(u->world.ranks[0].aborts, 1);
    free(u);

    u = new_until(0.1, false);
    u->world.ranks[1].gone_at = 3;
    check_until(u, 3, TC_ERROR_GONE, TC_ERROR_TIMEOUT);
    free(u);

    u = new_until(10.0, false); // late, but in time
    u->world.ranks[1].stall_at = 2;
    u->world.ranks[1].stall_s = 0.05;
    check_until(u, 10, 0, 0);
    free(u);

    u = new_until(0.05, true); // too late: whoever comes first ends it for all
    u->world.ranks[1].stall_at = 2;
    u->world.ranks[1].stall_s = 20.0;
    assert_true(tc_run(&u->world, sum_until, u));
    for (uint32_t r = 0; r < 3; ++r) {
        assert_int_equal(u->calls[r], 2);
        assert_true(u->errors[r] == TC_ERROR_TIMEOUT || u->errors[r] == TC_ERROR_ABORTED);
    }
    tc_close(&u->world);
    free(u);
}

static void *differ(uint32_t rank, void *argument) {
    tc_world *w = (tc_world *)argument;
    const ms_comm *comm = &w->ranks[rank].comm;
    float x[8] = {0.0f};
    ms_collective c;
    memset(&c, 0, sizeof c);
    c.send = c.receive = x;
    c.count = rank == 2 ? 8 : 4;
    return comm->all_reduce(comm->user, &c) == TC_ERROR_DIFFERENT ? NULL : argument;
}

static void test_threads_differ(void **state) {
    (void)state;
    tc_world w;
    tc_open(&w, 3);
    w.keeps_differences = true;
    assert_true(tc_run(&w, differ, &w));
    assert_string_equal(tc_error_text(&w.ranks[0], TC_ERROR_DIFFERENT),
                        "call 1 of rank 0 is all_reduce of 4 f32 from root 0, call 1 of rank 2 is "
                        "all_reduce of 8 f32 from root 0");
    tc_close(&w);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_threads),
        cmocka_unit_test(test_threads_faults),
        cmocka_unit_test(test_threads_differ),
    };
    return cmocka_run_group_tests_name("comm", tests, NULL, NULL);
}
