/*  test_state.c - optimizer state in BF16 and in codes of 8 bits: the books and their nearest codes
    against the published formula, updates against float64 arithmetic, and what plans, ms_read,
    ms_write and another ms_wrap make of it. */
#include "private.h"
#include "toy_layers.h"

// ------------------------------------------------------------------------------------------------
// books

/* The magnitudes of a book by the formula, in rising order from 0 to 1: 10^(i-6) times the means of
   a linear partition of [0.1, 1], for i from 0 to 6. */
typedef struct book {
    bool is_signed;
    int count;
    long double value[256];
} book;

static book make_book(bool is_signed) {
    book b;
    memset(&b, 0, sizeof b);
    b.is_signed = is_signed;
    b.count = 1;
    for (int i = 0; i < 7; ++i) {
        const int parts = (is_signed ? 1 : 2) << i;
        for (int k = 0; k < parts; ++k) {
            const long double from = 0.1L + 0.9L * k / parts, to = 0.1L + 0.9L * (k + 1) / parts;
            b.value[b.count++] = (from + to) / 2 * powl(10.0L, i - 6);
        }
    }
    b.value[b.count++] = 1.0L;
    return b;
}

static float top_of(const book *b) {
    return b->is_signed ? MSI_TOP_SIGNED : MSI_TOP_UNSIGNED;
}

static float value_of(bool is_signed, int code, float scale) {
    const uint8_t one = (uint8_t)code;
    float value;
    msi_decode(&one, scale, is_signed, 1, &value);
    return value;
}

static uint8_t code_of(bool is_signed, float x, float units) {
    return is_signed ? msi_signed_code(x, units) : msi_unsigned_code(x, units);
}

static float units_of(const book *b, int number) { // in a block of scale top, a unit is 1
    return value_of(b->is_signed, (b->is_signed ? 127 : 0) + number, top_of(b));
}

static void books_are_those_of_the_paper(void **state) {
    (void)state;
    for (int is_signed = 0; is_signed < 2; ++is_signed) {
        const book b = make_book(is_signed);
        assert_int_equal(b.count, is_signed ? 129 : 256);
        for (int k = 0; k < b.count; ++k) { // whole numbers of units, rounded once
            const long double units = roundl(b.value[k] * (long double)top_of(&b));
            assert_true(fabsl(units - b.value[k] * (long double)top_of(&b)) <
                        1e-8L * units + 1e-12L);
            assert_true(units_of(&b, k) == (float)units);
        }
    }
    for (int code = 0; code < 127; ++code) { // negative numbers mirror all but 1
        assert_true(value_of(true, code, 1.0f) == -value_of(true, 254 - code, 1.0f));
        assert_true(value_of(true, code, -1.0f) == -value_of(true, code, 1.0f));
    }
    assert_true(fabs((double)value_of(true, 129, 1.0f) - 3.25e-6) < 1e-12);
    assert_true(fabs((double)value_of(false, 254, 1.0f) - 0.9964844) < 1e-7);
    assert_true(value_of(true, 127, 1.0f) == 0.0f && value_of(false, 0, 1.0f) == 0.0f);
    assert_true(value_of(true, 255, 0.3f) == 0.3f && value_of(true, 255, -0.3f) == -0.3f);
    assert_true(value_of(false, 255, 0.7f) == 0.7f);
}

/* The number whose exact value is nearest, by search; of two that are as near, the larger. */
static int nearest_in(const book *b, const long double *units, float x) {
    int low = 0, high = b->count - 1;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        *(units[middle] <= (long double)x ? &low : &high) = middle;
    }
    return units[high] - (long double)x <= (long double)x - units[low] ? high : low;
}

static int wrong_codes(const book *b, const long double *units, float x) {
    const int nearest = nearest_in(b, units, x);
    if (!b->is_signed) {
        return msi_unsigned_code(x, 1.0f) != nearest;
    }
    const int negative = nearest == 128 ? 127 : nearest; // there is no -1
    return (msi_signed_code(x, 1.0f) != 127 + nearest) +
           (msi_signed_code(-x, 1.0f) != 127 - negative);
}

/* Between any two neighbours the middle and the floats around it; and random numbers, evenly on a
   logarithmic scale. */
static void codes_are_the_nearest(void **state) {
    (void)state;
    for (int is_signed = 0; is_signed < 2; ++is_signed) {
        const book b = make_book(is_signed);
        long double units[256];
        t_rng rng = t_seed(8);
        int64_t wrong = 0;
        const uint64_t randoms = t_sweep(2000000, 100000000);
        for (int k = 0; k < b.count; ++k) {
            units[k] = roundl(b.value[k] * (long double)top_of(&b));
        }
        for (int k = 0; k + 1 < b.count; ++k) {
            const float middle = (float)((units[k] + units[k + 1]) / 2);
            float x = middle;
            for (int step = 0; step < 8; ++step, x = nextafterf(x, 0.0f)) {
                wrong += wrong_codes(&b, units, x);
            }
            x = middle;
            for (int step = 0; step < 8; ++step, x = nextafterf(x, 1e9f)) {
                wrong += x <= top_of(&b) ? wrong_codes(&b, units, x) : 0;
            }
        }
        for (uint64_t i = 0; i < randoms; ++i) {
            const double size = exp2(-31.0 * t_unit(&rng));
            wrong += wrong_codes(&b, units, (float)((double)top_of(&b) * size));
        }
        assert_int_equal(wrong, 0);
    }
}

/* What a whole block is coded to, by vector instructions where there are some, its numbers are coded
   to one by one; and likewise the other way round. */
static void blocks_are_coded_as_numbers_are(void **state) {
    (void)state;
    t_rng rng = t_seed(15);
    float x[MSI_CODED_BLOCK], y[MSI_CODED_BLOCK];
    uint8_t codes[MSI_CODED_BLOCK];
    for (int is_signed = 0; is_signed < 2; ++is_signed) {
        const float top = is_signed ? MSI_TOP_SIGNED : MSI_TOP_UNSIGNED;
        for (int i = 0; i < MSI_CODED_BLOCK; ++i) {
            codes[i] = (uint8_t)i;
        }
        msi_decode(codes, 3.0f, is_signed, MSI_CODED_BLOCK, y);
        for (int i = 0; i < MSI_CODED_BLOCK; ++i) {
            assert_true(msi_bits_of_f32(y[i]) == msi_bits_of_f32(value_of(is_signed, i, 3.0f)));
        }
        for (uint64_t round = 0; round < t_sweep(20000, 400000); ++round) {
            for (int i = 0; i < MSI_CODED_BLOCK; ++i) {
                x[i] = top * (float)exp2(-33.0 * t_unit(&rng));
                x[i] = t_chance(&rng, 0.01) ? 0.0f : x[i];
                x[i] = is_signed && t_chance(&rng, 0.5) ? -x[i] : x[i];
            }
            x[round % MSI_CODED_BLOCK] = is_signed && t_chance(&rng, 0.5) ? -top : top;
            const float scale = msi_encode(x, is_signed, MSI_CODED_BLOCK, codes);
            const float units = msi_units_of_scale(scale, top);
            for (int i = 0; i < MSI_CODED_BLOCK; ++i) {
                assert_int_equal(codes[i], code_of(is_signed, x[i], units));
            }
        }
    }
}

/* The same for the floats around each middle between neighbours, where vector instructions depend
   on the rounding of their tables; and for random bits, of which some are negative or infinite. */
static void blocks_are_coded_as_numbers_at_the_middles(void **state) {
    (void)state;
    float x[MSI_CODED_BLOCK];
    uint8_t codes[MSI_CODED_BLOCK];
    t_rng rng = t_seed(16);
    for (int is_signed = 0; is_signed < 2; ++is_signed) {
        const book b = make_book(is_signed);
        for (int k = 0; k + 1 < b.count; ++k) {
            const long double sum = b.value[k] + b.value[k + 1];
            const float middle = (float)roundl(sum / 2 * (long double)top_of(&b));
            float up = middle, down = middle;
            x[0] = top_of(&b);
            for (int i = 1; i < MSI_CODED_BLOCK; ++i) {
                up = nextafterf(up, 1e9f);
                down = nextafterf(down, 0.0f);
                x[i] = i % 2 ? down : up <= x[0] ? up : middle;
                x[i] = is_signed && t_chance(&rng, 0.5) ? -x[i] : x[i];
            }
            x[1] = middle;
            assert_true(msi_encode(x, is_signed, MSI_CODED_BLOCK, codes) == x[0]);
            for (int i = 0; i < MSI_CODED_BLOCK; ++i) { // the units of scale top are those of 1
                assert_int_equal(codes[i], code_of(is_signed, x[i], 1.0f));
            }
        }
        for (int round = 0; round < 3000; ++round) {
            for (int i = 0; i < MSI_CODED_BLOCK; ++i) {
                x[i] = msi_f32_of_bits((uint32_t)t_next(&rng) >> (round % 3 ? 1 : 0));
                x[i] = round % 2 ? (float)(t_unit(&rng) - 0.5) : x[i];
            }
            const float scale = msi_encode(x, is_signed, MSI_CODED_BLOCK, codes);
            const float units = msi_units_of_scale(scale, top_of(&b));
            for (int i = 0; i < MSI_CODED_BLOCK && units != 0.0f; ++i) {
                assert_int_equal(codes[i], code_of(is_signed, x[i], units));
            }
        }
    }
}

static void blocks_keep_zeros_signs_and_the_largest(void **state) {
    (void)state;
    t_rng rng = t_seed(9);
    for (int round = 0; round < 3000; ++round) {
        const bool is_signed = t_chance(&rng, 0.5);
        const int count = 1 + (int)t_below(&rng, MSI_CODED_BLOCK);
        float x[MSI_CODED_BLOCK], y[MSI_CODED_BLOCK], most = 0.0f;
        uint8_t codes[MSI_CODED_BLOCK];
        const double size = exp2(60.0 * (t_unit(&rng) - 0.5));
        for (int i = 0; i < count; ++i) {
            x[i] = (float)(size * exp2(-20.0 * t_unit(&rng)));
            x[i] = round % 10 == 0 || t_chance(&rng, 0.1) ? 0.0f : x[i];
            x[i] = is_signed && t_chance(&rng, 0.5) ? -x[i] : x[i];
            most = fabsf(x[i]) > fabsf(most) ? x[i] : most;
        }
        const float scale = msi_encode(x, is_signed, count, codes);
        assert_true(scale == most);
        msi_decode(codes, scale, is_signed, count, y);
        for (int i = 0; i < count; ++i) {
            assert_true(x[i] != 0.0f || y[i] == 0.0f);
            assert_true((x[i] < 0.0f && y[i] <= 0.0f) || (x[i] > 0.0f && y[i] >= 0.0f) ||
                        x[i] == 0.0f);
            assert_true(x[i] != most || y[i] == most);
            /* No code is farther than half of the widest gap, nor half of the gap around it. */
            assert_true(fabs((double)y[i] - (double)x[i]) <=
                        0.5 * (0.9 / 64 + 1e-6) * fabs((double)most) * (is_signed ? 1.0 : 0.5));
        }
    }
    /* What is too small for a scale counts as 0. */
    const float tiny[2] = {1e-31f, -3e-31f};
    uint8_t codes[2];
    assert_true(msi_encode(tiny, true, 2, codes) == 0.0f);
    assert_int_equal(codes[0], 127);
    assert_int_equal(codes[1], 127);
}

