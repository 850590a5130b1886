/*  test_blocks.c - numbers in blocks of codes (examples/blocks.h) against references in float64 by the
    published layouts, which share no code with them. */
#include "private.h"

#include "blocks.h"
#include "testing.h"

enum { NUMBERS = 64 * 64 };

/* A binary16 number by its definition. */
static double half_of(uint32_t code) {
    const int exponent = (int)(code >> 10 & 31), fraction = (int)(code & 1023);
    const double size =
        exponent == 0 ? ldexp(fraction, -24) : ldexp(1024 + fraction, exponent - 25);
    return code & 0x8000u ? -size : size;
}

static double half_at(const uint8_t *b) {
    return half_of((uint32_t)(b[0] + 256 * b[1]));
}

static double float_at(const uint8_t *b) {
    const uint32_t bits = (uint32_t)b[0] + 256u * b[1] + 65536u * b[2] + 16777216u * b[3];
    const int exponent = (int)(bits >> 23 & 255);
    const double size = ldexp((double)((bits & 0x7fffffu) + 0x800000u), exponent - 150);
    return exponent == 0 ? 0.0 : size; // of a magnitude
}

/* The quantile of the standard normal distribution. */
static double quantile_of(double p) {
    double low = -10.0, high = 10.0;
    for (int i = 0; i < 200; i++) {
        const double middle = 0.5 * (low + high);
        *(0.5 * erfc(-middle / sqrt(2.0)) < p ? &low : &high) = middle;
    }
    return 0.5 * (low + high);
}

/* The 16 values of NF4 by their construction (Dettmers et al., 2023, section 3, and the code that was
   published with it): quantiles at equal distances from 0.9677083 to 1/2, 8 of them above 0 and 7 below,
   scaled so that the largest is 1. */
static double nf4_value(int code) {
    const double offset = 0.9677083, most = quantile_of(offset);
    return code == 7  ? 0.0
           : code > 7 ? quantile_of(offset + (0.5 - offset) * (15 - code) / 8.0) / most
                      : -quantile_of(offset + (0.5 - offset) * code / 7.0) / most;
}

typedef struct layout {
    blocks_kind kind;
    int length, bytes;
} layout;

static const layout layouts[] = {
    {BLOCKS_Q8_0, 32, 34}, {BLOCKS_Q4_1, 32, 20}, {BLOCKS_NF4, 64, 36}};

/* Number i of a block. */
static double number_of(const layout *l, const uint8_t *b, int i) {
    switch (l->kind) {
    case BLOCKS_Q8_0:
        return half_at(b) * (b[2 + i] < 128 ? b[2 + i] : b[2 + i] - 256);
    case BLOCKS_Q4_1:
        return half_at(b) * (i < 16 ? b[4 + i] % 16 : b[4 + i - 16] / 16) + half_at(b + 2);
    case BLOCKS_NF4:
        return float_at(b) * nf4_value(i % 2 == 0 ? b[4 + i / 2] / 16 : b[4 + i / 2] % 16);
    case BLOCKS_NONE:
        break;
    }
    fail();
    return 0.0;
}

static void random_numbers(uint64_t seed, float *values) {
    t_rng rng = t_seed(seed);
    for (int i = 0; i < NUMBERS; i++) {
        const float size = (float)ldexp(1.0, (int)t_below(&rng, 12) - 8);
        values[i] = size * (2.0f * (float)t_unit(&rng) - 1.0f + (i / 256 % 2 ? 1.5f : 0.0f));
    }
    memset(values + 128, 0, 128 * sizeof *values); // blocks of zeros, and of one number
    for (int i = 256; i < 384; i++) {
        values[i] = 0.75f;
    }
}

/* Every pattern of bits that can be a block of finite numbers. */
static void blocks_are_decoded_as_published(void **state) {
    (void)state;
    t_rng rng = t_seed(5);
    for (size_t k = 0; k < sizeof layouts / sizeof layouts[0]; k++) {
        const layout *l = &layouts[k];
        assert_int_equal(blocks_length(l->kind), l->length);
        assert_int_equal(blocks_row_bytes(l->kind, 5 * l->length), 5 * l->bytes);
        for (int n = 0; n < 2000; n++) {
            uint8_t b[BLOCKS_LONGEST];
            float values[BLOCKS_LONGEST];
            for (int i = 0; i < l->bytes; i++) {
                b[i] = (uint8_t)t_below(&rng, 256);
            }
            b[1] = (uint8_t)(b[1] & 0xbf); // exponents below those of infinity
            b[3] = (uint8_t)(b[3] & (l->kind == BLOCKS_NF4    ? 0x3f
                                     : l->kind == BLOCKS_Q4_1 ? 0xbf
                                                              : 255));
            b[3] = l->kind == BLOCKS_NF4 && b[3] < 8 ? 8 : b[3];
            blocks_decode(l->kind, b, l->length, values);
            for (int i = 0; i < l->length; i++) {
                const double x = number_of(l, b, i);
                const double most = l->kind == BLOCKS_NF4 ? 3e-7 * float_at(b) : 6e-8 * fabs(x);
                assert_true(fabs((double)values[i] - x) <= most);
            }
        }
    }
}

