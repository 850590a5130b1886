/*  chains.h - chains of stages, in the form that benchmarks of checkpointing use, read from CSV or
    made by hand, and registered as a model. Include memscale.h first.

    Stage i reads x[i] (ain bytes) and writes x[i+1] (aout bytes). A forward that is kept leaves
    abar bytes, its output included; one that is dropped leaves only its output. Backward needs
    input, output and the rest of abar, the gradients of both, and tmpb bytes; forward needs tmpf
    bytes.
*/
#ifndef MEMSCALE_BENCH_CHAINS_H
#define MEMSCALE_BENCH_CHAINS_H

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined(__GNUC__)
#define CHAIN_API static __attribute__((unused))
#else
#define CHAIN_API static
#endif

typedef struct chain_stage {
    uint64_t ain, aout, abar, tmpf, tmpb;
    double tf, tb;
} chain_stage;

typedef struct chain {
    chain_stage *stages;
    uint32_t count, capacity;
} chain;

static const char CHAIN_HEADER[] = "stage,ain,aout,abar,tf,tb,tmpf,tmpb";

/* The arena rounds each tensor up to 64 bytes: a byte of the chain is this many in the model, so
   that nothing is lost. */
enum { CHAIN_ROWS = 32, CHAIN_SCALE = CHAIN_ROWS * (int)sizeof(float) };

/* In a model the chain comes after a layer that makes x[0], whose param (one element) makes it
   want a gradient, and before the loss (one element). Both are in memory while backwards run. While
   forwards run the loss is not: 64 unused bytes, less than a byte of the chain. */
enum { CHAIN_EXTRA_BYTES = 2 * 64 };

/* Times are seconds. The layers around the chain take this tiny share of them, and so does a stage
   whose time is 0: for ms_set_layer_time, 0 is a time that is not known. */
static const double CHAIN_US = 1e6, CHAIN_NO_TIME = 1e-12;

// ------------------------------------------------------------------------------------------------
// >>stages

/* Adds a stage; returns what is wrong with it, or NULL. */
CHAIN_API const char *chain_add(chain *c, const chain_stage *s) {
    const uint64_t limit = (uint64_t)1 << 40;
    if (s->ain == 0 || s->aout == 0 || s->abar < s->aout) {
        return "ain and aout must be at least 1, abar at least aout";
    }
    if (s->ain > limit || s->abar > limit || s->tmpf > limit || s->tmpb > limit) {
        return "a size is beyond 2^40 bytes";
    }
    if (!(s->tf >= 0.0 && s->tb >= 0.0 && s->tf < 1e15 && s->tb < 1e15)) {
        return "times must be from 0 to 1e15";
    }
    if (c->count > 0 && c->stages[c->count - 1].aout != s->ain) {
        return "ain must be the aout of the stage before";
    }
    if (c->count == c->capacity) {
        const uint32_t capacity = c->capacity ? 2 * c->capacity : 64;
        chain_stage *grown = (chain_stage *)realloc(c->stages, capacity * sizeof *grown);
        if (!grown) {
            return "out of memory";
        }
        c->stages = grown;
        c->capacity = capacity;
    }
    c->stages[c->count++] = *s;
    return NULL;
}

CHAIN_API void chain_free(chain *c) {
    free(c->stages);
    memset(c, 0, sizeof *c);
}

/* Reads the number at *text, and moves *text after it and the comma that follows; false if there is
   none. Sizes have only digits; a time may have a point and an exponent. */
CHAIN_API bool chain_take(const char **text, uint64_t *whole, double *real) {
    char *end;
    if ((**text < '0' || **text > '9') && !(real && **text == '.')) {
        return false;
    }
    errno = 0;
    if (real) {
        *real = strtod(*text, &end);
    } else {
        *whole = strtoull(*text, &end, 10);
    }
    if (errno != 0 || (*end != ',' && *end != '\0')) {
        return false;
    }
    *text = *end ? end + 1 : end;
    return true;
}

/* Adds the stage of one line; returns what is wrong with it, or NULL. */
CHAIN_API const char *chain_add_line(chain *c, const char *line) {
    chain_stage s;
    uint64_t number;
    if (!chain_take(&line, &number, NULL) || !chain_take(&line, &s.ain, NULL) ||
        !chain_take(&line, &s.aout, NULL) || !chain_take(&line, &s.abar, NULL) ||
        !chain_take(&line, NULL, &s.tf) || !chain_take(&line, NULL, &s.tb) ||
        !chain_take(&line, &s.tmpf, NULL) || !chain_take(&line, &s.tmpb, NULL) || *line) {
        return "not eight numbers from 0 on: stage, ain, aout, abar, tf, tb, tmpf, tmpb";
    }
    return number == c->count ? chain_add(c, &s) : "stages must be numbered 0, 1, 2 and so on";
}

/* Reads a file. Returns what is wrong, at *number (0: the file itself), or NULL. */
CHAIN_API const char *chain_read(chain *c, const char *path, uint64_t *number) {
    char line[512];
    const char *wrong = NULL;
    memset(c, 0, sizeof *c);
    *number = 0;
    FILE *file = fopen(path, "r");
    if (!file) {
        return strerror(errno);
    }
    while (!wrong && fgets(line, sizeof line, file)) {
        const size_t length = strcspn(line, "\r\n");
        const bool complete = length + 1 < sizeof line;
        ++*number;
        line[length] = '\0';
        if (!complete) {
            wrong = "the line is too long";
        } else if (*number == 1) {
            wrong = strcmp(line, CHAIN_HEADER) == 0
                        ? NULL
                        : "the first line must be stage,ain,aout,abar,tf,tb,tmpf,tmpb";
        } else if (length > 0) {
            wrong = chain_add_line(c, line);
        }
    }
    if (!wrong && (ferror(file) || c->count == 0)) {
        wrong = ferror(file) ? "cannot be read" : "no stages in this file";
        *number = 0;
    }
    fclose(file);
    return wrong;
}