/* Whatever lies in codes comes back: for each code, and for scales of all sizes and signs, what was
   decoded is encoded to the same code, and its block to the same scale; by vector instructions where
   there are some, and in a block that is too short for them. */
static void what_was_decoded_is_encoded_to_the_same(void **state) {
    (void)state;
    t_rng rng = t_seed(19);
    float x[MSI_CODED_BLOCK];
    uint8_t codes[MSI_CODED_BLOCK], again[MSI_CODED_BLOCK];
    const uint32_t least = msi_bits_of_f32(MSI_LEAST_SCALE), most = msi_bits_of_f32(FLT_MAX);
    const uint32_t step = (uint32_t)t_sweep(49999, 997);
    int64_t wrong = 0;
    for (int i = 0; i < MSI_CODED_BLOCK; ++i) {
        codes[i] = (uint8_t)i;
    }
    for (uint32_t bits = least; bits < most; bits += 1 + (uint32_t)t_below(&rng, step)) {
        const bool is_signed = t_chance(&rng, 0.5);
        const float size = msi_f32_of_bits(bits);
        const float scale = is_signed && t_chance(&rng, 0.5) ? -size : size;
        const int rounds = bits - least < step || most - bits < step ? 2 : 1; // both at the ends
        for (int round = 0; round < rounds; ++round) {
            const int first = round + (int)t_below(&rng, 2), count = MSI_CODED_BLOCK - first;
            msi_decode(codes + first, scale, is_signed, count, x);
            const float scale_again = msi_encode(x, is_signed, count, again);
            wrong += msi_bits_of_f32(scale_again) != msi_bits_of_f32(scale);
            wrong += memcmp(codes + first, again, (size_t)count) != 0;
        }
    }
    assert_int_equal(wrong, 0);
}

/* The same for any numbers that there may be in a block: once they are in codes, no more changes. */
static void numbers_change_once_at_most(void **state) {
    (void)state;
    t_rng rng = t_seed(20);
    for (uint64_t round = 0; round < t_sweep(20000, 400000); ++round) {
        float x[MSI_CODED_BLOCK], y[MSI_CODED_BLOCK];
        uint8_t codes[MSI_CODED_BLOCK], again[MSI_CODED_BLOCK];
        const bool is_signed = t_chance(&rng, 0.5);
        const int count =
            t_chance(&rng, 0.5) ? MSI_CODED_BLOCK : 1 + (int)t_below(&rng, MSI_CODED_BLOCK);
        const double size = exp2(200.0 * (t_unit(&rng) - 0.5));
        for (int i = 0; i < count; ++i) { // negative ones also where the code book has no signs
            x[i] = (float)(size * exp2(-25.0 * t_unit(&rng)));
            x[i] = t_chance(&rng, 0.5) ? -x[i] : t_chance(&rng, 0.1) ? 0.0f : x[i];
            x[i] = t_chance(&rng, 0.1) ? -x[t_below(&rng, (uint32_t)i + 1)] : x[i]; // ties
        }
        const float scale = msi_encode(x, is_signed, count, codes);
        msi_decode(codes, scale, is_signed, count, y);
        const float scale_again = msi_encode(y, is_signed, count, again);
        assert_true(msi_bits_of_f32(scale_again) == msi_bits_of_f32(scale));
        assert_memory_equal(codes, again, (size_t)count);
    }
}

/* For each count of elements: no code and no scale lies in the place of another, or outside. */
static void codes_and_scales_have_places_of_their_own(void **state) {
    (void)state;
    static uint8_t taken[4 * 4160];
    for (uint64_t count = 1; count < 12500; count += count < 700 ? 1 : 97) {
        const uint64_t bytes = msi_coded_bytes(count);
        assert_true(bytes <= sizeof taken);
        assert_true(count < 4096 || (double)bytes <= 1.02 * (double)count + 64.0);
        memset(taken, 0, sizeof taken);
        for (uint64_t at = 0; at < count; at += MSI_CODED_BLOCK) {
            const uint64_t scale = msi_scale_at(at, count), codes = msi_codes_at(at);
            assert_int_equal(scale % 4, 0);
            assert_int_equal(codes % 8, 0);
            for (uint64_t i = 0; i < 4; ++i) {
                assert_true(scale + i < bytes);
                taken[scale + i] += 1;
            }
            for (uint64_t i = 0; i < MSI_CODED_BLOCK && at + i < count; ++i) {
                assert_true(codes + i < bytes);
                taken[codes + i] += 1;
            }
        }
        for (uint64_t i = 0; i < bytes; ++i) {
            assert_true(taken[i] <= 1);
        }
    }
    assert_int_equal(msi_coded_bytes(4096), 4160); // 1.016 bytes an element: 2.03 for two moments
    assert_int_equal(msi_coded_bytes((uint64_t)1 << 30), (uint64_t)4160 << 18);
}

/* A part of a param has its elements, and its state lies where an update of the whole looks for it:
   in parts that are smaller than a group there are no codes. */
static void parts_lie_as_they_do_in_the_whole(void **state) {
    (void)state;
    t_rng rng = t_seed(29);
    for (int k = 0; k < 500; ++k) {
        const uint64_t count = 1 + t_below(&rng, k % 2 ? 100000 : 3000);
        const uint32_t parts = 1 + (uint32_t)t_below(&rng, 9);
        const bool coded = parts == 1 || msi_part_size(count, parts) >= MSI_CODED_GROUP;
        uint64_t end = 0;
        for (uint32_t part = 0; part < parts && end < count; ++part) {
            const msi_part p = msi_part_of(count, part, parts);
            const msi_part floats = msi_part_bytes(MSI_FORMAT_F32, p);
            const msi_part halves = msi_part_bytes(MSI_FORMAT_BF16, p);
            const msi_part codes = msi_part_bytes(MSI_FORMAT_8BIT, p);
            assert_true(p.begin == end && p.count > 0 && p.count <= count - end);
            assert_true(floats.begin == 4 * p.begin && floats.count == 4 * p.count);
            assert_true(halves.begin == 2 * p.begin && halves.count == 2 * p.count);
            assert_true(halves.begin % MSI_ALIGNMENT == 0 && (!coded || codes.begin % 64 == 0));
            for (uint64_t at = 0; coded && at < p.count; at += MSI_CODED_BLOCK) {
                assert_true(msi_codes_at(p.begin + at) == codes.begin + msi_codes_at(at));
                assert_true(msi_scale_at(p.begin + at, count) ==
                            codes.begin + msi_scale_at(at, p.count));
            }
            end += p.count;
        }
        assert_true(end == count);
    }
}

/* Up or down, by a random draw whose mean is the number; never to infinity. */
static void bf16_is_rounded_at_random(void **state) {
    (void)state;
    t_rng rng = t_seed(10);
    for (int round = 0; round < 200; ++round) {
        const float x = (float)((t_unit(&rng) - 0.5) * exp2(40.0 * (t_unit(&rng) - 0.5)));
        const uint32_t key = (uint32_t)t_next(&rng);
        double sum = 0.0, low = 1e30, high = -1e30;
        enum { DRAWS = 4000 };
        for (uint64_t i = 0; i < DRAWS; ++i) {
            const double y = (double)msi_f32_of_bf16(msi_bf16_at_random(x, msi_random(key, i)));
            sum += y;
            low = y < low ? y : low;
            high = y > high ? y : high;
        }
        const double gap = high - low;
        assert_true(low <= (double)x && (double)x <= high);
        assert_true(gap <= fabs((double)x) / 127.0);
        assert_true(fabs(sum / DRAWS - (double)x) <= 5.0 * 0.5 * gap / sqrt((double)DRAWS) + 1e-30);
    }
    assert_int_equal(msi_bf16_at_random(FLT_MAX, 0xffffffffu), 0x7f7f);
    assert_int_equal(msi_bf16_at_random(-FLT_MAX, 0xffffffffu), 0xff7f);
    assert_int_equal(msi_bf16_at_random(1.0f, 0xffffffffu), 0x3f80); // exact: no choice
    assert_int_equal(msi_bf16_at_random(0.0f, 0xffffffffu), 0);
    assert_true(msi_random(1, 2) != msi_random(1, 3) && msi_random(1, 2) != msi_random(2, 2));
    assert_true(msi_random(1, (uint64_t)1 << 32) != msi_random(1, 0));
}

// ------------------------------------------------------------------------------------------------
// updates

enum { MOST = 10000 };

/* A param with its state in two formats, and what float64 arithmetic makes of it. */
typedef struct updated {
    ms_update_args args;
    ms_update_factors factors;
    ms_step_state step;
    float value[MOST], gradient[MOST];
    float storage[2][MOST + 64];
    int states;
} updated;

static void updated_init(updated *u, ms_optimizer_kind kind, ms_state_format first,
                         ms_state_format second, uint64_t count, t_rng *rng) {
    ms_optimizer_desc o = t_optimizer(kind, 0.01f);
    memset(u, 0, sizeof *u);
    o.beta1 = 0.9f;
    o.beta2 = 0.999f;
    o.epsilon = 1e-8f;
    o.momentum = 0.9f;
    u->factors = msi_factors_at(&o, 3);
    u->factors.decay = msi_decay_factor(&o, 0.01f);
    u->states = msi_optimizer_of(kind).states;
    u->args.kind = kind;
    u->args.count = count;
    u->args.seed = 77;
    u->step.seed = 99;
    u->args.state_format[0] = first;
    u->args.state_format[1] = second;
    for (uint64_t i = 0; i < count; ++i) {
        u->value[i] = (float)(t_unit(rng) - 0.5);
        u->gradient[i] = (float)((t_unit(rng) - 0.5) * exp2(-8.0 * t_unit(rng)));
    }
}

/* Of 9 combinations of formats: that of a second tensor of state, if there is one. */
static ms_state_format second_format(int kind, int formats) {
    return msi_optimizer_of((ms_optimizer_kind)kind).states > 1 ? (ms_state_format)(formats / 3)
                                                                : MS_STATE_FORMAT_F32;
}

/* The pointers; a copy of an updated needs them again. */
static const ms_update_args *args_of(updated *u) {
    u->args.value = u->value;
    u->args.gradient = u->gradient;
    u->args.factors = &u->factors;
    u->args.state_of_step = &u->step;
    for (int k = 0; k < u->states; ++k) {
        u->args.state[k] = u->storage[k];
    }
    return &u->args;
}

