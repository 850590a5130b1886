/*  ranks.h - trainers that run as several processes which train one model together: the ranks of an MPI
    job, as mpirun or srun starts them.

        mpirun -n 4 build/examples/gpt2 --budget 40M

    Shown here: MPI_Init_thread, the comm of the library's (ms_comm_mpi; and ms_comm_nccl for a GPU each),
    one rank that prints, and an end that leaves no rank waiting for one that has failed. A program

    1. calls ranks_begin first, and returns what ranks_end returns of its exit status;
    2. sets ms_config.comm to what ranks_comm gives, in all its models, which have to be the same ones;
    3. lets each rank train on batches of its own: of what one rank alone would draw with `count` times
       the accumulation, rank r has every count-th batch, from the r-th on;
    4. takes what must not differ between ranks, such as a clock that ends the run, from the first one
       (ranks_share).

    It is compiled with MEMSCALE_MPI where there is MPI, and linked with an implementation that was too:
    the Makefile does that for gpt2, bert and llama. Otherwise, and without mpirun, there is one rank.
    Include memscale.h and options.h first. */
#ifndef MEMSCALE_RANKS_H
#define MEMSCALE_RANKS_H

#ifdef MEMSCALE_MPI
#include <mpi.h>
#endif

enum { RANKS_SHOWN = 8 };

/* The comms of this job; both are zero if there is one rank. */
static struct {
    ms_comm comm;   // between hosts
    ms_comm on_gpu; // between devices, once ranks_comm was asked for it
} ranks_job;

static uint32_t ranks_count(void) {
    return ranks_job.comm.size > 0 ? ranks_job.comm.count : 1;
}

/* Errors of the others name their rank. */
static void ranks_name(void) {
    const size_t used = strlen(options_program);
    if (ranks_job.comm.rank > 0) {
        snprintf(options_program + used, sizeof options_program - used, " (rank %u)",
                 (unsigned)ranks_job.comm.rank);
    }
}

#ifdef MEMSCALE_MPI

/* Where mpirun or srun has started this process, the environment says so. MPI is not begun without, since
   a process alone would have to wait for its services. */
static bool ranks_is_job(void) {
    static const char *const names[] = {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK",
                                        "MPI_LOCALNRANKS"};
    bool is = false;
    for (int i = 0; i < OPTIONS_IN(names); i++) {
        is = is || getenv(names[i]) != NULL;
    }
    return is;
}

/* Also where a program ends by exit. */
static void ranks_finalize(void) {
    int is_over = 0;
    MPI_Finalized(&is_over);
    if (!is_over) {
        ms_comm_close(&ranks_job.on_gpu);
        ms_comm_close(&ranks_job.comm);
        MPI_Finalize();
    }
}

/* Each process of a machine takes a GPU of its own, which is then the first one that it sees: that of
   its number on the machine, of those that CUDA_VISIBLE_DEVICES lists. A launcher that has given each
   process one has done so already. */
static void ranks_choose_gpu(void) {
    MPI_Comm machine;
    int number = 0, others = 0;
    char own[64];
    MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &machine);
    MPI_Comm_rank(machine, &number);
    MPI_Comm_free(&machine);
    const char *at = getenv("CUDA_VISIBLE_DEVICES");
    if (at && !strchr(at, ',')) {
        return;
    }
    for (; at && others < number && strchr(at, ','); others++) {
        at = strchr(at, ',') + 1;
    }
    snprintf(own, sizeof own, "%.*s", at ? (int)strcspn(at, ",") : 0, at ? at : "");
    if (!at) {
        snprintf(own, sizeof own, "%d", number);
    }
    setenv("CUDA_VISIBLE_DEVICES", own, 1);
}

/* Joins the job, if there is one; all ranks except the first print nothing but errors. Returns 1 after
   an error. */
