/*  testing_formats.h - 16-bit floats by float64 arithmetic, and products and casts of the library
    against them, for any device. Include it after toy_layers.h. */
#ifndef TESTING_FORMATS_H
#define TESTING_FORMATS_H

// ------------------------------------------------------------------------------------------------
// the formats, by their definition

typedef struct f_format {
    int digits, lowest; // significant bits; exponent of the smallest normal number
    double largest;
} f_format;

static inline f_format f_format_of(ms_dtype dtype) {
    static const f_format of_f16 = {11, -14, 65504.0}, of_bf16 = {8, -126, 3.3895313892515355e38};
    static const f_format of_f32 = {24, -126, 3.4028234663852886e38};
    return dtype == MS_DTYPE_F16 ? of_f16 : dtype == MS_DTYPE_BF16 ? of_bf16 : of_f32;
}

/* Whether a float32 is subnormal in a program that was linked with -Ofast: the processor then takes
   it for zero. */
static inline bool f_is_flushed(uint32_t bits) {
    const volatile float least = FLT_MIN;
    const volatile float half = least * 0.5f;
    return (bits & 0x7fffffffu) - 1 < 0x7fffffu && half == 0.0f;
}

/* |x| with a sign, by the bits: -Ofast knows no -0. */
static inline double f_signed(bool negative, double x) {
    return msi_f64_of_bits((msi_bits_of_f64(x) & ~((uint64_t)1 << 63)) | (uint64_t)negative << 63);
}

static inline bool f_is_negative(double x) {
    return msi_bits_of_f64(x) >> 63 != 0; // -0 too
}

/* Rounds to the nearest number of a format, ties to the even one; infinity where that is larger
   than the largest. */
static inline double f_round(ms_dtype dtype, double x) {
    const f_format f = f_format_of(dtype);
    int exponent = 0;
    if (x == 0.0 || !msi_is_finite(x)) {
        return x;
    }
    (void)frexp(x, &exponent); // x = [0.5, 1) * 2^exponent
    exponent = exponent - 1 < f.lowest ? f.lowest : exponent - 1;
    const double unit = ldexp(1.0, exponent - f.digits + 1);
    const double rounded = nearbyint(x / unit) * unit;
    return fabs(rounded) > f.largest ? f_signed(f_is_negative(x), (double)INFINITY)
                                     : f_signed(f_is_negative(x), rounded);
}

/* The value of 16 bits: sign, exponent, mantissa. */
static inline double f_value(ms_dtype dtype, uint16_t bits) {
    const int mantissa_bits = dtype == MS_DTYPE_F16 ? 10 : 7;
    const int bias = dtype == MS_DTYPE_F16 ? 15 : 127;
    const int mantissa = bits & ((1 << mantissa_bits) - 1);
    const int exponent = (bits & 0x7fff) >> mantissa_bits;
    const bool negative = (bits & 0x8000) != 0;
    if (exponent == 2 * bias + 1) {
        return mantissa != 0 ? (double)NAN : f_signed(negative, (double)INFINITY);
    }
    const int whole = exponent == 0 ? mantissa : mantissa + (1 << mantissa_bits);
    return f_signed(negative,
                    ldexp((double)whole, (exponent == 0 ? 1 : exponent) - bias - mantissa_bits));
}

static inline uint32_t f_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline float f_of_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline size_t f_bytes(ms_dtype dtype) {
    return dtype == MS_DTYPE_F32 ? 4 : 2;
}

/* The bits of element i of an array, F32 or BF16, as a float32. */
static inline uint32_t f_bits_at(const void *data, ms_dtype dtype, uint64_t i) {
    return dtype == MS_DTYPE_F32 ? ((const uint32_t *)data)[i]
                                 : (uint32_t)((const uint16_t *)data)[i] << 16;
}

/* Element i of an array. */
static inline double f_get(const void *data, ms_dtype dtype, int64_t i) {
    if (dtype == MS_DTYPE_F32) {
        return (double)((const float *)data)[i];
    }
    return f_value(dtype, ((const uint16_t *)data)[i]);
}

