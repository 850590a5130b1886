/*  test_formats.c - 16-bit floats on the CPU: conversions of every number and every boundary against
    float64 arithmetic, casts, and products with sums in float32. */
#include "private.h"
#include "toy_layers.h"
#include "testing_formats.h"

/* Every 16-bit number to float32, which is exact, and back. */
static void every_number_there_and_back(void **state) {
    (void)state;
    for (uint32_t i = 0; i < 65536; i++) {
        const uint16_t bits = (uint16_t)i;
        const float half = msi_f32_of_f16(bits), brain = msi_f32_of_bf16(bits);
        const double half_value = f_value(MS_DTYPE_F16, bits);
        const double brain_value = f_value(MS_DTYPE_BF16, bits);
        if (msi_is_nan(half_value)) {
            assert_true(t_is_nan(half));
            assert_true((msi_f16_of_f32(half) & 0x7fff) > 0x7c00);
            assert_int_equal(msi_f16_of_f32(half) & 0x8000, bits & 0x8000);
        } else {
            assert_int_equal(f_bits(half), f_bits((float)half_value));
            assert_int_equal(msi_f16_of_f32(half), bits);
        }
        if (msi_is_nan(brain_value)) {
            assert_true(t_is_nan(brain));
            assert_true((msi_bf16_of_f32(brain) & 0x7fff) > 0x7f80);
            assert_int_equal(msi_bf16_of_f32(brain) & 0x8000, bits & 0x8000);
        } else {
            assert_true(f_bits(brain) == f_bits((float)brain_value) || f_is_flushed(f_bits(brain)));
            assert_int_equal(msi_bf16_of_f32(brain), bits);
        }
    }
}

static void check_rounding(float x) {
    if (f_is_flushed(f_bits(x))) {
        return;
    }
    const double half = f_value(MS_DTYPE_F16, msi_f16_of_f32(x));
    const double brain = f_value(MS_DTYPE_BF16, msi_bf16_of_f32(x));
    if (t_is_nan(x)) {
        assert_true(msi_is_nan(half) && msi_is_nan(brain));
        return;
    }
    const double half_expected = f_round(MS_DTYPE_F16, (double)x);
    const double brain_expected = f_round(MS_DTYPE_BF16, (double)x);
    if (half != half_expected || brain != brain_expected ||
        f_is_negative(half) != f_is_negative((double)x)) {
        print_error("%a became %a and %a, not %a and %a\n", (double)x, half, brain, half_expected,
                    brain_expected);
        fail();
    }
}

/* The middles between neighbours of a dtype, from 0 up to what rounds to infinity. */
static uint32_t make_middles(ms_dtype dtype, double *middles) {
    const uint32_t infinity = dtype == MS_DTYPE_F16 ? 0x7c00 : 0x7f80;
    for (uint32_t i = 0; i + 1 < infinity; i++) {
        middles[i] = 0.5 * (f_value(dtype, (uint16_t)i) + f_value(dtype, (uint16_t)(i + 1)));
    }
    const double last = f_value(dtype, (uint16_t)(infinity - 1));
    middles[infinity - 1] = last + (last - middles[infinity - 2]);
    return infinity;
}

/* Whether a magnitude lies between the middles on both sides of a number; on one, if that is even. */
static bool is_nearest(const double *middles, uint32_t infinity, uint32_t bits, double magnitude) {
    const double below = bits > 0 ? middles[bits - 1] : 0.0;
    const bool even = bits % 2 == 0;
    return bits <= infinity && (even ? magnitude >= below : magnitude > below || bits == 0) &&
           (bits == infinity || (even ? magnitude <= middles[bits] : magnitude < middles[bits]));
}

