/*  test_comm.c - collectives, each by itself: of threads (threads_comm.h), and of NCCL as
    emulation/nccl.cpp imitates it, against loops in float64. Those of MPI are in mpi_comm.c. */
#ifndef _XOPEN_SOURCE
#define _XOPEN_SOURCE 700
#endif
#ifdef T_CUDA
#include <cuda_runtime.h>
#endif
#ifdef CUDART_EMULATION
#include "emulation/emulation.h"
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
        w->forks = w->forks || ranks == 6;
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
    until *u = (until *)meeting_shared(sizeof *u);
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
    munmap(u, sizeof *u);

    u = new_until(0.0, true); // without a limit, until rank 1 calls abort
    u->world.ranks[1].fail_at = 1;
    check_until(u, 1, TC_ERROR_INJECTED, TC_ERROR_ABORTED);
    munmap(u, sizeof *u);

    u = new_until(0.1, true);
    u->world.keeps_aborts = true;
    u->world.ranks[1].fail_at = 2;
    check_until(u, 2, TC_ERROR_INJECTED, TC_ERROR_TIMEOUT);
    assert_int_equal(u->world.ranks[0].aborts, 1);
    munmap(u, sizeof *u);

    u = new_until(0.1, false);
    u->world.ranks[1].gone_at = 3;
    check_until(u, 3, TC_ERROR_GONE, TC_ERROR_TIMEOUT);
    munmap(u, sizeof *u);

    u = new_until(10.0, false); // late, but in time
    u->world.ranks[1].stall_at = 2;
    u->world.ranks[1].stall_s = 0.05;
    check_until(u, 10, 0, 0);
    munmap(u, sizeof *u);

    u = new_until(0.05, true); // too late: whoever comes first ends it for all
    u->world.ranks[1].stall_at = 2;
    u->world.ranks[1].stall_s = 20.0;
    assert_true(tc_run(&u->world, sum_until, u));
    for (uint32_t r = 0; r < 3; ++r) {
        assert_int_equal(u->calls[r], 2);
        assert_true(u->errors[r] == TC_ERROR_TIMEOUT || u->errors[r] == TC_ERROR_ABORTED);
    }
    tc_close(&u->world);
    munmap(u, sizeof *u);
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

// ------------------------------------------------------------------------------------------------
// NCCL

#ifdef CUDART_EMULATION

enum { NCCL_RANKS = 3 };

typedef struct nccl_test {
    tc_world world;
    char path[64];
    uint32_t wrong[NCCL_RANKS];
} nccl_test;

/* Each rank is a process, and says what is wrong. */
static void nccl_expect(nccl_test *t, uint32_t rank, bool is_so, const char *what) {
    if (!is_so) {
        fprintf(stderr, "rank %u: %s\n", rank, what);
        t->wrong[rank] += 1;
    }
}

static void *device_alloc(void *user, size_t bytes) {
    void *memory = NULL;
    (void)user;
    return cudaMalloc(&memory, bytes) == cudaSuccess ? memory : NULL;
}

static void device_release(void *user, void *memory) {
    (void)user;
    cudaFree(memory);
}

static bool device_copy(void *user, void *target, const void *source, size_t bytes) {
    (void)user;
    return cudaMemcpy(target, source, bytes, cudaMemcpyDefault) == cudaSuccess &&
           cudaStreamSynchronize(cudaStreamLegacy) == cudaSuccess;
}

static bool device_wait(void *user) {
    return cudaStreamSynchronize((cudaStream_t)user) == cudaSuccess;
}

