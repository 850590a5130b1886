/*  mpi_comm.c - ms_comm_mpi by itself, on all ranks of an MPI job: mpirun -n 3 mpi_comm serialized.
    The argument is the support of threads that is asked for. Status 0: all is well. */
#ifndef _XOPEN_SOURCE
#define _XOPEN_SOURCE 700 // nanosleep
#endif
#define MEMSCALE_MPI
#define MEMSCALE_IMPLEMENTATION
#include "memscale.h"
#include "comm_checks.h"

static uint32_t failures;

static void expect(bool is_so, const char *what, const ms_comm *comm) {
    if (!is_so) {
        fprintf(stderr, "rank %u of %u: %s\n", comm->rank, comm->count, what);
        failures += 1;
    }
}

static void pause_s(double seconds) {
    struct timespec t;
    t.tv_sec = (time_t)seconds;
    t.tv_nsec = (long)(1e9 * (seconds - (double)t.tv_sec));
    nanosleep(&t, NULL);
}

static int sum_of(const ms_comm *comm, float *x, double timeout_s) {
    ms_collective c;
    memset(&c, 0, sizeof c);
    c.send = c.receive = x;
    c.count = 1;
    c.timeout_s = timeout_s;
    return comm->all_reduce(comm->user, &c);
}

static ms_comm open_comm(const MPI_Comm *of) {
    ms_comm comm;
    if (ms_comm_mpi(of, &comm) != MS_RESULT_OK) {
        fprintf(stderr, "ms_comm_mpi: %s\n", comm.name);
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
    return comm;
}

/* The last rank comes when the others have given up, which they do in time and without using a
   processor meanwhile. Then its call lets theirs end, so that the job can. */
static void check_late(void) {
    ms_comm comm = open_comm(NULL);
    float x = 1.0f;
    MPI_Barrier(MPI_COMM_WORLD);
    if (comm.rank == comm.count - 1) {
        pause_s(2.5);
        (void)sum_of(&comm, &x, 20.0);
    } else {
        const double begin = MPI_Wtime();
        const clock_t work = clock();
        const int error = sum_of(&comm, &x, 1.0);
        const double waited_s = MPI_Wtime() - begin;
        const double worked_s = (double)(clock() - work) / (double)CLOCKS_PER_SEC;
        const char *text = comm.error_text(comm.user, error);
        expect(error != 0 && waited_s >= 1.0 && waited_s < 2.4, "a wait of 1 s", &comm);
        expect(worked_s < 0.4, "a wait takes a processor", &comm);
        expect(text != NULL &&
                   strstr(text, "has waited 1.0 s for another one in all_reduce") != NULL,
               "text of a timeout", &comm);
        expect(sum_of(&comm, &x, 1.0) == error, "an error stays", &comm);
        comm.abort(comm.user);
    }
    MPI_Barrier(MPI_COMM_WORLD);
    ms_comm_close(&comm);
    expect(comm.size == 0 && comm.user == NULL, "a comm that is closed is zero", &comm);
}

static void *abort_soon(void *user) {
    const ms_comm *comm = (const ms_comm *)user;
    pause_s(0.3);
    comm->abort(comm->user);
    return NULL;
}

/* Without a time limit, a wait ends when another thread of the rank says so. */
static void check_abort(void) {
    ms_comm comm = open_comm(NULL);
    float x = 1.0f;
    MPI_Barrier(MPI_COMM_WORLD);
    if (comm.rank == 0 && comm.count > 1) {
        pthread_t thread;
        expect(pthread_create(&thread, NULL, abort_soon, &comm) == 0, "a thread", &comm);
        const int error = sum_of(&comm, &x, 0.0);
        expect(pthread_join(thread, NULL) == 0 && error == MSI_COMM_ENDED, "abort", &comm);
        expect(strcmp(comm.error_text(comm.user, error), "this rank has ended it") == 0,
               "text of an abort", &comm);
    } else {
        pause_s(1.0);
        (void)sum_of(&comm, &x, 20.0);
    }
    MPI_Barrier(MPI_COMM_WORLD);
    ms_comm_close(&comm);
}

/* What MPI refuses comes back with its text, and what the table does not take with ours. */
static void check_errors(void) {
    ms_comm comm = open_comm(NULL), other = open_comm(NULL);
    float x = 1.0f;
    ms_collective c;
    memset(&c, 0, sizeof c);
    c.send = c.receive = &x;
    c.count = 1;
    c.root = 1000000;
    int error = comm.broadcast(comm.user, &c);
    const char *text = comm.error_text(comm.user, error);
    expect(error > 0 && text != NULL && strstr(text, "root") != NULL, "a root that is none", &comm);
    c.root = 0;
    c.dtype = MS_DTYPE_I8;
    error = other.all_reduce(other.user, &c);
    text = other.error_text(other.user, error);
    expect(error == MSI_COMM_DTYPE && strstr(text, "F32") != NULL, "a sum of I8", &comm);
    ms_comm_close(&comm);
    ms_comm_close(&other);
}

/* The same ranks the other way round. */
static uint32_t check_reversed(void) {
    int rank;
    MPI_Comm reversed;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_split(MPI_COMM_WORLD, 0, -rank, &reversed);
    ms_comm comm = open_comm(&reversed);
    MPI_Comm_free(&reversed); // it was duplicated
    expect((int)(comm.count - 1 - comm.rank) == rank, "a communicator of the caller's", &comm);
    const uint32_t wrong = cc_check_all(&comm, NULL);
    ms_comm_close(&comm);
    return wrong;
}

int main(int argc, char **argv) {
    const char *const names[] = {"single", "serialized", "multiple"};
    const int levels[] = {MPI_THREAD_SINGLE, MPI_THREAD_SERIALIZED, MPI_THREAD_MULTIPLE};
    ms_comm comm;
    int level = 0, granted;
    while (argc > 1 && level < 2 && strcmp(argv[1], names[level]) != 0) {
        level += 1;
    }
    memset(&comm, 0x5a, sizeof comm);
    if (ms_comm_mpi(NULL, &comm) != MS_RESULT_INVALID || comm.count != 0 ||
        strstr(comm.name, "MPI_Init_thread") == NULL) {
        fprintf(stderr, "a comm before MPI_Init_thread\n");
        return 1;
    }
    ms_comm_close(&comm);
    ms_comm_close(NULL);
    MPI_Init_thread(&argc, &argv, levels[level], &granted);
    comm = open_comm(NULL);
    expect(comm.on_calling_thread == (granted < MPI_THREAD_SERIALIZED) && !comm.on_device,
           "on_calling_thread", &comm);
    const MPI_Comm null = MPI_COMM_NULL;
    ms_comm none;
    expect(ms_comm_mpi(&null, &none) == MS_RESULT_INVALID, "MPI_COMM_NULL", &comm);
    failures += cc_check_all(&comm, NULL);
    failures += check_reversed();
    check_errors();
    if (comm.count > 1) {
        check_late();
        check_abort();
    }
    uint32_t all = failures;
    MPI_Allreduce(MPI_IN_PLACE, &all, 1, MPI_UINT32_T, MPI_SUM, MPI_COMM_WORLD);
    if (comm.rank == 0) {
        printf("%u ranks, threads %s: %u checks have failed\n", comm.count, names[level], all);
    }
    ms_comm_close(&comm);
    MPI_Finalize();
    ms_result after = ms_comm_mpi(NULL, &comm);
    return all != 0 || after != MS_RESULT_INVALID;
}