static void load_all(const updated *u, int k, float *to) {
    for (uint64_t at = 0; at < u->args.count; at += MSI_CODED_BLOCK) {
        const int some = (int)msi_smaller(u->args.count - at, MSI_CODED_BLOCK);
        msi_load_state(u->storage[k], msi_format_of_state(u->args.state_format[k]),
                       msi_state_is_signed(u->args.kind, k), at, some, u->args.count, to + at);
    }
}

/* What a stored moment may be away from the exact one: half of the gap between numbers, of codes in
   a block with this largest magnitude, or a whole gap if rounded at random; besides the rounding of
   float arithmetic. */
static double tolerance(const updated *u, int k, double x, double most) {
    const double arithmetic = 1e-6 * fabs(x) + 1e-7 * most + 1e-38;
    const double size = fabs(x) / (most > 0.0 ? most : 1.0);
    double decade = 1e-6;
    switch (u->args.state_format[k]) {
    case MS_STATE_FORMAT_BF16:
        return arithmetic + fabs(x) / 127.0;
    case MS_STATE_FORMAT_8BIT:
        while (decade < 0.99 && size > 0.95 * decade) {
            decade *= 10.0;
        }
        /* In a decade of parts 2^i, or twice as many, the gap is 0.9 / parts of it; next to the
           decade below it is smaller, next to the one above not larger than the half of that. */
        return arithmetic + most * decade *
                                (0.9 / ldexp(msi_state_is_signed(u->args.kind, k) ? 1.0 : 2.0,
                                             6 + (int)lround(log10(decade))) +
                                 1e-5);
    case MS_STATE_FORMAT_F32:
    case MS_STATE_FORMAT_COUNT:
        break;
    }
    return arithmetic;
}

/* An update in double: the value; and the state, in its place. DBL_MAX where the rounding of
   floats decides which way the value goes. */
static double exact_update(ms_optimizer_kind kind, const ms_update_factors *f, double p, double g,
                           double *s) {
    const double rate = (double)f->rate, decay = (double)f->decay;
    const double m = (double)f->beta1 * s[0] + (double)f->rest1 * g;
    switch (kind) {
    case MS_OPTIMIZER_ADAMW:
        s[0] = m;
        s[1] = (double)f->beta2 * s[1] + (double)f->rest2 * g * g;
        return decay * p + rate * m / (sqrt(s[1]) * (double)f->scale2 + (double)f->epsilon);
    case MS_OPTIMIZER_SGD:
        s[0] = (double)f->beta1 * s[0] + g;
        return p + rate * (s[0] + decay * p);
    case MS_OPTIMIZER_NESTEROV:
        s[0] = (double)f->beta1 * s[0] + g;
        return p + rate * (g + (double)f->beta1 * s[0] + decay * p);
    case MS_OPTIMIZER_LION:
        s[0] = (double)f->beta2 * s[0] + (double)f->rest2 * g;
        return m != 0.0 && fabs(m) <= 2e-7 * fabs((double)f->rest1 * g)
                   ? DBL_MAX
                   : decay * p + rate * ((m > 0.0) - (m < 0.0));
    default: // not of one element at a time
        break;
    }
    return 0.0;
}

/* A step by the backend against the formulas in double, from the state that is stored. */
static void check_step(updated *u, const ms_backend *backend) {
    static float before[MOST], old[2][MOST], now[2][MOST];
    const ms_update_factors *f = &u->factors;
    memcpy(before, u->value, sizeof before);
    memset(old, 0, sizeof old);
    for (int k = 0; k < u->states; ++k) {
        load_all(u, k, old[k]);
    }
    assert_int_equal(backend->update(backend->user, args_of(u)), 0);
    for (int k = 0; k < u->states; ++k) {
        load_all(u, k, now[k]);
    }
    for (uint64_t block = 0; block < u->args.count; block += MSI_CODED_BLOCK) {
        const uint64_t end = msi_smaller(block + MSI_CODED_BLOCK, u->args.count);
        double exact[2][MSI_CODED_BLOCK], most[2] = {0.0, 0.0};
        for (uint64_t i = block; i < end; ++i) {
            const double g = (double)u->gradient[i], p = (double)before[i];
            double s[2] = {(double)old[0][i], (double)old[1][i]};
            const double expected = exact_update(u->args.kind, f, p, g, s);
            assert_true(expected == DBL_MAX ||
                        fabs((double)u->value[i] - expected) <=
                            1e-6 * (fabs(p) + fabs(expected) + fabs(expected - p)) + 1e-30);
            for (int k = 0; k < 2; ++k) {
                exact[k][i - block] = s[k];
                most[k] = fabs(s[k]) > most[k] ? fabs(s[k]) : most[k];
            }
        }
        for (uint64_t i = block; i < end; ++i) {
            for (int k = 0; k < u->states; ++k) {
                const double x = exact[k][i - block], error = fabs((double)now[k][i] - x);
                if (error > tolerance(u, k, x, most[k])) {
                    fail_msg("moment %d of element %u: %g, exactly %g, most %g", k, (unsigned)i,
                             (double)now[k][i], x, most[k]);
                }
            }
        }
    }
}

static void updates_are_those_of_the_formulas(void **state) {
    (void)state;
    static updated u;
    static const uint64_t counts[] = {1, 63, 256, 257, 4096, 4097, 5000, MOST};
    const ms_backend cpu = ms_backend_cpu();
    t_rng rng = t_seed(11);
    for (int c = 0; c < 8; ++c) {
        for (int formats = 0; formats < 9; ++formats) {
            for (int kind = 0; t_is_built_in(kind); ++kind) {
                updated_init(&u, (ms_optimizer_kind)kind, (ms_state_format)(formats % 3),
                             second_format(kind, formats), counts[c], &rng);
                for (int step = 0; step < 4; ++step) {
                    u.step.seed += 1;
                    check_step(&u, &cpu);
                    for (uint64_t i = 0; i < u.args.count; ++i) {
                        u.gradient[i] *= (float)(2.0 * t_unit(&rng) - 0.5);
                    }
                }
            }
        }
    }
}

/* Whole blocks are updated by vector instructions, where there are some, with the bits that
   elements one by one have. The first element has a number such that the random bits of some block
   are those of numbers on both sides of 2^32. */
static void blocks_are_updated_as_elements_are(void **state) {
    (void)state;
#ifdef __FAST_MATH__
    skip(); // divisions and square roots of loops are approximate
#endif
    static updated u, by_element;
    const ms_backend cpu = ms_backend_cpu();
    t_rng rng = t_seed(17);
    for (int formats = 0; formats < 9; ++formats) {
        for (int kind = 0; t_is_built_in(kind); ++kind) {
            updated_init(&u, (ms_optimizer_kind)kind, (ms_state_format)(formats % 3),
                         second_format(kind, formats), 5000, &rng);
            const float scale = 0.3f, wrong[] = {INFINITY, NAN, -3e38f};
            u.args.begin = ((uint64_t)1 << 32) - (formats % 2 ? 4096 : 4000);
            for (int step = 0; step < 4; ++step) {
                u.args.gradient_scale = step % 2 ? &scale : NULL;
                for (int i = 0; i < 12; ++i) {
                    u.gradient[t_below(&rng, 5000)] = step < 2 ? 0.0f : wrong[i % 3];
                }
                by_element = u;
                assert_int_equal(cpu.update(cpu.user, args_of(&u)), 0);
                const ms_update_args *args = args_of(&by_element);
                const uint32_t keys[2] = {msi_state_key(args, 0), msi_state_key(args, 1)};
                for (uint64_t at = 0; at < 5000 && msi_has_formats(args); at += MSI_CODED_BLOCK) {
                    msi_update_floats b;
                    b.at = at;
                    b.count = (int)msi_smaller(MSI_CODED_BLOCK, 5000 - at);
                    b.value = args->value + at;
                    b.gradient = args->gradient + at;
                    b.scale = step % 2 ? scale : 1.0f;
                    msi_update_any(args, keys, u.states, &b);
                }
                if (msi_has_formats(args)) {
                    assert_memory_equal(u.value, by_element.value, sizeof u.value);
                    assert_memory_equal(u.storage, by_element.storage, sizeof u.storage);
                }
                u.step.seed += 1;
            }
        }
    }
}

/* In parts of whole groups, and on any number of threads, an update has the same bits. */
static void parts_and_threads_change_nothing(void **state) {
    (void)state;
    static updated whole, parted;
    const ms_backend cpu = ms_backend_cpu();
    t_rng rng = t_seed(12);
    for (int n = 1; t_is_built_in(n / 9); ++n) {
        const int kind = n / 9;
        const ms_state_format of[2] = {(ms_state_format)(n % 3), second_format(kind, n % 9)};
        updated_init(&whole, (ms_optimizer_kind)kind, of[0], of[1], MOST, &rng);
        parted = whole;
        for (int step = 0; step < 3; ++step) {
            t_threads(1);
            assert_int_equal(cpu.update(cpu.user, args_of(&whole)), 0);
            t_threads(3);
            for (uint64_t at = 0; at < MOST; at += 2 * MSI_CODED_GROUP) {
                ms_update_args part = *args_of(&parted);
                part.begin = at;
                part.count = msi_smaller(2 * MSI_CODED_GROUP, MOST - at);
                part.value += at;
                part.gradient += at;
                for (int k = 0; k < parted.states; ++k) {
                    part.state[k] =
                        (float *)(void *)((uint8_t *)part.state[k] +
                                          msi_format_bytes(msi_format_of_state(of[k]), at));
                }
                assert_int_equal(cpu.update(cpu.user, &part), 0);
            }
            whole.step.seed = parted.step.seed = 100 + (uint64_t)step;
        }
        assert_memory_equal(whole.value, parted.value, sizeof whole.value);
        assert_memory_equal(whole.storage, parted.storage, sizeof whole.storage);
    }
    t_threads(0);
}

/* Elements whose gradient is not finite, or whose square would not be, stay as they are, and so
   does all if the step is halted. */
