/*  blocks.h - numbers in blocks that share a scale: from float32, and back. For weights that are not
    trained.

        Q8_0   32 numbers in 34 bytes: a scale d in binary16, 32 signed bytes q.    x = d q
        Q4_1   32 numbers in 20 bytes: a scale d and a least number m in binary16, 32 codes q of
               4 bits, those of the first 16 numbers in the low halves of 16 bytes.  x = d q + m
        NF4    64 numbers in 36 bytes: the largest magnitude a in float32, 64 codes q of 4 bits, two to
               a byte, the first in the high half.                                   x = a value[q]

    Q8_0 and Q4_1 are those of GGUF files (the ggml repository, ggml-common.h and ggml-quants.c, whose
    reference quantizers these follow). NF4: Dettmers et al., "QLoRA", 2023, section 3 and, for the 16
    values, appendix E; the order of the codes is that of the bitsandbytes library. Numbers of more than
    one byte are little-endian.

    A matrix is stored row by row, each of whole blocks. Every number is decoded to the same bits by
    every compiler and device: it is one product, rounded once (NF4), or exact (Q8_0), or a sum of an exact
    product and a number, rounded once (Q4_1).

    It needs C alone. It is C, C++ and CUDA C++. */
#ifndef MEMSCALE_BLOCKS_H
#define MEMSCALE_BLOCKS_H

#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__GNUC__)
#define BLOCKS_API static __attribute__((unused))
#else
#define BLOCKS_API static
#endif
#if defined(__CUDACC__)
#define BLOCKS_HD BLOCKS_API __host__ __device__ inline
#else
#define BLOCKS_HD BLOCKS_API inline
#endif

typedef enum blocks_kind { BLOCKS_NONE, BLOCKS_Q8_0, BLOCKS_Q4_1, BLOCKS_NF4 } blocks_kind;

enum { BLOCKS_LONGEST = 64 }; // numbers of a block, at most

// ---- bytes --------------------------------------------------------------------------------------

BLOCKS_HD float blocks_float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

BLOCKS_HD uint32_t blocks_bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* A binary16 number; its subnormal numbers are normal in float32. */
BLOCKS_HD float blocks_half(uint32_t half) {
    const uint32_t sign = (half & 0x8000u) << 16, exponent = half >> 10 & 31,
                   fraction = half & 1023;
    if (exponent == 0) {
        const float value = (float)fraction * 5.9604644775390625e-8f; // 2^-24
        return sign ? -value : value;
    }
    return blocks_float_of(sign | (exponent == 31 ? 255u : exponent + 112u) << 23 | fraction << 13);
}

/* The nearest binary16 number, ties to even, as IEEE 754 has it; NaN stays NaN. */
BLOCKS_API uint32_t blocks_half_of(float value) {
    const uint32_t bits = blocks_bits_of(value), sign = bits >> 16 & 0x8000u;
    const uint32_t size = bits & 0x7fffffffu;
    if (size > 0x7f800000u) {
        return sign | 0x7e00u;
    }
    if (size >= 0x477ff000u) { // from 65520 on
        return sign | 0x7c00u;
    }
    if (size < 0x38800000u) { // subnormal: steps of 2^-24, as float32 has them from 0.5 on
        return sign | (blocks_bits_of(blocks_float_of(size) + 0.5f) - 0x3f000000u);
    }
    return sign | (size - 0x38000000u + 0xfffu + (size >> 13 & 1)) >> 13;
}

BLOCKS_HD float blocks_half_at(const uint8_t *data) {
    return blocks_half((uint32_t)data[0] | (uint32_t)data[1] << 8);
}

BLOCKS_HD float blocks_float_at(const uint8_t *data) {
    return blocks_float_of((uint32_t)data[0] | (uint32_t)data[1] << 8 | (uint32_t)data[2] << 16 |
                           (uint32_t)data[3] << 24);
}

BLOCKS_API void blocks_put(uint8_t *data, uint32_t bits, int bytes) {
    for (int i = 0; i < bytes; i++) {
        data[i] = (uint8_t)(bits >> (8 * i));
    }
}

// ---- decoding -----------------------------------------------------------------------------------

/* A block to its numbers. */
BLOCKS_HD void blocks_decode_q8_0(const uint8_t *b, float *to) {
    const float scale = blocks_half_at(b);
    for (int i = 0; i < 32; i++) {
        to[i] = (float)(b[2 + i] < 128 ? b[2 + i] : b[2 + i] - 256) * scale;
    }
}

/* The product of a code and the scale is exact: 4 bits times 11. */
BLOCKS_HD void blocks_decode_q4_1(const uint8_t *b, float *to) {
    const float scale = blocks_half_at(b), least = blocks_half_at(b + 2);
    float value[16]; // of each code
    for (int code = 0; code < 16; code++) {
        value[code] = (float)code * scale + least;
    }
    for (int i = 0; i < 16; i++) {
        to[i] = value[b[4 + i] & 15];
        to[i + 16] = value[b[4 + i] >> 4];
    }
}

/* Quantiles of the normal distribution, scaled to 1: see the start of the file. */
#define BLOCKS_NF4_VALUES                                                                          \
    {                                                                                              \
        -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f,                  \
            -0.28444138169288635f, -0.18477343022823334f, -0.09105003625154495f, 0.0f,             \
            0.07958029955625534f, 0.16093020141124725f, 0.24611230194568634f,                      \
            0.33791524171829224f, 0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f,  \
            1.0f                                                                                   \
    }

