/*  gguf.h - a file of published weights in memory: its tensors, decoded to float32, and for files of
    the format GGUF their metadata.

    Format: the public specification of GGUF in the ggml repository (docs/gguf.md) and its ggml-quants;
    versions 2 and 3, little-endian. Tensors of type F32, F16, BF16, Q8_0, Q4_0 and Q4_1 can be decoded;
    others are listed, and refused with their name when they are asked for.

    Nothing in a file is trusted: each offset, count and size is checked before it is used, and an error
    is one line of text in weight_file.error. safetensors.h opens a path and knows the other format.

    It needs blocks.h, which decodes blocks that nets have too. It is C and C++. */
#ifndef MEMSCALE_GGUF_H
#define MEMSCALE_GGUF_H

#include "blocks.h"

#include <errno.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined(__unix__) || defined(__APPLE__)
#define GGUF_MMAP
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#if defined(__linux__) && !defined(__cplusplus) && !defined(MADV_DONTNEED)
extern int madvise(void *begin, size_t bytes, int advice); // which strict dialects of C hide
#define MADV_DONTNEED 4
#endif
#endif

#if defined(__GNUC__)
#define GGUF_API static __attribute__((unused))
#else
#define GGUF_API static
#endif

// ---- what a file has ----------------------------------------------------------------------------

enum {
    WEIGHT_NAME = 128,  // bytes of the name of a tensor, with the 0 at its end
    WEIGHT_RANK = 4,    // most dims
    WEIGHT_ERROR = 512, // bytes of an error text
    WEIGHT_BLOCK = 256  // most elements of a block of codes
};

/* Elements are stored in blocks, one after the other; decode is NULL for what this file cannot read. */
typedef struct weight_type {
    const char *name;
    int32_t number;                                                  // in GGUF; -1: not there
    int32_t elements, bytes;                                         // of a block
    void (*decode)(const uint8_t *blocks, int64_t count, float *to); // blocks
} weight_type;

/* A tensor of a file: dims as in C, the last one varies fastest. */
typedef struct weight_entry {
    char name[WEIGHT_NAME];
    const weight_type *type;
    int32_t rank;
    int64_t dim[WEIGHT_RANK];
    int64_t count; // elements
    uint64_t bytes;
    const uint8_t *data;
    uint32_t used; // for weights.h
} weight_entry;

/* The bytes of a file: mapped, read, or of the caller. */
typedef struct weight_bytes {
    uint8_t *data;
    uint64_t size;
    bool is_mapped, is_owned;
} weight_bytes;

/* Text in a file: no 0 at its end. */
typedef struct gguf_text {
    const char *data;
    uint64_t length;
} gguf_text;

typedef enum gguf_type {
    GGUF_U8,
    GGUF_I8,
    GGUF_U16,
    GGUF_I16,
    GGUF_U32,
    GGUF_I32,
    GGUF_F32,
    GGUF_BOOL,
    GGUF_STRING,
    GGUF_ARRAY,
    GGUF_U64,
    GGUF_I64,
    GGUF_F64,
    GGUF_TYPES
} gguf_type;

/* A value of the metadata; of an array, type is that of its items. */
typedef struct gguf_value {
    gguf_text key;
    gguf_type type;
    bool is_array;
    uint64_t count; // 1 if it is not an array
    const uint8_t *data, *end;
} gguf_value;

typedef struct weight_file {
    weight_entry *entries; // sorted by name
    int64_t count, capacity;
    gguf_value *values; // of GGUF
    int64_t value_count;
    weight_bytes *parts;
    int32_t part_count;
    char error[WEIGHT_ERROR];
} weight_file;

/* Sets an error text of WEIGHT_ERROR bytes: one line, whatever is in names. Returns false. */
GGUF_API bool weight_fail(char *error, const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(error, WEIGHT_ERROR, format, args);
    va_end(args);
    for (char *c = error; *c; c++) {
        *c = (unsigned char)*c < 32 || *c == 127 ? '?' : *c;
    }
    return false;
}

// ---- bytes --------------------------------------------------------------------------------------

GGUF_API uint64_t gguf_load(const uint8_t *data, int bytes) {
    uint64_t value = 0;
    for (int i = 0; i < bytes; i++) {
        value |= (uint64_t)data[i] << (8 * i);
    }
    return value;
}