static void wrong_gradients_change_nothing(void **state) {
    (void)state;
    static updated u, before;
    static float old[2][MOST], now[2][MOST];
    const float wrong[] = {INFINITY, -INFINITY, NAN, 3e38f, -1.9e19f};
    const ms_backend cpu = ms_backend_cpu();
    t_rng rng = t_seed(13);
    for (int n = 1; t_is_built_in(n / 9); ++n) {
        const int kind = n / 9;
        const ms_state_format of[2] = {(ms_state_format)(n % 3), second_format(kind, n % 9)};
        updated_init(&u, (ms_optimizer_kind)kind, of[0], of[1], 3000, &rng);
        if (!msi_has_formats(args_of(&u))) {
            continue; // floats go where their gradients go
        }
        assert_int_equal(cpu.update(cpu.user, args_of(&u)), 0);
        for (int i = 0; i < 5; ++i) { // not the largest of their blocks, so that the scale stays
            u.gradient[400 * i + 7] = wrong[i];
            u.gradient[400 * i + 8] = 4.0f;
        }
        before = u;
        memset(old, 0, sizeof old);
        memset(now, 0, sizeof now);
        for (int k = 0; k < u.states; ++k) {
            load_all(&u, k, old[k]);
        }
        u.step.halted = MS_HALT_LOSS;
        assert_int_equal(cpu.update(cpu.user, args_of(&u)), 0);
        assert_memory_equal(u.value, before.value, sizeof u.value);
        assert_memory_equal(u.storage, before.storage, sizeof u.storage);
        u.step.halted = MS_HALT_NONE;
        assert_int_equal(cpu.update(cpu.user, args_of(&u)), 0);
        for (int k = 0; k < u.states; ++k) {
            load_all(&u, k, now[k]);
        }
        for (int i = 0; i < 5; ++i) {
            const int at = 400 * i + 7;
            assert_true(u.value[at] == before.value[at]);
            for (int k = 0; k < 2; ++k) { // rounded again, in a block with another scale
                assert_true(u.args.state_format[k] == MS_STATE_FORMAT_8BIT
                                ? fabsf(now[k][at]) <= 2.0f * fabsf(old[k][at]) + 0.01f
                                : now[k][at] == old[k][at]);
            }
        }
        for (int i = 0; i < 3000; ++i) {
            assert_true(msi_is_finite((double)u.value[i]) && msi_is_finite((double)now[0][i]) &&
                        msi_is_finite((double)now[1][i]));
        }
    }
}

// ------------------------------------------------------------------------------------------------
// models

enum { PARAMS = 4, ROWS = 300, COLS = 64, WIDE = ROWS * COLS };

/* Params whose gradients are whatever the inputs are: the loss is 1. */
typedef struct pulled {
    ms_model *m;
    ms_tensor x[PARAMS], p[PARAMS], tokens;
    t_heap heap;
    uint64_t round;
} pulled;

static int pulled_forward(const ms_call *call) {
    t_data(&call->out[0])[0] = 1.0f;
    return 0;
}

static int pulled_backward(const ms_call *call) {
    const float pull = t_data(&call->grad_out[0])[0] < 0.0f ? -1.0f : 1.0f; // 1 in every plan
    if (call->grad_in[0].data) {
        t_contribute(&call->grad_in[0], 0, pull);
    }
    for (int k = 0; k < PARAMS; ++k) {
        for (int64_t i = 0; call->grad_param[k].data && i < t_count(&call->param[k]); ++i) {
            t_contribute(&call->grad_param[k], i, pull * t_data(&call->in[k])[i]);
        }
    }
    return 0;
}

/* Params: wide enough for codes, too small, of rank 1, and looked up (as declared by tokens). */
static void pulled_create(pulled *z, const ms_config *config, const ms_optimizer_desc *optimizer) {
    static const char *const names[PARAMS] = {"wide", "small", "vector", "table"};
    ms_config with_heap = *config;
    memset(z, 0, sizeof *z);
    with_heap.allocator = t_heap_allocator(&z->heap);
    assert_int_equal(ms_create(&with_heap, &z->m), MS_RESULT_OK);
    z->tokens = ms_input(z->m, "tokens", MS_DTYPE_I32, ms_shape1(4));
    const ms_tensor loss = ms_activation(z->m, "loss", MS_DTYPE_F32, ms_shape1(1));
    const ms_tensor losses = ms_activation(z->m, "losses", MS_DTYPE_F32, ms_shape1(1));
    const ms_tensor none = {0};
    ms_layer_desc table, d;
    memset(&d, 0, sizeof d);
    d.name = "pull";
    d.forward = pulled_forward;
    d.backward = pulled_backward;
    for (int k = 0; k < PARAMS; ++k) {
        const ms_shape shape = k == 1   ? ms_shape2(63, 65)
                               : k == 2 ? ms_shape1(WIDE)
                                        : ms_shape2(ROWS, COLS);
        z->x[k] = ms_input(z->m, "x", MS_DTYPE_F32, shape);
        z->p[k] = ms_param(z->m, names[k], MS_DTYPE_F32, shape);
        d.in[k] = z->x[k];
        d.param[k] = z->p[k];
    }
    table = d;
    table = d;
    d.in[3] = d.param[3] = none;
    for (int k = 0; k < 3; ++k) {
        table.in[k] = table.param[k] = none;
    }
    d.out[0] = loss;
    table.in[0] = loss;
    table.in[4] = z->tokens;
    table.out[0] = losses;
    ms_register_layer(z->m, &d);
    ms_register_layer(z->m, &table);
    ms_set_loss(z->m, losses);
    ms_set_optimizer(z->m, optimizer);
}

static uint64_t count_of(int param) {
    return param == 1 ? 63 * 65 : WIDE;
}

/* Writes params, and the gradients of a round. */
static void pulled_write(pulled *z) {
    static float values[WIDE];
    static const int32_t tokens[4] = {0, 0, 0, 0};
    t_rng rng = t_seed(1000 + z->round);
    for (int k = 0; k < PARAMS; ++k) {
        t_fill(&rng, values, count_of(k), 1.0f);
        if (z->round == 0) {
            t_ok(z->m, ms_write(z->m, z->p[k], values));
        }
        for (uint64_t i = 0; i < count_of(k); ++i) {
            values[i] *= (float)exp2(-10.0 * t_unit(&rng));
        }
        t_ok(z->m, ms_write(z->m, z->x[k], values));
    }
    t_ok(z->m, ms_write(z->m, z->tokens, tokens));
    z->round += 1;
}

static void pulled_step(pulled *z, int steps) {
    for (int i = 0; i < steps; ++i) {
        for (uint32_t micro = 0; micro < z->m->run.store->micro_count; ++micro) {
            pulled_write(z);
            t_ok(z->m, ms_step(z->m, NULL));
        }
    }
    t_ok(z->m, ms_synchronize(z->m));
}

static void pulled_destroy(pulled *z) {
    ms_destroy(z->m);
    assert_int_equal(z->heap.live_count, 0);
    assert_int_equal(z->heap.wrong_releases, 0);
}

static void force_codes(pulled *z, int param, ms_switch force) {
    ms_set_tensor_technique(z->m, z->p[param], MS_TECHNIQUE_OPTIMIZER_8BIT, force);
}

static ms_state_format format_in(const pulled *z, int param, int k) {
    const msi_resident *r = msi_find_resident(z->m->run.store, msi_index(&z->m->graph, z->p[param]),
                                              (msi_role)(MSI_ROLE_STATE0 + k));
    assert_non_null(r);
    return msi_formats[r->format].state;
}

static void read_state(const pulled *z, int param, int k, float *to) {
    t_ok(z->m, ms_read(z->m, ms_optimizer_state(z->m, z->p[param], k), to));
}

/* All that a step leaves behind, of two models. */
static void expect_same_bits(const pulled *a, const pulled *b, int states) {
    static float of_a[WIDE], of_b[WIDE];
    for (int k = 0; k < PARAMS; ++k) {
        t_ok(a->m, ms_read(a->m, a->p[k], of_a));
        t_ok(b->m, ms_read(b->m, b->p[k], of_b));
        assert_memory_equal(of_a, of_b, count_of(k) * sizeof(float));
        for (int s = 0; s < states; ++s) {
            read_state(a, k, s, of_a);
            read_state(b, k, s, of_b);
            assert_memory_equal(of_a, of_b, count_of(k) * sizeof(float));
        }
    }
}

/* What a mode or a switch allows is used where the budget asks for it, by rule only on params that
   take it well. */
static void plans_code_what_rules_allow(void **state) {
    (void)state;
    const ms_optimizer_desc adamw = t_optimizer(MS_OPTIMIZER_ADAMW, 0.01f);
    for (int how = 0; how < 4; ++how) {
        pulled z;
        ms_config config = t_config();
        ms_memory_report report;
        config.mode = how == 0 ? MS_MODE_AGGRESSIVE : MS_MODE_BALANCED;
        config.optimizer_8bit = how == 1   ? MS_SWITCH_ON
                                : how == 2 ? MS_SWITCH_DEFAULT
                                           : MS_SWITCH_OFF;
        config.optimizer_8bit = how == 0 ? MS_SWITCH_DEFAULT : config.optimizer_8bit;
        pulled_create(&z, &config, &adamw);
        t_ok(z.m, ms_wrap(z.m));
        assert_int_equal(format_in(&z, 0, 0), MS_STATE_FORMAT_F32); // the budget is large
        uint64_t smallest = 0;
        t_ok(z.m, ms_smallest_budget(z.m, &smallest));
        ms_set_budget(z.m, smallest);
        t_ok(z.m, ms_wrap(z.m));
        t_report(z.m, &report);
        const bool coded = how < 2;
        for (int k = 0; k < PARAMS; ++k) {
            for (int s = 0; s < 2; ++s) {
                assert_int_equal(format_in(&z, k, s),
                                 coded && k == 0 ? MS_STATE_FORMAT_8BIT : MS_STATE_FORMAT_F32);
            }
        }
        const uint64_t wide = 2ull * WIDE * sizeof(float), small = 2 * msi_align(63 * 65 * 4);
        const uint64_t codes = 2 * msi_align(msi_coded_bytes(WIDE));
        assert_int_equal(report.peak_bytes[MS_CATEGORY_OPTIMIZER],
                         2 * wide + small + (coded ? codes : wide));
        assert_true((double)codes <= 2.04 * WIDE);
        assert_int_equal(report.freed_bytes[MS_TECHNIQUE_OPTIMIZER_8BIT],
                         coded ? (int64_t)(wide - codes) : 0);
        pulled_step(&z, 2);
        pulled_destroy(&z);
    }
}

/* A chain of layers, some of which read an earlier one, with weights of rank 1 or 2 and a random
   device, which is fast or slow at coding beside all else. It is only planned. */
typedef struct drawn {
    ms_model *m;
    t_heap heap;
    ms_tensor weight[24];
    int layers;
} drawn;

