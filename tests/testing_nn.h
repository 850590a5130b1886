/*  testing_nn.h - the device that tests of nn.h run on: the CPU, or, where T_CUDA is defined, the
    CUDA device, true or emulated. After memscale.h, nn.h and testing.h. */
#ifndef TESTING_NN_H
#define TESTING_NN_H

#ifdef T_CUDA
static bool t_on_cpu = false; // set where the two are compared
#else
static const bool t_on_cpu = true;
#endif

/* What a case of a layer is to have. */
enum {
    T_CAUSAL = 1,
    T_SAVE_SCORES = 2,
    T_BIAS = 4,
    T_POSITIONS = 8,
    T_SEGMENTS = 16,
    T_ERF = 32,
    T_POST_NORM = 64
};

static inline const nn_device *t_nn_device(void) {
#ifdef T_CUDA
    return t_on_cpu ? nn_cpu() : nn_cuda();
#else
    return nn_cpu();
#endif
}

/* cuBLAS gets little workspace, so that it does not hide what a plan saves in a small model. */
static inline ms_config t_device_config(void) {
    ms_config config = t_config();
#ifdef T_CUDA
    if (!t_on_cpu) {
        config.backend = ms_backend_cuda(0);
        config.backend.workspace_bytes = 16384;
    }
#endif
    return config;
}

static inline void t_note_half(const ms_decision *decision, void *user) {
    *(bool *)user |= decision->technique == MS_TECHNIQUE_MIXED_PRECISION && decision->is_applied;
}

/* Whether the plan has anything in 16 bits. */
static inline bool t_is_half(const ms_model *model) {
    bool is_half = false;
    assert_int_equal(ms_visit_decisions(model, t_note_half, &is_half), MS_RESULT_OK);
    return is_half;
}

#endif // TESTING_NN_H
