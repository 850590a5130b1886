/* A stand-in for the CUDA runtime and its kernel language: the parts that this project uses, on the
 * host, without a GPU. CUDA sources that launch with cudaLaunchKernelEx (and never with <<<>>>)
 * compile with an ordinary C++ compiler, C programs that use streams and events with a C compiler:
 *
 *   g++ -x c++ -std=c++11 -O2 -D__CUDACC__=1 -Itests/emulation -I. -Iexamples -c part.cu
 *   gcc -std=c99 -O2 -Itests/emulation -I. -Iexamples -c program.c
 *   g++ -std=c++11 -O2 -Itests/emulation -c tests/emulation/{runtime,memory,fibers,cublas}.cpp
 *   g++ *.o -lm -pthread
 *
 * Add -fsanitize=alignment -fsanitize-undefined-trap-on-error to the first line, and misaligned
 * vectors are caught as well. With -fsanitize=address,undefined nothing more is needed; ASAN_OPTIONS must leave
 * allow_user_segv_handler=1 (the default) alone. The thread sanitizer is replaced by races.cpp,
 * which says how. Linux on x86-64 or aarch64; other processors by ucontext.
 *
 * What it does to a program:
 * - A call only queues its work. The work runs when the host waits, in an adversarial order
 *   (streams.h). A kernel runs block by block in random order, the threads of a block one after
 *   the other in an order that changes, each until it ends or waits for others.
 * - Device memory is inaccessible to the host and filled with poison; an access past one of its
 *   ends, or after cudaFree, faults, and a write past the other end is found at cudaFree. Kernels
 *   can touch neither pinned memory nor what emulation_host_alloc gives. Shared memory is garbage
 *   at the start of each block.
 * - Copies from and to pinned memory take place when their turn comes; pageable memory is read at
 *   the call, and what is copied to it is waited for.
 * - __syncthreads must be reached by every thread of the block at the same line, and warp functions
 *   by all lanes of the mask that have not returned.
 * - A mistake ends the program with a line that names it: emulation: kernel k_sum, thread (3,0,0) of
 *   block (0,0,0): touched host memory at ..., offset 12 of an allocation of 400 bytes.
 * - emulation.h has the rest: the seed, the failure of the N-th call, a device that breaks, counts,
 *   the device's properties, and how a test catches what would otherwise end the program.
 *
 * Not here: dynamic shared memory, cooperative launches, managed memory, memory pools, textures.
 * __CUDA_ARCH__ is not defined.
 */
#ifndef EMULATION_CUDA_RUNTIME_H
#define EMULATION_CUDA_RUNTIME_H

#include <stddef.h>
#include <stdint.h>

#define CUDART_VERSION   13000
#define CUDART_EMULATION 1

/* ---- types ---- */

#define EMULATION_VECTOR2(name, type, alignment)                                                   \
    typedef struct name {                                                                          \
        type x, y;                                                                                 \
    } __attribute__((aligned(alignment))) name;
#define EMULATION_VECTOR3(name, type)                                                              \
    typedef struct name {                                                                          \
        type x, y, z;                                                                              \
    } name;
#define EMULATION_VECTOR4(name, type, alignment)                                                   \
    typedef struct name {                                                                          \
        type x, y, z, w;                                                                           \
    } __attribute__((aligned(alignment))) name;

EMULATION_VECTOR2(uchar2, unsigned char, 2)
EMULATION_VECTOR2(ushort2, unsigned short, 4)
EMULATION_VECTOR2(int2, int, 8)
EMULATION_VECTOR2(uint2, unsigned, 8)
EMULATION_VECTOR2(float2, float, 8)
EMULATION_VECTOR2(double2, double, 16)
EMULATION_VECTOR2(longlong2, long long, 16)
EMULATION_VECTOR2(ulonglong2, unsigned long long, 16)
EMULATION_VECTOR3(int3, int)
EMULATION_VECTOR3(uint3, unsigned)
EMULATION_VECTOR3(float3, float)
EMULATION_VECTOR4(uchar4, unsigned char, 4)
EMULATION_VECTOR4(ushort4, unsigned short, 8)
EMULATION_VECTOR4(int4, int, 16)
EMULATION_VECTOR4(uint4, unsigned, 16)
EMULATION_VECTOR4(float4, float, 16)