static void drawn_create(drawn *z, uint64_t seed, const ms_config *config) {
    t_rng rng = t_seed(seed);
    ms_config with_heap = *config;
    ms_hardware hardware;
    ms_tensor made[24];
    const ms_optimizer_desc adamw = t_optimizer(MS_OPTIMIZER_ADAMW, 0.01f);
    const int64_t batch = 16 + t_below(&rng, 240);
    memset(z, 0, sizeof *z);
    memset(&hardware, 0, sizeof hardware);
    with_heap.dry_run = true;
    with_heap.allocator = t_heap_allocator(&z->heap);
    hardware.kind = seed % 3 == 0 ? MS_DEVICE_DISCRETE : MS_DEVICE_CPU;
    hardware.memory_gb_per_s = hardware.to_device_gb_per_s = hardware.to_host_gb_per_s = 10.0;
    hardware.f32_tflops = 0.02 * exp2(12.0 * t_unit(&rng));
    hardware.launch_us = 1.0;
    assert_int_equal(ms_create(&with_heap, &z->m), MS_RESULT_OK);
    ms_set_hardware(z->m, &hardware);
    z->layers = 3 + (int)t_below(&rng, (uint32_t)t_size(6, 10));
    for (int i = 0; i < z->layers; ++i) {
        const ms_shape shape = ms_shape2(batch, 32 + t_below(&rng, 96));
        const int64_t rows = 16 + t_below(&rng, 400);
        const double us = 5.0 + 400.0 * t_unit(&rng) * t_unit(&rng);
        const ms_layer_time time = {us, 2.0 * us, us};
        ms_layer_desc d;
        memset(&d, 0, sizeof d);
        d.forward = d.backward = t_nothing;
        d.in[0] = i == 0 ? ms_input(z->m, "x", MS_DTYPE_F32, shape) : made[i - 1];
        if (i > 2 && t_chance(&rng, 0.3)) {
            d.in[1] = made[t_below(&rng, (uint32_t)i - 1)];
        }
        d.param[0] = z->weight[i] =
            ms_param(z->m, "w", MS_DTYPE_F32,
                     t_chance(&rng, 0.8) ? ms_shape2(rows, 64) : ms_shape1(64 * rows));
        d.out[0] = made[i] = ms_activation(z->m, "a", MS_DTYPE_F32, shape);
        ms_set_layer_time(z->m, ms_register_layer(z->m, &d), &time);
    }
    ms_set_loss(z->m, made[z->layers - 1]);
    ms_set_optimizer(z->m, &adamw);
}

static void drawn_destroy(drawn *z) {
    ms_destroy(z->m);
    assert_int_equal(z->heap.live_count, 0);
}

/* Whether a budget has a plan. The step counts no less than the plain one: plans do not compete to be
   faster than that unless they code state. */
static bool drawn_plan(drawn *z, uint64_t budget, ms_memory_report *report, double *us) {
    ms_set_budget(z->m, budget);
    const ms_result result = ms_wrap(z->m);
    assert_true(result == MS_RESULT_OK || result == MS_RESULT_BUDGET);
    if (result == MS_RESULT_OK) {
        t_report(z->m, report);
        *us = report->step_us > report->plain_step_us ? report->step_us : report->plain_step_us;
    }
    return result == MS_RESULT_OK;
}

/* At equal budgets a mode that may code state is at least as fast as one that may not, whether the
   device codes slowly or not. */
static void codes_make_no_plan_slower(void **state) {
    (void)state;
    int coded = 0, plain = 0, faster = 0;
    for (uint64_t seed = 1; seed <= t_sweep(12, 1000); ++seed) {
        drawn z[2];
        uint64_t most = 0, least[2];
        for (int k = 0; k < 2; ++k) {
            ms_config config = t_config();
            config.mode = k ? MS_MODE_AGGRESSIVE : MS_MODE_BALANCED;
            drawn_create(&z[k], seed, &config);
            t_ok(z[k].m, ms_wrap(z[k].m));
            ms_memory_report report;
            t_report(z[k].m, &report);
            most = report.plain_bytes;
            t_ok(z[k].m, ms_smallest_budget(z[k].m, &least[k]));
        }
        assert_true(least[1] <= least[0]);
        for (uint64_t i = 0; i < 6; ++i) {
            const uint64_t budget = least[1] + (most - least[1]) * i / 6;
            ms_memory_report of[2] = {{0}};
            double us[2] = {0.0, 0.0};
            const bool fits = drawn_plan(&z[0], budget, &of[0], &us[0]);
            assert_true(drawn_plan(&z[1], budget, &of[1], &us[1]));
            const bool codes = of[1].freed_bytes[MS_TECHNIQUE_OPTIMIZER_8BIT] > 0;
            coded += codes;
            plain += fits && !codes;
            faster += codes && of[1].step_us < of[1].plain_step_us;
            if (fits && us[1] > us[0]) {
                print_message("net %llu, budget %llu: %.17g us without codes, %.17g with them\n",
                              (unsigned long long)seed, (unsigned long long)budget, us[0], us[1]);
            }
            assert_true(!fits || us[1] <= us[0]);
        }
        drawn_destroy(&z[0]);
        drawn_destroy(&z[1]);
    }
    assert_true(coded > 10 && plain > 5 && faster > 2);
}

/* Where codes are all that the budget asks for, and make the step faster, nothing else is done; where
   they are forced, nothing is done for a large budget. */
static void codes_that_are_fast_are_enough(void **state) {
    (void)state;
    int checked = 0;
    for (uint64_t seed = 1; seed <= t_sweep(40, 3000); ++seed) {
        drawn z;
        ms_config config = t_config();
        ms_memory_report plain = {0}, forced = {0}, report = {0};
        double us = 0.0;
        config.mode = MS_MODE_AGGRESSIVE;
        config.early_update = config.offloading = MS_SWITCH_OFF;
        drawn_create(&z, seed, &config);
        assert_true(drawn_plan(&z, (uint64_t)1 << 40, &plain, &us));
        for (int i = 0; i < z.layers; ++i) {
            const ms_tensor w = z.weight[i];
            ms_set_tensor_technique(z.m, w, MS_TECHNIQUE_OPTIMIZER_8BIT, MS_SWITCH_ON);
        }
        assert_true(drawn_plan(&z, (uint64_t)1 << 40, &forced, &us));
        assert_int_equal(forced.recompute_count, 0);
        for (int i = 0; i < z.layers; ++i) {
            const bool vector =
                msi_why_not_8bit(&z.m->optimizers, true,
                                 &z.m->graph.tensors.items[msi_index(&z.m->graph, z.weight[i])]) !=
                MSI_8BIT_MAY_BE;
            ms_set_tensor_technique(z.m, z.weight[i], MS_TECHNIQUE_OPTIMIZER_8BIT,
                                    vector ? MS_SWITCH_OFF : MS_SWITCH_ON);
        }
        assert_true(drawn_plan(&z, (uint64_t)1 << 40, &forced, &us));
        for (int i = 0; i < z.layers; ++i) {
            ms_set_tensor_technique(z.m, z.weight[i], MS_TECHNIQUE_OPTIMIZER_8BIT,
                                    MS_SWITCH_DEFAULT);
        }
        if (forced.step_us < plain.step_us && forced.arena_bytes < plain.arena_bytes) {
            assert_true(drawn_plan(&z, forced.arena_bytes, &report, &us));
            assert_int_equal(report.recompute_count, 0);
            assert_true(report.step_us <= forced.step_us);
            checked += 1;
        }
        drawn_destroy(&z);
    }
    assert_true(checked > 10);
}

/* What explains why each param of a layer has its format; how often each rule was given. */
typedef struct explained {
    const char *id[2];
    uint64_t saved, refused;
} explained;

static void note_decision(const ms_decision *d, void *user) {
    explained *e = (explained *)user;
    if (d->technique == MS_TECHNIQUE_OPTIMIZER_8BIT) {
        e->id[d->layer_index] = d->rule->id;
        e->saved += d->saved_bytes;
        e->refused += d->refused_bytes;
    }
}

static void decisions_name_their_rules(void **state) {
    (void)state;
    const ms_optimizer_desc adamw = t_optimizer(MS_OPTIMIZER_ADAMW, 0.01f);
    const uint64_t wide = 2ull * WIDE * sizeof(float), codes = 2 * msi_align(msi_coded_bytes(WIDE));
    pulled z;
    ms_config config = t_config();
    explained e;
    config.mode = MS_MODE_AGGRESSIVE;
    config.force_optimize = true;
    pulled_create(&z, &config, &adamw);
    for (int how = 0; how < 3; ++how) {
        memset(&e, 0, sizeof e);
        force_codes(&z, 0, how == 1 ? MS_SWITCH_OFF : MS_SWITCH_DEFAULT);
        force_codes(&z, 3, how == 2 ? MS_SWITCH_ON : MS_SWITCH_DEFAULT);
        t_ok(z.m, ms_wrap(z.m));
        t_ok(z.m, ms_visit_decisions(z.m, note_decision, &e));
        assert_string_equal(e.id[0], how == 1 ? "forbidden" : "smallest");
        assert_string_equal(e.id[1], how == 2 ? "forced" : "looked-up");
        assert_int_equal(e.saved, (how == 1 ? 0 : wide - codes) + (how == 2 ? wide - codes : 0));
        /* The vector, in the line of the first layer, and whatever else is not coded. */
        const uint64_t small = 2 * (msi_align(63 * 65 * 4) - msi_align(msi_coded_bytes(63 * 65)));
        assert_int_equal(e.refused, small + (wide - codes) + (how == 1 ? wide - codes : 0) +
                                        (how == 2 ? 0 : wide - codes));
    }
    pulled_destroy(&z);
}

static void steps_of(const ms_config *config, const ms_optimizer_desc *optimizer, bool codes,
                     bool moves, pulled *z) {
    pulled_create(z, config, optimizer);
    for (int k = 0; k < PARAMS && codes; ++k) {
        force_codes(z, k, k == 2 ? MS_SWITCH_OFF : MS_SWITCH_ON);
    }
    for (int k = 0; k < PARAMS && moves; ++k) {
        ms_set_tensor_technique(z->m, z->p[k], MS_TECHNIQUE_OFFLOADING, MS_SWITCH_ON);
        ms_set_tensor_technique(z->m, ms_gradient(z->m, z->p[k]), MS_TECHNIQUE_OFFLOADING,
                                k % 2 ? MS_SWITCH_ON : MS_SWITCH_OFF);
        ms_set_tensor_technique(z->m, ms_optimizer_state(z->m, z->p[k], 0), MS_TECHNIQUE_OFFLOADING,
                                MS_SWITCH_ON);
    }
    t_ok(z->m, ms_wrap(z->m));
    pulled_step(z, 3);
}

/* Moved in parts, updated inside backward, in debug mode, with accumulation and clipping: the bits are
   those of the plan that only codes. */
static void plans_change_no_bit_of_coded_state(void **state) {
    (void)state;
    for (uint32_t how = 0; how < 32; ++how) {
        pulled plain, wrapped;
        ms_config config = t_config();
        const bool sgd = how & 1;
        ms_optimizer_desc o = t_optimizer(sgd ? MS_OPTIMIZER_SGD : MS_OPTIMIZER_ADAMW, 0.01f);
        o.momentum = sgd ? 0.9f : 0.0f;
        o.grad_clip_norm = how & 2 ? 0.5f : 0.0f;
        o.state_format[0] = how & 8 ? MS_STATE_FORMAT_BF16 : MS_STATE_FORMAT_F32;
        config.accumulation_steps = how & 4 ? 2 : 1;
        config.seed = 5;
        config.early_update = MS_SWITCH_OFF;
        steps_of(&config, &o, true, false, &plain);
        config.early_update = (how & 6) == 0 ? MS_SWITCH_ON : MS_SWITCH_DEFAULT;
        config.debug = how & 16;
        steps_of(&config, &o, true, true, &wrapped);
        bool in_parts = false;
        const msi_program *p = &wrapped.m->run.plan->train;
        for (uint32_t i = 0; i < p->code.instructions.count; ++i) {
            in_parts |= p->code.instructions.items[i].part_count > 1;
        }
        assert_true(in_parts);
        expect_same_bits(&plain, &wrapped, sgd ? 1 : 2);
        pulled_destroy(&wrapped);
        pulled_destroy(&plain);
    }
}

