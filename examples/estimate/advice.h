/*  advice.h - the plans of all modes, and which of them is advised. */
#ifndef MEMSCALE_ESTIMATE_ADVICE_H
#define MEMSCALE_ESTIMATE_ADVICE_H

#include "plans.h"

typedef struct findings {
    uint32_t techniques[MODES]; // masks of techniques: those that a mode allows
    int same_as[MODES];         // the first mode with the same mask, and so with equal plans
    plan plain;
    plan at_budget[MODES]; // where none fits: the smallest
    plan smallest[MODES];
    plan late;             // the smallest without early updates, where the others have some
    double pressure;       // plain peak over the memory
    int advised;           // of modes
    int rounding;          // of modes: a plan that rounds and is faster; -1: there is none
    bool searched;         // for the largest batch, since this one does not fit
    int64_t largest_batch; // 0: not even one sequence fits
    plan largest;          // its plan, within the budget
    plan single;           // the smallest plan of one sequence
} findings;

/* The largest batch whose smallest plan fits, below one that does not. Peaks grow nearly in
   proportion, so that a line through the ends of the interval leads there in a few plans. */
static int search_batch(const estimate *e, findings *f) {
    const ms_mode mode = MS_MODE_AGGRESSIVE;
    const uint64_t budget = e->device.budget_bytes;
    int64_t low = 1, high = e->options.batch;
    plan p;
    f->searched = true;
    f->single = f->smallest[MODES - 1];
    if (high > 1 && plan_smallest(e, 1, mode, &f->single) != 0) {
        return 1;
    }
    if (!f->single.fits) {
        return 0;
    }
    uint64_t low_bytes = f->single.report.arena_bytes;
    uint64_t high_bytes = f->smallest[MODES - 1].report.arena_bytes;
    for (int i = 0; high - low > 1; i++) {
        const double share = (double)(budget - low_bytes) / (double)(high_bytes - low_bytes);
        int64_t guess = i % 3 == 2 ? low + (high - low) / 2
                                   : low + (int64_t)(share * (double)(high - low)) + (i % 3);
        guess = nn_least(nn_most(guess, low + 1), high - 1);
        if (plan_smallest(e, guess, mode, &p) != 0) {
            return 1;
        }
        if (p.fits) {
            low = guess;
            low_bytes = p.report.arena_bytes;
        } else {
            high = guess;
            high_bytes = p.report.arena_bytes;
        }
    }
    f->largest_batch = low;
    return plan_budget(e, low, mode, budget, &f->largest);
}

/* Whether a plan has other bits than the plain one. */
static bool is_rounded(const findings *f, const plan *p) {
    static const ms_technique rounds[] = {MS_TECHNIQUE_TILING, MS_TECHNIQUE_MIXED_PRECISION,
                                          MS_TECHNIQUE_OPTIMIZER_8BIT};
    bool is = false;
    for (int i = 0; i < 3; i++) {
        is |= p->applies[rounds[i]] && !f->plain.applies[rounds[i]];
    }
    return is;
}

/* Of the modes that fit, with or without rounding, the one with the fastest step; of equal ones the
   most careful. -1: none fits. */
static int fastest_mode(const findings *f, bool rounds) {
    int best = -1;
    for (int i = 0; i < MODES; i++) {
        const plan *p = &f->at_budget[i];
        if (p->fits && is_rounded(f, p) == rounds &&
            (best < 0 || p->report.step_us < f->at_budget[best].report.step_us)) {
            best = i;
        }
    }
    return best;
}

/* A mode that keeps the numbers, and one that is faster because it rounds, by more than predictions
   can tell; where only the latter fits, that one. Where none fits, the most careful that has the techniques of the last. */
static int advise(const estimate *e, findings *f) {
    const double memory =
        (double)(e->device.is_user_size ? e->device.budget_bytes : e->device.memory_bytes);
    f->pressure = (double)f->plain.report.arena_bytes / memory;
    f->advised = fastest_mode(f, false);
    f->rounding = fastest_mode(f, true);
    if (f->advised < 0) {
        f->advised = f->rounding;
    } else if (f->rounding >= 0 && f->at_budget[f->rounding].report.step_us >=
                                       0.995 * f->at_budget[f->advised].report.step_us) {
        f->rounding = -1;
    }
    if (f->advised >= 0) {
        return 0;
    }
    f->advised = f->same_as[MODES - 1];
    return search_batch(e, f);
}