#ifdef __cplusplus
struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned nx = 1, unsigned ny = 1, unsigned nz = 1) : x(nx), y(ny), z(nz) {
    }
};
#else
typedef struct dim3 {
    unsigned x, y, z;
} dim3;
#endif

typedef enum cudaError {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaErrorMemoryAllocation = 2,
    cudaErrorInitializationError = 3,
    cudaErrorInvalidConfiguration = 9,
    cudaErrorInvalidMemcpyDirection = 21,
    cudaErrorInsufficientDriver = 35,
    cudaErrorInvalidDeviceFunction = 98,
    cudaErrorNoDevice = 100,
    cudaErrorInvalidDevice = 101,
    cudaErrorNoKernelImageForDevice = 209,
    cudaErrorInvalidResourceHandle = 400,
    cudaErrorIllegalState = 401,
    cudaErrorNotReady = 600,
    cudaErrorIllegalAddress = 700,
    cudaErrorLaunchOutOfResources = 701,
    cudaErrorMisalignedAddress = 716,
    cudaErrorLaunchFailure = 719,
    cudaErrorNotPermitted = 800,
    cudaErrorNotSupported = 801,
    cudaErrorStreamCaptureUnsupported = 900,
    cudaErrorStreamCaptureInvalidated = 901,
    cudaErrorStreamCaptureMerge = 902,
    cudaErrorStreamCaptureUnmatched = 903,
    cudaErrorStreamCaptureUnjoined = 904,
    cudaErrorStreamCaptureIsolation = 905,
    cudaErrorStreamCaptureImplicit = 906,
    cudaErrorCapturedEvent = 907,
    cudaErrorStreamCaptureWrongThread = 908,
    cudaErrorUnknown = 999
} cudaError_t;

enum cudaMemcpyKind {
    cudaMemcpyHostToHost = 0,
    cudaMemcpyHostToDevice = 1,
    cudaMemcpyDeviceToHost = 2,
    cudaMemcpyDeviceToDevice = 3,
    cudaMemcpyDefault = 4
};

enum cudaStreamCaptureMode {
    cudaStreamCaptureModeGlobal = 0,
    cudaStreamCaptureModeThreadLocal = 1,
    cudaStreamCaptureModeRelaxed = 2
};

enum cudaStreamCaptureStatus {
    cudaStreamCaptureStatusNone = 0,
    cudaStreamCaptureStatusActive = 1,
    cudaStreamCaptureStatusInvalidated = 2
};

enum cudaDeviceAttr {
    cudaDevAttrMaxThreadsPerBlock = 1,
    cudaDevAttrMaxGridDimX = 5,
    cudaDevAttrMaxGridDimY = 6,
    cudaDevAttrMaxGridDimZ = 7,
    cudaDevAttrMaxSharedMemoryPerBlock = 8,
    cudaDevAttrWarpSize = 10,
    cudaDevAttrClockRate = 13,
    cudaDevAttrMultiProcessorCount = 16,
    cudaDevAttrIntegrated = 18,
    cudaDevAttrConcurrentKernels = 31,
    cudaDevAttrMemoryClockRate = 36,
    cudaDevAttrGlobalMemoryBusWidth = 37,
    cudaDevAttrL2CacheSize = 38,
    cudaDevAttrMaxThreadsPerMultiProcessor = 39,
    cudaDevAttrAsyncEngineCount = 40,
    cudaDevAttrUnifiedAddressing = 41,
    cudaDevAttrComputeCapabilityMajor = 75,
    cudaDevAttrComputeCapabilityMinor = 76,
    cudaDevAttrMaxSharedMemoryPerMultiprocessor = 81,
    cudaDevAttrMaxRegistersPerMultiprocessor = 82
};

struct cudaDeviceProp {
    char name[256];
    size_t totalGlobalMem, sharedMemPerBlock;
    int regsPerBlock, warpSize;
    int maxThreadsPerBlock, maxThreadsDim[3], maxGridSize[3];
    int major, minor;
    int multiProcessorCount, integrated, canMapHostMemory;
    int concurrentKernels, ECCEnabled;
    int pciBusID, pciDeviceID, pciDomainID;
    int asyncEngineCount, unifiedAddressing;
    int memoryBusWidth, l2CacheSize, maxThreadsPerMultiProcessor;
    size_t sharedMemPerMultiprocessor;
    int regsPerMultiprocessor, managedMemory;
};