/* No code that a block could have would be nearer, for its own scale: to rounding, and for Q8_0 and Q4_1
   to what rounding the scale moves. */
static void numbers_get_the_nearest_codes(void **state) {
    (void)state;
    float values[NUMBERS];
    uint8_t blocks[NUMBERS * 2];
    for (size_t k = 0; k < sizeof layouts / sizeof layouts[0]; k++) {
        const layout *l = &layouts[k];
        random_numbers(7 + k, values);
        blocks_encode(l->kind, values, NUMBERS, blocks);
        for (int n = 0; n < NUMBERS / l->length; n++) {
            const uint8_t *b = blocks + n * l->bytes;
            const float *x = values + n * l->length;
            double least = x[0], most = x[0], size = 0.0;
            for (int i = 0; i < l->length; i++) {
                least = (double)x[i] < least ? (double)x[i] : least;
                most = (double)x[i] > most ? (double)x[i] : most;
                size = fabs((double)x[i]) > size ? fabs((double)x[i]) : size;
            }
            const double half_step = l->kind == BLOCKS_Q8_0   ? size / 127.0 / 2.0
                                     : l->kind == BLOCKS_Q4_1 ? (most - least) / 15.0 / 2.0
                                                              : 0.0;
            for (int i = 0; i < l->length; i++) {
                const double error = fabs(number_of(l, b, i) - (double)x[i]);
                double nearest = 1e30;
                for (int code = 0; code < 16 && l->kind == BLOCKS_NF4; code++) {
                    nearest = fmin(nearest, fabs(size * nf4_value(code) - (double)x[i]));
                }
                const double bound = l->kind == BLOCKS_NF4 ? nearest + 1e-6 * size
                                                           : half_step + ldexp(size, -10) + 6e-8;
                assert_true(error <= bound);
            }
            if (l->kind == BLOCKS_NF4) {
                assert_true(float_at(b) == size); // exact
            }
        }
    }
}

/* Numbers that blocks can hold come back as they are, so that nothing is lost by writing them again. */
static void what_was_decoded_is_encoded_to_the_same_numbers(void **state) {
    (void)state;
    float values[NUMBERS], once[NUMBERS], twice[NUMBERS];
    uint8_t blocks[NUMBERS * 2];
    random_numbers(11, values);
    for (size_t k = 0; k < sizeof layouts / sizeof layouts[0]; k++) {
        const layout *l = &layouts[k];
        blocks_encode(l->kind, values, NUMBERS, blocks);
        blocks_decode(l->kind, blocks, NUMBERS, once);
        blocks_encode(l->kind, once, NUMBERS, blocks);
        blocks_decode(l->kind, blocks, NUMBERS, twice);
        for (int i = 0; i < NUMBERS; i++) { // NF4 exactly; the others round their scale again
            const double most = l->kind == BLOCKS_NF4 ? 0.0 : 0.004 * fabs((double)once[i]) + 0.02;
            assert_true(fabs((double)twice[i] - (double)once[i]) <= most);
        }
    }
}

static void kinds_have_names(void **state) {
    (void)state;
    blocks_kind kind = BLOCKS_NONE;
    assert_true(blocks_find("q8_0", &kind) && kind == BLOCKS_Q8_0);
    assert_true(blocks_find("q4_1", &kind) && kind == BLOCKS_Q4_1);
    assert_true(blocks_find("nf4", &kind) && kind == BLOCKS_NF4);
    assert_false(blocks_find("q4_0", &kind));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(blocks_are_decoded_as_published),
        cmocka_unit_test(numbers_get_the_nearest_codes),
        cmocka_unit_test(what_was_decoded_is_encoded_to_the_same_numbers),
        cmocka_unit_test(kinds_have_names),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