/* A policy that chooses nothing, but notes which techniques the modes allow. */
static uint32_t keep_techniques(const ms_policy_args *args) {
    findings *f = (findings *)args->user;
    for (uint32_t k = 0; k < args->strategy_count; k++) {
        for (int i = 0; i < MODES; i++) {
            if (args->strategies[k].mode == modes[i]) {
                f->techniques[i] = args->strategies[k].techniques;
            }
        }
    }
    return UINT32_MAX;
}

/* Plans a small model for that, since it does not depend on the size. */
static int compare_modes(const estimate *e, findings *f) {
    estimate small = *e;
    plan p;
    ms_config config;
    memset(&config, 0, sizeof config);
    config.auto_policy = true;
    config.policy = keep_techniques;
    config.policy_user = f;
    config.memory_budget_bytes = (uint64_t)1 << 60;
    start_family(&small.model, MODEL_GPT2);
    small.model.of.llama.layers = small.model.of.llama.heads = 1;
    small.model.of.llama.channels = 64;
    small.options.sequence = 64;
    for (int i = 0; i < MODES; i++) {
        f->techniques[i] = UINT32_MAX - (uint32_t)i;
    }
    const int status = make_plan(&small, 1, &config, &p);
    for (int i = 0; i < MODES; i++) {
        f->same_as[i] = 0;
        while (f->techniques[f->same_as[i]] != f->techniques[i]) {
            f->same_as[i]++;
        }
    }
    return status;
}

static int plan_mode(const estimate *e, findings *f, int mode) {
    const int64_t batch = e->options.batch;
    if (plan_smallest(e, batch, modes[mode], &f->smallest[mode]) != 0) {
        return 1;
    }
    f->at_budget[mode] = f->smallest[mode];
    return f->smallest[mode].fits
               ? plan_budget(e, batch, modes[mode], e->device.budget_bytes, &f->at_budget[mode])
               : 0;
}

/* Plans every mode; models of their own share nothing, so that each may have its thread. */
static int plan_modes(const estimate *e, findings *f) {
    int failed = 0, first_count = 0;
    for (int i = 0; i < MODES; i++) {
        first_count += f->same_as[i] == i;
    }
    expect_plans(e, 2 * first_count + 1);
#ifdef _OPENMP
#pragma omp parallel for schedule(dynamic) reduction(+ : failed)
#endif
    for (int i = 0; i < MODES; i++) {
        failed += f->same_as[i] == i && plan_mode(e, f, i) != 0;
    }
    for (int i = 0; i < MODES; i++) {
        f->smallest[i] = f->smallest[f->same_as[i]];
        f->at_budget[i] = f->at_budget[f->same_as[i]];
    }
    return failed != 0;
}

static int find_all(const estimate *e, findings *f) {
    const int64_t batch = e->options.batch;
    memset(f, 0, sizeof *f);
    expect_plans(e, 2 + 2 * MODES + 1);
    if (compare_modes(e, f) != 0 || plan_plain(e, batch, &f->plain) != 0 || plan_modes(e, f) != 0) {
        return 1;
    }
    const plan *last = &f->smallest[MODES - 1];
    if (last->report.early_update &&
        plan_smallest_with(e, batch, modes[MODES - 1], MS_SWITCH_OFF, &f->late) != 0) {
        return 1;
    }
    return advise(e, f);
}

/* The whole step of a plan as a multiple of that of the plain plan with the same batch. */
static double over_plain(const findings *f, const plan *p) {
    return p->report.step_us / f->plain.report.step_us;
}

static bool is_fit(const findings *f) {
    return f->plain.fits || !f->searched;
}

/* The plan that is advised; where none fits, the smallest. */
static const plan *advised_plan(const findings *f) {
    return f->plain.fits ? &f->plain : &f->at_budget[f->advised];
}

static int shown_mode(const estimate *e, const findings *f) {
    return e->options.mode ? find_mode(e->options.mode) : f->advised;
}

#endif // MEMSCALE_ESTIMATE_ADVICE_H
