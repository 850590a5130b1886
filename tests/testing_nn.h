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

typedef struct t_technique {
    ms_technique kind;
    bool is_applied;
} t_technique;

static inline void t_note_technique(const ms_decision *decision, void *user) {
    t_technique *technique = (t_technique *)user;
    technique->is_applied |= decision->technique == technique->kind && decision->is_applied;
}

/* Whether the plan uses it for any value. */
static inline bool t_is_applied(const ms_model *model, ms_technique kind) {
    t_technique technique = {kind, false};
    assert_int_equal(ms_visit_decisions(model, t_note_technique, &technique), MS_RESULT_OK);
    return technique.is_applied;
}

/* Whether the plan has anything in 16 bits. */
static inline bool t_is_half(const ms_model *model) {
    return t_is_applied(model, MS_TECHNIQUE_MIXED_PRECISION);
}

#endif // TESTING_NN_H