static cc_device nccl_device(void) {
    cc_device device;
    cudaStream_t stream = NULL;
    assert_int_equal(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
    device.user = device.stream = stream;
    device.alloc = device_alloc;
    device.release = device_release;
    device.copy = device_copy;
    device.wait = device_wait;
    return device;
}

/* A comm of all ranks, by an id that rank 0 has shared. */
static ms_comm nccl_open(nccl_test *t, uint32_t rank) {
    ms_nccl_id id;
    ms_comm comm;
    const ms_comm *threads = &t->world.ranks[rank].comm;
    nccl_expect(t, rank, ms_nccl_share_id(threads, &id) == MS_RESULT_OK, "sharing the id");
    nccl_expect(t, rank, ms_comm_nccl(&id, rank, threads->count, &comm) == MS_RESULT_OK, comm.name);
    nccl_expect(t, rank, comm.on_device && comm.rank == rank && comm.count == threads->count,
                "the comm");
    return comm;
}

static void nccl_run(void *(*work)(uint32_t rank, void *argument)) {
    nccl_test *t = (nccl_test *)meeting_shared(sizeof *t);
    assert_non_null(t);
    tc_open(&t->world, NCCL_RANKS);
    snprintf(t->path, sizeof t->path, "/tmp/test_comm-%ld", (long)getpid());
    const bool ok = tc_run(&t->world, work, t);
    for (uint32_t r = 0; r < NCCL_RANKS; ++r) {
        assert_int_equal(t->wrong[r], 0);
    }
    assert_true(ok);
    tc_close(&t->world);
    munmap(t, sizeof *t);
}

static ms_collective one_float(void *x, void *stream) {
    ms_collective c;
    memset(&c, 0, sizeof c);
    c.send = c.receive = x;
    c.count = 1;
    c.stream = stream;
    return c;
}

static void *nccl_check_all(uint32_t rank, void *argument) {
    nccl_test *t = (nccl_test *)argument;
    for (uint64_t seed = 0; seed < 4; ++seed) {
        emulation_reset(seed * 7 + (seed > 0 ? rank : 0));
        const cc_device device = nccl_device();
        ms_comm comm = nccl_open(t, rank);
        t->wrong[rank] += cc_check_all(&comm, &device);
        nccl_expect(t, rank, comm.check(comm.user) == 0, "an error");
        const double begin_us = t_hook.platform_us();
        ms_collective barrier = one_float(NULL, device.stream);
        nccl_expect(t, rank, comm.barrier(comm.user, &barrier) == 0, "a barrier");
        ms_comm_close(&comm); // waits for it
        nccl_expect(t, rank, t_hook.platform_us() - begin_us < 3e7, "an end by force");
        cudaStreamDestroy((cudaStream_t)device.stream);
        const emulation_counts left = emulation_count();
        nccl_expect(t, rank, left.device_allocations == 0 && left.streams == 0, "what is left");
    }
    return NULL;
}

static void test_nccl(void **state) {
    (void)state;
    nccl_run(nccl_check_all);
}

/* The last rank does not come: the others see that nothing happens, and end it on their side. */
static void *nccl_wait_in_vain(uint32_t rank, void *argument) {
    nccl_test *t = (nccl_test *)argument;
    const cc_device device = nccl_device();
    ms_comm comm = nccl_open(t, rank);
    void *x = device_alloc(NULL, 4);
    ms_collective c = one_float(x, device.stream);
    if (rank < NCCL_RANKS - 1) {
        nccl_expect(t, rank, comm.all_reduce(comm.user, &c) == 0, "all_reduce");
        for (int i = 0; i < 100; ++i) {
            nccl_expect(t, rank,
                        cudaStreamQuery((cudaStream_t)device.stream) == cudaErrorNotReady &&
                            comm.check(comm.user) == 0,
                        "an end of what cannot end");
        }
        comm.abort(comm.user);
        nccl_expect(t, rank, device.wait(device.user), "a wait after abort");
        const int error = comm.all_reduce(comm.user, &c);
        nccl_expect(t, rank,
                    error == MSI_COMM_ENDED && comm.group_begin(comm.user) == error &&
                        comm.group_end(comm.user) == error && comm.check(comm.user) != 0,
                    "a call after abort");
    }
    device.release(NULL, x);
    ms_comm_close(&comm);
    return NULL;
}

static void test_nccl_abort(void **state) {
    (void)state;
    nccl_run(nccl_wait_in_vain);
}

/* Errors of NCCL and ours, and their texts. */
static void *nccl_errors(uint32_t rank, void *argument) {
    nccl_test *t = (nccl_test *)argument;
    const cc_device device = nccl_device();
    ms_comm comm = nccl_open(t, rank);
    void *x = device_alloc(NULL, 4);
    ms_collective c = one_float(x, device.stream);
    c.root = 99;
    int error = comm.broadcast(comm.user, &c);
    nccl_expect(t, rank, strcmp(comm.error_text(comm.user, error), "invalid argument") == 0,
                "root");
    c.dtype = MS_DTYPE_I8;
    error = comm.all_reduce(comm.user, &c);
    nccl_expect(t, rank, error < 0 && strstr(comm.error_text(comm.user, error), "F32") != NULL,
                "a sum of bytes");
    c = one_float(x, device.stream);
    emulation_fail(1);
    error = comm.all_reduce(comm.user, &c);
    nccl_expect(t, rank, strcmp(comm.error_text(comm.user, error), "unhandled cuda error") == 0,
                "a call that fails");
    emulation_nccl_error(6);
    error = comm.check(comm.user);
    nccl_expect(t, rank, strstr(comm.error_text(comm.user, error), "remote") != NULL,
                "an error that comes later");
    comm.abort(comm.user);
    ms_comm_close(&comm);
    device.release(NULL, x);
    return NULL;
}

static void test_nccl_errors(void **state) {
    (void)state;
    nccl_run(nccl_errors);
}

/* A clock that runs fast: 10 s each time that it is asked. */
static double fast_us;
static double fast_clock(void) {
    return fast_us += 1e7;
}

/* By a file; ids that nobody shares; a rank that does not come to ms_comm_nccl. */
static void *nccl_ids(uint32_t rank, void *argument) {
    nccl_test *t = (nccl_test *)argument;
    ms_nccl_id id;
    ms_comm comm;
    nccl_expect(t, rank,
                rank == 0 || ms_nccl_id_in_file(t->path, rank, 0.05, &id) == MS_RESULT_FILE,
                "a file that does not come");
    nccl_expect(t, rank, ms_nccl_id_in_file("/no/such/folder", rank, 0.05, &id) == MS_RESULT_FILE,
                "a folder that is not there");
    nccl_expect(t, rank, ms_nccl_id_in_file(NULL, rank, 0.0, &id) == MS_RESULT_INVALID, "no path");
    ms_collective barrier = one_float(NULL, NULL);
    const ms_comm *threads = &t->world.ranks[rank].comm;
    nccl_expect(t, rank, threads->barrier(threads->user, &barrier) == 0, "barrier");
    if (rank == 0) { // the others wait for it
        usleep(20000);
    }
    nccl_expect(t, rank, ms_nccl_id_in_file(t->path, rank, 20.0, &id) == MS_RESULT_OK, "a file");
    nccl_expect(t, rank, ms_comm_nccl(&id, rank, NCCL_RANKS, &comm) == MS_RESULT_OK, comm.name);
    ms_comm_close(&comm);
    if (rank == 0) {
        remove(t->path);
        emulation_fail(1); // rank 0 has no id: all hear of it
    }
    nccl_expect(t, rank, ms_nccl_share_id(threads, &id) == MS_RESULT_RANKS, "no id");
    nccl_expect(t, rank,
                ms_nccl_share_id(NULL, &id) == MS_RESULT_INVALID &&
                    ms_nccl_make_id(NULL) == MS_RESULT_INVALID &&
                    ms_comm_nccl(&id, 3, 3, &comm) == MS_RESULT_INVALID && comm.count == 0 &&
                    strstr(comm.name, "no such rank") != NULL,
                "wrong arguments");
    t_hook.platform_us = fast_clock;
    nccl_expect(t, rank, ms_nccl_make_id(&id) == MS_RESULT_OK, "an id");
    nccl_expect(t, rank,
                ms_comm_nccl(&id, 0, 2, &comm) == MS_RESULT_RANKS &&
                    strstr(comm.name, "did not come") != NULL,
                "a rank that does not come");
    nccl_expect(t, rank, emulation_count().device_allocations == 0, "what is left");
    return NULL;
}

static void test_nccl_ids(void **state) {
    (void)state;
    nccl_run(nccl_ids);
}

#endif

int main(void) {
    const struct CMUnitTest tests[] = {
#ifdef CUDART_EMULATION
        cmocka_unit_test(test_nccl),           cmocka_unit_test(test_nccl_abort),
        cmocka_unit_test(test_nccl_errors),    cmocka_unit_test(test_nccl_ids),
#endif
        cmocka_unit_test(test_threads),        cmocka_unit_test(test_threads_faults),
        cmocka_unit_test(test_threads_differ),
    };
    return cmocka_run_group_tests_name("comm", tests, NULL, NULL);
}
