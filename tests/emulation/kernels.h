/* The kernel language, and the typed launch. Included by cuda_runtime.h, in C++ alone. */
#ifndef EMULATION_KERNELS_H
#define EMULATION_KERNELS_H

#include <math.h>
#include <string.h>
#include <type_traits>
#include <utility>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#ifndef __noinline__
#define __noinline__ __attribute__((noinline))
#endif
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))

/* A section of their own, so that all of them can be filled with poison before each block. */
#define __shared__ static __attribute__((section("emulation_shared")))

/* Of the thread that runs. */
extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;
static const int warpSize = 32;

/* ---- what the threads of a block do together ---- */

enum emulation_warp_kind {
    EMULATION_SYNCWARP,
    EMULATION_SHFL,
    EMULATION_SHFL_UP,
    EMULATION_SHFL_DOWN,
    EMULATION_SHFL_XOR,
    EMULATION_BALLOT,
    EMULATION_ANY,
    EMULATION_ALL
};

void emulation_syncthreads(const char *file, int line);
uint64_t emulation_warp(emulation_warp_kind kind, unsigned mask, uint64_t value, int argument,
                        int width);

#define __syncthreads() emulation_syncthreads(__FILE__, __LINE__)

static inline void __syncwarp(unsigned mask = 0xFFFFFFFFu) {
    emulation_warp(EMULATION_SYNCWARP, mask, 0, 0, 32);
}

static inline unsigned __ballot_sync(unsigned mask, int predicate) {
    return static_cast<unsigned>(emulation_warp(EMULATION_BALLOT, mask, predicate != 0, 0, 32));
}

static inline int __any_sync(unsigned mask, int predicate) {
    return static_cast<int>(emulation_warp(EMULATION_ANY, mask, predicate != 0, 0, 32));
}

static inline int __all_sync(unsigned mask, int predicate) {
    return static_cast<int>(emulation_warp(EMULATION_ALL, mask, predicate != 0, 0, 32));
}

template <typename T>
static inline T emulation_shuffle(emulation_warp_kind kind, unsigned mask, T value, int argument,
                                  int width) {
    static_assert(std::is_arithmetic<T>::value && sizeof(T) >= 4, "shuffles take 4 or 8 bytes");
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof(value));
    bits = emulation_warp(kind, mask, bits, argument, width);
    memcpy(&value, &bits, sizeof(value));
    return value;
}

template <typename T>
static inline T __shfl_sync(unsigned mask, T value, int lane, int width = 32) {
    return emulation_shuffle(EMULATION_SHFL, mask, value, lane, width);
}

template <typename T>
static inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
    return emulation_shuffle(EMULATION_SHFL_UP, mask, value, static_cast<int>(delta), width);
}

template <typename T>
static inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
    return emulation_shuffle(EMULATION_SHFL_DOWN, mask, value, static_cast<int>(delta), width);
}

template <typename T>
static inline T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32) {
    return emulation_shuffle(EMULATION_SHFL_XOR, mask, value, lanes, width);
}

/* ---- atomics: nothing else runs meanwhile ---- */

#if defined(__SANITIZE_THREAD__)
#define EMULATION_RACES 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define EMULATION_RACES 1
#endif
#endif

/* With races.cpp the compiler tells of each access; those of atomics are told of here. */
void emulation_race_atomic(const void *at, size_t size);
void emulation_race_fence(void);
#ifdef EMULATION_RACES
#define EMULATION_ATOMIC static __attribute__((noinline, unused, no_sanitize("thread")))
#else
#define EMULATION_ATOMIC                static inline
#define emulation_race_atomic(at, size) ((void)0)
#define emulation_race_fence()          ((void)0)
#endif

template <typename T> EMULATION_ATOMIC T emulation_exchange(T *at, T value) {
    emulation_race_atomic(at, sizeof(T));
    const T old = *at;
    *at = value;
    return old;
}

EMULATION_ATOMIC int atomicAdd(int *at, int value) {
    return emulation_exchange(
        at, static_cast<int>(static_cast<unsigned>(*at) + static_cast<unsigned>(value)));
}