// ---- types --------------------------------------------------------------------------------------

GGUF_API void gguf_decode_f32(const uint8_t *blocks, int64_t count, float *to) {
    for (int64_t i = 0; i < count; i++) {
        to[i] = blocks_float_of((uint32_t)gguf_load(blocks + 4 * i, 4));
    }
}

GGUF_API void gguf_decode_f16(const uint8_t *blocks, int64_t count, float *to) {
    for (int64_t i = 0; i < count; i++) {
        to[i] = blocks_half_at(blocks + 2 * i);
    }
}

GGUF_API void gguf_decode_bf16(const uint8_t *blocks, int64_t count, float *to) {
    for (int64_t i = 0; i < count; i++) {
        to[i] = blocks_float_of((uint32_t)gguf_load(blocks + 2 * i, 2) << 16);
    }
}

GGUF_API void gguf_decode_q8_0(const uint8_t *blocks, int64_t count, float *to) {
    blocks_decode(BLOCKS_Q8_0, blocks, 32 * count, to);
}

/* A block of 32: a scale, then codes of 4 bits minus 8: low halves of the bytes first. */
GGUF_API void gguf_decode_q4_0(const uint8_t *blocks, int64_t count, float *to) {
    for (const uint8_t *b = blocks; b < blocks + 18 * count; b += 18, to += 32) {
        const float scale = blocks_half_at(b);
        for (int i = 0; i < 16; i++) {
            to[i] = (float)((b[2 + i] & 15) - 8) * scale;
            to[i + 16] = (float)((b[2 + i] >> 4) - 8) * scale;
        }
    }
}

GGUF_API void gguf_decode_q4_1(const uint8_t *blocks, int64_t count, float *to) {
    blocks_decode(BLOCKS_Q4_1, blocks, 32 * count, to);
}

/* Sizes of types that are not decoded: so that a file that has some can be checked and listed. */
static const weight_type weight_types[] = {
    {"F32", 0, 1, 4, gguf_decode_f32},
    {"F16", 1, 1, 2, gguf_decode_f16},
    {"BF16", 30, 1, 2, gguf_decode_bf16},
    {"Q8_0", 8, 32, 34, gguf_decode_q8_0},
    {"Q4_0", 2, 32, 18, gguf_decode_q4_0},
    {"Q4_1", 3, 32, 20, gguf_decode_q4_1},
    {"Q5_0", 6, 32, 22, NULL},
    {"Q5_1", 7, 32, 24, NULL},
    {"Q8_1", 9, 32, 36, NULL},
    {"Q2_K", 10, 256, 84, NULL},
    {"Q3_K", 11, 256, 110, NULL},
    {"Q4_K", 12, 256, 144, NULL},
    {"Q5_K", 13, 256, 176, NULL},
    {"Q6_K", 14, 256, 210, NULL},
    {"Q8_K", 15, 256, 292, NULL},
    {"IQ2_XXS", 16, 256, 66, NULL},
    {"IQ2_XS", 17, 256, 74, NULL},
    {"IQ3_XXS", 18, 256, 98, NULL},
    {"IQ1_S", 19, 256, 50, NULL},
    {"IQ4_NL", 20, 32, 18, NULL},
    {"IQ3_S", 21, 256, 110, NULL},
    {"IQ2_S", 22, 256, 82, NULL},
    {"IQ4_XS", 23, 256, 136, NULL},
    {"IQ1_M", 29, 256, 56, NULL},
    {"TQ1_0", 34, 256, 54, NULL},
    {"TQ2_0", 35, 256, 66, NULL},
    {"MXFP4", 39, 32, 17, NULL},
    {"NVFP4", 40, 64, 36, NULL},
    {"I8", 24, 1, 1, NULL},
    {"I16", 25, 1, 2, NULL},
    {"I32", 26, 1, 4, NULL},
    {"I64", 27, 1, 8, NULL},
    {"F64", 28, 1, 8, NULL},
    {"BOOL", -1, 1, 1, NULL},
    {"U8", -1, 1, 1, NULL},
    {"U16", -1, 1, 2, NULL},
    {"U32", -1, 1, 4, NULL},
    {"U64", -1, 1, 8, NULL},
    {"C64", -1, 1, 8, NULL},
    {"F8_E4M3", -1, 1, 1, NULL},
    {"F8_E5M2", -1, 1, 1, NULL},
    {"F8_E8M0", -1, 1, 1, NULL},
};
enum { WEIGHT_TYPES = sizeof weight_types / sizeof weight_types[0] };

