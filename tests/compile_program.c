// A whole program for the compile matrix: one scalar param that is pulled to a target. Built alone
// with MEMSCALE_IMPLEMENTATION, or as the user of an implementation in another translation unit.
#include <string.h>

#include "memscale.h"

#ifdef COMPILE_LATE // the bodies at a second include
#define MEMSCALE_IMPLEMENTATION
#include "memscale.h"
#endif

/* loss = (param - target)^2 */
static int square_forward(const ms_call *call) {
    float difference = *(const float *)call->param[0].data - *(const float *)call->in[0].data;
    *(float *)call->out[0].data = difference * difference;
    return 0;
}

static int square_backward(const ms_call *call) {
    float difference = *(const float *)call->param[0].data - *(const float *)call->in[0].data;
    const ms_view *grad = &call->grad_param[0];
    float *g = (float *)grad->data;
    float kept = grad->beta == 0.0f ? 0.0f : grad->beta * *g;
    *g = kept + 2.0f * difference * *(const float *)call->grad_out[0].data;
    return 0;
}

/* Returns the target; the param begins at zero. */
static ms_tensor register_square(ms_model *model) {
    const float zero = 0.0f;
    ms_layer_desc desc;
    ms_shape scalar;
    memset(&desc, 0, sizeof desc);
    memset(&scalar, 0, sizeof scalar);
    desc.name = "square";
    desc.forward = square_forward;
    desc.backward = square_backward;
    desc.in[0] = ms_input(model, "target", MS_DTYPE_F32, scalar);
    desc.param[0] = ms_param(model, "param", MS_DTYPE_F32, scalar);
    desc.out[0] = ms_activation(model, "loss", MS_DTYPE_F32, scalar);
    ms_register_layer(model, &desc);
    ms_set_loss(model, desc.out[0]);
    if (ms_write(model, desc.param[0], &zero) != MS_RESULT_OK) {
        desc.in[0].id = 0;
    }
    return desc.in[0];
}

#ifdef COMPILE_CUDA // a device that is not there is an error, on every machine
static bool refuses_a_missing_device(void) {
    ms_config config;
    ms_model *model;
    memset(&config, 0, sizeof config);
    config.backend = ms_backend_cuda(4096);
    const bool refuses = ms_create(&config, &model) != MS_RESULT_OK && model != NULL;
    ms_destroy(model);
    return refuses;
}
#else
static bool refuses_a_missing_device(void) {
    return true;
}
#endif

int main(void) {
    ms_config config;
    ms_model *model;
    memset(&config, 0, sizeof config);
    config.memory_budget_bytes = 1u << 20; // with MEMSCALE_NO_SYSTEM nothing else is known
    if (ms_create(&config, &model) != MS_RESULT_OK) {
        return 1;
    }
    ms_tensor target = register_square(model);
    ms_set_learning_rate(model, 0.1f);
    const float one = 1.0f;
    double first = 0.0, last = 0.0;
    bool good = ms_write(model, target, &one) == MS_RESULT_OK;
#ifdef MEMSCALE_NO_PLANNER // nothing is loaded, so there is the plain plan alone
    good = good && ms_wrap(model) == MS_RESULT_UNSUPPORTED && ms_detach(model) == MS_RESULT_OK;
    for (int once = 1; once > 0; --once) {
#else
    MS_OPTIMIZE(model) {
#endif
        good = good && ms_step(model, &first) == MS_RESULT_OK;
        for (int step = 1; step < 10; ++step) {
            good = good && ms_step(model, &last) == MS_RESULT_OK;
        }
    }
    ms_destroy(model);
    return good && refuses_a_missing_device() && first > 0.99 && last < 0.5 * first ? 0 : 1;
}