EMULATION_ATOMIC unsigned atomicAdd(unsigned *at, unsigned value) {
    return emulation_exchange(at, *at + value);
}

EMULATION_ATOMIC unsigned long long atomicAdd(unsigned long long *at, unsigned long long value) {
    return emulation_exchange(at, *at + value);
}

EMULATION_ATOMIC float atomicAdd(float *at, float value) {
    return emulation_exchange(at, *at + value);
}

EMULATION_ATOMIC double atomicAdd(double *at, double value) {
    return emulation_exchange(at, *at + value);
}

#define EMULATION_ATOMICS(type)                                                                    \
    EMULATION_ATOMIC type atomicMax(type *at, type value) {                                        \
        return emulation_exchange(at, *at > value ? *at : value);                                  \
    }                                                                                              \
    EMULATION_ATOMIC type atomicMin(type *at, type value) {                                        \
        return emulation_exchange(at, *at < value ? *at : value);                                  \
    }                                                                                              \
    EMULATION_ATOMIC type atomicOr(type *at, type value) {                                         \
        return emulation_exchange(at, *at | value);                                                \
    }                                                                                              \
    EMULATION_ATOMIC type atomicAnd(type *at, type value) {                                        \
        return emulation_exchange(at, *at & value);                                                \
    }                                                                                              \
    EMULATION_ATOMIC type atomicExch(type *at, type value) {                                       \
        return emulation_exchange(at, value);                                                      \
    }                                                                                              \
    EMULATION_ATOMIC type atomicCAS(type *at, type compare, type value) {                          \
        return emulation_exchange(at, *at == compare ? value : *at);                               \
    }

EMULATION_ATOMICS(int)
EMULATION_ATOMICS(unsigned)
EMULATION_ATOMICS(unsigned long long)

EMULATION_ATOMIC float atomicExch(float *at, float value) {
    return emulation_exchange(at, value);
}

static inline void __threadfence(void) {
    emulation_race_fence();
}

static inline void __threadfence_block(void) {
}

/* ---- numbers ---- */

#define EMULATION_MAKE2(name, type)                                                                \
    static inline name make_##name(type x, type y) {                                               \
        const name v = {x, y};                                                                     \
        return v;                                                                                  \
    }
#define EMULATION_MAKE3(name, type)                                                                \
    static inline name make_##name(type x, type y, type z) {                                       \
        const name v = {x, y, z};                                                                  \
        return v;                                                                                  \
    }
#define EMULATION_MAKE4(name, type)                                                                \
    static inline name make_##name(type x, type y, type z, type w) {                               \
        const name v = {x, y, z, w};                                                               \
        return v;                                                                                  \
    }

EMULATION_MAKE2(uchar2, unsigned char)
EMULATION_MAKE2(ushort2, unsigned short)
EMULATION_MAKE2(int2, int)
EMULATION_MAKE2(uint2, unsigned)
EMULATION_MAKE2(float2, float)
EMULATION_MAKE2(double2, double)
EMULATION_MAKE2(longlong2, long long)
EMULATION_MAKE2(ulonglong2, unsigned long long)
EMULATION_MAKE3(int3, int)
EMULATION_MAKE3(uint3, unsigned)
EMULATION_MAKE3(float3, float)
EMULATION_MAKE4(uchar4, unsigned char)
EMULATION_MAKE4(ushort4, unsigned short)
EMULATION_MAKE4(int4, int)
EMULATION_MAKE4(uint4, unsigned)
EMULATION_MAKE4(float4, float)

/* Keeps the compiler from fusing a product and a sum that are to be rounded one by one. */
static inline float emulation_rounded(float x) {
#if defined(__x86_64__)
    __asm__("" : "+x"(x));
#elif defined(__aarch64__)
    __asm__("" : "+w"(x));
#else
    volatile float y = x;
    x = y;
#endif
    return x;
}

static inline float __fmul_rn(float a, float b) {
    return emulation_rounded(a * b);
}

static inline float __fadd_rn(float a, float b) {
    return emulation_rounded(emulation_rounded(a) + emulation_rounded(b));
}

