/*  json.h - writes JSON by RFC 8259: commas where they belong, strings in UTF-8, null for what is not a
    finite number. */
#ifndef MEMSCALE_ESTIMATE_JSON_H
#define MEMSCALE_ESTIMATE_JSON_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#if defined(__GNUC__)
#define JSON_API static __attribute__((unused))
#else
#define JSON_API static
#endif

typedef struct json {
    FILE *file;
    int depth;
    bool has_items; // there is an element before, at this depth
    bool is_row;    // in one line
} json;

JSON_API void json_string(json *j, const char *text) {
    fputc('"', j->file);
    for (const unsigned char *c = (const unsigned char *)text; *c; c++) {
        if (*c < 32 || *c == 127 || *c == '"' || *c == '\\' || *c == '<') { // "</script>" too
            fprintf(j->file, "\\u%04x", (unsigned)*c);
        } else {
            fputc(*c, j->file);
        }
    }
    fputc('"', j->file);
}

/* The key of a member; NULL for an element of an array. */
JSON_API void json_key(json *j, const char *key) {
    fprintf(j->file, "%s", j->has_items ? "," : "");
    if (!j->is_row) {
        fprintf(j->file, "\n%*s", 2 * j->depth, "");
    }
    j->has_items = true;
    if (key) {
        json_string(j, key);
        fprintf(j->file, ": ");
    }
}

JSON_API void json_open(json *j, const char *key, char bracket) {
    if (j->depth > 0) {
        json_key(j, key);
    }
    fputc(bracket, j->file);
    j->depth++;
    j->has_items = false;
}

JSON_API void json_close(json *j, char bracket) {
    j->depth--;
    if (!j->is_row) {
        fprintf(j->file, "\n%*s", 2 * j->depth, "");
    }
    fputc(bracket, j->file);
    j->has_items = true;
}

JSON_API void json_text(json *j, const char *key, const char *text) {
    json_key(j, key);
    json_string(j, text);
}

JSON_API void json_count(json *j, const char *key, uint64_t count) {
    json_key(j, key);
    fprintf(j->file, "%llu", (unsigned long long)count);
}

/* By its bits, since -ffast-math lets compilers assume that every number is finite. */
JSON_API bool is_finite(double value) {
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (bits >> 52 & 0x7ff) != 0x7ff;
}

JSON_API void json_real(json *j, const char *key, double value) {
    json_key(j, key);
    if (is_finite(value)) {
        fprintf(j->file, "%.9g", value);
    } else {
        fprintf(j->file, "null");
    }
}

JSON_API void json_flag(json *j, const char *key, bool value) {
    json_key(j, key);
    fprintf(j->file, value ? "true" : "false");
}

/* An array in a line of its own. */
JSON_API void json_open_row(json *j, const char *key) {
    json_open(j, key, '[');
    j->is_row = true;
}

JSON_API void json_close_row(json *j) {
    json_close(j, ']');
    j->is_row = false;
}

#endif // MEMSCALE_ESTIMATE_JSON_H
