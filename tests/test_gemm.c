/*  test_gemm.c - ms_gemm: products of all formats and layouts against float64, the same bits wherever the
    operands lie, and products that are refused. */
#include "private.h"
#include "toy_layers.h"

static ms_model *plain_model(void) {
    ms_model *m = NULL;
    ms_config config = t_config();
    assert_int_equal(ms_create(&config, &m), MS_RESULT_OK);
    return m;
}

typedef struct gemm_case {
    int64_t m, n, k;
    bool transposed_a, transposed_b;
    float alpha, beta;
    int64_t gap;     // added to every stride
    ms_dtype dtype;  // of a and b
    ms_dtype result; // of c
} gemm_case;

static size_t matrix_bytes(const ms_matrix *x) {
    return (size_t)(x->rows * x->stride) * ms_dtype_bytes(x->dtype);
}

static ms_matrix make_matrix(t_rng *rng, int64_t rows, int64_t cols, int64_t gap, ms_dtype dtype) {
    ms_matrix x;
    memset(&x, 0, sizeof x);
    x.rows = rows;
    x.cols = cols;
    x.stride = cols + gap;
    x.dtype = dtype;
    x.data = t_lend(matrix_bytes(&x));
    assert_non_null(x.data);
    for (int64_t i = 0; i < rows * x.stride; ++i) {
        float value;
        t_fill(rng, &value, 1, 1.0f);
        msi_store_as(x.data, dtype, (uint64_t)i, value);
    }
    return x;
}

static double element(const ms_matrix *x, int64_t row, int64_t col) {
    const int64_t at = x->transposed ? col * x->stride + row : row * x->stride + col;
    return (double)msi_load(x->data, x->dtype, (uint64_t)at);
}

/* Sums are float; a result in 16 bits is rounded once more, which moves it by 2^-8 or 2^-11 of
   itself at most. */
static double gemm_error(const gemm_case *g, double size, double product, double expected) {
    const double inner = T_ROUNDS_PRODUCTS && g->beta != 0.0f ? fabs(product) : 0.0;
    const double rounding = g->result == MS_DTYPE_BF16  ? 0.00390625
                            : g->result == MS_DTYPE_F16 ? 0.00048828125
                                                        : 0.0;
    return 1e-5 * size + rounding * (fabs(expected) + inner);
}

static void check_gemm(const ms_call *call, t_rng *rng, const gemm_case *g) {
    ms_matrix a = g->transposed_a ? ms_transpose(make_matrix(rng, g->k, g->m, g->gap, g->dtype))
                                  : make_matrix(rng, g->m, g->k, g->gap, g->dtype);
    ms_matrix b = g->transposed_b ? ms_transpose(make_matrix(rng, g->n, g->k, g->gap, g->dtype))
                                  : make_matrix(rng, g->k, g->n, g->gap, g->dtype);
    ms_matrix c = make_matrix(rng, g->m, g->n, g->gap, g->result);
    ms_matrix old = c;
    old.data = malloc(matrix_bytes(&c));
    assert_non_null(old.data);
    memcpy(old.data, c.data, matrix_bytes(&c));
    for (int64_t i = 0; i < g->m * g->n && g->beta == 0.0f; ++i) { // must not be read
        msi_store_as(c.data, c.dtype, (uint64_t)(i / g->n * c.stride + i % g->n), NAN);
    }
    t_ok(call->model, ms_gemm(call, g->alpha, a, b, g->beta, c));
    for (int64_t i = 0; i < g->m; ++i) {
        for (int64_t j = 0; j < c.stride; ++j) {
            double sum = 0.0, size = 1.0;
            for (int64_t p = 0; p < g->k && j < g->n; ++p) {
                sum += element(&a, i, p) * element(&b, p, j);
                size += fabs(element(&a, i, p) * element(&b, p, j));
            }
            double before = element(&old, i, j);
            double product = (double)g->alpha * sum;
            double expected = product + (double)g->beta * before;
            double got = element(&c, i, j);
            assert_true(j < g->n ? fabs(got - expected) <= gemm_error(g, size, product, expected)
                                 : got == before);
        }
    }
    t_take_back(a.data);
    t_take_back(b.data);
    t_take_back(c.data);
    free(old.data);
}

/* A product by a layer that takes what it did not declare, or gives what nobody wants. */
typedef struct careless {
    bool gives; // into grad_in, which nobody wants
} careless;