/* ms_read gives F32, ms_write rounds to the nearest code, and another plan converts. */
static void state_is_f32_for_the_trainer(void **state) {
    (void)state;
    static float written[WIDE], read[WIDE], again[WIDE];
    const ms_optimizer_desc adamw = t_optimizer(MS_OPTIMIZER_ADAMW, 0.01f);
    t_rng rng = t_seed(14);
    for (int how = 0; how < 2; ++how) { // written before the first ms_wrap, or after it
        pulled z;
        const ms_config config = t_config();
        pulled_create(&z, &config, &adamw);
        force_codes(&z, 0, MS_SWITCH_ON);
        if (how == 1) {
            t_ok(z.m, ms_wrap(z.m));
            read_state(&z, 0, 1, read);
            for (int i = 0; i < WIDE; ++i) {
                assert_true(msi_bits_of_f32(read[i]) == 0); // not -0
            }
        }
        for (int k = 0; k < 2; ++k) {
            t_fill(&rng, written, WIDE, 1.0f);
            for (int i = 0; i < WIDE && k == 1; ++i) {
                written[i] *= written[i];
            }
            t_ok(z.m, ms_write(z.m, ms_optimizer_state(z.m, z.p[0], k), written));
            if (how == 0 && k == 1) {
                t_ok(z.m, ms_wrap(z.m));
            }
            read_state(&z, 0, how == 0 ? 1 : k, read);
            for (int at = 0; at < WIDE && (how == 1 || k == 1); at += MSI_CODED_BLOCK) {
                uint8_t codes[MSI_CODED_BLOCK];
                float block[MSI_CODED_BLOCK];
                const float scale = msi_encode(written + at, k == 0, MSI_CODED_BLOCK, codes);
                msi_decode(codes, scale, k == 0, MSI_CODED_BLOCK, block);
                assert_memory_equal(block, read + at, sizeof block);
            }
        }
        assert_null(ms_data(z.m, ms_optimizer_state(z.m, z.p[0], 1)));
        assert_non_null(ms_data(z.m, ms_optimizer_state(z.m, z.p[1], 1)));
        t_ok(z.m, ms_detach(z.m)); // exact, since F32 has all numbers of codes
        assert_int_equal(format_in(&z, 0, 1), MS_STATE_FORMAT_F32);
        read_state(&z, 0, 1, again);
        assert_memory_equal(read, again, sizeof read);
        t_ok(z.m, ms_wrap(z.m)); // no number is negative, so these have codes
        assert_int_equal(format_in(&z, 0, 1), MS_STATE_FORMAT_8BIT);
        read_state(&z, 0, 1, again);
        assert_memory_equal(read, again, sizeof read);
        pulled_step(&z, 1);
        pulled_destroy(&z);
    }
}

/* Read and written, detached and wrapped, planned for another budget and back: once it has been in
   its format, no bit of state changes without a step, whatever the optimizer and the format. */
static void round_trips_change_no_state(void **state) {
    (void)state;
    static float first[2][WIDE], again[WIDE];
    for (int how = 0; how < 12; ++how) {
        pulled z;
        const ms_config config = t_config();
        const bool in_bf16 = how & 1;
        ms_optimizer_desc o = t_optimizer((ms_optimizer_kind)(how / 4), 0.01f);
        o.momentum = 0.9f;
        o.state_format[0] = in_bf16 ? MS_STATE_FORMAT_BF16 : MS_STATE_FORMAT_F32;
        pulled_create(&z, &config, &o);
        for (int k = 0; k < PARAMS && !in_bf16; ++k) {
            force_codes(&z, k, k == 2 ? MS_SWITCH_OFF : MS_SWITCH_ON);
        }
        t_ok(z.m, ms_wrap(z.m));
        pulled_step(&z, 3);
        const int states = msi_optimizer_of(o.kind).states;
        for (int p = 0; p < PARAMS; ++p) {
            for (int k = 0; k < states; ++k) {
                read_state(&z, p, k, first[k]);
            }
            for (int round = 0; round < 30; ++round) {
                for (int k = 0; k < states && how % 4 < 2; ++k) {
                    const ms_tensor s = ms_optimizer_state(z.m, z.p[p], k);
                    t_ok(z.m, ms_read(z.m, s, again));
                    t_ok(z.m, ms_write(z.m, s, again));
                }
                if (how % 4 >= 2) { // F32 and back, and with other choices
                    t_ok(z.m, ms_detach(z.m));
                    t_ok(z.m, ms_wrap(z.m));
                }
            }
            for (int k = 0; k < states; ++k) {
                read_state(&z, p, k, again);
                assert_memory_equal(first[k], again, count_of(p) * sizeof(float));
            }
        }
        pulled_destroy(&z);
    }
}

/* A block with an element that is not finite becomes zeros; no other block changes. */
static void what_is_not_finite_zeroes_its_block(void **state) {
    (void)state;
    static float written[WIDE], read[WIDE];
    const ms_optimizer_desc adamw = t_optimizer(MS_OPTIMIZER_ADAMW, 0.01f);
    const float wrong[] = {NAN, INFINITY, -INFINITY};
    pulled z;
    const ms_config config = t_config();
    pulled_create(&z, &config, &adamw);
    force_codes(&z, 0, MS_SWITCH_ON);
    t_ok(z.m, ms_wrap(z.m));
    for (int i = 0; i < WIDE; ++i) {
        written[i] = i % (2 * MSI_CODED_BLOCK) == 7 ? wrong[i / MSI_CODED_BLOCK % 3] : 1.0f;
    }
    t_ok(z.m, ms_write(z.m, ms_optimizer_state(z.m, z.p[0], 0), written));
    read_state(&z, 0, 0, read);
    for (int i = 0; i < WIDE; ++i) {
        assert_true(read[i] == (i / MSI_CODED_BLOCK % 2 ? 1.0f : 0.0f));
    }
    pulled_destroy(&z);
}

/* What is shown of formats, in lifetimes and in events, of training and of eval. */
typedef struct shown {
    const pulled *z;
    int lifetimes, updates;
} shown;

static ms_state_format format_shown(const pulled *z, ms_tensor tensor) {
    const msi_role role = msi_role_of(&z->m->graph, tensor);
    const bool coded = msi_index(&z->m->graph, tensor) == msi_index(&z->m->graph, z->p[0]);
    return tensor.id == 0 || role < MSI_ROLE_STATE0 ? MS_STATE_FORMAT_F32
           : coded                                  ? MS_STATE_FORMAT_8BIT
           : role == MSI_ROLE_STATE0                ? MS_STATE_FORMAT_BF16
                                                    : MS_STATE_FORMAT_F32;
}

static void look_at_lifetime(const ms_lifetime *l, void *user) {
    shown *seen = (shown *)user;
    assert_int_equal(l->format, format_shown(seen->z, l->tensor));
    if (l->format == MS_STATE_FORMAT_8BIT && l->is_resident) {
        assert_int_equal(l->bytes, msi_align(msi_coded_bytes(WIDE)));
        seen->lifetimes += 1;
    }
}

static void look_at_event(const ms_event *event, void *user) {
    shown *seen = (shown *)user;
    for (uint32_t k = 0; k < event->operand_count; ++k) {
        const ms_event_operand *o = &event->operands[k];
        assert_int_equal(o->format, format_shown(seen->z, o->tensor));
        seen->updates += event->kind == MS_EVENT_UPDATE && o->format == MS_STATE_FORMAT_8BIT;
    }
}

static void formats_are_shown(void **state) {
    (void)state;
    for (int moved = 0; moved < 2; ++moved) {
        pulled z;
        const ms_config config = t_config();
        ms_optimizer_desc o = t_optimizer(MS_OPTIMIZER_ADAMW, 0.01f);
        o.state_format[0] = MS_STATE_FORMAT_BF16;
        pulled_create(&z, &config, &o);
        force_codes(&z, 0, MS_SWITCH_ON);
        ms_set_tensor_technique(z.m, ms_optimizer_state(z.m, z.p[0], 0), MS_TECHNIQUE_OFFLOADING,
                                moved ? MS_SWITCH_ON : MS_SWITCH_OFF);
        t_ok(z.m, ms_wrap(z.m));
        for (int program = 0; program < 2; ++program) {
            shown seen = {&z, 0, 0};
            t_ok(z.m, ms_visit_lifetimes(z.m, (ms_program)program, look_at_lifetime, &seen));
            t_ok(z.m, ms_visit_events(z.m, (ms_program)program, look_at_event, &seen));
            assert_int_equal(seen.lifetimes, 2);
            assert_int_equal(seen.updates > 0, program == 0);
        }
        pulled_destroy(&z);
    }
}

/* Plans whose state takes as many bytes in another format are not the same plan: 17 floats take those
   of 17 codes, padded, and their scale. */
static void the_hash_of_a_plan_tells_formats_apart(void **state) {
    (void)state;
    uint64_t hash[2];
    const ms_optimizer_desc adamw = t_optimizer(MS_OPTIMIZER_ADAMW, 0.01f);
    for (int k = 0; k < 2; ++k) {
        const ms_config config = t_config();
        ms_memory_report report;
        ms_layer_desc d;
        ms_model *m;
        memset(&d, 0, sizeof d);
        assert_int_equal(ms_create(&config, &m), MS_RESULT_OK);
        d.forward = d.backward = t_nothing;
        d.in[0] = ms_input(m, "x", MS_DTYPE_F32, ms_shape1(1));
        d.param[0] = ms_param(m, "w", MS_DTYPE_F32, ms_shape1(17));
        d.out[0] = ms_activation(m, "y", MS_DTYPE_F32, ms_shape1(1));
        ms_register_layer(m, &d);
        ms_set_loss(m, d.out[0]);
        ms_set_optimizer(m, &adamw);
        ms_set_tensor_technique(m, d.param[0], MS_TECHNIQUE_OPTIMIZER_8BIT,
                                k ? MS_SWITCH_ON : MS_SWITCH_OFF);
        t_ok(m, ms_wrap(m));
        t_report(m, &report);
        hash[k] = report.plan_hash;
        ms_destroy(m);
    }
    assert_int_equal(msi_format_bytes(MSI_FORMAT_8BIT, 17), 17 * sizeof(float));
    assert_true(hash[0] != hash[1]);
}

/* Whether state is worth a copy depends on the bytes that it has in its format: copying codes takes
   less time than the launch here, and copying floats takes more. It does not where the budget is so
   small that codes count. */
