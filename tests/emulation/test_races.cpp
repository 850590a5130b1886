/* races.cpp: what it finds, and what it lets pass. Compiled with -fsanitize=thread, linked without. */
#include <cuda_runtime.h>

#include "emulation.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

extern "C" {
#include <cmocka.h>
}

enum { THREADS = 64, BLOCKS = 3 };

typedef struct trial {
    const char *name;
    void (*kernel)(int *x, bool is_right);
    const char *part; /* of the message */
} trial;

/* Reads a neighbour's word. */
static __global__ void k_neighbour(int *x, bool is_right) {
    __shared__ int tile[THREADS];
    tile[threadIdx.x] = static_cast<int>(threadIdx.x);
    if (is_right) {
        __syncthreads();
    }
    x[blockIdx.x * THREADS + threadIdx.x] = tile[threadIdx.x ^ 1];
}

/* Writes where others still read, though every thread happens to write what is there. */
static __global__ void k_again(int *x, bool is_right) {
    __shared__ int tile[THREADS];
    tile[threadIdx.x] = 5;
    __syncthreads();
    const int y = tile[(threadIdx.x + 1) % THREADS];
    if (is_right) {
        __syncthreads();
    }
    tile[threadIdx.x] = y;
    __syncthreads();
    x[blockIdx.x * THREADS + threadIdx.x] = tile[0];
}

static __global__ void k_sum(int *x, bool is_right) {
    if (is_right) {
        atomicAdd(&x[blockIdx.x], 1);
    } else {
        x[blockIdx.x] += 1;
    }
}

/* One thread of each block: no barrier could help. */
static __global__ void k_blocks(int *x, bool is_right) {
    if (threadIdx.x == 0) {
        if (is_right) {
            atomicMax(&x[0], static_cast<int>(blockIdx.x));
        } else {
            x[0] = x[0] > 1 ? x[0] : 1;
        }
    }
}

static __global__ void k_atomic_and_plain(int *x, bool is_right) {
    if (threadIdx.x == 5 && !is_right) {
        x[blockIdx.x] = 0;
    }
    atomicAdd(&x[blockIdx.x], 1);
}

static __global__ void k_warp(int *x, bool is_right) {
    __shared__ int tile[THREADS];
    tile[threadIdx.x] = static_cast<int>(threadIdx.x);
    if (is_right) {
        __syncwarp();
    } else {
        __shfl_sync(0xFFFFFFFFu, 1, 0); /* exchanges a value, orders nothing else */
    }
    x[blockIdx.x * THREADS + threadIdx.x] = tile[threadIdx.x ^ 1];
}

/* Bytes and halves of one word are different memory; 16 bytes are four words. */
static __global__ void k_parts(int *x, bool is_right) {
    unsigned char *const bytes = reinterpret_cast<unsigned char *>(x + blockIdx.x * THREADS);
    unsigned short *const halves = reinterpret_cast<unsigned short *>(bytes);
    float4 *const wide = reinterpret_cast<float4 *>(bytes);
    if (threadIdx.x < 4) {
        bytes[threadIdx.x] = 1;
    } else if (threadIdx.x < 8) {
        halves[threadIdx.x] = 1;
    } else if (threadIdx.x < 10) {
        wide[threadIdx.x] = make_float4(1, 2, 3, 4);
    } else if (threadIdx.x == 10) {
        bytes[is_right ? 16 * 10 : 16 * 10 - 1] = 1;
    }
}

/* The last block to arrive reads what the others have left. */
static __global__ void k_last_block(int *x, bool is_right) {
    __shared__ int arrived;
    if (threadIdx.x == 0) {
        x[1 + blockIdx.x] = 1;
        if (is_right) {
            __threadfence();
        }
        arrived = atomicAdd(&x[0], 1);
    }
    __syncthreads();
    if (arrived % static_cast<int>(gridDim.x) == static_cast<int>(gridDim.x) - 1 &&
        threadIdx.x == 1) {
        int sum = 0;
        for (unsigned i = 0; i < gridDim.x; i++) {
            sum += x[1 + i];
        }
        x[10] = sum;
    }
}

static const trial trials[] = {
    {"a neighbour without a barrier", k_neighbour, "shared memory"},
    {"a second barrier left out", k_again, "shared memory"},
    {"a sum without an atomic", k_sum, "device memory"},
    {"blocks that write the same word", k_blocks, "device memory"},
    {"an atomic and a plain store", k_atomic_and_plain, "device memory"},
    {"lanes without __syncwarp", k_warp, "shared memory"},
    {"a byte of another's 16", k_parts, "device memory"},
    {"the last block without a fence", k_last_block, "device memory"},
};
enum { TRIALS = sizeof trials / sizeof trials[0] };

typedef struct launch {
    const trial *of;
    bool is_right;
    cudaError_t error;
} launch;

static void run(void *user) {
    launch *const l = static_cast<launch *>(user);
    int *x = nullptr;
    cudaLaunchConfig_t c = cudaLaunchConfig_t();
    c.gridDim = dim3(BLOCKS);
    c.blockDim = dim3(THREADS);
    l->error = cudaMalloc(&x, BLOCKS * THREADS * sizeof(int));
    for (int i = 0; i < 2 && !l->error; i++) { /* launches of one stream do not race */
        l->error = cudaMemset(x, 0, BLOCKS * THREADS * sizeof(int));
        l->error = l->error ? l->error : cudaLaunchKernelEx(&c, l->of->kernel, x, l->is_right);
    }
    l->error = l->error ? l->error : cudaDeviceSynchronize();
}

static void races_are_found(void **) {
    for (int t = 0; t < TRIALS; t++) {
        for (uint64_t seed = 0; seed < 20; seed++) {
            char text[600];
            launch l = {&trials[t], false, cudaSuccess};
            emulation_reset(seed);
            const bool is_caught = emulation_catch(run, &l, text, sizeof(text));
            if (!is_caught || !strstr(text, "race: thread") || !strstr(text, trials[t].part)) {
                fail_msg("%s, seed %u: '%s'", trials[t].name, static_cast<unsigned>(seed), text);
            }
        }
    }
    emulation_reset(1);
}

static void what_is_ordered_passes(void **) {
    for (int t = 0; t < TRIALS; t++) {
        for (uint64_t seed = 0; seed < 20; seed++) {
            char text[600];
            launch l = {&trials[t], true, cudaSuccess};
            emulation_reset(seed);
            if (emulation_catch(run, &l, text, sizeof(text)) || l.error) {
                fail_msg("%s, seed %u: '%s'", trials[t].name, static_cast<unsigned>(seed), text);
            }
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(races_are_found),
        cmocka_unit_test(what_is_ordered_passes),
    };
    return cmocka_run_group_tests(tests, nullptr, nullptr);
}