/* Every float to both dtypes in a full sweep, otherwise one in many. */
static void every_float_to_the_nearest(void **state) {
    (void)state;
    static double half[0x7c00], brain[0x7f80];
    const uint64_t stride = t_stride(65521);
    const uint32_t half_infinity = make_middles(MS_DTYPE_F16, half);
    const uint32_t brain_infinity = make_middles(MS_DTYPE_BF16, brain);
    for (uint64_t i = 0; i <= UINT32_MAX; i += stride) {
        const uint32_t bits = (uint32_t)i, sign = bits >> 16 & 0x8000u;
        const float x = f_of_bits(bits);
        const uint32_t to_half = msi_f16_of_f32(x), to_brain = msi_bf16_of_f32(x);
        const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
        if (f_is_flushed(bits)) {
            continue;
        }
        const double size = (bits & 0x7fffffffu) == 0x7f800000u ? HUGE_VAL : fabs((double)x);
        if (is_nan ? (to_half & 0x7fffu) <= 0x7c00u || (to_brain & 0x7fffu) <= 0x7f80u
                   : !is_nearest(half, half_infinity, to_half & 0x7fffu, size) ||
                         !is_nearest(brain, brain_infinity, to_brain & 0x7fffu, size)) {
            print_error("%08x became %04x in F16 and %04x in BF16\n", bits, to_half, to_brain);
            fail();
        }
        assert_true((to_half & 0x8000u) == sign && (to_brain & 0x8000u) == sign);
    }
}

/* Random bits, every boundary between two numbers, and what is next to it. */
static void rounding_to_the_nearest(void **state) {
    (void)state;
    t_rng rng = t_seed(3);
    for (int i = 0; i < 2000000; i++) {
        check_rounding(f_of_bits((uint32_t)t_next(&rng)));
    }
    for (int i = 0; i < 500000; i++) { // most random bits are far out of the range of F16
        const float x = (float)ldexp(2.0 * t_unit(&rng) - 1.0, 17 - (int)t_below(&rng, 44));
        check_rounding(x);
    }
    uint8_t *inputs = (uint8_t *)malloc((size_t)F_INPUTS * sizeof(float));
    assert_non_null(inputs);
    const uint64_t count = f_inputs(MS_DTYPE_F32, inputs);
    assert_int_equal(count, F_INPUTS);
    for (uint64_t i = 0; i < count; i++) {
        check_rounding(((const float *)(const void *)inputs)[i]);
    }
    free(inputs);
}

/* Numbers that are known from elsewhere: IEEE 754 binary16, and the upper half of binary32. */
static void known_numbers(void **state) {
    (void)state;
    assert_int_equal(msi_f16_of_f32(1.0f), 0x3c00);
    assert_int_equal(msi_f16_of_f32(-2.0f), 0xc000);
    assert_int_equal(msi_f16_of_f32(65504.0f), 0x7bff);
    assert_int_equal(msi_f16_of_f32(65519.996f), 0x7bff);
    assert_int_equal(msi_f16_of_f32(65520.0f), 0x7c00); // a tie, and infinity is even
    assert_int_equal(msi_f16_of_f32(5.9604645e-8f), 0x0001);
    assert_int_equal(msi_f16_of_f32(2.9802322e-8f), 0x0000); // a tie
    assert_int_equal(msi_f16_of_f32(2.9802326e-8f), 0x0001);
    assert_int_equal(msi_f16_of_f32(6.1035156e-5f), 0x0400);
    assert_int_equal(msi_f16_of_f32(0.333251953125f), 0x3555);
    assert_int_equal(msi_f16_of_f32(-0.0f), 0x8000);
    assert_int_equal(msi_bf16_of_f32(1.0f), 0x3f80);
    assert_int_equal(msi_bf16_of_f32(f_of_bits(0x3f808000u)), 0x3f80); // ties to even
    assert_int_equal(msi_bf16_of_f32(f_of_bits(0x3f818000u)), 0x3f82);
    assert_int_equal(msi_bf16_of_f32(f_of_bits(0x7f7fffffu)), 0x7f80);
    assert_int_equal(msi_bf16_of_f32(f_of_bits(0x7f800001u)), 0x7fc0); // NaN, and not infinity
    assert_int_equal(msi_bf16_of_f32(-INFINITY), 0xff80);
}