static void what_is_moved_counts_in_its_format(void **state) {
    (void)state;
    const ms_optimizer_desc adamw = t_optimizer(MS_OPTIMIZER_ADAMW, 0.01f);
    pulled z;
    ms_config config = t_config();
    ms_hardware hardware;
    memset(&hardware, 0, sizeof hardware);
    hardware.kind = MS_DEVICE_DISCRETE;
    hardware.memory_gb_per_s = 100.0;
    hardware.f32_tflops = hardware.to_device_gb_per_s = hardware.to_host_gb_per_s = 1.0;
    hardware.launch_us = 40.0;
    config.dry_run = true;
    pulled_create(&z, &config, &adamw);
    ms_set_hardware(z.m, &hardware);
    force_codes(&z, 0, MS_SWITCH_ON);
    t_ok(z.m, ms_wrap(z.m));
    msi_lowering lowering;
    msi_scorer scorer;
    msi_search search;
    msi_greedy greedy;
    memset(&lowering, 0, sizeof lowering);
    memset(&scorer, 0, sizeof scorer);
    memset(&search, 0, sizeof search);
    memset(&greedy, 0, sizeof greedy);
    lowering.optimizers = &z.m->optimizers;
    scorer.graph = &z.m->graph;
    scorer.costs = &z.m->costs;
    scorer.lowering = &lowering;
    scorer.store = z.m->run.store;
    search.moves = MSI_MOVES_ALL;
    greedy.search = &search;
    greedy.scorer = &scorer;
    greedy.graph = &z.m->graph;
    greedy.decisions = z.m->run.plan->decisions;
    for (int k = 0; k < PARAMS; k += 3) { // both of the same shape
        const uint32_t t = msi_index(&z.m->graph, z.p[k]);
        greedy.host_left = UINT64_MAX;
        search.budget = 4 * WIDE * sizeof(float);
        assert_true(msi_may_move(&greedy, t, MSI_MOVES_STATE));
        search.budget = UINT64_MAX;
        assert_int_equal(msi_may_move(&greedy, t, MSI_MOVES_STATE), k == 3);
        assert_true(msi_may_move(&greedy, t, MSI_MOVES_VALUE));
        greedy.host_left = 2 * WIDE * sizeof(float) - 1; // room for one of two moments
        assert_false(msi_may_move(&greedy, t, MSI_MOVES_STATE));
    }
    pulled_destroy(&z);
}

/* Updates of state in codes are timed apart from those of F32, and predicted by their own speed. */
static void coded_updates_have_their_own_speed(void **state) {
    (void)state;
    const ms_optimizer_desc adamw = t_optimizer(MS_OPTIMIZER_ADAMW, 0.01f);
    pulled z;
    ms_config config = t_config();
    ms_memory_report before, after;
    config.empirical_profiling = MS_SWITCH_ON;
    pulled_create(&z, &config, &adamw);
    force_codes(&z, 0, MS_SWITCH_ON);
    t_ok(z.m, ms_wrap(z.m));
    pulled_step(&z, 6);
    assert_true(z.m->costs.bytes_per_us[MSI_COST_UPDATE] > 0.0);
    assert_true(z.m->costs.bytes_per_us[MSI_COST_UPDATE_8BIT] > 0.0);
    t_ok(z.m, ms_wrap(z.m));
    t_report(z.m, &before);
    const double moved = 12.0 * WIDE + 4.0 * (double)msi_coded_bytes(WIDE);
    const double speed = z.m->costs.bytes_per_us[MSI_COST_UPDATE_8BIT];
    z.m->costs.bytes_per_us[MSI_COST_UPDATE_8BIT] = speed / 2.0;
    z.m->wrapped.changed = true;
    t_ok(z.m, ms_wrap(z.m));
    t_report(z.m, &after);
    assert_true(fabs(after.step_us - before.step_us - moved / speed) < 1e-6 * after.step_us);
    pulled_destroy(&z);
}

/* Conversions that lack memory of the host change nothing, and leave nothing behind. */
/* Long tensors are converted a piece at a time, to the same bits as at once. */
static void conversions_in_pieces_change_nothing(void **state) {
    (void)state;
    enum { LONG = 2 * MSI_CONVERT_ELEMENTS + 1000 };
    static float values[LONG], of_pieces[LONG], at_once[LONG];
    static uint8_t from[LONG * sizeof(float)], to[2][LONG * sizeof(float)];
    static const msi_format formats[] = {MSI_FORMAT_F32, MSI_FORMAT_BF16, MSI_FORMAT_8BIT};
    const ms_config config = t_config();
    ms_model *m;
    t_rng rng = t_seed(21);
    assert_int_equal(ms_create(&config, &m), MS_RESULT_OK);
    t_fill(&rng, values, LONG, 1.0f);
    for (int how = 0; how < 9; ++how) {
        const msi_memory source = {from, NULL, formats[how / 3], true, 0};
        const msi_memory target = {NULL, to[0], formats[how % 3], true, 0};
        if (how / 3 != how % 3) {
            msi_convert_on_host(from, source.format, values, MSI_FORMAT_F32, true, LONG);
            t_ok(m, msi_convert_state(m, &target, &source, true, LONG));
            msi_convert_on_host(to[1], target.format, from, source.format, true, LONG);
            msi_convert_on_host(of_pieces, MSI_FORMAT_F32, to[0], target.format, true, LONG);
            msi_convert_on_host(at_once, MSI_FORMAT_F32, to[1], target.format, true, LONG);
            assert_memory_equal(of_pieces, at_once, sizeof at_once);
        }
    }
    ms_destroy(m);
}

static void conversions_may_lack_memory(void **state) {
    (void)state;
    static float before[WIDE], after[WIDE];
    const ms_optimizer_desc adamw = t_optimizer(MS_OPTIMIZER_ADAMW, 0.01f);
    pulled z;
    const ms_config config = t_config();
    pulled_create(&z, &config, &adamw);
    force_codes(&z, 0, MS_SWITCH_ON);
    t_ok(z.m, ms_wrap(z.m));
    pulled_step(&z, 2);
    read_state(&z, 0, 0, before);
    z.heap.fail_at = z.heap.calls + 1;
    t_error(z.m, ms_read(z.m, ms_optimizer_state(z.m, z.p[0], 0), after), MS_RESULT_OUT_OF_MEMORY);
    z.heap.fail_at = z.heap.calls + 1;
    t_error(z.m, ms_write(z.m, ms_optimizer_state(z.m, z.p[0], 0), before),
            MS_RESULT_OUT_OF_MEMORY);
    ms_result result = MS_RESULT_OUT_OF_MEMORY;
    for (uint64_t n = 1; result == MS_RESULT_OUT_OF_MEMORY; ++n) {
        z.heap.fail_at = z.heap.calls + n;
        result = ms_detach(z.m);
        z.heap.fail_at = 0;
        read_state(&z, 0, 0, after);
        assert_memory_equal(before, after, sizeof before);
        assert_int_equal(format_in(&z, 0, 0),
                         result == MS_RESULT_OK ? MS_STATE_FORMAT_F32 : MS_STATE_FORMAT_8BIT);
    }
    t_ok(z.m, result);
    pulled_step(&z, 1);
    pulled_destroy(&z);
}

static int own_update(const ms_update_args *args) {
    (void)args;
    return 0;
}

/* With an optimizer of a kind, and a backend whose update takes every format or F32 alone. */
static void pulled_create_for(pulled *z, ms_optimizer_kind kind, const ms_state_format *formats,
                              bool has_formats, t_device *device) {
    ms_config config = t_config();
    ms_optimizer_desc o = t_optimizer(kind, 0.01f);
    o.update = kind == MS_OPTIMIZER_CUSTOM ? own_update : NULL;
    o.state_count = kind == MS_OPTIMIZER_CUSTOM ? 1 : 0;
    o.state_format[0] = formats[0];
    o.state_format[1] = formats[1];
    if (!has_formats) {
        config.backend = t_device_backend(device);
        config.backend.has_state_formats = false;
    }
    pulled_create(z, &config, &o);
}

/* Why a plan cannot be had. */
static void what_cannot_be_coded_is_refused(void **state) {
    (void)state;
    static float lent[WIDE];
    static const char *const reasons[] = {"its state is borrowed", "trainer's own",
                                          "no optimizer state", "no optimizer state",
                                          "has_state_formats"};
    for (int how = 0; how < 5; ++how) {
        const ms_optimizer_kind kind = how == 1   ? MS_OPTIMIZER_CUSTOM
                                       : how == 2 ? MS_OPTIMIZER_SGD
                                                  : MS_OPTIMIZER_ADAMW;
        const ms_state_format formats[2] = {MS_STATE_FORMAT_F32, MS_STATE_FORMAT_F32};
        pulled z;
        t_device device;
        pulled_create_for(&z, kind, formats, how != 4, &device);
        if (how == 0) {
            t_ok(z.m, ms_borrow(z.m, ms_optimizer_state(z.m, z.p[0], 1), lent));
        }
        ms_set_frozen(z.m, z.p[0], how == 3);
        force_codes(&z, 0, MS_SWITCH_ON);
        t_error(z.m, ms_wrap(z.m), MS_RESULT_INVALID);
        t_text_has(ms_last_error(z.m), reasons[how]);
        t_text_has(ms_last_error(z.m), "\"wide\"");
        force_codes(&z, 0, MS_SWITCH_OFF);
        t_ok(z.m, ms_wrap(z.m));
        pulled_destroy(&z);
    }
}

static void wrong_formats_are_refused(void **state) {
    (void)state;
    for (int how = 0; how < 5; ++how) {
        const ms_optimizer_kind kind = how == 2   ? MS_OPTIMIZER_CUSTOM
                                       : how == 3 ? MS_OPTIMIZER_NONE
                                                  : MS_OPTIMIZER_ADAMW;
        ms_state_format formats[2] = {MS_STATE_FORMAT_F32, MS_STATE_FORMAT_F32};
        pulled z;
        t_device device;
        formats[how % 2] = how == 0   ? MS_STATE_FORMAT_8BIT
                           : how == 1 ? MS_STATE_FORMAT_COUNT
                                      : MS_STATE_FORMAT_BF16;
        pulled_create_for(&z, kind, formats, how != 4, &device);
        t_error(z.m, ms_wrap(z.m), how == 4 ? MS_RESULT_UNSUPPORTED : MS_RESULT_INVALID);
        t_text_has(ms_last_error(z.m), "state_format");
        ms_destroy(z.m);
        assert_int_equal(z.heap.live_count, 0);
    }
}