/* Time of a step that recomputes nothing. */
CHAIN_API double chain_time(const chain *c) {
    double time = 0.0;
    for (uint32_t i = 0; i < c->count; i++) {
        time += c->stages[i].tf + c->stages[i].tb;
    }
    return time;
}

/* Peak of a step that keeps everything. */
CHAIN_API uint64_t chain_peak(const chain *c) {
    uint64_t held = c->stages[0].ain, peak = 0;
    for (uint32_t i = 0; i < c->count; i++) {
        const chain_stage *s = &c->stages[i];
        held += s->abar;
        const uint64_t backward = s->aout + s->ain + s->tmpb;
        const uint64_t most = backward > s->tmpf ? backward : s->tmpf;
        peak = held + most > peak ? held + most : peak;
    }
    return peak;
}

// ------------------------------------------------------------------------------------------------
// >>model

/* A byte of the chain is an element of each row. */
CHAIN_API ms_shape chain_shape(uint64_t bytes) {
    return ms_shape2(CHAIN_ROWS, (int64_t)bytes);
}

CHAIN_API void chain_register_ends(ms_model *m, ms_tensor *x, bool is_loss, const char *name,
                                   double us) {
    ms_layer_desc d;
    ms_layer_time time;
    memset(&d, 0, sizeof d);
    d.name = name;
    d.no_recompute = true;
    d.backward_reads.nothing = true;
    if (is_loss) {
        d.in[0] = *x;
        d.out[0] = *x = ms_activation(m, "loss", MS_DTYPE_F32, ms_shape1(1));
    } else {
        d.param[0] = ms_param(m, "start", MS_DTYPE_F32, ms_shape1(1));
        d.out[0] = *x;
    }
    time.forward_us = time.backward_us = time.recompute_us = us;
    ms_set_layer_time(m, ms_register_layer(m, &d), &time);
}

CHAIN_API ms_tensor chain_register_stage(ms_model *m, const chain_stage *s, uint32_t number,
                                         ms_tensor x, bool tiles, double least_us) {
    ms_layer_desc d;
    ms_layer_time time;
    char name[32], out[32], saved[32];
    memset(&d, 0, sizeof d);
    snprintf(name, sizeof name, "stage %u", (unsigned)number);
    snprintf(out, sizeof out, "x%u", (unsigned)number + 1);
    snprintf(saved, sizeof saved, "saved%u", (unsigned)number);
    d.name = name;
    d.in[0] = x;
    d.out[0] = ms_activation(m, out, MS_DTYPE_F32, chain_shape(s->aout));
    if (s->abar > s->aout) {
        d.saved[0] = ms_saved(m, saved, MS_DTYPE_F32, chain_shape(s->abar - s->aout));
        d.optional_saved = 1;
    }
    d.forward_workspace.bytes = s->tmpf * CHAIN_SCALE;
    d.backward_workspace.bytes = s->tmpb * CHAIN_SCALE;
    d.tile.axes = tiles;
    time.forward_us = CHAIN_US * s->tf > least_us ? CHAIN_US * s->tf : least_us;
    time.backward_us = CHAIN_US * s->tb > least_us ? CHAIN_US * s->tb : least_us;
    time.recompute_us = time.forward_us;
    ms_set_layer_time(m, ms_register_layer(m, &d), &time);
    return d.out[0];
}

/* Registers the chain, without callbacks: for a dry run with early_update OFF. With `tiles` the
   rows of stages are independent; each tile has all of the workspace. Errors stick to the model. */
CHAIN_API void chain_register(ms_model *m, const chain *c, bool tiles) {
    const double no_us = CHAIN_NO_TIME * CHAIN_US * (chain_time(c) > 0.0 ? chain_time(c) : 1.0);
    ms_optimizer_desc optimizer;
    memset(&optimizer, 0, sizeof optimizer);
    optimizer.kind = MS_OPTIMIZER_NONE;
    ms_set_optimizer(m, &optimizer);
    ms_tensor x = ms_activation(m, "x0", MS_DTYPE_F32, chain_shape(c->stages[0].ain));
    chain_register_ends(m, &x, false, "source", no_us);
    for (uint32_t i = 0; i < c->count; i++) {
        x = chain_register_stage(m, &c->stages[i], i, x, tiles, no_us);
    }
    chain_register_ends(m, &x, true, "loss", no_us);
    ms_set_loss(m, x);
}

/* The budget of the model for one of the chain, and what an arena of the model is for the chain. */
CHAIN_API uint64_t chain_budget(uint64_t bytes) {
    const uint64_t most = (UINT64_MAX - CHAIN_EXTRA_BYTES) / CHAIN_SCALE;
    return (bytes < most ? bytes : most) * CHAIN_SCALE + CHAIN_EXTRA_BYTES;
}

CHAIN_API uint64_t chain_bytes(uint64_t arena_bytes) {
    return (arena_bytes - CHAIN_EXTRA_BYTES + CHAIN_SCALE - 1) / CHAIN_SCALE;
}

#endif // MEMSCALE_BENCH_CHAINS_H