static int careless_forward(const ms_call *call) {
    return (int)ms_gemm(call, 1.0f, ms_matrix_of(&call->in[0]), ms_matrix_of(&call->param[0]), 0.0f,
                        ms_matrix_of(&call->out[0]));
}

static int careless_backward(const ms_call *call) {
    const careless *user = (const careless *)call->user;
    const ms_matrix g = ms_matrix_of(&call->grad_out[0]), w = ms_matrix_of(&call->param[0]);
    const ms_matrix x = ms_matrix_of(&call->in[0]), grad_w = ms_matrix_of(&call->grad_param[0]);
    return user->gives ? (int)ms_gemm(call, 1.0f, g, ms_transpose(w), call->grad_in[0].beta,
                                      ms_matrix_of(&call->grad_in[0]))
                       : (int)ms_gemm(call, 1.0f, g, ms_transpose(x), 0.0f, grad_w);
}

static void products_without_data_are_explained(void **state) {
    (void)state;
    for (int gives = 0; gives < 2; ++gives) {
        careless user = {gives != 0};
        const ms_shape shape = ms_shape2(4, 4);
        float values[16] = {0};
        ms_model *m;
        ms_layer_desc d;
        memset(&d, 0, sizeof d);
        assert_int_equal(ms_create(NULL, &m), MS_RESULT_OK);
        d.name = "careless";
        d.user = &user;
        d.forward = careless_forward;
        d.backward = careless_backward;
        d.in[0] = ms_input(m, "x", MS_DTYPE_F32, shape);
        d.param[0] = ms_param(m, "w", MS_DTYPE_F32, shape);
        d.out[0] = ms_activation(m, "y", MS_DTYPE_F32, shape);
        d.backward_reads.param = 1; // and not in[0]
        ms_register_layer(m, &d);
        ms_set_loss(m, d.out[0]);
        t_ok(m, ms_wrap(m));
        t_ok(m, ms_write(m, d.in[0], values));
        t_ok(m, ms_write(m, d.param[0], values));
        t_error(m, ms_step(m, NULL), MS_RESULT_CALLBACK);
        t_text_has(ms_last_error(m), "layer 0 \"careless\": its backward callback returned");
        t_text_has(ms_last_error(m), gives ? "ms_gemm: c has no data: nobody wants this gradient"
                                           : "ms_gemm: b has no data: its slot is empty, or the "
                                             "layer does not declare that it reads");
        t_text_has(ms_last_error(m), gives ? "leave this product out" : "backward_reads");
        t_text_has(ms_last_error(m), gives ? "it is 4 x 4" : "it is 4 x 4 transposed");
        ms_destroy(m);
    }
}

static void gemm_against_float64(void **state) {
    (void)state;
    static const int64_t sizes[] = {1, 2, 3, 7, 8, 17, 33, 64, 129};
    static const ms_dtype dtypes[] = {MS_DTYPE_F32, MS_DTYPE_BF16, MS_DTYPE_F16};
    static const float scales[] = {1.0f, 0.0f, -0.5f};
    ms_call call;
    t_chain chain;
    const ms_config config = t_config();
    t_rng rng = t_seed(11);
    memset(&call, 0, sizeof call);
    t_chain_start(&chain, &config, 1);
    call.model = chain.model;
    for (int i = 0; i < 1200; ++i) {
        gemm_case g;
        g.m = sizes[t_below(&rng, 9)];
        g.n = sizes[t_below(&rng, 9)];
        g.k = sizes[t_below(&rng, 9)];
        g.transposed_a = (i & 1) != 0;
        g.transposed_b = (i & 2) != 0;
        g.alpha = scales[t_below(&rng, 3)];
        g.beta = scales[t_below(&rng, 3)];
        g.gap = t_chance(&rng, 0.5) ? (int64_t)t_below(&rng, 9) : 0;
        g.dtype = dtypes[i % 3];
        g.result = t_chance(&rng, 0.5) ? g.dtype : MS_DTYPE_F32;
        check_gemm(&call, &rng, &g);
    }
    for (int i = 0; i < 3; ++i) {
        const gemm_case deep = {5, 6, 3001, true, false, 1.0f, 1.0f, 3, dtypes[i], dtypes[i]};
        check_gemm(&call, &rng, &deep);
    }
    ms_destroy(call.model);
}

