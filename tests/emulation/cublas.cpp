/* Matrix products with the interface of cuBLAS: column-major, float32 sums, the workspace that was
 * given scribbled over at each product. */
#include "internal.h"

#include <cublas_v2.h>

#include <map>
#include <vector>

namespace {

struct context {
    cudaStream_t stream;
    cublasMath_t math;
    void *workspace, *own; /* own: what stands in where none was given */
    size_t workspace_size;
};

std::map<uintptr_t, context> contexts;
uintptr_t serial;

const size_t own_size = size_t(4) << 20;

enum rounding { AS_IT_IS, TO_TF32, TO_HALF, TO_BFLOAT };

struct operand {
    const void *at;
    cudaDataType type;
    int64_t leading, step;
    bool is_transposed;
};

struct product {
    int m, n, k, count;
    float alpha, beta;
    operand a, b, c;
    rounding inputs;
    void *workspace;
    size_t workspace_size;
};

/* ---- numbers ---- */

float half_to_float(uint16_t h) {
    const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
    const uint32_t exponent = h >> 10 & 31u, mantissa = h & 1023u;
    if (exponent == 0) {
        const float tiny = ldexpf(static_cast<float>(mantissa), -24);
        return sign ? -tiny : tiny;
    }
    const uint32_t bits =
        exponent == 31 ? 0x7F800000u | mantissa << 13 : (exponent + 112) << 23 | mantissa << 13;
    return __uint_as_float(sign | bits);
}

uint16_t float_to_half(float x) {
    const uint32_t bits = __float_as_uint(x), sign = bits >> 16 & 0x8000u;
    const uint32_t size = bits & 0x7FFFFFFFu;
    if (size > 0x7F800000u) {
        return static_cast<uint16_t>(sign | 0x7E00u);
    }
    if (size >= 0x477FF000u) { /* 65520 and more */
        return static_cast<uint16_t>(sign | 0x7C00u);
    }
    if (size < 0x38800000u) { /* subnormal: units of 2^-24 */
        const float units = nearbyintf(__uint_as_float(size) * 16777216.0f);
        return static_cast<uint16_t>(sign | static_cast<uint32_t>(units));
    }
    return static_cast<uint16_t>(sign | ((size - 0x38000000u + 0xFFFu + (size >> 13 & 1u)) >> 13));
}

float bfloat_to_float(uint16_t b) {
    return __uint_as_float(static_cast<uint32_t>(b) << 16);
}

uint16_t float_to_bfloat(float x) {
    const uint32_t bits = __float_as_uint(x);
    if ((bits & 0x7FFFFFFFu) > 0x7F800000u) {
        return static_cast<uint16_t>(bits >> 16 | 64u);
    }
    return static_cast<uint16_t>((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
}

float to_tf32(float x) {
    const uint32_t bits = __float_as_uint(x);
    const bool is_finite = (bits & 0x7F800000u) != 0x7F800000u;
    return is_finite ? __uint_as_float((bits + 0x1000u) & ~0x1FFFu) : x;
}

size_t width(cudaDataType type) {
    return type == CUDA_R_32F ? 4 : 2;
}

float load(const char *at, cudaDataType type) {
    if (type == CUDA_R_32F) {
        float x;
        memcpy(&x, at, sizeof(x));
        return x;
    }
    uint16_t h;
    memcpy(&h, at, sizeof(h));
    return type == CUDA_R_16F ? half_to_float(h) : bfloat_to_float(h);
}

void store(char *at, cudaDataType type, float x) {
    const uint16_t h = type == CUDA_R_16F ? float_to_half(x) : float_to_bfloat(x);
    if (type == CUDA_R_32F) {
        memcpy(at, &x, sizeof(x));
    } else {
        memcpy(at, &h, sizeof(h));
    }
}

float rounded(float x, rounding to) {
    switch (to) {
    case TO_TF32:
        return to_tf32(x);
    case TO_HALF:
        return half_to_float(float_to_half(x));
    case TO_BFLOAT:
        return bfloat_to_float(float_to_bfloat(x));
    default:
        return x;
    }
}

/* ---- the product: tiles of 8 x 6, from operands laid out in panels ---- */

enum { TILE_M = 8, TILE_N = 6 };
typedef float tile_column __attribute__((vector_size(TILE_M * sizeof(float))));

/* Panels of `height` rows (columns of op(B)), k values deep, zeros past the end. `row` and `deep`:
 * the distances between neighbours. */
void pack(std::vector<float> &to, const operand &o, const char *at, int rows, int k, int height,
          int64_t row, int64_t deep, rounding inputs) {
    const int panels = (rows + height - 1) / height;
    const int64_t size = static_cast<int64_t>(width(o.type));
    to.assign(static_cast<size_t>(panels) * static_cast<size_t>(height) * static_cast<size_t>(k),
              0);
    float *out = to.data();
    for (int p = 0; p < panels; p++) {
        const int here = rows - p * height < height ? rows - p * height : height;
        for (int d = 0; d < k; d++, out += height) {
            const char *in = at + (p * static_cast<int64_t>(height) * row + d * deep) * size;
            for (int i = 0; i < here; i++, in += row * size) {
                out[i] = rounded(load(in, o.type), inputs);
            }
        }
    }
}

/* The sums are named one by one: as an array they would not stay in registers. */
inline __attribute__((always_inline)) void multiply_columns(const float *a, const float *b, int k,
                                                            float *sums) {
    tile_column s0 = {}, s1 = {}, s2 = {}, s3 = {}, s4 = {}, s5 = {}, column;
    for (int d = 0; d < k; d++, a += TILE_M, b += TILE_N) {
        memcpy(&column, a, sizeof(column));
        s0 += column * b[0];
        s1 += column * b[1];
        s2 += column * b[2];
        s3 += column * b[3];
        s4 += column * b[4];
        s5 += column * b[5];
    }
    memcpy(sums, &s0, sizeof(s0));
    memcpy(sums + TILE_M, &s1, sizeof(s1));
    memcpy(sums + 2 * TILE_M, &s2, sizeof(s2));
    memcpy(sums + 3 * TILE_M, &s3, sizeof(s3));
    memcpy(sums + 4 * TILE_M, &s4, sizeof(s4));
    memcpy(sums + 5 * TILE_M, &s5, sizeof(s5));
}

void multiply_plain(const float *a, const float *b, int k, float *sums) {
    multiply_columns(a, b, k, sums);
}

#if defined(__x86_64__)
__attribute__((target("avx2,fma"))) void multiply_avx2(const float *a, const float *b, int k,
                                                       float *sums) {
    multiply_columns(a, b, k, sums);
}
#endif

typedef void multiply_function(const float *a, const float *b, int k, float *sums);

multiply_function *choose_multiply() {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
        return multiply_avx2;
    }
#endif
    return multiply_plain;
}

void store_tile(const product &p, char *c, int i, int j, const float *sums) {
    for (int y = 0; y < TILE_N && j + y < p.n; y++) {
        char *out = c + (i + static_cast<int64_t>(j + y) * p.c.leading) *
                            static_cast<int64_t>(width(p.c.type));
        for (int x = 0; x < TILE_M && i + x < p.m; x++, out += width(p.c.type)) {
            float value = p.alpha * sums[y * TILE_M + x];
            value = p.beta == 0.0f ? value : value + p.beta * load(out, p.c.type);
            store(out, p.c.type, value);
        }
    }
}

void multiply(const product &p, const char *a, const char *b, char *c) {
    static std::vector<float> left, right;
    static multiply_function *const multiply_tile = choose_multiply();
    float sums[TILE_M * TILE_N];
    const int64_t la = p.a.leading, lb = p.b.leading;
    const bool ta = p.a.is_transposed, tb = p.b.is_transposed;
    pack(left, p.a, a, p.m, p.k, TILE_M, ta ? la : 1, ta ? 1 : la, p.inputs);
    pack(right, p.b, b, p.n, p.k, TILE_N, tb ? 1 : lb, tb ? lb : 1, p.inputs);
    for (int j = 0; j < p.n; j += TILE_N) {
        for (int i = 0; i < p.m; i += TILE_M) {
            multiply_tile(left.data() + static_cast<size_t>(i) * static_cast<size_t>(p.k),
                          right.data() + static_cast<size_t>(j) * static_cast<size_t>(p.k), p.k,
                          sums);
            store_tile(p, c, i, j, sums);
        }
    }
}

/* ---- checks ---- */

/* All the matrices of an operand must lie in one allocation of the device. */
void check_extent(const char *name, const operand &o, int64_t rows, int64_t columns, int count) {
    if (!rows || !columns) {
        return;
    }
    const int64_t size = static_cast<int64_t>(width(o.type)), far = (count - 1) * o.step;
    const int64_t first = far < 0 ? far : 0, last = far < 0 ? 0 : far;
    const char *const start = static_cast<const char *>(o.at) + first * size;
    const int64_t length = last - first + (columns - 1) * o.leading + rows;
    if (!emulation_holds(start, static_cast<size_t>(length * size))) {
        emulation_die(
            "cublasGemmStridedBatchedEx: %s at %p, %lld bytes over all matrices, does not "
            "lie in one allocation of the device",
            name, static_cast<const void *>(start), static_cast<long long>(length * size));
    }
}

void scribble(const product &p) {
    const size_t size = p.workspace_size < 65536 ? p.workspace_size : 65536;
    if (!size) {
        return;
    }
    if (!memory_holds(MEMORY_DEVICE, p.workspace, p.workspace_size)) {
        emulation_die(
            "cublasGemmStridedBatchedEx: the workspace of %zu bytes at %p is no memory of "
            "the device",
            p.workspace_size, p.workspace);
    }
    char *const at = memory_open(p.workspace);
    memset(at, 0xA7, size);
    memset(at + p.workspace_size - size, 0xA7, size);
}

void run_product(void *, void *arguments) {
    const product &p = *static_cast<const product *>(arguments);
    if (!emulation_works()) {
        return;
    }
    const operand &a = p.a, &b = p.b;
    check_extent("A", a, a.is_transposed ? p.k : p.m, a.is_transposed ? p.m : p.k, p.count);
    check_extent("B", b, b.is_transposed ? p.n : p.k, b.is_transposed ? p.k : p.n, p.count);
    check_extent("C", p.c, p.m, p.n, p.count);
    scribble(p);
    for (int i = 0; i < p.count; i++) {
        const int64_t in = static_cast<int64_t>(width(a.type)),
                      out = static_cast<int64_t>(width(p.c.type));
        multiply(p, memory_open(a.at) + i * a.step * in, memory_open(b.at) + i * b.step * in,
                 memory_open(p.c.at) + i * p.c.step * out);
    }
    emulation_count_product();
}

context *find(cublasHandle_t handle) {
    const std::map<uintptr_t, context>::iterator i =
        contexts.find(reinterpret_cast<uintptr_t>(handle));
    return i == contexts.end() ? nullptr : &i->second;
}

bool is_supported(cudaDataType a, cudaDataType b, cudaDataType c, cublasComputeType_t compute) {
    const bool is_plain = compute == CUBLAS_COMPUTE_32F || compute == CUBLAS_COMPUTE_32F_PEDANTIC;
    const bool is_fast = compute == CUBLAS_COMPUTE_32F_FAST_TF32 ||
                         compute == CUBLAS_COMPUTE_32F_FAST_16F ||
                         compute == CUBLAS_COMPUTE_32F_FAST_16BF;
    if (a != b || (!is_plain && !is_fast)) {
        return false;
    }
    return a == CUDA_R_32F
               ? c == CUDA_R_32F
               : is_plain && (a == CUDA_R_16F || a == CUDA_R_16BF) && (c == a || c == CUDA_R_32F);
}

rounding choose_rounding(const context &x, cudaDataType type, cublasComputeType_t compute) {
    const bool is_new = emulation_get_device().compute_major >= 8;
    if (type != CUDA_R_32F || compute == CUBLAS_COMPUTE_32F_PEDANTIC) {
        return AS_IT_IS;
    }
    if (compute == CUBLAS_COMPUTE_32F_FAST_16F) {
        return TO_HALF;
    }
    if (compute == CUBLAS_COMPUTE_32F_FAST_16BF) {
        return is_new ? TO_BFLOAT : AS_IT_IS;
    }
    const bool is_asked =
        compute == CUBLAS_COMPUTE_32F_FAST_TF32 || (x.math & 15) == CUBLAS_TF32_TENSOR_OP_MATH;
    return is_asked && is_new ? TO_TF32 : AS_IT_IS;
}

bool is_operation(cublasOperation_t o) {
    return o == CUBLAS_OP_N || o == CUBLAS_OP_T || o == CUBLAS_OP_C;
}

bool is_shape(const product &p) {
    const operand &a = p.a, &b = p.b;
    const int64_t rows_a = a.is_transposed ? p.k : p.m, rows_b = b.is_transposed ? p.n : p.k;
    return p.m >= 0 && p.n >= 0 && p.k >= 0 && p.count >= 0 && a.leading >= (rows_a ? rows_a : 1) &&
           b.leading >= (rows_b ? rows_b : 1) && p.c.leading >= (p.m ? p.m : 1);
}

cublasStatus_t status_of(cudaError_t error) {
    return error == cudaSuccess                 ? CUBLAS_STATUS_SUCCESS
           : error == cudaErrorMemoryAllocation ? CUBLAS_STATUS_ALLOC_FAILED
                                                : CUBLAS_STATUS_EXECUTION_FAILED;
}

} // namespace

void cublas_reset() {
    contexts.clear();
}

uint64_t cublas_handles() {
    return contexts.size();
}

cublasStatus_t cublasCreate(cublasHandle_t *handle) {
    const emulation_lock lock;
    if (emulation_fails("cublasCreate")) {
        return CUBLAS_STATUS_ALLOC_FAILED;
    }
    if (!handle) {
        return CUBLAS_STATUS_INVALID_VALUE;
    }
    context x;
    memset(&x, 0, sizeof(x));
    const uintptr_t number = 16 * ++serial + 8;
    contexts[number] = x;
    *handle = reinterpret_cast<cublasHandle_t>(number);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasDestroy(cublasHandle_t handle) {
    const emulation_lock lock;
    const context *const x = find(handle);
    if (!x) {
        return CUBLAS_STATUS_NOT_INITIALIZED;
    }
    const cudaError_t error = cudaFree(x->own);
    contexts.erase(reinterpret_cast<uintptr_t>(handle));
    return status_of(error);
}

cublasStatus_t cublasGetVersion(cublasHandle_t, int *version) {
    *version = CUBLAS_VERSION;
    return CUBLAS_STATUS_SUCCESS;
}

/* The workspace goes with the stream. */
cublasStatus_t cublasSetStream(cublasHandle_t handle, cudaStream_t stream) {
    const emulation_lock lock;
    if (emulation_fails("cublasSetStream")) {
        return CUBLAS_STATUS_EXECUTION_FAILED;
    }
    context *const x = find(handle);
    if (!x) {
        return CUBLAS_STATUS_NOT_INITIALIZED;
    }
    if (!emulation_is_stream(stream)) {
        return CUBLAS_STATUS_INVALID_VALUE;
    }
    x->stream = stream;
    x->workspace = nullptr;
    x->workspace_size = 0;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasGetStream(cublasHandle_t handle, cudaStream_t *stream) {
    const emulation_lock lock;
    const context *const x = find(handle);
    *stream = x ? x->stream : nullptr;
    return x ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_INITIALIZED;
}

cublasStatus_t cublasSetWorkspace(cublasHandle_t handle, void *workspace, size_t size) {
    const emulation_lock lock;
    if (emulation_fails("cublasSetWorkspace")) {
        return CUBLAS_STATUS_EXECUTION_FAILED;
    }
    context *const x = find(handle);
    if (!x) {
        return CUBLAS_STATUS_NOT_INITIALIZED;
    }
    if (reinterpret_cast<uintptr_t>(workspace) % 256 != 0 ||
        (workspace && !memory_holds(MEMORY_DEVICE, workspace, size))) {
        return CUBLAS_STATUS_INVALID_VALUE;
    }
    x->workspace = workspace;
    x->workspace_size = workspace ? size : 0;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetMathMode(cublasHandle_t handle, cublasMath_t mode) {
    const emulation_lock lock;
    if (emulation_fails("cublasSetMathMode")) {
        return CUBLAS_STATUS_EXECUTION_FAILED;
    }
    context *const x = find(handle);
    if (!x) {
        return CUBLAS_STATUS_NOT_INITIALIZED;
    }
    if ((mode & 15) > CUBLAS_TF32_TENSOR_OP_MATH) {
        return CUBLAS_STATUS_INVALID_VALUE;
    }
    x->math = mode;
    return CUBLAS_STATUS_SUCCESS;
}

static const struct {
    cublasStatus_t status;
    const char *name, *text;
} status_texts[] = {
    {CUBLAS_STATUS_SUCCESS, "CUBLAS_STATUS_SUCCESS", "success"},
    {CUBLAS_STATUS_NOT_INITIALIZED, "CUBLAS_STATUS_NOT_INITIALIZED",
     "the library was not initialized"},
    {CUBLAS_STATUS_ALLOC_FAILED, "CUBLAS_STATUS_ALLOC_FAILED", "the resource allocation failed"},
    {CUBLAS_STATUS_INVALID_VALUE, "CUBLAS_STATUS_INVALID_VALUE",
     "an unsupported value or parameter was passed to the function"},
    {CUBLAS_STATUS_ARCH_MISMATCH, "CUBLAS_STATUS_ARCH_MISMATCH",
     "the function requires a feature absent from the device architecture"},
    {CUBLAS_STATUS_MAPPING_ERROR, "CUBLAS_STATUS_MAPPING_ERROR",
     "an access to GPU memory space failed"},
    {CUBLAS_STATUS_EXECUTION_FAILED, "CUBLAS_STATUS_EXECUTION_FAILED",
     "the GPU program failed to execute"},
    {CUBLAS_STATUS_INTERNAL_ERROR, "CUBLAS_STATUS_INTERNAL_ERROR", "an internal operation failed"},
    {CUBLAS_STATUS_NOT_SUPPORTED, "CUBLAS_STATUS_NOT_SUPPORTED",
     "the functionality requested is not supported"},
    {CUBLAS_STATUS_LICENSE_ERROR, "CUBLAS_STATUS_LICENSE_ERROR",
     "the functionality requested requires some license"},
};

const char *cublasGetStatusName(cublasStatus_t status) {
    for (size_t i = 0; i < sizeof(status_texts) / sizeof(status_texts[0]); i++) {
        if (status_texts[i].status == status) {
            return status_texts[i].name;
        }
    }
    return "<unknown>";
}

const char *cublasGetStatusString(cublasStatus_t status) {
    for (size_t i = 0; i < sizeof(status_texts) / sizeof(status_texts[0]); i++) {
        if (status_texts[i].status == status) {
            return status_texts[i].text;
        }
    }
    return "<unknown>";
}

/* Where no workspace was given cuBLAS takes one of its own. */
static cudaError_t give_workspace(context *x, product *p) {
    p->workspace = x->workspace;
    p->workspace_size = x->workspace_size;
    if (!x->workspace && !x->own) {
        x->own = memory_allocate(MEMORY_DEVICE, own_size, false);
    }
    return x->workspace || x->own ? cudaSuccess : cudaErrorMemoryAllocation;
}

cublasStatus_t cublasGemmStridedBatchedEx(
    cublasHandle_t handle, cublasOperation_t transa, cublasOperation_t transb, int m, int n, int k,
    const void *alpha, const void *A, cudaDataType Atype, int lda, long long strideA, const void *B,
    cudaDataType Btype, int ldb, long long strideB, const void *beta, void *C, cudaDataType Ctype,
    int ldc, long long strideC, int batchCount, cublasComputeType_t computeType, cublasGemmAlgo_t) {
    const emulation_lock lock;
    if (emulation_fails("cublasGemmStridedBatchedEx")) {
        return CUBLAS_STATUS_EXECUTION_FAILED;
    }
    context *const x = find(handle);
    if (!x) {
        return CUBLAS_STATUS_NOT_INITIALIZED;
    }
    const operand a = {A, Atype, lda, strideA, transa != CUBLAS_OP_N};
    const operand b = {B, Btype, ldb, strideB, transb != CUBLAS_OP_N};
    const operand c = {C, Ctype, ldc, strideC, false};
    product p = {m,       n, k, batchCount, 0, 0, a, b, c, choose_rounding(*x, Atype, computeType),
                 nullptr, 0};
    if (!alpha || !beta || !is_operation(transa) || !is_operation(transb) || !is_shape(p) ||
        (batchCount > 1 && strideC == 0)) {
        return CUBLAS_STATUS_INVALID_VALUE;
    }
    if (!is_supported(Atype, Btype, Ctype, computeType)) {
        return CUBLAS_STATUS_NOT_SUPPORTED;
    }
    memcpy(&p.alpha, alpha, sizeof(p.alpha));
    memcpy(&p.beta, beta, sizeof(p.beta));
    if (!m || !n || !batchCount) {
        return CUBLAS_STATUS_SUCCESS;
    }
    const cudaError_t error = give_workspace(x, &p);
    if (error) {
        return status_of(error);
    }
    const double flops = 2.0 * m * n * static_cast<double>(k) * batchCount;
    return status_of(emulation_enqueue(x->stream, run_product, &p, sizeof(p),
                                       3000 + static_cast<uint64_t>(flops / 10000)));
}

cublasStatus_t cublasGemmEx(cublasHandle_t handle, cublasOperation_t transa,
                            cublasOperation_t transb, int m, int n, int k, const void *alpha,
                            const void *A, cudaDataType Atype, int lda, const void *B,
                            cudaDataType Btype, int ldb, const void *beta, void *C,
                            cudaDataType Ctype, int ldc, cublasComputeType_t computeType,
                            cublasGemmAlgo_t algo) {
    return cublasGemmStridedBatchedEx(handle, transa, transb, m, n, k, alpha, A, Atype, lda, 0, B,
                                      Btype, ldb, 0, beta, C, Ctype, ldc, 0, 1, computeType, algo);
}