/* Decodes `count` elements from element `first` on, both multiples of the elements of a block. */
GGUF_API bool weight_decode(weight_file *f, const weight_entry *e, int64_t first, int64_t count,
                            float *to) {
    const weight_type *t = e->type;
    if (!t->decode) {
        return weight_fail(f->error,
                           "%s is of type %s: only F32, F16, BF16, Q8_0, Q4_0 and Q4_1 can be read",
                           e->name, t->name);
    }
    if (first < 0 || count < 0 || first > e->count || count > e->count - first ||
        first % t->elements != 0 || count % t->elements != 0) {
        return weight_fail(f->error, "%s has no elements %lld to %lld in whole blocks of %d",
                           e->name, (long long)first, (long long)first + (long long)count,
                           (int)t->elements);
    }
    t->decode(e->data + first / t->elements * t->bytes, count / t->elements, to);
    return true;
}

// ---- entries ------------------------------------------------------------------------------------

/* Room for one more entry, cleared; NULL after an error. */
GGUF_API weight_entry *weight_append(weight_file *f) {
    if (f->count == f->capacity) {
        const int64_t capacity = 2 * f->capacity + 64;
        weight_entry *entries =
            (weight_entry *)realloc(f->entries, (size_t)capacity * sizeof *entries);
        if (!entries) {
            weight_fail(f->error, "no memory for %lld tensors", (long long)capacity);
            return NULL;
        }
        f->entries = entries;
        f->capacity = capacity;
    }
    memset(&f->entries[f->count], 0, sizeof f->entries[0]);
    return &f->entries[f->count++];
}

GGUF_API bool weight_set_name(weight_file *f, weight_entry *e, const char *name, uint64_t length) {
    if (length == 0 || length >= WEIGHT_NAME || memchr(name, 0, (size_t)length)) {
        return weight_fail(f->error, "the name of a tensor, %.*s, is not of 1 to %d characters",
                           (int)(length < 128 ? length : 128), name, WEIGHT_NAME - 1);
    }
    memcpy(e->name, name, (size_t)length);
    e->name[length] = 0;
    return true;
}

/* Sets count and bytes from type, rank and dims. */
GGUF_API bool weight_measure(weight_file *f, weight_entry *e) {
    const weight_type *t = e->type;
    const int64_t most = INT64_MAX / 512; // so that bytes do not overflow either
    e->count = 1;
    for (int32_t i = 0; i < e->rank; i++) {
        if (e->dim[i] < 0 || (e->dim[i] > 0 && e->count > most / e->dim[i])) {
            return weight_fail(f->error, "%s: its dims are too large", e->name);
        }
        e->count *= e->dim[i];
    }
    const int64_t last = e->rank > 0 ? e->dim[e->rank - 1] : 1;
    if (last % t->elements != 0) {
        return weight_fail(f->error, "%s: rows of %lld elements are not whole blocks of %s, of %d",
                           e->name, (long long)last, t->name, (int)t->elements);
    }
    e->bytes = (uint64_t)(e->count / t->elements) * (uint64_t)t->bytes;
    return true;
}

GGUF_API int weight_compare(const void *a, const void *b) {
    return strcmp(((const weight_entry *)a)->name, ((const weight_entry *)b)->name);
}

/* Sorts the entries, once all are there. */
GGUF_API bool weight_sort(weight_file *f) {
    if (f->count > 1) {
        qsort(f->entries, (size_t)f->count, sizeof f->entries[0], weight_compare);
    }
    for (int64_t i = 1; i < f->count; i++) {
        if (weight_compare(&f->entries[i - 1], &f->entries[i]) == 0) {
            return weight_fail(f->error, "there are two tensors named %s", f->entries[i].name);
        }
    }
    return true;
}