static void casts(void **state) {
    (void)state;
    const ms_backend cpu = ms_backend_cpu();
    const f_memory memory = f_host_memory();
    f_check_casts(&cpu, &memory);
}

static void products(void **state) {
    (void)state;
    const ms_backend cpu = ms_backend_cpu();
    const f_memory memory = f_host_memory();
    f_check_products(&cpu, &memory, 3000);
}

/* What the library formats, by printf or (MEMSCALE_NO_STDIO) by itself, reads the same. */
static void check_text(const char *format, ...) {
    char own[64], libc[64];
    va_list args, again;
    va_start(args, format);
    va_copy(again, args);
    const int length = msi_vformat(own, sizeof own, format, args);
    const int expected = vsnprintf(libc, sizeof libc, format, again);
    va_end(again);
    va_end(args);
    if (strcmp(own, libc) != 0 || length != expected) {
        print_error("%s: \"%s\" (%d), not \"%s\" (%d)\n", format, own, length, libc, expected);
        fail();
    }
}

static void texts_are_those_of_printf(void **state) {
    (void)state;
    static const char *const reals[] = {"%g", "%.0f", "%.1f", "%.2f", "%.3f", "%.15g", "%.17g"};
    static const double edges[] = {0.0,     0.5,    1.5,    2.5,     0.05,   0.25,   999999.5,
                                   1e6,     9.5,    0.0001, 1e-5,    99.995, 5e-324, 1e22,
                                   1e300,   9.9995, -1.25,  1e15,    1e-4,   0.999,  1024.0,
                                   1.0 / 3, 1e-30,  123456, 1234567, 1e5,    0.1};
    t_rng rng = t_seed(5);
    for (uint32_t i = 0; i < 4000; i++) {
        const uint32_t count = sizeof edges / sizeof edges[0];
        const double size = ldexp(t_unit(&rng) - 0.5, (int)t_below(&rng, 160) - 80);
        const double x = i < count ? edges[i] : i % 2 ? size : floor(1e5 * t_unit(&rng)) / 100.0;
        for (size_t k = 0; k < sizeof reals / sizeof reals[0]; k++) {
            if (i >= count || x < 1e40) { // what is longer than the texts is cut off alike
                check_text(reals[k], x);
            }
        }
    }
    check_text("%g %g", -(double)INFINITY, (double)INFINITY);
    check_text("%.*f|%.*g|%f", 3, 2.0 / 3.0, 9, 2.0 / 3.0, 12.5);
    check_text("%d %d %u %x", -2147483647 - 1, 0, 4294967295u, 48879u);
    check_text("%lld %llu %016llx", -9223372036854775807ll, 18446744073709551615ull, 255ull);
    check_text("%5u|%7u|%0*llu|%04x|%-5d|%3d", 7u, 1234567u, 6, 42ull, 0xau, -3, -12345);
    check_text("%s|%10s|%-16s|%.3s|%.*s|%*s|%*s", "a", "right", "left", "cut off", 2, "two", 6, "x",
               -6, "y");
    check_text("%zu %lu %ld %c %% %s", (size_t)99, 98ul, -97l, 'c', "end");
    check_text("%s", "a text that is longer than the buffer by far, so that its end is cut off.");
}

static void refusals(void **state) {
    (void)state;
    const ms_backend cpu = ms_backend_cpu();
    f_check_refusals(&cpu);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_number_there_and_back),
        cmocka_unit_test(rounding_to_the_nearest),
        cmocka_unit_test(every_float_to_the_nearest),
        cmocka_unit_test(known_numbers),
        cmocka_unit_test(casts),
        cmocka_unit_test(products),
        cmocka_unit_test(texts_are_those_of_printf),
        cmocka_unit_test(refusals),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
