/*  output.h - what text, JSON, pictures and pages have in common: units, names, files. */
#ifndef MEMSCALE_ESTIMATE_OUTPUT_H
#define MEMSCALE_ESTIMATE_OUTPUT_H

#include "advice.h"

#include <errno.h>

/* A number of bytes in the unit of the whole table. */
typedef struct unit {
    const char *name;
    double bytes;
    int digits;
} unit;

static unit unit_for(uint64_t largest_bytes) {
    const unit mebi = {"MiB", 1048576.0, 1}, gibi = {"GiB", 1073741824.0, 2};
    return largest_bytes < (uint64_t)4 << 30 ? mebi : gibi;
}

typedef struct size_text {
    char text[32];
} size_text;

/* Rounded up, so that a budget that is typed in again is large enough. */
static size_text show_bytes(uint64_t bytes) {
    const unit u = unit_for(bytes);
    size_text s;
    snprintf(s.text, sizeof s.text, "%.*f %s", u.digits,
             rounded_up((double)bytes / u.bytes, u.digits), u.name);
    return s;
}

static size_text show_time(double us) {
    static const struct {
        const char *name;
        double us;
    } units[] = {{"h", 3.6e9}, {"min", 6e7}, {"s", 1e6}, {"ms", 1e3}};
    const int last = sizeof units / sizeof units[0] - 1;
    size_text s;
    int i = 0;
    while (i < last && us < 2.0 * units[i].us) {
        i++;
    }
    snprintf(s.text, sizeof s.text, "%.*f %s", us < 10.0 * units[i].us ? 2 : 1, us / units[i].us,
             units[i].name);
    return s;
}

/* Names of the categories in the table. */
static const struct {
    const char *name, *key;
    ms_category parts[3];
    int count;
} table_rows[] = {
    {"params", "params_bytes", {MS_CATEGORY_PARAM}, 1},
    {"gradients", "gradients_bytes", {MS_CATEGORY_GRADIENT}, 1},
    {"optimizer state", "optimizer_bytes", {MS_CATEGORY_OPTIMIZER}, 1},
    {"activations",
     "activations_bytes",
     {MS_CATEGORY_ACTIVATION, MS_CATEGORY_ACTIVATION_GRADIENT, MS_CATEGORY_SAVED},
     3},
    {"inputs", "inputs_bytes", {MS_CATEGORY_INPUT, MS_CATEGORY_BUFFER}, 2},
    {"workspace", "workspace_bytes", {MS_CATEGORY_WORKSPACE}, 1},
};
enum { ROWS = sizeof table_rows / sizeof table_rows[0] };

static uint64_t row_bytes(const uint64_t *categories, int row) {
    uint64_t bytes = 0;
    for (int i = 0; i < table_rows[row].count; i++) {
        bytes += categories[table_rows[row].parts[i]];
    }
    return bytes;
}

/* The part of a step for which the busier direction of the link copies. */
static double link_share(const ms_memory_report *r) {
    const double us = r->to_device_us > r->to_host_us ? r->to_device_us : r->to_host_us;
    return us / r->last_micro_us;
}

/* Of titles; nothing if there is one rank. */
static size_text show_ranks(const estimate *e) {
    size_text s;
    s.text[0] = 0;
    if (e->options.ranks > 1) {
        snprintf(s.text, sizeof s.text, " on each of %d ranks", (int)e->options.ranks);
    }
    return s;
}

/* The part of a step for which the ranks exchange. */
static double network_share(const ms_memory_report *r) {
    return (r->gather_us + r->reduce_us) / r->last_micro_us;
}

/* The part of some elements of which each rank has a part; below 0: there are none. */
static double share_divided(const shard_count *s) {
    return s->all > 0 ? (double)s->divided / (double)s->all : -1.0;
}

/* Names of what may be divided among ranks. */
static const struct {
    const char *name, *key;
} shard_names[SHARD_KINDS] = {{"state divided", "state_divided"},
                              {"gradients divided", "gradients_divided"},
                              {"params divided", "params_divided"}};

/* What a plan rounds that the plain one does not. */
typedef struct rounding_text {
    char text[96];
} rounding_text;

static rounding_text show_rounding(const findings *f, const plan *p) {
    const struct {
        const char *text;
        ms_technique technique;
    } parts[] = {{p->half == MS_DTYPE_F16 ? "F16" : "BF16", MS_TECHNIQUE_MIXED_PRECISION},
                 {"8 bits (optimizer state)", MS_TECHNIQUE_OPTIMIZER_8BIT},
                 {"sums of another order", MS_TECHNIQUE_TILING}};
    rounding_text r;
    r.text[0] = 0;
    for (int i = 0; i < 3; i++) {
        if (p->applies[parts[i].technique] && !f->plain.applies[parts[i].technique]) {
            const size_t used = strlen(r.text);
            snprintf(r.text + used, sizeof r.text - used, "%s%s", used ? ", " : "", parts[i].text);
        }
    }
    return r;
}

/* Ends what was written to a file; returns `status`, or prints what went wrong and returns 1. */
static int close_file(FILE *file, const char *path, int status) {
    const bool failed = ferror(file) != 0;
    return fclose(file) != 0 || failed ? fail("cannot write %s: %s", path, strerror(errno))
                                       : status;
}

static FILE *open_file(const char *path) {
    FILE *file = fopen(path, "wb");
    if (!file) {
        fail("cannot write %s: %s", path, strerror(errno));
    }
    return file;
}

#endif // MEMSCALE_ESTIMATE_OUTPUT_H