/* In a batch, a matrix that is one of its kind is used for all products, whatever its batch_stride. */
static void a_batch_of_one_repeats_its_matrix(void **state) {
    (void)state;
    static const ms_dtype dtypes[] = {MS_DTYPE_F32, MS_DTYPE_BF16, MS_DTYPE_F16};
    enum { SIZE = 4, COUNT = 3, STRIDE = SIZE * SIZE };
    static const int64_t counts[] = {COUNT, 0, 1};
    ms_call call;
    t_chain chain;
    const ms_config config = t_config();
    t_rng rng = t_seed(13);
    memset(&call, 0, sizeof call);
    t_chain_start(&chain, &config, 1);
    call.model = chain.model;
    for (int i = 0; i < 48; ++i) {
        ms_matrix x[3]; // a, b, c
        for (int k = 0; k < 3; ++k) {
            x[k] = make_matrix(&rng, COUNT * SIZE, SIZE, 0, k < 2 ? dtypes[i % 3] : MS_DTYPE_F32);
            x[k].rows = SIZE;
            x[k].batch_count = counts[k == 2 ? 0 : t_below(&rng, 3)];
            x[k].batch_stride = x[k].batch_count == 1 && t_chance(&rng, 0.3) ? 0 : STRIDE;
        }
        t_ok(call.model, ms_gemm(&call, 1.0f, x[0], x[1], 0.0f, x[2]));
        for (int at = 0; at < COUNT * STRIDE; ++at) {
            const int in_a = x[0].batch_count > 1 ? at / STRIDE * SIZE : 0;
            const int in_b = x[1].batch_count > 1 ? at / STRIDE * SIZE : 0;
            double sum = 0.0;
            for (int p = 0; p < SIZE; ++p) {
                sum += element(&x[0], in_a + at / SIZE % SIZE, p) *
                       element(&x[1], in_b + p, at % SIZE);
            }
            assert_true(fabs((double)((float *)x[2].data)[at] - sum) < 1e-5);
        }
        for (int k = 0; k < 3; ++k) {
            t_take_back(x[k].data);
        }
    }
    ms_destroy(call.model);
}

#ifndef T_CUDA // cuBLAS promises nothing of the kind
/* x, with a row of garbage above it, a column to its left, and other strides; transposed or not in
   memory, whatever x is. */
static ms_matrix moved_matrix(t_rng *rng, const ms_matrix *x, bool transposed, void **memory) {
    const int64_t rows = x->transposed ? x->cols : x->rows;
    const int64_t cols = x->transposed ? x->rows : x->cols;
    ms_matrix moved = transposed ? make_matrix(rng, cols + 1, rows + 1, 5, x->dtype)
                                 : make_matrix(rng, rows + 1, cols + 1, 5, x->dtype);
    *memory = moved.data;
    moved.data = (uint8_t *)moved.data + (moved.stride + 1) * (int64_t)ms_dtype_bytes(x->dtype);
    moved.rows--;
    moved.cols--;
    moved.transposed = transposed;
    for (int64_t i = 0; i < rows; ++i) {
        for (int64_t j = 0; j < cols; ++j) {
            const int64_t at = transposed ? j * moved.stride + i : i * moved.stride + j;
            msi_store_as(moved.data, x->dtype, (uint64_t)at, (float)element(x, i, j));
        }
    }
    return moved;
}

/* A recomputation may find its operands elsewhere, and a batch in other parts. The same rows and
   columns, at another place, must have the same bits. */
