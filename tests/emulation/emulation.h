/* What tests say to the emulation of CUDA, and ask it. See cuda_runtime.h. */
#ifndef EMULATION_H
#define EMULATION_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Forgets everything but the host memory given out below, and starts anew: default device, this seed.
 * Seed 0 runs work in the order of the calls and threads in the order of their numbers. A program
 * that never calls it runs with EMULATION_SEED of the environment, or 1. A process that was forked calls
 * it first, and then has a device of its own: nothing is shared with its parent. */
void emulation_reset(uint64_t seed);

typedef struct emulation_device {
    char name[256];
    int count; /* of devices; 0: cudaErrorNoDevice */
    int compute_major, compute_minor;
    int is_integrated, multiprocessors;
    int driver_version, runtime_version;
    int clock_khz, memory_clock_khz, memory_bus_bits;
    uint64_t memory_bytes; /* cudaMalloc fails beyond, less what is in use by others */
    uint64_t used_bytes;   /* by others */
} emulation_device;

emulation_device emulation_get_device(void);
void emulation_set_device(const emulation_device *device);

/* The n-th call from now on which can fail, fails, without effect; 0: none. Allocations return
 * cudaErrorMemoryAllocation, other calls cudaErrorLaunchFailure, cuBLAS its execution failed. What
 * frees and destroys does not fail, nor what asks for errors, versions and texts. */
void emulation_fail(uint64_t n);
/* Whether it came to pass; the name of the call, or NULL. */
const char *emulation_failed(void);

/* The n-th operation that runs from now on (kernel, copy, fill, product, host function) breaks the
 * device, as an illegal address does: it and all later ones do nothing, and every call, first the one
 * that waits, returns cudaErrorIllegalAddress. What frees and destroys still does so. A reset mends. */
void emulation_break(uint64_t n);
bool emulation_is_broken(void);

typedef struct emulation_counts {
    /* Alive now. */
    uint64_t device_bytes, pinned_bytes; /* as asked for */
    uint64_t device_allocations, pinned_allocations, host_allocations;
    uint64_t streams, events, graphs, graph_execs, handles;
    /* Since the reset. */
    uint64_t calls; /* that can fail */
    uint64_t
        host_waits; /* calls that waited: synchronize, blocking copies, cudaFree with work left */
    uint64_t launches, graph_launches, copies, fills, products;
    uint64_t graphs_cut_off; /* executable graphs destroyed while they ran */
    uint64_t threads;        /* that ran in kernels */
    uint64_t pending;        /* operations queued, waits included */
    uint64_t device_peak_bytes;
} emulation_counts;

emulation_counts emulation_count(void);
/* Launches of a kernel since the reset, those in replayed graphs included; of all when NULL. */
uint64_t emulation_launches(const char *kernel);
/* The clock of the host in nanoseconds: it moves by what waits cost on an imagined device. */
uint64_t emulation_time_ns(void);
/* Runs all that is queued. */
void emulation_finish(void);

/* Host memory that kernels cannot touch; plain malloc'ed memory they can, unnoticed. */
void *emulation_host_alloc(size_t size);
void emulation_host_release(void *pointer);

/* For the test alone: device memory as the host sees it, without a copy being queued. Finish the
 * work first. */
void emulation_peek(void *to, const void *device, size_t size);
void emulation_poke(void *device, const void *from, size_t size);

/* Whether an address lies where device memory is. */
bool emulation_is_device(const void *pointer);
/* Lets host code touch device memory, until it is closed again. For tests whose callbacks are host
 * code; a reset closes it, and so does a mistake that is caught. */
void emulation_open(bool is_open);
/* As on systems where the device reads all memory of the host: memory that the emulation did not
 * give may stand for device memory in copies and fills. A reset leaves it as it is; false at first. */
void emulation_set_pageable_access(bool is_allowed);

/* From now on every communicator of this process reports this ncclResult_t when it is asked; 0: none. */
void emulation_nccl_error(int error);

/* Runs a function. true: the emulation found a mistake in it, which otherwise ends the program;
 * `text` says which. What the function held is lost: emulation_reset comes next. */
bool emulation_catch(void (*function)(void *), void *user, char *text, size_t size);

#ifdef __cplusplus
}
#endif

#endif