static inline float __fsub_rn(float a, float b) {
    return emulation_rounded(emulation_rounded(a) - emulation_rounded(b));
}

static inline float __fdiv_rn(float a, float b) {
    return emulation_rounded(a / b);
}

static inline float __fmaf_rn(float a, float b, float c) {
    return emulation_rounded(fmaf(a, b, c));
}

static inline float __fsqrt_rn(float x) {
    return emulation_rounded(sqrtf(x));
}

static inline float __frcp_rn(float x) {
    return emulation_rounded(1.0f / x);
}

/* The C library has functions of these names. */
#define __expf(x) expf(x)
#define __logf(x) logf(x)

static inline float __fdividef(float a, float b) {
    return a / b;
}

static inline float rsqrtf(float x) {
    return 1.0f / sqrtf(x);
}

static inline int __popc(unsigned x) {
    return __builtin_popcount(x);
}

static inline int __ffs(int x) {
    return __builtin_ffs(x);
}

static inline int __clz(int x) {
    return x ? __builtin_clz(static_cast<unsigned>(x)) : 32;
}

template <typename T> static inline T __ldg(const T *at) {
    return *at;
}

template <typename To, typename From> static inline To emulation_bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "of the same size");
    To to;
    memcpy(&to, &from, sizeof(to));
    return to;
}

static inline unsigned __float_as_uint(float x) {
    return emulation_bits<unsigned>(x);
}

static inline int __float_as_int(float x) {
    return emulation_bits<int>(x);
}

static inline float __uint_as_float(unsigned x) {
    return emulation_bits<float>(x);
}

static inline float __int_as_float(int x) {
    return emulation_bits<float>(x);
}

/* ---- launches ---- */

/* The arguments of a kernel, and the call with all of them. */
template <typename... T> struct emulation_pack {
    template <typename F, typename... A> void call(F f, A... a) const {
        f(a...);
    }
};

template <typename H, typename... T> struct emulation_pack<H, T...> {
    static_assert(std::is_trivially_copyable<H>::value, "kernels take plain values");
    H head;
    emulation_pack<T...> tail;

    emulation_pack(H h, T... t) : head(h), tail{t...} {
    }

    template <typename F, typename... A> void call(F f, A... a) const {
        tail.call(f, a..., head);
    }
};

template <typename... T> struct emulation_closure {
    void (*kernel)(T...);
    emulation_pack<T...> arguments;

    template <typename... A>
    emulation_closure(void (*k)(T...), A &&...a) : kernel(k), arguments{std::forward<A>(a)...} {
    }

    static void call(const void *closure) {
        const emulation_closure *const c = static_cast<const emulation_closure *>(closure);
        c->arguments.call(c->kernel);
    }
};

cudaError_t emulation_launch(const cudaLaunchConfig_t *config, void (*kernel)(void),
                             void (*call)(const void *), const void *closure, size_t size);

template <typename... T, typename... A>
static inline cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t *config, void (*kernel)(T...),
                                             A &&...a) {
    static_assert(sizeof...(T) == sizeof...(A), "one argument for each parameter of the kernel");
    const emulation_closure<T...> closure(kernel, std::forward<A>(a)...);
    return emulation_launch(config, reinterpret_cast<void (*)(void)>(kernel),
                            emulation_closure<T...>::call, &closure, sizeof(closure));
}

template <typename T> static inline cudaError_t cudaMalloc(T **pointer, size_t size) {
    void *p = nullptr;
    const cudaError_t error = cudaMalloc(&p, size);
    *pointer = static_cast<T *>(p);
    return error;
}

template <typename T>
static inline cudaError_t cudaHostAlloc(T **pointer, size_t size, unsigned flags) {
    void *p = nullptr;
    const cudaError_t error = cudaHostAlloc(&p, size, flags);
    *pointer = static_cast<T *>(p);
    return error;
}

template <typename T> static inline cudaError_t cudaMallocHost(T **pointer, size_t size) {
    void *p = nullptr;
    const cudaError_t error = cudaMallocHost(&p, size);
    *pointer = static_cast<T *>(p);
    return error;
}

#endif
