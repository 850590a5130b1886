// What the snippets of the documents take as given.
#ifndef SNIPPETS_H
#define SNIPPETS_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "memscale.h"

static ms_model *model, *m;
static ms_config config;
static ms_tensor tokens, targets, weight, weights, x;
static float initial_values[16], initial[16];
static int32_t batch[16];
static double loss;

static inline void my_log(ms_log_level level, const char *tag, const char *text, void *user) {
    (void)user;
    fprintf(stderr, "%d %s: %s\n", (int)level, tag, text);
}

#endif // SNIPPETS_H
