/*  slices.h - steps in slices of random length, for tests that compare the bits of steps. A model
    whose config is given to s_slice runs by a clock that moves only when it is read, by a random
    number of microseconds; s_step runs each of its steps in slices, and those of other models at
    once. Between slices it may be suspended and resumed. Include it after testing.h. */
#ifndef SLICES_H
#define SLICES_H

typedef struct s_slicer {
    t_rng rng;
    double now_us;
    uint64_t slices, steps;
} s_slicer;

static s_slicer s_slicers; // of all models

static inline double s_clock(void *user) {
    s_slicer *s = (s_slicer *)user;
    s->now_us += (double)t_below(&s->rng, 8);
    return s->now_us;
}

/* From now on steps of a model with this config, by s_step, are in slices. */
static inline void s_slice(ms_config *config, uint64_t seed) {
    s_slicers.rng = t_seed(seed);
    config->clock = s_clock;
    config->clock_user = &s_slicers;
}

static inline ms_result s_step(ms_model *m, double *loss) {
    s_slicer *s = &s_slicers;
    ms_result result = MS_RESULT_MORE;
    if (m->config.clock != s_clock) {
        return ms_step(m, loss);
    }
    const uint32_t longest = 1 + t_below(&s->rng, 60);
    for (uint64_t k = 0; result == MS_RESULT_MORE; ++k) {
        const bool rest = t_chance(&s->rng, 0.01);
        result = ms_step_slice(m, rest ? UINT64_MAX : (uint64_t)t_below(&s->rng, longest), loss);
        s->slices += 1;
        if (k > 1000000) {
            fail_msg("a step does not come to its end in slices");
        }
        if (result == MS_RESULT_MORE && t_chance(&s->rng, 0.05)) {
            const ms_result refused = ms_step(m, NULL);
            if (refused != MS_RESULT_ORDER) {
                fail_msg("ms_step between slices: %s", ms_result_name(refused));
            }
        }
        if (result == MS_RESULT_MORE && t_chance(&s->rng, 0.03)) {
            const ms_result suspended = ms_suspend(m, NULL);
            result = suspended == MS_RESULT_OK ? ms_resume(m) : suspended;
            result = result == MS_RESULT_OK ? MS_RESULT_MORE : result;
        }
    }
    s->steps += 1;
    return result;
}

#endif // SLICES_H