static void gemm_has_the_same_bits_anywhere(void **state) {
    (void)state;
    static const ms_dtype dtypes[] = {MS_DTYPE_BF16, MS_DTYPE_F16};
    ms_call call;
    t_rng rng = t_seed(12);
    memset(&call, 0, sizeof call);
    call.model = plain_model();
    for (int i = 0; i < 32; ++i) {
        const ms_dtype dtype = dtypes[i % 2];
        const int64_t m = 1 + (int64_t)t_below(&rng, 200), n = 1 + (int64_t)t_below(&rng, 200);
        const int64_t k = 1 + (int64_t)t_below(&rng, 600),
                      top = (int64_t)t_below(&rng, (uint32_t)m);
        const int64_t left = (int64_t)t_below(&rng, (uint32_t)n);
        void *memory[2];
        ms_matrix a = make_matrix(&rng, m, k, 0, dtype), b = make_matrix(&rng, k, n, 0, dtype);
        ms_matrix c = make_matrix(&rng, m, n, 0, MS_DTYPE_F32), part_a = a, part_b = b;
        part_a.data = (uint16_t *)a.data + top * a.stride;
        part_a.rows = m - top;
        part_b.data = (uint16_t *)b.data + left;
        part_b.cols = n - left;
        part_a = moved_matrix(&rng, &part_a, (i & 2) != 0, &memory[0]);
        part_b = moved_matrix(&rng, &part_b, (i & 4) != 0, &memory[1]);
        ms_matrix part = make_matrix(&rng, m - top, n - left, 7, MS_DTYPE_F32);
        t_ok(call.model, ms_gemm(&call, 1.0f, a, b, 0.0f, c));
        t_ok(call.model, ms_gemm(&call, 1.0f, part_a, part_b, 0.0f, part));
        for (int64_t row = 0; row < m - top; ++row) {
            assert_memory_equal((float *)part.data + row * part.stride,
                                (float *)c.data + (top + row) * c.stride + left,
                                (size_t)(n - left) * sizeof(float));
        }
        t_take_back(a.data);
        t_take_back(b.data);
        t_take_back(c.data);
        t_take_back(part.data);
        t_take_back(memory[0]);
        t_take_back(memory[1]);
    }
    ms_destroy(call.model);
}
#endif

static void gemm_refuses_what_does_not_match(void **state) {
    (void)state;
    float data[64];
    ms_call call;
    t_rng rng = t_seed(1);
    memset(&call, 0, sizeof call);
    call.model = plain_model();
    t_fill(&rng, data, 64, 1.0f);
    ms_view view;
    memset(&view, 0, sizeof view);
    view.data = data;
    view.shape = ms_shape3(2, 2, 8);
    ms_matrix a = ms_matrix_of(&view);
    assert_true(a.rows == 4 && a.cols == 8 && a.stride == 8 && !a.transposed);
    view.shape = ms_shape1(8);
    ms_matrix row = ms_matrix_of(&view);
    assert_true(row.rows == 1 && row.cols == 8);
    view.shape = ms_shape2(8, 4);
    ms_matrix b = ms_matrix_of(&view);
    view.shape = ms_shape2(4, 4);
    ms_matrix c = ms_matrix_of(&view);
    ms_model *m = call.model;
    t_error(m, ms_gemm(&call, 1.0f, a, a, 0.0f, c), MS_RESULT_INVALID);
    t_error(m, ms_gemm(&call, 1.0f, b, a, 0.0f, c), MS_RESULT_INVALID);
    t_error(m, ms_gemm(&call, 1.0f, a, b, 0.0f, b), MS_RESULT_INVALID);
    t_error(m, ms_gemm(&call, 1.0f, ms_transpose(a), b, 0.0f, c), MS_RESULT_INVALID);
    ms_matrix wrong = a;
    wrong.data = NULL;
    t_error(m, ms_gemm(&call, 1.0f, wrong, b, 0.0f, c), MS_RESULT_INVALID);
    wrong = a;
    wrong.stride = 7;
    t_error(m, ms_gemm(&call, 1.0f, wrong, b, 0.0f, c), MS_RESULT_INVALID);
    wrong = a;
    wrong.dtype = MS_DTYPE_F64;
    t_error(m, ms_gemm(&call, 1.0f, wrong, b, 0.0f, c), MS_RESULT_UNSUPPORTED);
    assert_int_equal(ms_gemm(NULL, 1.0f, a, b, 0.0f, c), MS_RESULT_INVALID);
    ms_matrix far = c; // products of its numbers are beyond 64 bits
    far.stride = INT64_MAX / 2;
    far.batch_count = 3;
    far.batch_stride = INT64_MAX;
    t_error(m, ms_gemm(&call, 1.0f, a, b, 0.0f, far), MS_RESULT_INVALID);
    t_text_has(ms_last_error(m), "the matrices of c overlap");
    ms_matrix twice = ms_transpose(ms_transpose(a));
    assert_true(twice.rows == a.rows && twice.cols == a.cols && !twice.transposed);
    ms_destroy(m);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gemm_against_float64),
        cmocka_unit_test(a_batch_of_one_repeats_its_matrix),
#ifndef T_CUDA
        cmocka_unit_test(gemm_has_the_same_bits_anywhere),
#endif
        cmocka_unit_test(gemm_refuses_what_does_not_match),
        cmocka_unit_test(products_without_data_are_explained),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