/* BF16 by choice holds for all own state that the plan does not code. */
static void bf16_is_for_all_other_state(void **state) {
    (void)state;
    static float lent[WIDE];
    pulled z;
    ms_config config = t_config();
    ms_memory_report report;
    ms_optimizer_desc o = t_optimizer(MS_OPTIMIZER_ADAMW, 0.01f);
    o.state_format[1] = MS_STATE_FORMAT_BF16;
    pulled_create(&z, &config, &o);
    t_ok(z.m, ms_borrow(z.m, ms_optimizer_state(z.m, z.p[2], 1), lent));
    force_codes(&z, 0, MS_SWITCH_ON);
    t_ok(z.m, ms_wrap(z.m));
    for (int k = 0; k < PARAMS; ++k) {
        assert_int_equal(format_in(&z, k, 0), k == 0 ? MS_STATE_FORMAT_8BIT : MS_STATE_FORMAT_F32);
        assert_int_equal(format_in(&z, k, 1), k == 0   ? MS_STATE_FORMAT_8BIT
                                              : k == 2 ? MS_STATE_FORMAT_F32
                                                       : MS_STATE_FORMAT_BF16);
    }
    pulled_step(&z, 2);
    t_report(z.m, &report);
    assert_int_equal(report.peak_bytes[MS_CATEGORY_OPTIMIZER],
                     2 * msi_align(msi_coded_bytes(WIDE)) + msi_align(63 * 65 * 4) +
                         msi_align(63 * 65 * 2) + WIDE * 4 + WIDE * 6);
    pulled_destroy(&z);
}

/* The same seed gives the same bits; another seed does not. */
static void runs_repeat(void **state) {
    (void)state;
    static float a[WIDE], b[WIDE];
    for (uint64_t seed = 1; seed < 3; ++seed) {
        pulled first, second;
        ms_config config = t_config();
        ms_optimizer_desc o = t_optimizer(MS_OPTIMIZER_ADAMW, 0.01f);
        o.state_format[0] = o.state_format[1] = MS_STATE_FORMAT_BF16;
        config.seed = 1;
        steps_of(&config, &o, false, false, &first);
        config.seed = seed;
        steps_of(&config, &o, false, false, &second);
        read_state(&first, 0, 1, a);
        read_state(&second, 0, 1, b);
        assert_int_equal(memcmp(a, b, sizeof a) == 0, seed == 1);
        pulled_destroy(&first);
        pulled_destroy(&second);
    }
}

/* What ms_verify says of state is what the next step does to it. */
typedef struct verified {
    const pulled *z;
    uint32_t gradients, states, matched;
    double absolute[PARAMS][2];
} verified;

static void note_difference(const ms_difference *d, void *user) {
    verified *seen = (verified *)user;
    const ms_model *m = seen->z->m;
    const msi_role role = msi_role_of(&m->graph, d->tensor);
    if (role < MSI_ROLE_STATE0) {
        seen->gradients += 1;
        assert_int_equal(d->differ_count, 0);
        return;
    }
    seen->states += 1;
    for (int k = 0; k < PARAMS; ++k) {
        if (msi_index(&m->graph, d->tensor) == msi_index(&m->graph, seen->z->p[k])) {
            seen->matched += 1;
            seen->absolute[k][role - MSI_ROLE_STATE0] = d->absolute;
            assert_int_equal(d->count, count_of(k));
            assert_true(d->differ_count > 0 && d->relative <= 1.0 && d->absolute > 0.0);
        }
    }
}

static void verify_says_what_rounding_does(void **state) {
    (void)state;
    static float old[WIDE], now[WIDE], gradient[WIDE];
    for (int how = 0; how < 4; ++how) {
        pulled z;
        const ms_config config = t_config();
        ms_optimizer_desc o = t_optimizer(MS_OPTIMIZER_ADAMW, 0.01f);
        verified seen;
        ms_verify_report report;
        o.state_format[0] = how & 1 ? MS_STATE_FORMAT_BF16 : MS_STATE_FORMAT_F32;
        pulled_create(&z, &config, &o);
        force_codes(&z, 0, how & 2 ? MS_SWITCH_ON : MS_SWITCH_DEFAULT);
        t_ok(z.m, ms_wrap(z.m));
        pulled_step(&z, 2);
        pulled_write(&z);
        memset(&seen, 0, sizeof seen);
        seen.z = &z;
        t_ok(z.m, ms_verify(z.m, note_difference, &seen, &report));
        assert_int_equal(seen.gradients, PARAMS);
        assert_int_equal(report.tensor_count, PARAMS);
        assert_int_equal(report.differ_count, 0);
        assert_int_equal(seen.states, (how & 1 ? 3 : 0) + (how & 2 ? 2 : how & 1 ? 1 : 0));
        assert_int_equal(seen.matched, seen.states);
        assert_int_equal(report.state_count, seen.states);
        assert_true(report.state_error < 0.03 && (report.state_error > 1e-4) == (how > 0));
        for (int k = 0; k < 2; ++k) { // of the wide param
            double most = 0.0;
            read_state(&z, 0, k, old);
            t_ok(z.m, ms_read(z.m, z.x[0], gradient));
            if (k == 1) {
                t_ok(z.m, ms_step(z.m, NULL));
                t_ok(z.m, ms_synchronize(z.m));
                read_state(&z, 0, k, now);
                for (int i = 0; i < WIDE; ++i) {
                    const double g = (double)gradient[i];
                    const double exact = (double)0.999f * (double)old[i] +
                                         (double)(float)(1.0 - (double)0.999f) * g * g;
                    most =
                        fabs((double)now[i] - exact) > most ? fabs((double)now[i] - exact) : most;
                }
                assert_true(fabs(most - seen.absolute[0][1]) <= 1e-6);
            }
        }
        pulled_destroy(&z);
    }
}

/* The error of small state is not hidden by large state that is rounded less. */
static void verify_gives_the_largest_error_of_one_tensor(void **state) {
    (void)state;
    static float small[WIDE];
    for (int param = 0; param < PARAMS - 1; ++param) {
        pulled z;
        const ms_config config = t_config();
        ms_optimizer_desc o = t_optimizer(MS_OPTIMIZER_ADAMW, 0.01f);
        ms_verify_report all;
        t_rng rng = t_seed(3);
        o.state_format[0] = MS_STATE_FORMAT_BF16;
        pulled_create(&z, &config, &o);
        force_codes(&z, param, MS_SWITCH_ON);
        t_ok(z.m, ms_wrap(z.m));
        pulled_step(&z, 1);
        pulled_write(&z);
        t_fill(&rng, small, WIDE, 1e-6f);
        t_ok(z.m, ms_write(z.m, ms_optimizer_state(z.m, z.p[param], 0), small));
        t_fill(&rng, small, WIDE, 1e-6f);
        t_ok(z.m, ms_write(z.m, z.x[param], small));
        t_ok(z.m, ms_verify(z.m, NULL, NULL, &all));
        assert_true(all.state_error > 0.005 && all.state_error < 0.03);
        pulled_destroy(&z);
    }
}

/* With accumulation the rounding that ms_verify reports is that of the last micro-batch, in which
   params are updated. All but that one have no gradients here. */
static void verify_rounds_as_the_last_micro_batch(void **state) {
    (void)state;
    static float zeros[WIDE], written[WIDE], old[WIDE], now[WIDE];
    pulled z;
    ms_config config = t_config();
    ms_optimizer_desc o = t_optimizer(MS_OPTIMIZER_ADAMW, 0.01f);
    verified seen;
    ms_verify_report report;
    t_rng rng = t_seed(4);
    o.state_format[1] = MS_STATE_FORMAT_BF16;
    config.accumulation_steps = 3;
    pulled_create(&z, &config, &o);
    t_ok(z.m, ms_wrap(z.m));
    pulled_step(&z, 1);
    pulled_write(&z);
    t_fill(&rng, written, WIDE, 1.0f);
    t_ok(z.m, ms_write(z.m, z.x[0], written));
    memset(&seen, 0, sizeof seen);
    seen.z = &z;
    t_ok(z.m, ms_verify(z.m, note_difference, &seen, &report));
    read_state(&z, 0, 1, old);
    for (int micro = 0; micro < 3; ++micro) {
        t_ok(z.m, ms_write(z.m, z.x[0], micro < 2 ? zeros : written));
        t_ok(z.m, ms_step(z.m, NULL));
    }
    t_ok(z.m, ms_synchronize(z.m));
    read_state(&z, 0, 1, now);
    double most = 0.0;
    for (int i = 0; i < WIDE; ++i) {
        const double g = (double)written[i];
        const double exact =
            (double)0.999f * (double)old[i] + (double)(float)(1.0 - (double)0.999f) * g * g;
        most = fabs((double)now[i] - exact) > most ? fabs((double)now[i] - exact) : most;
    }
    assert_true(fabs(most - seen.absolute[0][1]) <= 1e-9);
    pulled_destroy(&z);
}

int main(void) {
    t_hook.part_bytes = 65536; // so that state comes in parts
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(books_are_those_of_the_paper),
        cmocka_unit_test(codes_are_the_nearest),
        cmocka_unit_test(blocks_are_coded_as_numbers_are),
        cmocka_unit_test(blocks_are_coded_as_numbers_at_the_middles),
        cmocka_unit_test(blocks_keep_zeros_signs_and_the_largest),
        cmocka_unit_test(what_was_decoded_is_encoded_to_the_same),
        cmocka_unit_test(numbers_change_once_at_most),
        cmocka_unit_test(codes_and_scales_have_places_of_their_own),
        cmocka_unit_test(parts_lie_as_they_do_in_the_whole),
        cmocka_unit_test(bf16_is_rounded_at_random),
        cmocka_unit_test(updates_are_those_of_the_formulas),
        cmocka_unit_test(blocks_are_updated_as_elements_are),
        cmocka_unit_test(parts_and_threads_change_nothing),
        cmocka_unit_test(wrong_gradients_change_nothing),
        cmocka_unit_test(plans_code_what_rules_allow),
        cmocka_unit_test(codes_make_no_plan_slower),
        cmocka_unit_test(codes_that_are_fast_are_enough),
        cmocka_unit_test(decisions_name_their_rules),
        cmocka_unit_test(plans_change_no_bit_of_coded_state),
        cmocka_unit_test(state_is_f32_for_the_trainer),
        cmocka_unit_test(round_trips_change_no_state),
        cmocka_unit_test(what_is_not_finite_zeroes_its_block),
        cmocka_unit_test(formats_are_shown),
        cmocka_unit_test(the_hash_of_a_plan_tells_formats_apart),
        cmocka_unit_test(what_is_moved_counts_in_its_format),
        cmocka_unit_test(conversions_in_pieces_change_nothing),
        cmocka_unit_test(coded_updates_have_their_own_speed),
        cmocka_unit_test(conversions_may_lack_memory),
        cmocka_unit_test(what_cannot_be_coded_is_refused),
        cmocka_unit_test(wrong_formats_are_refused),
        cmocka_unit_test(bf16_is_for_all_other_state),
        cmocka_unit_test(runs_repeat),
        cmocka_unit_test(verify_says_what_rounding_does),
        cmocka_unit_test(verify_gives_the_largest_error_of_one_tensor),
        cmocka_unit_test(verify_rounds_as_the_last_micro_batch),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