static int ranks_begin(int *argc, char ***argv) {
    int granted = MPI_THREAD_SINGLE;
    if (!ranks_is_job()) {
        return 0;
    }
    if (MPI_Init_thread(argc, argv, MPI_THREAD_MULTIPLE, &granted) != MPI_SUCCESS) {
        return fail("MPI_Init_thread has failed");
    }
    /* Else Open MPI ends the process where ranks call different functions, before the library can say so. */
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    atexit(ranks_finalize);
    if (ms_comm_mpi(NULL, &ranks_job.comm) != MS_RESULT_OK) {
        return fail("ms_comm_mpi: %s", ranks_job.comm.name);
    }
    ranks_choose_gpu();
    return ranks_job.comm.rank == 0 || freopen("/dev/null", "w", stdout) ? 0 : fail("no /dev/null");
}

/* Whether all ranks come here within a second: with the same mistake in their options, say. */
static bool ranks_end_together(void) {
    const double begin = MPI_Wtime();
    MPI_Request request;
    int have_come = 0;
    MPI_Ibarrier(MPI_COMM_WORLD, &request);
    while (!have_come && MPI_Wtime() - begin < 1.0) {
        MPI_Test(&request, &have_come, MPI_STATUS_IGNORE);
    }
    return have_come != 0;
}

/* What the program returns. After an error on this rank alone the others, which would wait for it, are
   ended too. */
static int ranks_end(int status) {
    fflush(NULL);
    if (status != 0 && ranks_count() > 1 && !ranks_end_together()) {
        MPI_Abort(MPI_COMM_WORLD, status);
    }
    return status;
}

/* The comm of a model: between the hosts, or where NCCL is compiled in between GPUs. */
static int ranks_comm(bool on_gpu, ms_comm *comm) {
#ifdef MEMSCALE_NCCL
    if (on_gpu && ranks_count() > 1 && ranks_job.on_gpu.size == 0) {
        ms_nccl_id id;
        if (ms_nccl_share_id(&ranks_job.comm, &id) != MS_RESULT_OK) {
            return fail("NCCL gives no id");
        }
        if (ms_comm_nccl(&id, ranks_job.comm.rank, ranks_count(), &ranks_job.on_gpu) !=
            MS_RESULT_OK) {
            return fail("ms_comm_nccl: %s", ranks_job.on_gpu.name);
        }
    }
#endif
    *comm = on_gpu && ranks_job.on_gpu.size > 0 ? ranks_job.on_gpu : ranks_job.comm;
    return 0;
}

#else

static int ranks_begin(int *argc, char ***argv) {
    (void)argc, (void)argv;
    return 0;
}

static int ranks_end(int status) {
    return status;
}

static int ranks_comm(bool on_gpu, ms_comm *comm) {
    (void)on_gpu;
    *comm = ranks_job.comm;
    return 0;
}

#endif // MEMSCALE_MPI

/* Makes a number that of the first rank, on all ranks, which all call it. */
static ms_result ranks_share(ms_model *model, double *value) {
    *value = ranks_job.comm.rank == 0 ? *value : 0.0;
    return ranks_count() > 1 ? ms_sum_over_ranks(model, value, 1) : MS_RESULT_OK;
}

/* Prints a time of each rank, or of many ranks the least and the most. */
static int ranks_print_times(ms_model *model, const char *what, double seconds) {
    double *all = (double *)calloc(ranks_count(), sizeof *all);
    if (!all) {
        return fail("no memory for the times of %u ranks", (unsigned)ranks_count());
    }
    all[ranks_job.comm.rank] = seconds;
    if (ms_sum_over_ranks(model, all, ranks_count()) != MS_RESULT_OK) {
        free(all);
        return fail("%s", ms_last_error(model));
    }
    double least = all[0], most = all[0];
    for (uint32_t r = 1; r < ranks_count(); r++) {
        least = all[r] < least ? all[r] : least;
        most = all[r] > most ? all[r] : most;
    }
    printf("ranks     %u, %s:", (unsigned)ranks_count(), what);
    for (uint32_t r = 0; r < ranks_count() && ranks_count() <= RANKS_SHOWN; r++) {
        printf(" %.2f", all[r]);
    }
    if (ranks_count() > RANKS_SHOWN) {
        printf(" %.2f to %.2f", least, most);
    }
    printf(" s\n");
    free(all);
    return 0;
}

#endif // MEMSCALE_RANKS_H