typedef struct CUstream_st *cudaStream_t;
typedef struct CUevent_st *cudaEvent_t;
typedef struct CUgraph_st *cudaGraph_t;
typedef struct CUgraphExec_st *cudaGraphExec_t;
#define CUDART_CB
typedef void(CUDART_CB *cudaHostFn_t)(void *user);

typedef struct cudaLaunchAttribute {
    int id;
    union {
        char pad[64];
        int cooperative, priority;
    } val;
} cudaLaunchAttribute;

typedef struct cudaLaunchConfig_st {
    dim3 gridDim, blockDim;
    size_t dynamicSmemBytes;
    cudaStream_t stream;
    cudaLaunchAttribute *attrs;
    unsigned numAttrs;
} cudaLaunchConfig_t;

#define cudaStreamDefault          0x00
#define cudaStreamNonBlocking      0x01
#define cudaStreamLegacy           ((cudaStream_t)0x1)
#define cudaStreamPerThread        ((cudaStream_t)0x2)
#define cudaEventDefault           0x00
#define cudaEventBlockingSync      0x01
#define cudaEventDisableTiming     0x02
#define cudaEventRecordDefault     0x00
#define cudaEventWaitDefault       0x00
#define cudaHostAllocDefault       0x00
#define cudaHostAllocPortable      0x01
#define cudaHostAllocMapped        0x02
#define cudaHostAllocWriteCombined 0x04

/* library_types.h */
typedef enum cudaDataType_t {
    CUDA_R_32F = 0,
    CUDA_R_64F = 1,
    CUDA_R_16F = 2,
    CUDA_R_16BF = 14
} cudaDataType;
typedef cudaDataType cudaDataType_t;

/* ---- functions ---- */

#ifdef __cplusplus
extern "C" {
#define EMULATION_DEFAULT(value) = value
#else
#define EMULATION_DEFAULT(value)
#endif

cudaError_t cudaGetLastError(void);
cudaError_t cudaPeekAtLastError(void);
const char *cudaGetErrorName(cudaError_t error);
const char *cudaGetErrorString(cudaError_t error);
cudaError_t cudaRuntimeGetVersion(int *version);
cudaError_t cudaDriverGetVersion(int *version);

cudaError_t cudaGetDeviceCount(int *count);
cudaError_t cudaGetDevice(int *device);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device);
cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device);
cudaError_t cudaDeviceSynchronize(void);
cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes);

cudaError_t cudaMalloc(void **pointer, size_t size);
cudaError_t cudaFree(void *pointer);
cudaError_t cudaHostAlloc(void **pointer, size_t size, unsigned flags);
cudaError_t cudaMallocHost(void **pointer, size_t size);
cudaError_t cudaFreeHost(void *pointer);
cudaError_t cudaMemcpy(void *to, const void *from, size_t count, enum cudaMemcpyKind kind);
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t count, enum cudaMemcpyKind kind,
                            cudaStream_t stream EMULATION_DEFAULT(0));
cudaError_t cudaMemset(void *to, int value, size_t count);
cudaError_t cudaMemsetAsync(void *to, int value, size_t count,
                            cudaStream_t stream EMULATION_DEFAULT(0));

cudaError_t cudaStreamCreate(cudaStream_t *stream);
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags);
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaStreamQuery(cudaStream_t stream);
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event,
                                unsigned flags EMULATION_DEFAULT(0));
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest);
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data);

cudaError_t cudaEventCreate(cudaEvent_t *event);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream EMULATION_DEFAULT(0));
cudaError_t cudaEventQuery(cudaEvent_t event);
cudaError_t cudaEventSynchronize(cudaEvent_t event);
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t start, cudaEvent_t end);

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode);
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph);
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status);
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph,
                                 unsigned long long flags EMULATION_DEFAULT(0));
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream);
cudaError_t cudaGraphDestroy(cudaGraph_t graph);
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec);

#ifdef __cplusplus
} /* extern "C" */

#include "kernels.h"
#endif

#endif
