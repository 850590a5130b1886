/*  sweep.h - plans over budgets, from the smallest that there is to the plain one. */
#ifndef MEMSCALE_ESTIMATE_SWEEP_H
#define MEMSCALE_ESTIMATE_SWEEP_H

#include "advice.h"

enum { SWEEP_POINTS = 25 };

/* One mode over budgets, from the smallest that fits to the peak of the plain plan. */
typedef struct sweep {
    ms_mode mode;
    double budget[SWEEP_POINTS], peak[SWEEP_POINTS], ratio[SWEEP_POINTS]; // bytes; over plain
    int count;
} sweep;

/* A budget of a sweep. */
typedef struct sweep_point {
    uint64_t budget, peak;
    double ratio;
    bool is_planned, fits;
} sweep_point;

static int plan_point(const estimate *e, const findings *f, int mode, sweep_point *at) {
    plan p;
    const int status = plan_budget(e, e->options.batch, modes[mode], at->budget, &p);
    at->is_planned = status == 0;
    at->fits = p.fits;
    at->peak = p.report.arena_bytes;
    at->ratio = p.fits ? over_plain(f, &p) : 0.0;
    return status;
}

/* What cannot be seen in the picture: a hundredth of its height. */
static double least_seen(const sweep_point *points) {
    double least = 1.0, most = 1.0;
    for (int i = 0; i < SWEEP_POINTS; i++) {
        least = points[i].fits && points[i].ratio < least ? points[i].ratio : least;
        most = points[i].fits && points[i].ratio > most ? points[i].ratio : most;
    }
    return most - least > 0.2 ? 0.01 * (most - least) : 0.002;
}

/* Whether the plan for a budget can be drawn as lying between those on both sides of it: neither
   peaks nor times go the wrong way, so that it cannot differ from them by more than they do. */
static bool is_drawn_without(const sweep_point *below, const sweep_point *above, double seen) {
    return !below->is_planned || !above->is_planned ||
           (below->fits && above->fits && fabs(below->ratio - above->ratio) < seen);
}

/* Plans the points that are wanted, in several threads. */
static int plan_points(const estimate *e, const findings *f, int mode, sweep_point *points,
                       const bool *is_wanted) {
    int failed = 0, count = 0;
    for (int i = 0; i < SWEEP_POINTS; i++) {
        count += is_wanted[i];
    }
    expect_plans(e, count);
#ifdef _OPENMP
#pragma omp parallel for schedule(dynamic) reduction(+ : failed)
#endif
    for (int i = 0; i < SWEEP_POINTS; i++) {
        failed += is_wanted[i] && plan_point(e, f, mode, &points[i]) != 0;
    }
    return failed != 0;
}

/* Every eighth budget first, then the middles of the intervals in which the time changes. */
static int make_sweep(const estimate *e, const findings *f, int mode, sweep *s) {
    const uint64_t least = f->smallest[mode].report.arena_bytes;
    const uint64_t most = f->plain.report.arena_bytes;
    sweep_point points[SWEEP_POINTS];
    bool is_wanted[SWEEP_POINTS];
    memset(points, 0, sizeof points);
    for (int i = 0; i < SWEEP_POINTS; i++) {
        const double share = (double)i / (double)(SWEEP_POINTS - 1);
        points[i].budget =
            i + 1 == SWEEP_POINTS ? most : least + (uint64_t)(share * (double)(most - least));
    }
    for (int step = 8; step > 0; step /= 2) {
        const double seen = least_seen(points);
        for (int i = 0; i < SWEEP_POINTS; i++) {
            is_wanted[i] = step == 8
                               ? i % 8 == 0
                               : i % (2 * step) == step &&
                                     !is_drawn_without(&points[i - step], &points[i + step], seen);
        }
        if (plan_points(e, f, mode, points, is_wanted) != 0) {
            return 1;
        }
    }
    s->mode = modes[mode];
    s->count = 0;
    for (int i = 0; i < SWEEP_POINTS; i++) {
        if (points[i].is_planned && points[i].fits) {
            s->budget[s->count] = (double)points[i].budget;
            s->peak[s->count] = (double)points[i].peak;
            s->ratio[s->count++] = points[i].ratio;
        }
    }
    return 0;
}

/* Of the modes that plan differently. */
typedef struct all_sweeps {
    sweep of[MODES];
    bool is_drawn[MODES];
} all_sweeps;

static int make_sweeps(const estimate *e, const findings *f, all_sweeps *all) {
    int status = 0;
    for (int i = 0; i < MODES; i++) {
        all->is_drawn[i] = f->same_as[i] == i;
        status = status == 0 && all->is_drawn[i] ? make_sweep(e, f, i, &all->of[i]) : status;
    }
    return status;
}

#endif // MEMSCALE_ESTIMATE_SWEEP_H
