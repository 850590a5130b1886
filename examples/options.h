/*  options.h - what the command lines of gpt2.c and cnn.c share. OPTIONS_PROGRAM is the program's
    name, defined before the include. */
#ifndef MEMSCALE_OPTIONS_H
#define MEMSCALE_OPTIONS_H

#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Says what is wrong, behind what was printed so far. Returns 1. */
static int fail(const char *format, ...) {
    va_list args;
    va_start(args, format);
    fflush(stdout);
    fprintf(stderr, OPTIONS_PROGRAM ": ");
    vfprintf(stderr, format, args);
    fprintf(stderr, "\n");
    va_end(args);
    return 1;
}

/* A positive number, with a suffix K, M or G (powers of 1024) where `scaled`; 0 if it is none. */
static double parse_number(const char *text, bool scaled) {
    static const char suffixes[] = "KMG";
    char *end;
    double value = strtod(text, &end);
    const char *suffix = scaled && *end ? strchr(suffixes, *end) : NULL;
    if (suffix) {
        value *= (double)((uint64_t)1024 << (10 * (suffix - suffixes)));
        end++;
    }
    return *end == 0 && value > 0.0 && value < 9e18 ? value : 0.0;
}

/* A whole number from 1 to `most`; 0, and the reason, if it is none. */
static int64_t parse_count(const char *name, const char *text, double most) {
    const double value = parse_number(text, false);
    if (value >= 1.0 && value <= most && value - (double)(int64_t)value == 0.0) {
        return (int64_t)value;
    }
    fail("%s %s: give a whole number from 1 to %.0f", name, text, most);
    return 0;
}

#endif // MEMSCALE_OPTIONS_H