/* x must be a number of the format; the search for its bits is slow and plain. */
static inline uint16_t f_encode(ms_dtype dtype, double x) {
    uint32_t low = 0, high = 0x7fff;
    const double size = fabs(x);
    while (low < high) { // positive numbers rise with their bits, up to infinity
        const uint32_t middle = (low + high) / 2;
        const double value = f_value(dtype, (uint16_t)middle);
        if (value == value && value < size) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return (uint16_t)(low | (f_is_negative(x) ? 0x8000u : 0u));
}

static inline void f_set(void *data, ms_dtype dtype, int64_t i, double x) {
    if (dtype == MS_DTYPE_F32) {
        ((float *)data)[i] = (float)x;
    } else {
        ((uint16_t *)data)[i] = msi_is_nan(x) ? 0x7fff : f_encode(dtype, f_round(dtype, x));
    }
}

static const ms_dtype f_dtypes[3] = {MS_DTYPE_F32, MS_DTYPE_F16, MS_DTYPE_BF16};

// ------------------------------------------------------------------------------------------------
// where the operands are

typedef struct f_memory {
    void *(*put)(const void *host, size_t bytes); // a copy on the device
    void (*get)(void *host, const void *device, size_t bytes);
    void (*release)(void *device);
} f_memory;

static inline void *f_host_put(const void *host, size_t bytes) {
    void *copy = malloc(bytes);
    assert_non_null(copy);
    memcpy(copy, host, bytes);
    return copy;
}

static inline void f_host_get(void *host, const void *device, size_t bytes) {
    memcpy(host, device, bytes);
}

static inline void f_host_release(void *device) {
    free(device);
}

static inline f_memory f_host_memory(void) {
    f_memory m;
    m.put = f_host_put;
    m.get = f_host_get;
    m.release = f_host_release;
    return m;
}

/* A model that is good for a call, and no more. */
static inline ms_model *f_model(const ms_backend *backend) {
    static t_op product, op;
    ms_model *m = NULL;
    ms_config config = t_config();
    config.backend = *backend;
    assert_int_equal(ms_create(&config, &m), MS_RESULT_OK);
    const ms_tensor weight = ms_param(m, "w", MS_DTYPE_F32, ms_shape2(2, 2));
    const ms_tensor x = ms_input(m, "x", MS_DTYPE_F32, ms_shape2(2, 2));
    t_set_loss(m, &op, T_LOSS, t_add_layer(m, &product, T_MATMUL, "product", x, weight));
    t_ok(m, ms_wrap(m));
    return m;
}

static inline ms_call f_call(ms_model *m) {
    ms_call call;
    memset(&call, 0, sizeof call);
    call.model = m;
    call.stream = ms_stream(m);
    return call;
}

// ------------------------------------------------------------------------------------------------
// products

enum { F_OPERANDS = 3, F_MOST = 1 << 16 };

typedef struct f_product {
    int64_t m, n, k, count;
    bool turned[2], shared[2]; // a, b: stored transposed; one matrix for all of c
    bool side_by_side;         // the matrices of c lie in the rows of one
    ms_dtype dtype, dtype_c;
    float alpha, beta;
    int64_t slack; // elements between rows and between matrices
} f_product;

typedef struct f_operand {
    ms_matrix matrix; // data: on the device
    int64_t elements;
    uint8_t *host, *before;
} f_operand;

/* Where element (row, col) of op(x) number `index` stands. */
static inline int64_t f_at(const ms_matrix *x, int64_t index, int64_t row, int64_t col) {
    const int64_t stride = x->batch_count > 1 ? x->batch_stride : 0;
    return index * stride + (x->transposed ? col * x->stride + row : row * x->stride + col);
}

static inline ms_matrix f_matrix(const f_product *p, int which) {
    ms_matrix x;
    memset(&x, 0, sizeof x);
    const int64_t rows = which == 1 ? p->k : p->m, cols = which == 0 ? p->k : p->n;
    x.transposed = which < 2 && p->turned[which];
    x.rows = x.transposed ? cols : rows;
    x.cols = x.transposed ? rows : cols;
    x.dtype = which < 2 ? p->dtype : p->dtype_c;
    x.stride = x.cols + p->slack;
    x.batch_count = which < 2 && p->shared[which] ? p->slack % 2 : p->count;
    x.batch_stride = x.rows * x.stride + 2 * p->slack;
    if (which == 2 && p->side_by_side) {
        x.batch_stride = x.cols + p->slack;
        x.stride = p->count * x.batch_stride;
    }
    return x;
}

/* Everything is set, gaps too; what beta 0 must not read is NaN. */
static inline void f_make_operand(const f_product *p, int which, t_rng *rng, const f_memory *memory,
                                  f_operand *o) {
    o->matrix = f_matrix(p, which);
    const ms_matrix *x = &o->matrix;
    o->elements =
        x->rows * x->stride + (x->batch_count > 1 ? (x->batch_count - 1) * x->batch_stride : 0) + 5;
    assert_true(o->elements <= (int64_t)F_MOST);
    const size_t bytes = (size_t)o->elements * f_bytes(x->dtype);
    o->host = (uint8_t *)malloc(bytes);
    o->before = (uint8_t *)malloc(bytes);
    assert_true(o->host && o->before);
    for (int64_t i = 0; i < o->elements; i++) {
        const double value = which == 2 && p->beta == 0.0f ? (double)NAN : 2.0 * t_unit(rng) - 1.0;
        f_set(o->host, x->dtype, i, value);
    }
    memcpy(o->before, o->host, bytes);
    o->matrix.data = memory->put(o->host, bytes);
}

static inline void f_check_element(const f_product *p, const f_operand *o, int64_t index,
                                   int64_t row, int64_t col) {
    const ms_matrix *c = &o[2].matrix;
    const int64_t at = f_at(c, index, row, col);
    double sum = 0.0, size = 0.0;
    for (int64_t k = 0; k < p->k; k++) {
        const double product = f_get(o[0].before, p->dtype, f_at(&o[0].matrix, index, row, k)) *
                               f_get(o[1].before, p->dtype, f_at(&o[1].matrix, index, k, col));
        sum += product;
        size += fabs(product);
    }
    const double old = p->beta == 0.0f ? 0.0 : (double)p->beta * f_get(o[2].before, c->dtype, at);
    const double expected = (double)p->alpha * sum + old;
    /* k roundings of products and sums each, and those of alpha, beta and the last sum. */
    const double error =
        ((double)(2 * p->k + 4) * (fabs((double)p->alpha) * size + fabs(old))) * ldexp(1.0, -24);
    const double found = f_get(o[2].host, c->dtype, at);
    const bool good = c->dtype == MS_DTYPE_F32 ? fabs(found - expected) <= error
                                               : found >= f_round(c->dtype, expected - error) &&
                                                     found <= f_round(c->dtype, expected + error);
    if (!good) {
        print_error("%d x %d x %d, %d of them: c[%d](%d, %d) is %.9g, not %.9g +- %.3g\n",
                    (int)p->m, (int)p->n, (int)p->k, (int)p->count, (int)index, (int)row, (int)col,
                    found, expected, error);
    }
    assert_true(good);
}

/* Every element of c, and that nothing else has changed. */
static inline void f_check_product(const f_product *p, f_operand *o) {
    const ms_matrix *c = &o[2].matrix;
    const size_t size = f_bytes(c->dtype);
    for (int64_t i = 0; i < p->count; i++) {
        for (int64_t row = 0; row < p->m; row++) {
            for (int64_t col = 0; col < p->n; col++) {
                const size_t at = (size_t)f_at(c, i, row, col) * size;
                f_check_element(p, o, i, row, col);
                memcpy(o[2].before + at, o[2].host + at, size);
            }
        }
    }
    assert_memory_equal(o[2].before, o[2].host, (size_t)o[2].elements * size);
}

static inline void f_run_product(ms_model *m, const f_memory *memory, const f_product *p,
                                 t_rng *rng) {
    f_operand o[F_OPERANDS];
    const ms_call call = f_call(m);
    for (int i = 0; i < F_OPERANDS; i++) {
        f_make_operand(p, i, rng, memory, &o[i]);
    }
    t_ok(m, ms_gemm(&call, p->alpha, o[0].matrix, o[1].matrix, p->beta, o[2].matrix));
    t_ok(m, ms_synchronize(m));
    const size_t bytes = (size_t)o[2].elements * f_bytes(p->dtype_c);
    memory->get(o[2].host, o[2].matrix.data, bytes);
    for (int i = 0; i < F_OPERANDS; i++) {
        memory->release(o[i].matrix.data);
    }
    f_check_product(p, o);
    for (int i = 0; i < F_OPERANDS; i++) {
        free(o[i].host);
        free(o[i].before);
    }
}

static inline f_product f_random_product(t_rng *rng, int number) {
    static const float factors[] = {1.0f, 0.0f, 0.5f, -1.25f};
    f_product p;
    memset(&p, 0, sizeof p);
    p.m = 1 + (int64_t)t_below(rng, 20);
    p.n = 1 + (int64_t)t_below(rng, 20);
    p.k = 1 + (int64_t)t_below(rng, number % 8 == 0 ? 150 : 20);
    p.count = number % 3 == 0 ? 2 + (int64_t)t_below(rng, 3) : 1;
    p.slack = (int64_t)t_below(rng, 4);
    for (int i = 0; i < 2; i++) {
        p.turned[i] = t_chance(rng, 0.5);
        p.shared[i] = p.count > 1 && t_chance(rng, 0.3);
    }
    p.side_by_side = p.count > 1 && t_chance(rng, 0.3);
    p.dtype = f_dtypes[t_below(rng, 3)];
    p.dtype_c = t_chance(rng, 0.5) ? p.dtype : MS_DTYPE_F32;
    p.alpha = factors[2 * t_below(rng, 2)];
    p.beta = factors[t_below(rng, 4)];
    return p;
}

/* Products of all kinds against float64, within what float32 sums may be off. */
static inline void f_check_products(const ms_backend *backend, const f_memory *memory, int count) {
    ms_model *m = f_model(backend);
    t_rng rng = t_seed(31);
    for (int i = 0; i < count; i++) {
        const f_product p = f_random_product(&rng, i);
        f_run_product(m, memory, &p, &rng);
    }
    f_product large = {
        70,   140,  90, 1, {false, true}, {false, false}, false, MS_DTYPE_BF16, MS_DTYPE_BF16,
        1.0f, 0.0f, 1}; // several blocks each way
    f_run_product(m, memory, &large, &rng);
    large.dtype = large.dtype_c = MS_DTYPE_F32;
    f_run_product(m, memory, &large, &rng);
    ms_destroy(m);
}

// ------------------------------------------------------------------------------------------------
// casts

/* All 16-bit numbers in `dtype`, or as many float32 of all kinds: every 16-bit number of both
   formats, the places in the middle between two of them, and their neighbours. */
static inline uint64_t f_inputs(ms_dtype dtype, uint8_t *data) {
    uint64_t count = 0;
    for (uint32_t bits = 0; bits < 65536; bits++) {
        if (dtype != MS_DTYPE_F32) {
            ((uint16_t *)(void *)data)[count++] = (uint16_t)bits;
            continue;
        }
        for (int k = 1; k < 3; k++) {
            const double value = f_value(f_dtypes[k], (uint16_t)bits);
            const double next = f_value(f_dtypes[k], (uint16_t)(bits + 1));
            const float middle = (float)(!msi_is_finite(next) ? value : 0.5 * value + 0.5 * next);
            const uint32_t around[3] = {f_bits((float)value), f_bits(middle), f_bits(middle)};
            for (uint32_t j = 0; j < 3; j++) {
                ((float *)(void *)data)[count++] = f_of_bits(around[j] + (j == 2));
                ((float *)(void *)data)[count++] = f_of_bits(around[j] - (j == 1));
            }
        }
    }
    return count;
}

enum { F_INPUTS = 65536 * 12 };

static inline ms_view f_view(void *data, ms_dtype dtype, uint64_t count) {
    ms_view v;
    memset(&v, 0, sizeof v);
    v.data = data;
    v.dtype = dtype;
    v.shape = ms_shape1((int64_t)count);
    return v;
}

static inline void f_check_cast(const uint8_t *from, ms_dtype from_type, const uint8_t *to,
                                ms_dtype to_type, uint64_t i) {
    const double x = f_get(from, from_type, (int64_t)i), y = f_get(to, to_type, (int64_t)i);
    const double expected = f_round(to_type, x);
    const bool good =
        msi_is_nan(x) ? msi_is_nan(y) : y == expected && f_is_negative(y) == f_is_negative(x);
    if (from_type != MS_DTYPE_F16 && f_is_flushed(f_bits_at(from, from_type, i))) {
        return;
    }
    if (!good) {
        print_error("%s to %s: %.17g became %.17g, not %.17g\n", ms_dtype_name(from_type),
                    ms_dtype_name(to_type), x, y, expected);
    }
    assert_true(good);
}

static inline void f_cast(ms_model *m, const f_memory *memory, ms_dtype from, ms_dtype to,
                          const uint8_t *in, uint8_t *out, uint64_t count) {
    const ms_call call = f_call(m);
    void *source = memory->put(in, (size_t)count * f_bytes(from));
    void *target = memory->put(out, (size_t)count * f_bytes(to));
    const ms_view view = f_view(source, from, count), result = f_view(target, to, count);
    t_ok(m, ms_cast(&call, &result, &view));
    t_ok(m, ms_synchronize(m));
    memory->get(out, target, (size_t)count * f_bytes(to));
    memory->release(source);
    memory->release(target);
}

/* All nine casts of all inputs, against the definition. */
static inline void f_check_casts(const ms_backend *backend, const f_memory *memory) {
    ms_model *m = f_model(backend);
    uint8_t *in = (uint8_t *)malloc((size_t)F_INPUTS * 4);
    uint8_t *out = (uint8_t *)calloc((size_t)F_INPUTS, 4);
    assert_true(in && out);
    for (int from = 0; from < 3; from++) {
        const uint64_t count = f_inputs(f_dtypes[from], in);
        for (int to = 0; to < 3; to++) {
            f_cast(m, memory, f_dtypes[from], f_dtypes[to], in, out, count);
            for (uint64_t i = 0; i < count; i++) {
                f_check_cast(in, f_dtypes[from], out, f_dtypes[to], i);
            }
        }
    }
    free(in);
    free(out);
    ms_destroy(m);
}

// ------------------------------------------------------------------------------------------------
// what is refused

static inline void f_refused(ms_model *m, ms_matrix a, ms_matrix b, ms_matrix c, ms_result result,
                             const char *text) {
    const ms_call call = f_call(m);
    t_error(m, ms_gemm(&call, 1.0f, a, b, 0.0f, c), result);
    t_text_has(ms_last_error(m), "ms_gemm: ");
    t_text_has(ms_last_error(m), text);
}

/* Nothing of it is read or written, so that any address does. */
static inline void f_check_refusals(const ms_backend *backend) {
    static float some[64];
    ms_model *m = f_model(backend);
    f_product p = {
        3,    2,    4, 1, {false, false}, {false, false}, false, MS_DTYPE_F32, MS_DTYPE_F32,
        1.0f, 0.0f, 0};
    p.count = 2;
    ms_matrix x[F_OPERANDS];
    for (int i = 0; i < F_OPERANDS; i++) {
        x[i] = f_matrix(&p, i);
        x[i].data = some;
    }
    const ms_matrix a = x[0], b = x[1], c = x[2];
    f_refused(m, a, a, c, MS_RESULT_INVALID,
              "the shapes do not match: a is 3 x 4, rows 4 apart, 2 of them 12 apart");
    f_refused(m, a, b, ms_transpose(c), MS_RESULT_INVALID, "the shapes do not match");
    for (int i = 0; i < F_OPERANDS; i++) { // which one, and the cure
        static const char *const cures[] = {
            "a has no data: its slot is empty, or the layer does not",
            "b has no data: its slot is empty, or the layer does not",
            "c has no data: nobody wants this gradient or output"};
        const ms_matrix good = x[i];
        char text[64];
        x[i].data = NULL;
        f_refused(m, x[0], x[1], x[2], MS_RESULT_INVALID, cures[i]);
        x[i] = good;
        x[i].stride = x[i].cols - 1;
        snprintf(text, sizeof text, "the stride of %c is below its cols", "abc"[i]);
        f_refused(m, x[0], x[1], x[2], MS_RESULT_INVALID, text);
        x[i] = good;
        x[i].rows = 0;
        snprintf(text, sizeof text, "%c has no elements", "abc"[i]);
        f_refused(m, x[0], x[1], x[2], MS_RESULT_INVALID, text);
        x[i] = good;
    }
    x[0].batch_count = 3;
    f_refused(m, x[0], b, c, MS_RESULT_INVALID, "as many matrices as c");
    x[2] = c;
    x[2].batch_count = 3;
    f_refused(m, a, b, x[2], MS_RESULT_INVALID, ", 3 of them");
    x[2] = c;
    x[2].batch_stride = 5;
    f_refused(m, a, b, x[2], MS_RESULT_INVALID, "the matrices of c overlap");
    x[1] = b;
    x[1].dtype = MS_DTYPE_F16;
    f_refused(m, a, x[1], c, MS_RESULT_UNSUPPORTED, "f32 x f16 -> f32");
    x[2] = c;
    x[2].dtype = MS_DTYPE_BF16;
    f_refused(m, a, b, x[2], MS_RESULT_UNSUPPORTED, "f32 x f32 -> bf16");
    x[0].dtype = x[1].dtype = MS_DTYPE_F64;
    x[0].batch_count = 2;
    f_refused(m, x[0], x[1], c, MS_RESULT_UNSUPPORTED, "f64 x f64 -> f32");
    const ms_call call = f_call(m);
    ms_view to = f_view(some, MS_DTYPE_F16, 8), from = f_view(some, MS_DTYPE_F32, 9);
    t_error(m, ms_cast(&call, &to, &from), MS_RESULT_INVALID);
    t_text_has(ms_last_error(m), "ms_cast: 9 elements to 8");
    t_error(m, ms_cast(&call, NULL, &from), MS_RESULT_INVALID);
    from = f_view(some, MS_DTYPE_I32, 8);
    t_error(m, ms_cast(&call, &to, &from), MS_RESULT_UNSUPPORTED);
    t_text_has(ms_last_error(m), "ms_cast: i32 to f16");
    assert_int_equal(ms_cast(NULL, &to, &from), MS_RESULT_INVALID);
    ms_destroy(m);
}

#endif // TESTING_FORMATS_H