GGUF_API weight_entry *weight_find(const weight_file *f, const char *name) {
    int64_t first = 0, end = f->count;
    while (first < end) {
        const int64_t middle = first + (end - first) / 2;
        const int order = strcmp(name, f->entries[middle].name);
        if (order == 0) {
            return &f->entries[middle];
        }
        first = order > 0 ? middle + 1 : first;
        end = order > 0 ? end : middle;
    }
    return NULL;
}

// ---- files --------------------------------------------------------------------------------------

/* Maps a file, privately: what is written to its memory does not reach it. */
GGUF_API bool weight_map(weight_file *f, const char *path, weight_bytes *bytes) {
#ifdef GGUF_MMAP
    struct stat found;
    const int file = open(path, O_RDONLY);
    if (file < 0 || fstat(file, &found) != 0 || !S_ISREG(found.st_mode) || found.st_size <= 0) {
        weight_fail(f->error, "cannot read %s: %s", path,
                    file < 0 ? strerror(errno) : "it has no bytes");
    } else {
        void *data =
            mmap(NULL, (size_t)found.st_size, PROT_READ | PROT_WRITE, MAP_PRIVATE, file, 0);
        bytes->is_mapped = data != MAP_FAILED;
        bytes->data = bytes->is_mapped ? (uint8_t *)data : NULL;
        bytes->size = (uint64_t)found.st_size;
        if (!bytes->is_mapped) {
            weight_fail(f->error, "cannot map %s: %s", path, strerror(errno));
        }
    }
    if (file >= 0) {
        close(file);
    }
    return bytes->data != NULL;
#else
    (void)f, (void)path, (void)bytes;
    return false;
#endif
}

/* Reads a whole file into memory. */
GGUF_API bool weight_slurp(weight_file *f, const char *path, weight_bytes *bytes) {
    FILE *file = fopen(path, "rb");
    size_t capacity = 0, got = 1;
    bytes->is_owned = true;
    while (file && got > 0 && !ferror(file)) {
        if (bytes->size == capacity) {
            uint8_t *data = (uint8_t *)realloc(bytes->data, capacity = 2 * capacity + (1 << 16));
            if (!data) {
                fclose(file);
                return weight_fail(f->error, "no memory for %s", path);
            }
            bytes->data = data;
        }
        got = fread(bytes->data + bytes->size, 1, capacity - (size_t)bytes->size, file);
        bytes->size += got;
    }
    const bool is_read = file && !ferror(file);
    if (!is_read || bytes->size == 0) {
        weight_fail(f->error, "cannot read %s: %s", path,
                    is_read ? "it has no bytes" : strerror(errno));
    }
    if (file) {
        fclose(file);
    }
    return is_read && bytes->size > 0;
}

/* Adds bytes to those that belong to the file; NULL after an error. */
GGUF_API weight_bytes *weight_add_part(weight_file *f) {
    weight_bytes *parts =
        (weight_bytes *)realloc(f->parts, ((size_t)f->part_count + 1) * sizeof *parts);
    if (!parts) {
        weight_fail(f->error, "no memory");
        return NULL;
    }
    f->parts = parts;
    memset(&parts[f->part_count], 0, sizeof *parts);
    return &parts[f->part_count++];
}

GGUF_API weight_bytes *weight_add_file(weight_file *f, const char *path) {
    weight_bytes *bytes = weight_add_part(f);
#ifdef GGUF_MMAP
    return bytes && weight_map(f, path, bytes) ? bytes : NULL;
#else
    return bytes && weight_slurp(f, path, bytes) ? bytes : NULL;
#endif
}

/* Takes the pages that an entry has to itself out of memory, if it is mapped: they are read from the file
   again where they are needed. */
GGUF_API void weight_forget(const weight_file *f, const weight_entry *e) {
#if defined(GGUF_MMAP) && defined(MADV_DONTNEED)
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), data = (uintptr_t)e->data;
    const uintptr_t begin = (data + page - 1) / page * page, end = (data + e->bytes) / page * page;
    for (int32_t i = 0; i < f->part_count && begin < end; i++) {
        const weight_bytes *b = &f->parts[i];
        if (b->is_mapped && data >= (uintptr_t)b->data && data - (uintptr_t)b->data < b->size) {
            (void)madvise(b->data + (begin - (uintptr_t)b->data), end - begin, MADV_DONTNEED);
        }
    }
