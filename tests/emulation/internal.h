/* Between the parts of the emulation. */
#ifndef EMULATION_INTERNAL_H
#define EMULATION_INTERNAL_H

#include <cuda_runtime.h>

#include "emulation.h"
#include "streams.h"

/* ---- memory.cpp ---- */

enum memory_kind { MEMORY_DEVICE, MEMORY_PINNED, MEMORY_HOST, MEMORY_KINDS, MEMORY_OTHER };

/* While kernels run, device memory is open, and pinned and host memory closed. */
void memory_set_mode(bool is_kernel);
void memory_reset(uint64_t seed);
void *memory_allocate(memory_kind kind, size_t size, bool is_mapped);
/* false: no such allocation. */
bool memory_release(memory_kind kind, void *pointer);
memory_kind memory_where(const void *pointer);
/* Whether one live allocation holds all of it. */
bool memory_holds(memory_kind kind, const void *pointer, size_t size);
/* The same bytes at an address that is always open; addresses that are not ours stay as they are. */
char *memory_open(const void *pointer);
const char *memory_base(memory_kind kind, size_t *size); /* of the region */
uint64_t memory_bytes(memory_kind kind);
uint64_t memory_charged(void); /* of the device, in its granularity */
uint64_t memory_charge(size_t size);
uint64_t memory_allocations(memory_kind kind);
void memory_check(void); /* writes past the ends */

/* A mistake of the program under test: ends it, unless emulation_catch stands around. */
[[noreturn]] void emulation_die(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* Where die ends: not on a fiber. */
[[noreturn]] void emulation_die_now();

/* ---- fibers.cpp ---- */

struct kernel_launch {
    void (*kernel)(void);
    void (*call)(const void *closure);
    dim3 grid, block;
};

/* Where the thread that runs stands. */
struct kernel_place {
    uint64_t launch, block; /* numbers: of the launch, of the block in its grid */
    uint16_t thread, barriers, warp_barriers;
    const char *shared;
    size_t shared_size;
};

void fibers_reset(uint64_t seed);
/* false: no kernel runs. */
bool fibers_place(kernel_place *place);
/* Runs a grid, wholly. */
void fibers_run(const kernel_launch *launch, const void *closure);
bool fibers_is_inside();
/* Leaves the fiber for good: fibers_run goes on to die. */
[[noreturn]] void fibers_abandon();
const char *fibers_kernel(); /* that runs */
const char *fibers_name(void (*kernel)(void));
/* "thread (1,0,0) of block (2,0,0)" */
const char *fibers_where();

/* ---- runtime.cpp ---- */

/* Into the stream, or into the graph that it captures. */
cudaError_t emulation_enqueue(cudaStream_t stream, streams_function *function,
                              const void *arguments, size_t size, uint64_t cost_ns);
/* The same, when a condition holds that other processes fulfil. */
cudaError_t emulation_enqueue_when(cudaStream_t stream, streams_condition *is_ready,
                                   streams_function *function, const void *arguments, size_t size,
                                   uint64_t cost_ns);
/* What a device does while the host does something else. */
void emulation_go_on(cudaStream_t stream);
/* One at a time; every entry point holds it. */
struct emulation_lock {
    emulation_lock();
    ~emulation_lock();
};
void emulation_unlock_all();
/* Counts a call, and says whether it is the one to fail. */
bool emulation_fails(const char *name);
/* Whether work of the device may touch this memory: see emulation_set_pageable_access too. */
bool emulation_holds(const void *pointer, size_t size);
/* false: the device is broken, and the operation does nothing. */
bool emulation_works();
bool emulation_is_stream(cudaStream_t stream);
bool emulation_is_captured(cudaStream_t stream);
void emulation_count_product();

/* ---- cublas.cpp ---- */

void cublas_reset();
uint64_t cublas_handles();

/* ---- nccl.cpp ---- */

extern void (*nccl_reset)(); /* NULL: the program does not use it */

#endif
