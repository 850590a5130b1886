/*  bench.h - what the benchmarks share: tables, a clock, the median, what is resident, and the options
    of examples/.

    Include it first: it asks for POSIX, whose clock does not jump. A table is printed for people, or
    with --tsv for programs: a header line, then a line per row, tab-separated, plain numbers.
    bench_markdown_begin makes one for the pages of bench/results.
*/
#ifndef MEMSCALE_BENCH_H
#define MEMSCALE_BENCH_H

#ifndef _POSIX_C_SOURCE
#define _POSIX_C_SOURCE 200809L
#endif

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "options.h"

#if defined(__GNUC__)
#define BENCH_API static __attribute__((unused))
#else
#define BENCH_API static
#endif

// ------------------------------------------------------------------------------------------------
// >>tables

typedef struct bench_table {
    bool tsv;
    int columns, column; // column: the next to be printed
    bool markdown;
} bench_table;

BENCH_API void bench_cell(bench_table *table, const char *text) {
    if (table->tsv) {
        printf("%s%s", table->column > 0 ? "\t" : "", text);
    } else if (table->markdown) {
        printf(table->column > 0 ? " %s |" : "| %s |", text);
    } else {
        printf(table->column > 0 ? " %14s" : "%-20s", text);
    }
    if (++table->column == table->columns) {
        putchar('\n');
        fflush(stdout);
        table->column = 0;
    }
}

/* names are separated by spaces; a row has as many cells. */
BENCH_API void bench_table_head(bench_table *table, const char *names) {
    table->columns = 1;
    for (const char *c = names; *c; c++) {
        table->columns += *c == ' ';
    }
    char name[64];
    for (int i = 0; i < table->columns; i++) {
        size_t length = strcspn(names, " ");
        snprintf(name, sizeof name, "%.*s", (int)length, names);
        for (char *c = name; table->markdown && *c; c++) {
            *c = *c == '_' ? ' ' : *c;
        }
        bench_cell(table, name);
        names += length + 1;
    }
    for (int i = 0; table->markdown && i < table->columns; i++) {
        printf(i + 1 < table->columns ? "|---" : "|---|\n");
    }
}

BENCH_API bench_table bench_table_begin(bool tsv, const char *names) {
    bench_table table = {tsv, 0, 0, false};
    bench_table_head(&table, names);
    return table;
}

/* A table of a page in Markdown. */
BENCH_API bench_table bench_markdown_begin(const char *names) {
    bench_table table = {false, 0, 0, true};
    bench_table_head(&table, names);
    return table;
}

BENCH_API void bench_count(bench_table *table, uint64_t count) {
    char text[32];
    snprintf(text, sizeof text, "%llu", (unsigned long long)count);
    bench_cell(table, text);
}

BENCH_API void bench_bytes(bench_table *table, uint64_t bytes) {
    if (table->tsv) {
        bench_count(table, bytes);
        return;
    }
    char text[32];
    snprintf(text, sizeof text, "%.1f MB", (double)bytes / 1e6);
    bench_cell(table, text);
}

/* A number with so many digits after the point. */
BENCH_API void bench_value(bench_table *table, double value, int digits) {
    char text[64];
    snprintf(text, sizeof text, "%.*f", digits, value);
    bench_cell(table, text);
}

// ------------------------------------------------------------------------------------------------
// >>time

/* Seconds since some moment in the past. */
BENCH_API double bench_seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

BENCH_API int bench_compare(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Sorts the values: the first is the smallest afterwards, the last the largest. */
BENCH_API double bench_median(double *values, int count) {
    qsort(values, (size_t)count, sizeof *values, bench_compare);
    return 0.5 * (values[(count - 1) / 2] + values[count / 2]);
}

// ------------------------------------------------------------------------------------------------
// >>memory

/* A size of this process, such as "VmRSS", which is resident now, or "VmHWM", the most that was; 0 where
   there is no /proc. */
BENCH_API uint64_t bench_status_bytes(const char *field) {
    char line[128];
    unsigned long long kibibytes = 0;
    const size_t length = strlen(field);
    FILE *file = fopen("/proc/self/status", "r");
    while (file && kibibytes == 0 && fgets(line, sizeof line, file)) {
        if (strncmp(line, field, length) == 0 && line[length] == ':') {
            kibibytes = strtoull(line + length + 1, NULL, 10);
        }
    }
    if (file) {
        fclose(file);
    }
    return (uint64_t)kibibytes * 1024;
}

#endif // MEMSCALE_BENCH_H