#else
    (void)f, (void)e;
#endif
}

GGUF_API void weight_close(weight_file *f) {
    for (int32_t i = 0; i < f->part_count; i++) {
        weight_bytes *b = &f->parts[i];
#ifdef GGUF_MMAP
        if (b->is_mapped) {
            munmap(b->data, (size_t)b->size);
        }
#endif
        if (b->is_owned) {
            free(b->data);
        }
    }
    free(f->parts);
    free(f->entries);
    free(f->values);
    f->parts = NULL;
    f->entries = NULL;
    f->values = NULL;
    f->part_count = 0;
    f->count = f->capacity = f->value_count = 0;
}

// ---- reading GGUF -------------------------------------------------------------------------------

static const int gguf_sizes[GGUF_TYPES] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8}; // 0: it varies

/* What has not been read. Once it has failed, all that is read is 0. */
typedef struct gguf_cursor {
    const uint8_t *at, *end;
    bool failed;
} gguf_cursor;

GGUF_API const uint8_t *gguf_take(gguf_cursor *c, uint64_t bytes) {
    const uint8_t *at = c->at;
    c->failed = c->failed || bytes > (uint64_t)(c->end - c->at);
    c->at += c->failed ? 0 : bytes;
    return c->failed ? NULL : at;
}

GGUF_API uint64_t gguf_take_number(gguf_cursor *c, int bytes) {
    const uint8_t *at = gguf_take(c, (uint64_t)bytes);
    return at ? gguf_load(at, bytes) : 0;
}

GGUF_API gguf_text gguf_take_text(gguf_cursor *c) {
    gguf_text text = {"", 0};
    const uint64_t length = gguf_take_number(c, 8);
    const uint8_t *data = gguf_take(c, length);
    if (data) {
        text.data = (const char *)data;
        text.length = length;
    }
    return text;
}

/* Passes over items of a type; arrays within arrays may be nested a few levels deep. */
GGUF_API void gguf_skip(gguf_cursor *c, uint64_t type, uint64_t count, int depth) {
    if (type >= GGUF_TYPES || depth > 4) {
        c->failed = true;
    } else if (gguf_sizes[type] > 0) {
        const uint64_t size = (uint64_t)gguf_sizes[type];
        c->failed = c->failed || count > UINT64_MAX / size;
        gguf_take(c, count * size);
    } else {
        for (uint64_t i = 0; i < count && !c->failed; i++) {
            if (type == GGUF_STRING) {
                gguf_take_text(c);
            } else {
                const uint64_t inner = gguf_take_number(c, 4);
                gguf_skip(c, inner, gguf_take_number(c, 8), depth + 1);
            }
        }
    }
}

GGUF_API bool gguf_read_values(weight_file *f, gguf_cursor *c, uint64_t count) {
    const uint64_t least = 8 + 4 + 1; // bytes of a value with its key
    if (count > (uint64_t)(c->end - c->at) / least) {
        return weight_fail(f->error,
                           "GGUF: it cannot have %llu values of metadata in its %llu bytes",
                           (unsigned long long)count, (unsigned long long)(c->end - c->at));
    }
    f->values = (gguf_value *)calloc((size_t)count + 1, sizeof *f->values);
    if (!f->values) {
        return weight_fail(f->error, "no memory");
    }
    for (uint64_t i = 0; i < count && !c->failed; i++) {
        gguf_value *v = &f->values[i];
        v->key = gguf_take_text(c);
        uint64_t type = gguf_take_number(c, 4);
        v->is_array = type == GGUF_ARRAY;
        type = v->is_array ? gguf_take_number(c, 4) : type;
        v->count = v->is_array ? gguf_take_number(c, 8) : 1;
        v->data = c->at;
        gguf_skip(c, type, v->count, 0);
        v->end = c->at;
        if (c->failed) {
            return weight_fail(
                f->error, "GGUF: value %llu of the metadata, %.*s, has no type or too few bytes",
                (unsigned long long)i, (int)(v->key.length < 64 ? v->key.length : 64), v->key.data);
        }
        v->type = (gguf_type)type;
        f->value_count++;
    }
    return true;
}

