/*  training.h - how the model is trained: the optimizer, and the formats of numbers. */
#ifndef MEMSCALE_ESTIMATE_TRAINING_H
#define MEMSCALE_ESTIMATE_TRAINING_H

#include "settings.h"

static const struct {
    const char *name, *title;
    ms_optimizer_kind kind;
    float momentum;
} optimizers[] = {{"adamw", "AdamW", MS_OPTIMIZER_ADAMW, 0.0f},
                  {"lion", "Lion", MS_OPTIMIZER_LION, 0.0f},
                  {"sgd", "SGD", MS_OPTIMIZER_SGD, 0.0f},
                  {"momentum", "SGD with momentum", MS_OPTIMIZER_SGD, 0.9f}};
enum { OPTIMIZERS = sizeof optimizers / sizeof optimizers[0] };

/* The number of the optimizer; OPTIMIZERS: there is none of that name. */
static int optimizer_of(const settings *o) {
    int i = 0;
    while (o->optimizer && i < OPTIMIZERS && !has_suffix(o->optimizer, optimizers[i].name)) {
        i++;
    }
    return i;
}

/* What the layers compute in, and who decides it. */
typedef struct precision {
    const char *name;
    ms_dtype dtype;
    ms_switch mixed;   // ms_config.mixed_precision; ON: forced for each layer
    ms_switch masters; // ms_config.master_weights
    bool tf32;
} precision;

/* The first is that of a run that says nothing. */
static const precision precisions[] = {
    {"f32", MS_DTYPE_F32, MS_SWITCH_DEFAULT, MS_SWITCH_DEFAULT, false},
    {"f32", MS_DTYPE_F32, MS_SWITCH_OFF, MS_SWITCH_DEFAULT, false},
    {"tf32", MS_DTYPE_F32, MS_SWITCH_DEFAULT, MS_SWITCH_DEFAULT, true},
    {"bf16", MS_DTYPE_BF16, MS_SWITCH_ON, MS_SWITCH_DEFAULT, false},
    {"bf16-alone", MS_DTYPE_BF16, MS_SWITCH_ON, MS_SWITCH_OFF, false},
    {"f16", MS_DTYPE_F16, MS_SWITCH_ON, MS_SWITCH_DEFAULT, false},
    {"f16-alone", MS_DTYPE_F16, MS_SWITCH_ON, MS_SWITCH_OFF, false}};
enum { PRECISIONS = sizeof precisions / sizeof precisions[0] };

/* NULL: there is none of that name. */
static const precision *precision_of(const settings *o) {
    for (int i = 1; o->precision && i < PRECISIONS; i++) {
        if (has_suffix(o->precision, precisions[i].name)) {
            return &precisions[i];
        }
    }
    return o->precision ? NULL : &precisions[0];
}

static const char *name_of_dtype(ms_dtype dtype) {
    return dtype == MS_DTYPE_BF16 ? "bf16" : dtype == MS_DTYPE_F16 ? "f16" : "f32";
}

/* Whether gradients of weights are in 16 bits too. */
static bool has_half_gradients(const settings *o) {
    return o->gradients && !has_suffix(o->gradients, "f32");
}

static bool has_half_state(const settings *o) {
    return o->state && has_suffix(o->state, "bf16");
}

static bool has_state(const settings *o) {
    const int i = optimizer_of(o);
    return optimizers[i].kind != MS_OPTIMIZER_SGD || optimizers[i].momentum > 0.0f;
}

static int choose_formats(const settings *o) {
    const precision *p = precision_of(o);
    if (!p) {
        return fail("--precision %s: there are f32, tf32, bf16, f16, bf16-alone and f16-alone",
                    o->precision);
    }
    if (o->gradients && !has_suffix(o->gradients, "f32") &&
        !has_suffix(o->gradients, name_of_dtype(p->dtype))) {
        return p->dtype == MS_DTYPE_F32
                   ? fail("--gradients %s: f32, unless --precision is in 16 bits", o->gradients)
                   : fail("--gradients %s: with --precision %s there are f32 and %s", o->gradients,
                          p->name, name_of_dtype(p->dtype));
    }
    if (o->state && !has_suffix(o->state, "f32") && !has_suffix(o->state, "bf16")) {
        return fail("--state %s: there are f32 and bf16", o->state);
    }
    return o->state && !has_state(o) ? fail("--state: SGD without momentum has none") : 0;
}

enum { MOST_RANKS = 1000 };

static int choose_training(settings *o) {
    if (o->accumulate && o->tokens) {
        return fail("--accumulate and --tokens: give one of them, since the other follows");
    }
    o->accumulate = o->accumulate ? o->accumulate : 1;
    if (o->network && !o->ranks) {
        return fail("--network: between the devices that --ranks counts");
    }
    o->ranks = o->ranks ? o->ranks : 1;
    if (check_most("--ranks", o->ranks, MOST_RANKS) != 0) {
        return 1;
    }
    if (o->rank && !o->frozen) {
        return fail("--rank: of the adapters that --frozen trains");
    }
    o->rank = o->frozen && !o->rank ? 8 : o->rank;
    if (o->mode && find_mode(o->mode) == MODES) {
        return fail("--mode %s: there are conservative, balanced and aggressive", o->mode);
    }
    if (optimizer_of(o) == OPTIMIZERS) {
        return fail("--optimizer %s: there are adamw, lion, sgd and momentum", o->optimizer);
    }
    return choose_offloading(o->offload, &o->offloading) != 0 || choose_formats(o) != 0;
}

/* Whether all gradients of params must exist at once, so that none is updated inside backward. */
static bool needs_all_gradients(const settings *o) {
    return o->clip > 0.0f || batches_of_step(o, o->batch) > 1 ||
           precision_of(o)->dtype == MS_DTYPE_F16;
}

static void set_optimizer(const settings *o, ms_model *model) {
    ms_optimizer_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.kind = optimizers[optimizer_of(o)].kind;
    desc.momentum = optimizers[optimizer_of(o)].momentum;
    desc.grad_clip_norm = o->clip;
    desc.state_format[0] = desc.state_format[1] =
        has_half_state(o) ? MS_STATE_FORMAT_BF16 : MS_STATE_FORMAT_F32;
    ms_set_optimizer(model, &desc);
}

#endif // MEMSCALE_ESTIMATE_TRAINING_H