BLOCKS_HD void blocks_decode_nf4(const uint8_t *b, float *to) {
    const float values[16] = BLOCKS_NF4_VALUES;
    const float largest = blocks_float_at(b);
    float value[16];
    for (int code = 0; code < 16; code++) {
        value[code] = values[code] * largest;
    }
    for (int i = 0; i < 32; i++) {
        to[2 * i] = value[b[4 + i] >> 4];
        to[2 * i + 1] = value[b[4 + i] & 15];
    }
}

/* Numbers and bytes of a block; 1 and 4 of BLOCKS_NONE. */
BLOCKS_HD int blocks_length(blocks_kind kind) {
    return kind == BLOCKS_NONE ? 1 : kind == BLOCKS_NF4 ? 64 : 32;
}

BLOCKS_HD int blocks_bytes(blocks_kind kind) {
    return kind == BLOCKS_Q8_0 ? 34 : kind == BLOCKS_Q4_1 ? 20 : kind == BLOCKS_NF4 ? 36 : 4;
}

/* Bytes of a row of so many numbers. */
BLOCKS_HD int64_t blocks_row_bytes(blocks_kind kind, int64_t count) {
    return count / blocks_length(kind) * blocks_bytes(kind);
}

BLOCKS_HD void blocks_decode_one(blocks_kind kind, const uint8_t *block, float *to) {
    if (kind == BLOCKS_Q8_0) {
        blocks_decode_q8_0(block, to);
    } else if (kind == BLOCKS_Q4_1) {
        blocks_decode_q4_1(block, to);
    } else if (kind == BLOCKS_NF4) {
        blocks_decode_nf4(block, to);
    } else {
        to[0] = blocks_float_at(block);
    }
}

/* The `count` numbers that begin with a block. */
BLOCKS_API void blocks_decode(blocks_kind kind, const uint8_t *blocks, int64_t count, float *to) {
    const int length = blocks_length(kind), bytes = blocks_bytes(kind);
    for (int64_t i = 0; i < count; i += length, blocks += bytes) {
        blocks_decode_one(kind, blocks, to + i);
    }
}

// ---- encoding -----------------------------------------------------------------------------------

/* Numbers to a block. The scale is rounded to binary16 after the codes are chosen, as ggml does. */
BLOCKS_API void blocks_encode_q8_0(const float *from, uint8_t *b) {
    float most = 0.0f;
    for (int i = 0; i < 32; i++) {
        most = fabsf(from[i]) > most ? fabsf(from[i]) : most;
    }
    const float scale = most / 127.0f, inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
    blocks_put(b, blocks_half_of(scale), 2);
    for (int i = 0; i < 32; i++) {
        b[2 + i] = (uint8_t)(int8_t)roundf(from[i] * inverse);
    }
}

BLOCKS_API void blocks_encode_q4_1(const float *from, uint8_t *b) {
    float least = from[0], most = from[0];
    for (int i = 1; i < 32; i++) {
        least = from[i] < least ? from[i] : least;
        most = from[i] > most ? from[i] : most;
    }
    const float scale = (most - least) / 15.0f, inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
    blocks_put(b, blocks_half_of(scale), 2);
    blocks_put(b + 2, blocks_half_of(least), 2);
    memset(b + 4, 0, 16);
    for (int i = 0; i < 32; i++) {
        const int code = (int)((from[i] - least) * inverse + 0.5f);
        b[4 + i % 16] = (uint8_t)(b[4 + i % 16] | (code < 15 ? code : 15) << (i < 16 ? 0 : 4));
    }
}

BLOCKS_API void blocks_encode_nf4(const float *from, uint8_t *b) {
    static const float values[16] = BLOCKS_NF4_VALUES;
    float most = 0.0f;
    for (int i = 0; i < 64; i++) {
        most = fabsf(from[i]) > most ? fabsf(from[i]) : most;
    }
    const float inverse = most > 0.0f ? 1.0f / most : 0.0f;
    blocks_put(b, blocks_bits_of(most), 4);
    memset(b + 4, 0, 32);
    for (int i = 0; i < 64; i++) {
        const float x = from[i] * inverse;
        int code = 0;
        while (code < 15 && x > (values[code] + values[code + 1]) * 0.5f) {
            code++;
        }
        b[4 + i / 2] = (uint8_t)(b[4 + i / 2] | code << (i % 2 == 0 ? 4 : 0));
    }
}

/* `count` finite numbers, of whole blocks. */
BLOCKS_API void blocks_encode(blocks_kind kind, const float *from, int64_t count, uint8_t *blocks) {
    const int length = blocks_length(kind), bytes = blocks_bytes(kind);
    for (int64_t i = 0; i < count; i += length, blocks += bytes) {
        if (kind == BLOCKS_Q8_0) {
            blocks_encode_q8_0(from + i, blocks);
        } else if (kind == BLOCKS_Q4_1) {
            blocks_encode_q4_1(from + i, blocks);
        } else if (kind == BLOCKS_NF4) {
            blocks_encode_nf4(from + i, blocks);
        } else {
            blocks_put(blocks, blocks_bits_of(from[i]), 4);
        }
    }
}

/* "q8_0", "q4_1" or "nf4"; false: no such name. */
BLOCKS_API bool blocks_find(const char *name, blocks_kind *kind) {
    static const char *const names[] = {"q8_0", "q4_1", "nf4"};
    for (int i = 0; i < 3; i++) {
        if (strcmp(name, names[i]) == 0) {
            *kind = (blocks_kind)(BLOCKS_Q8_0 + i);
            return true;
        }
    }
    return false;
}

#endif // MEMSCALE_BLOCKS_H