// ---- metadata -----------------------------------------------------------------------------------

/* NULL: there is no such key. */
GGUF_API const gguf_value *gguf_find(const weight_file *f, const char *key) {
    for (int64_t i = 0; i < f->value_count; i++) {
        const gguf_text k = f->values[i].key;
        if (k.length == strlen(key) && memcmp(k.data, key, (size_t)k.length) == 0) {
            return &f->values[i];
        }
    }
    return NULL;
}

/* The number of any type at an index; 0 where there is none. */
GGUF_API double gguf_number_at(const gguf_value *v, uint64_t index) {
    const int size = v ? gguf_sizes[v->type] : 0;
    double real = 0.0;
    if (size == 0 || index >= v->count) {
        return 0.0;
    }
    const uint64_t bits = gguf_load(v->data + index * (uint64_t)size, size);
    switch (v->type) {
    case GGUF_F32:
        return (double)blocks_float_of((uint32_t)bits);
    case GGUF_F64:
        memcpy(&real, &bits, sizeof real);
        return real;
    case GGUF_I8:
        return (double)(int8_t)bits;
    case GGUF_I16:
        return (double)(int16_t)bits;
    case GGUF_I32:
        return (double)(int32_t)bits;
    case GGUF_I64:
        return (double)(int64_t)bits;
    case GGUF_U8:
    case GGUF_U16:
    case GGUF_U32:
    case GGUF_U64:
    case GGUF_BOOL:
    case GGUF_STRING:
    case GGUF_ARRAY:
    case GGUF_TYPES:
        break;
    }
    return (double)bits;
}

GGUF_API bool gguf_is_number(const gguf_value *v) {
    return v && !v->is_array && gguf_sizes[v->type] > 0;
}

/* Empty if it is not one text. */
GGUF_API gguf_text gguf_text_of(const gguf_value *v) {
    gguf_cursor c = {NULL, NULL, false};
    gguf_text none = {"", 0};
    if (!v || v->is_array || v->type != GGUF_STRING) {
        return none;
    }
    c.at = v->data;
    c.end = v->end;
    return gguf_take_text(&c);
}

/* The texts of an array, one after the other by gguf_take_text; all of them are in the file. */
GGUF_API gguf_cursor gguf_texts_of(const gguf_value *v) {
    gguf_cursor c = {NULL, NULL, true};
    if (v && v->is_array && v->type == GGUF_STRING) {
        c.at = v->data;
        c.end = v->end;
        c.failed = false;
    }
    return c;
}

GGUF_API bool gguf_equals(gguf_text text, const char *other) {
    return text.length == strlen(other) && memcmp(text.data, other, (size_t)text.length) == 0;
}

// ---- tensors of GGUF ----------------------------------------------------------------------------

enum { GGUF_ALIGNMENT = 32 }; // of data, where the metadata has no other

/* Reads one description; *offset is that of its data from the first of all. */
GGUF_API bool gguf_read_entry(weight_file *f, gguf_cursor *c, uint64_t *offset) {
    weight_entry *e = weight_append(f);
    const gguf_text name = gguf_take_text(c);
    const uint64_t rank = gguf_take_number(c, 4);
    if (!e || c->failed) {
        return e ? weight_fail(f->error, "GGUF: it ends within the list of tensors") : false;
    }
    if (!weight_set_name(f, e, name.data, name.length)) {
        return false;
    }
    if (rank > WEIGHT_RANK) {
        return weight_fail(f->error, "%s has %llu dims: there are at most %d", e->name,
                           (unsigned long long)rank, WEIGHT_RANK);
    }
    e->rank = (int32_t)rank;
    for (int32_t i = 0; i < e->rank; i++) {
        const uint64_t dim = gguf_take_number(c, 8);
        e->dim[e->rank - 1 - i] = dim > (uint64_t)INT64_MAX ? INT64_MAX : (int64_t)dim;
    }
    const uint64_t number = gguf_take_number(c, 4);
    *offset = gguf_take_number(c, 8);
    for (int i = 0; i < WEIGHT_TYPES && number <= INT32_MAX; i++) {
        e->type = weight_types[i].number == (int32_t)number ? &weight_types[i] : e->type;
    }
    return c->failed  ? weight_fail(f->error, "GGUF: it ends within the list of tensors")
           : !e->type ? weight_fail(f->error, "%s is of type %llu, which is unknown", e->name,
                                    (unsigned long long)number)
                      : weight_measure(f, e);
}

GGUF_API bool gguf_place(weight_file *f, const uint8_t *begin, const uint8_t *end,
                         uint64_t alignment, weight_entry *e, uint64_t offset) {
    const uint64_t size = (uint64_t)(end - begin);
    if (offset % alignment != 0) {
        return weight_fail(f->error,
                           "%s begins at byte %llu of the data, which is no multiple of %llu",
                           e->name, (unsigned long long)offset, (unsigned long long)alignment);
    }
    if (offset > size || e->bytes > size - offset) {
        return weight_fail(
            f->error, "%s has bytes %llu to %llu of the data, of which there are %llu", e->name,
            (unsigned long long)offset, (unsigned long long)offset + (unsigned long long)e->bytes,
            (unsigned long long)size);
    }
    e->data = begin + offset;
    return true;
}

/* Where data begins: after the description of all tensors, aligned. */
GGUF_API bool gguf_read_tensors(weight_file *f, gguf_cursor *c, const uint8_t *start,
                                uint64_t count) {
    const gguf_value *given = gguf_find(f, "general.alignment");
    const double number = given ? gguf_number_at(given, 0) : (double)GGUF_ALIGNMENT;
    const uint64_t alignment = number >= 1.0 && number <= 1048576.0 ? (uint64_t)number : 0;
    if (alignment == 0 || (alignment & (alignment - 1)) != 0) {
        return weight_fail(f->error, "GGUF: an alignment of %g is no power of 2 up to 1048576",
                           number);
    }
    const uint64_t least = 8 + 1 + 4 + 4 + 8; // bytes of a description
    if (count > (uint64_t)(c->end - c->at) / least) {
        return weight_fail(f->error, "GGUF: it cannot have %llu tensors in its %llu bytes",
                           (unsigned long long)count, (unsigned long long)(c->end - c->at));
    }
    uint64_t *offsets = (uint64_t *)malloc(((size_t)count + 1) * sizeof *offsets);
    bool is_read = offsets ? true : weight_fail(f->error, "no memory");
    for (uint64_t i = 0; i < count && is_read; i++) {
        is_read = gguf_read_entry(f, c, &offsets[i]);
    }
    if (is_read) {
        const uint64_t head = (uint64_t)(c->at - start), size = (uint64_t)(c->end - start);
        const uint64_t aligned = (head + alignment - 1) & ~(alignment - 1);
        const uint8_t *begin = start + (aligned < size ? aligned : size);
        for (uint64_t i = 0; i < count && is_read; i++) {
            is_read = gguf_place(f, begin, c->end, alignment, &f->entries[i], offsets[i]);
        }
    }
    free(offsets);
    return is_read && weight_sort(f);
}

GGUF_API bool gguf_is(const weight_bytes *bytes) {
    return bytes->size >= 4 && memcmp(bytes->data, "GGUF", 4) == 0;
}

/* Lists what is in these bytes, which must stay where they are until weight_close. */
GGUF_API bool gguf_open(weight_file *f, const weight_bytes *bytes) {
    gguf_cursor c = {bytes->data, bytes->data + bytes->size, false};
    const uint64_t magic = gguf_take_number(&c, 4), version = gguf_take_number(&c, 4);
    const uint64_t tensors = gguf_take_number(&c, 8), values = gguf_take_number(&c, 8);
    if (c.failed || magic != 0x46554747u) {
        return weight_fail(f->error, "it is no GGUF file");
    }
    if (version != 2 && version != 3) {
        return weight_fail(f->error, "GGUF: version %llu%s; versions 2 and 3 can be read",
                           (unsigned long long)version,
                           (version & 0xffff) == 0 ? " (the file is big-endian)" : "");
    }
    return gguf_read_values(f, &c, values) && gguf_read_tensors(f, &c, bytes->data, tensors);
}

#endif // MEMSCALE_GGUF_H
