/*  test_recipes.c - the code of docs/recipes.md, which is here word for word (`tests/source.sh recipes`
    compares it): each recipe trains a small net by several plans, and what comes of it is compared with
    loops in float64 and differences of their losses. */
#define _POSIX_C_SOURCE 200809L
#include <pthread.h>
#include <time.h>

#include "private.h"
#include "testing.h"

// ------------------------------------------------------------------------------------------------
// what the recipes take as given

/* out (rows, n) = in (rows, k) W (k, n) */
static int dense_forward(const ms_call *call) {
    return (int)ms_gemm(call, 1.0f, ms_matrix_of(&call->in[0]), ms_matrix_of(&call->param[0]), 0.0f,
                        ms_matrix_of(&call->out[0]));
}

static int dense_backward(const ms_call *call) {
    const ms_view *grad_in = &call->grad_in[0], *grad_W = &call->grad_param[0];
    const ms_matrix grad_out = ms_matrix_of(&call->grad_out[0]);
    if (grad_W->data && ms_gemm(call, 1.0f, ms_transpose(ms_matrix_of(&call->in[0])), grad_out,
                                grad_W->beta, ms_matrix_of(grad_W)) != MS_RESULT_OK) {
        return 1;
    }
    return grad_in->data &&
           ms_gemm(call, 1.0f, grad_out, ms_transpose(ms_matrix_of(&call->param[0])), grad_in->beta,
                   ms_matrix_of(grad_in)) != MS_RESULT_OK;
}

/* out = tanh(in) */
static int tanh_forward(const ms_call *call) {
    for (uint64_t i = 0; i < ms_shape_count(&call->in[0].shape); ++i) {
        ((float *)call->out[0].data)[i] = tanhf(((const float *)call->in[0].data)[i]);
    }
    return 0;
}

static int tanh_backward(const ms_call *call) {
    const ms_view *grad_in = &call->grad_in[0];
    for (uint64_t i = 0; grad_in->data && i < ms_shape_count(&grad_in->shape); ++i) {
        const float out = ((const float *)call->out[0].data)[i];
        const float slope = (1.0f - out * out) * ((const float *)call->grad_out[0].data)[i];
        float *to = (float *)grad_in->data + i;
        *to = slope + (grad_in->beta == 0.0f ? 0.0f : *to);
    }
    return 0;
}

/* out = (in - target)^2, element by element */
static int error_forward(const ms_call *call) {
    const float *in = (const float *)call->in[0].data, *target = (const float *)call->in[1].data;
    for (uint64_t i = 0; i < ms_shape_count(&call->in[0].shape); ++i) {
        ((float *)call->out[0].data)[i] = (in[i] - target[i]) * (in[i] - target[i]);
    }
    return 0;
}

static int error_backward(const ms_call *call) {
    const ms_view *grad_in = &call->grad_in[0];
    const float *in = (const float *)call->in[0].data, *target = (const float *)call->in[1].data;
    for (uint64_t i = 0; grad_in->data && i < ms_shape_count(&grad_in->shape); ++i) {
        const float slope = 2.0f * (in[i] - target[i]) * ((const float *)call->grad_out[0].data)[i];
        float *to = (float *)grad_in->data + i;
        *to = slope + (grad_in->beta == 0.0f ? 0.0f : *to);
    }
    return 0;
}

static ms_tensor add_dense(ms_model *to, ms_tensor in, ms_tensor W) {
    ms_layer_desc d = {0};
    ms_shape shape = ms_tensor_shape(to, in);
    shape.dim[shape.rank - 1] = ms_tensor_shape(to, W).dim[1];
    d.name = "dense", d.forward = dense_forward, d.backward = dense_backward;
    d.in[0] = in, d.param[0] = W;
    d.out[0] = ms_activation(to, "product", MS_DTYPE_F32, shape);
    d.backward_reads.in = d.backward_reads.param = 1;
    ms_register_layer(to, &d);
    return d.out[0];
}

static ms_tensor add_tanh(ms_model *to, ms_tensor in) {
    ms_layer_desc d = {0};
    d.name = "tanh", d.forward = tanh_forward, d.backward = tanh_backward;
    d.in[0] = in;
    d.out[0] = ms_activation(to, "tanh", MS_DTYPE_F32, ms_tensor_shape(to, in));
    d.backward_reads.out = 1;
    ms_register_layer(to, &d);
    return d.out[0];
}

static ms_tensor add_error(ms_model *to, ms_tensor in, ms_tensor target) {
    ms_layer_desc d = {0};
    d.name = "error", d.forward = error_forward, d.backward = error_backward;
    d.in[0] = in, d.in[1] = target;
    d.out[0] = ms_activation(to, "errors", MS_DTYPE_F32, ms_tensor_shape(to, in));
    d.backward_reads.in = 3;
    ms_register_layer(to, &d);
    return d.out[0];
}

// ------------------------------------------------------------------------------------------------
// learning-rate schedules

/* Rises in a line over the first steps, then falls along half a cosine to `last`, and stays there. */
typedef struct schedule {
    uint64_t warmup, steps;
    float peak, last;
} schedule;

static float rate_at(const schedule *s, uint64_t step) {
    if (step < s->warmup) {
        return s->peak * (float)(step + 1) / (float)s->warmup;
    }
    const double done =
        step < s->steps ? (double)(step - s->warmup) / (double)(s->steps - s->warmup) : 1.0;
    return s->last + (s->peak - s->last) * (float)(0.5 + 0.5 * cos(3.14159265358979 * done));
}

static ms_result scheduled_step(ms_model *of, const schedule *s, double *loss_of) {
    ms_memory_report report;
    const ms_result result = ms_report(of, &report);
    if (result != MS_RESULT_OK) {
        return result;
    }
    ms_set_learning_rate(of, rate_at(s, report.step_count));
    return ms_step(of, loss_of);
}

// ------------------------------------------------------------------------------------------------
// rates of groups

/* Params whose rate follows a schedule of their own. */
typedef struct scheduled_group {
    ms_param_group group;
    schedule rates;
} scheduled_group;

/* Before ms_wrap. */
static void add_group(ms_model *to, scheduled_group *g, const ms_optimizer_desc *optimizer,
                      const ms_tensor *params, int count) {
    g->group = ms_optimizer_group(to, optimizer);
    for (int i = 0; i < count; ++i) {
        ms_set_param_group(to, params[i], g->group);
    }
}

/* Params in no group follow `rest`. */
static ms_result grouped_step(ms_model *of, const schedule *rest, const scheduled_group *groups,
                              int count, double *loss_of) {
    ms_memory_report report;
    const ms_result result = ms_report(of, &report);
    if (result != MS_RESULT_OK) {
        return result;
    }
    for (int i = 0; i < count; ++i) {
        const float rate = rate_at(&groups[i].rates, report.step_count);
        ms_set_group_learning_rate(of, groups[i].group, rate);
    }
    return scheduled_step(of, rest, loss_of);
}

// ------------------------------------------------------------------------------------------------
// averaged weights

enum { MOST_PARAMS = 16 };

/* Averages of params, one after the other in a block of the trainer's own. */
typedef struct averages {
    ms_tensor param[MOST_PARAMS];
    float *average[MOST_PARAMS];
    int count;
    float *block, *scratch; // scratch: as large as the largest param
} averages;

/* After ms_wrap and the first ms_write of the params: the averages begin at their values. */
static ms_result averages_begin(averages *a, ms_model *of, const ms_tensor *params, int count) {
    uint64_t total = 0, largest = 0;
    for (int i = 0; i < count; ++i) {
        const uint64_t elements = ms_tensor_count(of, params[i]);
        total += elements;
        largest = elements > largest ? elements : largest;
    }
    a->block = (float *)malloc((size_t)total * sizeof(float));
    a->scratch = (float *)malloc((size_t)largest * sizeof(float));
    a->count = a->block && a->scratch ? count : 0;
    ms_result result = a->count == count ? MS_RESULT_OK : MS_RESULT_OUT_OF_MEMORY;
    float *at = a->block;
    for (int i = 0; i < count && result == MS_RESULT_OK; ++i) {
        a->param[i] = params[i];
        a->average[i] = at;
        at += ms_tensor_count(of, params[i]);
        result = ms_read(of, params[i], a->average[i]);
    }
    return result;
}

/* After each step: average = decay * average + (1 - decay) * param */
static ms_result averages_follow(averages *a, ms_model *of, float decay) {
    ms_result result = MS_RESULT_OK;
    for (int i = 0; i < a->count && result == MS_RESULT_OK; ++i) {
        result = ms_read(of, a->param[i], a->scratch);
        for (uint64_t j = 0; j < ms_tensor_count(of, a->param[i]); ++j) {
            a->average[i][j] += (1.0f - decay) * (a->scratch[j] - a->average[i][j]);
        }
    }
    return result;
}

/* Before ms_wrap of a model of the same net without a loss: its params are the averages. */
static void averages_lend(const averages *a, ms_model *to, const ms_tensor *params) {
    for (int i = 0; i < a->count; ++i) {
        (void)ms_borrow(to, params[i], a->average[i]); /* an error sticks, and ms_wrap returns it */
    }
}

static void averages_end(averages *a) {
    free(a->block);
    free(a->scratch);
}

// ------------------------------------------------------------------------------------------------
// distillation

/* log(sum of exp(logits / T)): logits / T less this are the logs of a softmax. */
static float log_sum(const float *logits, int64_t count, float T) {
    float largest = logits[0], sum = 0.0f;
    for (int64_t c = 1; c < count; ++c) {
        largest = logits[c] > largest ? logits[c] : largest;
    }
    for (int64_t c = 0; c < count; ++c) {
        sum += expf((logits[c] - largest) / T);
    }
    return largest / T + logf(sum);
}

/* out (rows, 1) = T^2 times the divergence (Kullback and Leibler) of softmax(in[0] / T), the
   student's, from softmax(in[1] / T), the teacher's: logits (rows, classes); T: user */
static int soft_forward(const ms_call *call) {
    const float T = *(const float *)call->user;
    const int64_t cols = call->in[0].shape.dim[1];
    for (int64_t r = 0; r < call->in[0].shape.dim[0]; ++r) {
        const float *student = (const float *)call->in[0].data + r * cols;
        const float *teacher = (const float *)call->in[1].data + r * cols;
        const float of_student = log_sum(student, cols, T), of_teacher = log_sum(teacher, cols, T);
        float sum = 0.0f;
        for (int64_t c = 0; c < cols; ++c) {
            const float log_p = teacher[c] / T - of_teacher;
            sum += expf(log_p) * (log_p - (student[c] / T - of_student));
        }
        ((float *)call->out[0].data)[r] = T * T * sum;
    }
    return 0;
}

static int soft_backward(const ms_call *call) {
    const ms_view *grad_in = &call->grad_in[0];
    const float T = *(const float *)call->user;
    const int64_t cols = grad_in->shape.dim[1];
    for (int64_t r = 0; grad_in->data && r < grad_in->shape.dim[0]; ++r) {
        const float *student = (const float *)call->in[0].data + r * cols;
        const float *teacher = (const float *)call->in[1].data + r * cols;
        const float of_student = log_sum(student, cols, T), of_teacher = log_sum(teacher, cols, T);
        float *to = (float *)grad_in->data + r * cols;
        for (int64_t c = 0; c < cols; ++c) {
            const float excess =
                expf(student[c] / T - of_student) - expf(teacher[c] / T - of_teacher);
            const float slope = T * excess * ((const float *)call->grad_out[0].data)[r];
            to[c] = slope + (grad_in->beta == 0.0f ? 0.0f : to[c]);
        }
    }
    return 0;
}

static ms_tensor add_soft_error(ms_model *to, ms_tensor student, ms_tensor teacher, float *T) {
    ms_layer_desc d = {0};
    d.name = "soft error", d.user = T, d.forward = soft_forward, d.backward = soft_backward;
    d.in[0] = student, d.in[1] = teacher;
    d.out[0] = ms_activation(to, "errors", MS_DTYPE_F32,
                             ms_shape2(ms_tensor_shape(to, student).dim[0], 1));
    d.backward_reads.in = 3;
    ms_register_layer(to, &d);
    return d.out[0];
}

typedef struct distillation {
    ms_model *teacher, *student;
    ms_tensor teacher_in, teacher_logits; // the latter by ms_add_eval_output
    ms_tensor in, soft_targets;           // inputs of the student
    float *logits;                        // of one batch: memory of the trainer
} distillation;

static ms_result distil(distillation *d, const float *in, double *loss_of) {
    ms_result result = ms_write(d->teacher, d->teacher_in, in);
    result = result == MS_RESULT_OK ? ms_eval(d->teacher, NULL) : result;
    result = result == MS_RESULT_OK ? ms_read(d->teacher, d->teacher_logits, d->logits) : result;
    result = result == MS_RESULT_OK ? ms_write(d->student, d->soft_targets, d->logits) : result;
    result = result == MS_RESULT_OK ? ms_write(d->student, d->in, in) : result;
    return result == MS_RESULT_OK ? ms_step(d->student, loss_of) : result;
}

// ------------------------------------------------------------------------------------------------
// a target net

/* out (rows) = (value of the action taken - wanted)^2; in: values (rows, actions), taken (rows),
   wanted (rows) */
static int taken_forward(const ms_call *call) {
    const float *values = (const float *)call->in[0].data,
                *wanted = (const float *)call->in[2].data;
    const int32_t *taken = (const int32_t *)call->in[1].data;
    const int64_t cols = call->in[0].shape.dim[1];
    for (int64_t r = 0; r < call->in[0].shape.dim[0]; ++r) {
        const float error = values[r * cols + taken[r]] - wanted[r];
        ((float *)call->out[0].data)[r] = error * error;
    }
    return 0;
}

static int taken_backward(const ms_call *call) {
    const float *values = (const float *)call->in[0].data,
                *wanted = (const float *)call->in[2].data;
    const int32_t *taken = (const int32_t *)call->in[1].data;
    const ms_view *grad_in = &call->grad_in[0];
    const int64_t cols = grad_in->shape.dim[1];
    for (int64_t i = 0; grad_in->data && i < grad_in->shape.dim[0] * cols; ++i) {
        const int64_t r = i / cols;
        const float slope =
            2.0f * (values[i] - wanted[r]) * ((const float *)call->grad_out[0].data)[r];
        float *to = (float *)grad_in->data + i;
        *to = (i % cols == taken[r] ? slope : 0.0f) + (grad_in->beta == 0.0f ? 0.0f : *to);
    }
    return 0;
}

static ms_tensor add_taken_error(ms_model *to, ms_tensor values, ms_tensor taken,
                                 ms_tensor wanted) {
    ms_layer_desc d = {0};
    d.name = "error", d.forward = taken_forward, d.backward = taken_backward;
    d.in[0] = values, d.in[1] = taken, d.in[2] = wanted;
    d.out[0] = ms_activation(to, "errors", MS_DTYPE_F32, ms_tensor_shape(to, wanted));
    d.backward_reads.in = 7;
    ms_register_layer(to, &d);
    return d.out[0];
}

enum { REPLAYED = 8, MOST_ACTED = 20, STATE = 4, CELLS = 6, ACTIONS = 3 };

typedef struct dqn {
    ms_model *net, *target;
    ms_axis rows;                            // of the net
    ms_tensor states, taken, wanted, values; // of the net: inputs, and its output
    ms_tensor next_states, next_values;      // of the target
    ms_tensor weight[2], target_weight[2];
} dqn;

static ms_tensor add_values(ms_model *to, ms_tensor states, ms_tensor *weight) {
    weight[0] = ms_param(to, "hidden", MS_DTYPE_F32, ms_shape2(STATE, CELLS));
    weight[1] = ms_param(to, "head", MS_DTYPE_F32, ms_shape2(CELLS, ACTIONS));
    const ms_tensor a = add_tanh(to, add_dense(to, states, weight[0]));
    const ms_tensor values = add_dense(to, a, weight[1]);
    ms_add_eval_output(to, values);
    return values;
}

static ms_result dqn_create(dqn *q, const ms_config *settings, const ms_optimizer_desc *optimizer) {
    ms_result result = ms_create(settings, &q->net);
    result = result == MS_RESULT_OK ? ms_create(settings, &q->target) : result;
    if (result != MS_RESULT_OK) {
        return result;
    }
    ms_model *m = q->net;
    q->rows = ms_add_axis(m, "rows", REPLAYED, REPLAYED); /* now, and the largest of a step */
    ms_set_eval_largest(m, q->rows, MOST_ACTED);          /* of ms_eval */
    const ms_shape rows = ms_along(ms_shape1(REPLAYED), 0, q->rows);
    q->states =
        ms_input(m, "states", MS_DTYPE_F32, ms_along(ms_shape2(REPLAYED, STATE), 0, q->rows));
    q->taken = ms_input(m, "taken", MS_DTYPE_I32, rows);
    q->wanted = ms_input(m, "wanted", MS_DTYPE_F32, rows);
    q->values = add_values(m, q->states, q->weight);
    ms_set_loss(m, add_taken_error(m, q->values, q->taken, q->wanted));
    ms_set_optimizer(m, optimizer);

    m = q->target; /* without a loss */
    q->next_states = ms_input(m, "next states", MS_DTYPE_F32, ms_shape2(REPLAYED, STATE));
    q->next_values = add_values(m, q->next_states, q->target_weight);
    result = ms_wrap(q->net);
    return result == MS_RESULT_OK ? ms_wrap(q->target) : result;
}

/* Once the params of the net are written, and then every few thousand steps. */
static ms_result replace_target(dqn *q) {
    float values[CELLS * (STATE + ACTIONS)];
    ms_result result = MS_RESULT_OK;
    for (int i = 0; i < 2 && result == MS_RESULT_OK; ++i) {
        result = ms_read(q->net, q->weight[i], values);
        result = result == MS_RESULT_OK ? ms_write(q->target, q->target_weight[i], values) : result;
    }
    return result;
}

static int32_t best_action(const float *values) {
    int32_t best = 0;
    for (int32_t a = 1; a < ACTIONS; ++a) {
        best = values[a] > values[best] ? a : best;
    }
    return best;
}

/* The best actions as the net has it, in up to MOST_ACTED environments at once. */
static ms_result act(dqn *q, const float *states, int64_t count, int32_t *actions) {
    static const int32_t none[MOST_ACTED] = {0}; /* ms_eval runs the layer of the loss as well */
    static const float nothing[MOST_ACTED] = {0.0f};
    float values[MOST_ACTED * ACTIONS];
    ms_result result = ms_reshape(q->net, &count);
    result = result == MS_RESULT_OK ? ms_write(q->net, q->states, states) : result;
    result = result == MS_RESULT_OK ? ms_write(q->net, q->taken, none) : result;
    result = result == MS_RESULT_OK ? ms_write(q->net, q->wanted, nothing) : result;
    result = result == MS_RESULT_OK ? ms_eval(q->net, NULL) : result;
    result = result == MS_RESULT_OK ? ms_read(q->net, q->values, values) : result;
    for (int64_t r = 0; r < count && result == MS_RESULT_OK; ++r) {
        actions[r] = best_action(values + r * ACTIONS);
    }
    return result;
}

/* Wanted is reward + discount * the largest value of the next state, or, at the end of an episode,
   the reward alone. */
static ms_result learn(dqn *q, const float *states, const int32_t *taken, const float *rewards,
                       const float *next_states, const bool *ends, float discount,
                       double *loss_of) {
    const int64_t count = REPLAYED;
    float values[REPLAYED * ACTIONS], wanted[REPLAYED];
    ms_result result = ms_write(q->target, q->next_states, next_states);
    result = result == MS_RESULT_OK ? ms_eval(q->target, NULL) : result;
    result = result == MS_RESULT_OK ? ms_read(q->target, q->next_values, values) : result;
    for (int r = 0; r < REPLAYED && result == MS_RESULT_OK; ++r) {
        const float best = values[r * ACTIONS + best_action(values + r * ACTIONS)];
        wanted[r] = rewards[r] + (ends[r] ? 0.0f : discount * best);
    }
    result = result == MS_RESULT_OK ? ms_reshape(q->net, &count) : result;
    result = result == MS_RESULT_OK ? ms_write(q->net, q->states, states) : result;
    result = result == MS_RESULT_OK ? ms_write(q->net, q->taken, taken) : result;
    result = result == MS_RESULT_OK ? ms_write(q->net, q->wanted, wanted) : result;
    return result == MS_RESULT_OK ? ms_step(q->net, loss_of) : result;
}

// ------------------------------------------------------------------------------------------------
// sparse gradients of a table

/* Rows of a table by their numbers, plus a bias. The table is frozen, so that it has no gradient as
   large as itself, and backward leaves the gradients of the rows that the batch has read here. */
typedef struct sparse_table {
    ms_tensor table, bias;
    ms_tensor numbers, gradients; // buffers: of `count` rows, each once; then -1
    int64_t count, cols;
} sparse_table;

static int rows_forward(const ms_call *call) {
    const int32_t *ids = (const int32_t *)call->in[0].data;
    const float *table = (const float *)call->param[0].data;
    const float *bias = (const float *)call->param[1].data;
    const int64_t cols = call->param[0].shape.dim[1];
    for (int64_t r = 0; r < call->in[0].shape.dim[0]; ++r) {
        for (int64_t c = 0; c < cols; ++c) {
            ((float *)call->out[0].data)[r * cols + c] = table[ids[r] * cols + c] + bias[c];
        }
    }
    return 0;
}

static int rows_backward(const ms_call *call) {
    const int32_t *ids = (const int32_t *)call->in[0].data;
    const float *grad_out = (const float *)call->grad_out[0].data;
    const ms_view *grad_bias = &call->grad_param[1];
    int32_t *numbers = (int32_t *)call->state[0].data;
    float *gradients = (float *)call->state[1].data;
    int32_t *place = (int32_t *)call->workspace; /* of each row of the table, from 1; zeros */
    const int64_t rows = call->in[0].shape.dim[0], cols = call->param[0].shape.dim[1];
    int32_t count = 0;
    for (int64_t r = 0; r < rows; ++r) {
        if (place[ids[r]] == 0) {
            memset(gradients + count * cols, 0, (size_t)cols * sizeof(float));
            numbers[count] = ids[r];
            place[ids[r]] = ++count;
        }
        for (int64_t c = 0; c < cols; ++c) {
            gradients[(place[ids[r]] - 1) * cols + c] += grad_out[r * cols + c];
        }
    }
    for (int64_t r = count; r < rows; ++r) {
        numbers[r] = -1;
    }
    for (int64_t r = 0; grad_bias->data && r < rows; ++r) {
        const bool begins = r == 0 && grad_bias->beta == 0.0f;
        for (int64_t c = 0; c < cols; ++c) {
            float *to = (float *)grad_bias->data + c;
            *to = grad_out[r * cols + c] + (begins ? 0.0f : *to);
        }
    }
    return 0;
}

static ms_tensor add_sparse_table(ms_model *to, sparse_table *s, ms_tensor ids, int64_t rows,
                                  int64_t cols) {
    ms_layer_desc d = {0};
    s->count = ms_tensor_shape(to, ids).dim[0];
    s->cols = cols;
    s->table = ms_param(to, "table", MS_DTYPE_F32, ms_shape2(rows, cols));
    s->bias = ms_param(to, "bias", MS_DTYPE_F32, ms_shape1(cols));
    s->numbers = ms_buffer(to, "numbers", MS_DTYPE_I32, ms_shape1(s->count));
    s->gradients = ms_buffer(to, "gradients", MS_DTYPE_F32, ms_shape2(s->count, cols));
    ms_set_frozen(to, s->table, true);
    d.name = "rows", d.forward = rows_forward, d.backward = rows_backward;
    d.in[0] = ids, d.param[0] = s->table, d.param[1] = s->bias;
    d.out[0] = ms_activation(to, "rows", MS_DTYPE_F32, ms_shape2(s->count, cols));
    d.state[0] = s->numbers, d.state[1] = s->gradients;
    d.backward_state = 3;
    d.recompute_keeps_state = true; /* forward does not touch it */
    d.backward_reads.in = 1;
    d.backward_workspace.bytes = (uint64_t)rows * sizeof(int32_t);
    d.backward_workspace.contents = MS_CONTENTS_ZERO;
    ms_register_layer(to, &d);
    return d.out[0];
}

/* After each step, on the CPU: AdaGrad with one sum for each row. sums: `rows` zeros at first. */
static ms_result sparse_update(ms_model *of, const sparse_table *s, float rate, float *sums) {
    float *table = (float *)ms_data(of, s->table);
    const float *gradients = (const float *)ms_data(of, s->gradients);
    const int32_t *numbers = (const int32_t *)ms_data(of, s->numbers);
    if (!table || !gradients || !numbers) {
        return MS_RESULT_ORDER;
    }
    for (int64_t k = 0; k < s->count && numbers[k] >= 0; ++k) {
        const float *gradient = gradients + k * s->cols;
        float *row = table + numbers[k] * s->cols, square = 0.0f;
        for (int64_t c = 0; c < s->cols; ++c) {
            square += gradient[c] * gradient[c];
        }
        float *sum = &sums[numbers[k]];
        *sum += square / (float)s->cols;
        for (int64_t c = 0; c < s->cols; ++c) {
            row[c] -= rate * gradient[c] / (sqrtf(*sum) + 1e-10f);
        }
    }
    return MS_RESULT_OK;
}

// ------------------------------------------------------------------------------------------------
// two losses

/* out (rows, 2): of each row the mean error of task 0 and of task 1, times the weights in[4] (2). */
static int tasks_forward(const ms_call *call) {
    const float *weights = (const float *)call->in[4].data;
    for (int task = 0; task < 2; ++task) {
        const float *in = (const float *)call->in[2 * task].data;
        const float *target = (const float *)call->in[2 * task + 1].data;
        const int64_t cols = call->in[2 * task].shape.dim[1];
        for (int64_t r = 0; r < call->out[0].shape.dim[0]; ++r) {
            float sum = 0.0f;
            for (int64_t i = r * cols; i < (r + 1) * cols; ++i) {
                sum += (in[i] - target[i]) * (in[i] - target[i]);
            }
            ((float *)call->out[0].data)[2 * r + task] = weights[task] * sum / (float)cols;
        }
    }
    return 0;
}

static int tasks_backward(const ms_call *call) {
    const float *weights = (const float *)call->in[4].data;
    const float *grad_out = (const float *)call->grad_out[0].data;
    for (int task = 0; task < 2; ++task) {
        const ms_view *grad_in = &call->grad_in[2 * task];
        const float *in = (const float *)call->in[2 * task].data;
        const float *target = (const float *)call->in[2 * task + 1].data;
        const int64_t cols = grad_in->shape.dim[1];
        for (int64_t i = 0; grad_in->data && i < grad_in->shape.dim[0] * cols; ++i) {
            const float slope = weights[task] * 2.0f * (in[i] - target[i]) / (float)cols;
            float *to = (float *)grad_in->data + i;
            *to = slope * grad_out[2 * (i / cols) + task] + (grad_in->beta == 0.0f ? 0.0f : *to);
        }
    }
    return 0;
}

/* outputs and targets (rows, any number) of the two tasks, weights (2): an input */
static ms_tensor add_tasks(ms_model *to, const ms_tensor *outputs, const ms_tensor *targets,
                           ms_tensor weights) {
    ms_layer_desc d = {0};
    d.name = "tasks", d.forward = tasks_forward, d.backward = tasks_backward;
    d.in[0] = outputs[0], d.in[1] = targets[0], d.in[2] = outputs[1], d.in[3] = targets[1];
    d.in[4] = weights;
    d.out[0] = ms_activation(to, "losses", MS_DTYPE_F32,
                             ms_shape2(ms_tensor_shape(to, outputs[0]).dim[0], 2));
    d.backward_reads.in = 31;
    ms_register_layer(to, &d);
    return d.out[0];
}

/* The gradient of a param that both tasks share, by one of them alone; nothing is updated. */
static ms_result task_gradient(ms_model *of, ms_tensor weights, int task, ms_tensor shared,
                               float *gradient) {
    float alone[2] = {0.0f, 0.0f};
    alone[task] = 1.0f;
    ms_result result = ms_write(of, weights, alone);
    result = result == MS_RESULT_OK ? ms_forward(of, NULL) : result;
    result = result == MS_RESULT_OK ? ms_backward(of) : result;
    return result == MS_RESULT_OK ? ms_read(of, ms_gradient(of, shared), gradient) : result;
}

/* One step with weights by which the gradients of both tasks are as long, and add up to 2. gradient:
   as large as the param that they share. */
static ms_result balanced_step(ms_model *of, ms_tensor weights, ms_tensor shared, float *gradient,
                               float *balance, double *loss_of) {
    double length[2] = {0.0, 0.0};
    for (int task = 0; task < 2; ++task) {
        const ms_result result = task_gradient(of, weights, task, shared, gradient);
        if (result != MS_RESULT_OK) {
            return result;
        }
        for (uint64_t i = 0; i < ms_tensor_count(of, shared); ++i) {
            length[task] += (double)gradient[i] * gradient[i];
        }
        length[task] = sqrt(length[task]);
    }
    balance[0] = (float)(2.0 * length[1] / (length[0] + length[1]));
    balance[1] = 2.0f - balance[0];
    const ms_result result = ms_write(of, weights, balance); /* ends the step that has no update */
    return result == MS_RESULT_OK ? ms_step(of, loss_of) : result;
}

// ------------------------------------------------------------------------------------------------
// a generator and its critic

enum { PAIRS = 4, NOISE = 3, POINT = 2, CRITIC = 8, GENERATOR = 6 };

typedef struct gan {
    ms_arena *arena;
    ms_model *critic, *generator;
    ms_tensor points,
        labels;            // of the critic: real points, then false ones; 1 for real, 0 for false
    ms_tensor noise, ones; // of the generator, which would have its points taken for real
    ms_tensor made;        // its points
    ms_tensor weight[2];   // its params
    float critic_weight[2][CRITIC * CRITIC]; // the critic's, which both models read
} gan;

static ms_tensor add_critic(gan *g, ms_model *to, ms_tensor in, bool is_trained) {
    const ms_shape shapes[] = {ms_shape2(POINT, CRITIC), ms_shape2(CRITIC, 1)};
    ms_tensor param[2];
    for (int i = 0; i < 2; ++i) {
        param[i] = ms_param(to, "critic", MS_DTYPE_F32, shapes[i]);
        (void)ms_borrow(to, param[i], g->critic_weight[i]);
        ms_set_frozen(to, param[i], !is_trained);
    }
    return add_dense(to, add_tanh(to, add_dense(to, in, param[0])), param[1]);
}

/* Its fields are zero, except critic_weight. */
static ms_result gan_create(gan *g, const ms_config *settings, const ms_optimizer_desc *optimizer) {
    ms_config shared = *settings;
    ms_result result = ms_arena_create(NULL, NULL, &g->arena);
    if (result != MS_RESULT_OK) {
        return result;
    }
    shared.arena = g->arena;
    result = ms_create(&shared, &g->critic);
    result = result == MS_RESULT_OK ? ms_create(&shared, &g->generator) : result;
    if (result != MS_RESULT_OK) {
        return result;
    }
    ms_model *m = g->critic;
    g->points = ms_input(m, "points", MS_DTYPE_F32, ms_shape2(2 * PAIRS, POINT));
    g->labels = ms_input(m, "labels", MS_DTYPE_F32, ms_shape2(2 * PAIRS, 1));
    ms_set_loss(m, add_error(m, add_critic(g, m, g->points, true), g->labels));
    ms_set_optimizer(m, optimizer);

    m = g->generator;
    g->noise = ms_input(m, "noise", MS_DTYPE_F32, ms_shape2(PAIRS, NOISE));
    g->ones = ms_input(m, "ones", MS_DTYPE_F32, ms_shape2(PAIRS, 1));
    g->weight[0] = ms_param(m, "generator", MS_DTYPE_F32, ms_shape2(NOISE, GENERATOR));
    g->weight[1] = ms_param(m, "generator", MS_DTYPE_F32, ms_shape2(GENERATOR, POINT));
    g->made = add_dense(m, add_tanh(m, add_dense(m, g->noise, g->weight[0])), g->weight[1]);
    ms_add_eval_output(m, g->made);
    ms_set_loss(m, add_error(m, add_critic(g, m, g->made, false), g->ones));
    ms_set_optimizer(m, optimizer);

    static const float labels[2 * PAIRS] = {1.0f, 1.0f, 1.0f, 1.0f}, *const ones = labels;
    result = ms_wrap(g->critic);
    result = result == MS_RESULT_OK ? ms_wrap(g->generator) : result;
    result = result == MS_RESULT_OK ? ms_write(g->critic, g->labels, labels) : result;
    return result == MS_RESULT_OK ? ms_write(g->generator, g->ones, ones) : result;
}

/* points: room for 2 * PAIRS points, of which the first PAIRS are real. */
static ms_result gan_step(gan *g, const float *noise, float *points, double *critic_loss,
                          double *generator_loss) {
    ms_result result = ms_write(g->generator, g->noise, noise);
    result = result == MS_RESULT_OK ? ms_eval(g->generator, NULL) : result;
    result =
        result == MS_RESULT_OK ? ms_read(g->generator, g->made, points + PAIRS * POINT) : result;
    result = result == MS_RESULT_OK ? ms_write(g->critic, g->points, points) : result;
    result = result == MS_RESULT_OK ? ms_step(g->critic, critic_loss) : result;
    return result == MS_RESULT_OK ? ms_step(g->generator, generator_loss) : result;
}

static void gan_destroy(gan *g) {
    ms_destroy(g->critic);
    ms_destroy(g->generator);
    ms_arena_destroy(g->arena);
}

// ------------------------------------------------------------------------------------------------
// a gradient penalty

/* out (rows, n) = (1 - a^2) v, element by element: the slope of tanh(h) v by h, where a = tanh(h)
   (rows, n) is in[0], and v (n, 1) is param[0]. */
static int slope_forward(const ms_call *call) {
    const float *a = (const float *)call->in[0].data, *v = (const float *)call->param[0].data;
    const int64_t cols = call->in[0].shape.dim[1];
    for (int64_t i = 0; i < call->in[0].shape.dim[0] * cols; ++i) {
        ((float *)call->out[0].data)[i] = (1.0f - a[i] * a[i]) * v[i % cols];
    }
    return 0;
}

static int slope_backward(const ms_call *call) {
    const float *a = (const float *)call->in[0].data, *v = (const float *)call->param[0].data;
    const float *grad_out = (const float *)call->grad_out[0].data;
    const ms_view *grad_a = &call->grad_in[0], *grad_v = &call->grad_param[0];
    const int64_t rows = call->in[0].shape.dim[0], cols = call->in[0].shape.dim[1];
    for (int64_t i = 0; grad_a->data && i < rows * cols; ++i) {
        float *to = (float *)grad_a->data + i;
        *to = -2.0f * a[i] * v[i % cols] * grad_out[i] + (grad_a->beta == 0.0f ? 0.0f : *to);
    }
    for (int64_t c = 0; grad_v->data && c < cols; ++c) {
        float *to = (float *)grad_v->data + c, sum = grad_v->beta == 0.0f ? 0.0f : *to;
        for (int64_t i = c; i < rows * cols; i += cols) {
            sum += (1.0f - a[i] * a[i]) * grad_out[i];
        }
        *to = sum;
    }
    return 0;
}

/* out (rows, k) = in (rows, n) W^T, W (k, n): what backward of a dense layer does, as a layer */
static int back_forward(const ms_call *call) {
    return (int)ms_gemm(call, 1.0f, ms_matrix_of(&call->in[0]),
                        ms_transpose(ms_matrix_of(&call->param[0])), 0.0f,
                        ms_matrix_of(&call->out[0]));
}

static int back_backward(const ms_call *call) {
    const ms_view *grad_in = &call->grad_in[0], *grad_W = &call->grad_param[0];
    const ms_matrix grad_out = ms_matrix_of(&call->grad_out[0]);
    if (grad_W->data && ms_gemm(call, 1.0f, ms_transpose(grad_out), ms_matrix_of(&call->in[0]),
                                grad_W->beta, ms_matrix_of(grad_W)) != MS_RESULT_OK) {
        return 1;
    }
    return grad_in->data && ms_gemm(call, 1.0f, grad_out, ms_matrix_of(&call->param[0]),
                                    grad_in->beta, ms_matrix_of(grad_in)) != MS_RESULT_OK;
}

/* out (rows, 1) = weight (|in| - 1)^2, of each row; weight: user */
static int penalty_forward(const ms_call *call) {
    const int64_t cols = call->in[0].shape.dim[1];
    for (int64_t r = 0; r < call->in[0].shape.dim[0]; ++r) {
        const float *g = (const float *)call->in[0].data + r * cols;
        float square = 0.0f;
        for (int64_t c = 0; c < cols; ++c) {
            square += g[c] * g[c];
        }
        const float excess = sqrtf(square) - 1.0f;
        ((float *)call->out[0].data)[r] = *(const float *)call->user * excess * excess;
    }
    return 0;
}

static int penalty_backward(const ms_call *call) {
    const ms_view *grad_in = &call->grad_in[0];
    const int64_t cols = grad_in->shape.dim[1];
    for (int64_t r = 0; grad_in->data && r < grad_in->shape.dim[0]; ++r) {
        const float *g = (const float *)call->in[0].data + r * cols;
        float square = 1e-30f, *to = (float *)grad_in->data + r * cols;
        for (int64_t c = 0; c < cols; ++c) {
            square += g[c] * g[c];
        }
        const float factor = 2.0f * *(const float *)call->user * (1.0f - 1.0f / sqrtf(square)) *
                             ((const float *)call->grad_out[0].data)[r];
        for (int64_t c = 0; c < cols; ++c) {
            to[c] = factor * g[c] + (grad_in->beta == 0.0f ? 0.0f : to[c]);
        }
    }
    return 0;
}

/* Of score = tanh(in W) v: weight (|gradient by in| - 1)^2, of each row. */
static ms_tensor add_penalty(ms_model *to, ms_tensor in, ms_tensor W, ms_tensor v, float *weight) {
    const ms_tensor a = add_tanh(to, add_dense(to, in, W));
    ms_layer_desc slope = {0}, back = {0}, penalty = {0};
    slope.name = "slope", slope.forward = slope_forward, slope.backward = slope_backward;
    slope.in[0] = a, slope.param[0] = v;
    slope.out[0] = ms_activation(to, "slope", MS_DTYPE_F32, ms_tensor_shape(to, a));
    slope.backward_reads.in = slope.backward_reads.param = 1;
    ms_register_layer(to, &slope);
    back.name = "back", back.forward = back_forward, back.backward = back_backward;
    back.in[0] = slope.out[0], back.param[0] = W;
    back.out[0] = ms_activation(to, "gradient", MS_DTYPE_F32, ms_tensor_shape(to, in));
    back.backward_reads.in = back.backward_reads.param = 1;
    ms_register_layer(to, &back);
    penalty.name = "penalty", penalty.user = weight;
    penalty.forward = penalty_forward, penalty.backward = penalty_backward;
    penalty.in[0] = back.out[0];
    penalty.out[0] =
        ms_activation(to, "penalty", MS_DTYPE_F32, ms_shape2(ms_tensor_shape(to, in).dim[0], 1));
    penalty.backward_reads.in = 1;
    ms_register_layer(to, &penalty);
    return penalty.out[0];
}

/* The loss of a critic of Wasserstein's distance, of each row: score of a false point - score of a
   real one + penalty */
static int critic_forward(const ms_call *call) {
    const float *is_false = (const float *)call->in[0].data,
                *real = (const float *)call->in[1].data;
    const float *penalty = (const float *)call->in[2].data;
    for (uint64_t i = 0; i < ms_shape_count(&call->out[0].shape); ++i) {
        ((float *)call->out[0].data)[i] = is_false[i] - real[i] + penalty[i];
    }
    return 0;
}

static int critic_backward(const ms_call *call) {
    static const float sign[3] = {1.0f, -1.0f, 1.0f};
    for (int k = 0; k < 3; ++k) {
        float *to = (float *)call->grad_in[k].data;
        for (uint64_t i = 0; to && i < ms_shape_count(&call->out[0].shape); ++i) {
            const float slope = sign[k] * ((const float *)call->grad_out[0].data)[i];
            to[i] = slope + (call->grad_in[k].beta == 0.0f ? 0.0f : to[i]);
        }
    }
    return 0;
}

/* real, made, between (rows, k): inputs; a row of the last is between those of the other two */
static ms_tensor add_penalized_critic(ms_model *to, ms_tensor real, ms_tensor made,
                                      ms_tensor between, ms_tensor W, ms_tensor v, float *weight) {
    ms_layer_desc d = {0};
    d.name = "critic", d.forward = critic_forward, d.backward = critic_backward;
    d.in[0] = add_dense(to, add_tanh(to, add_dense(to, made, W)), v);
    d.in[1] = add_dense(to, add_tanh(to, add_dense(to, real, W)), v);
    d.in[2] = add_penalty(to, between, W, v, weight);
    d.out[0] = ms_activation(to, "losses", MS_DTYPE_F32, ms_tensor_shape(to, d.in[0]));
    d.backward_reads.nothing = true;
    ms_register_layer(to, &d);
    return d.out[0];
}

// ------------------------------------------------------------------------------------------------
// gradients of inputs and activations

/* An adversarial example by the sign of the gradient. gradient: as large as the image */
static ms_result perturb(ms_model *of, ms_tensor image, float *pixels, float *gradient, float by) {
    ms_result result = ms_write(of, image, pixels);
    result = result == MS_RESULT_OK ? ms_step(of, NULL) : result;
    result = result == MS_RESULT_OK ? ms_read(of, ms_gradient(of, image), gradient) : result;
    for (uint64_t i = 0; i < ms_tensor_count(of, image) && result == MS_RESULT_OK; ++i) {
        pixels[i] += gradient[i] > 0.0f ? by : gradient[i] < 0.0f ? -by : 0.0f;
    }
    return result;
}

// ------------------------------------------------------------------------------------------------
// two models in a chain

/* out = in * factors, element by element: the gradient of its sum by `in` is factors, an input. */
static int product_forward(const ms_call *call) {
    const float *in = (const float *)call->in[0].data, *factors = (const float *)call->in[1].data;
    for (uint64_t i = 0; i < ms_shape_count(&call->in[0].shape); ++i) {
        ((float *)call->out[0].data)[i] = in[i] * factors[i];
    }
    return 0;
}

static int product_backward(const ms_call *call) {
    const ms_view *grad_in = &call->grad_in[0];
    const float *factors = (const float *)call->in[1].data;
    for (uint64_t i = 0; grad_in->data && i < ms_shape_count(&grad_in->shape); ++i) {
        float *to = (float *)grad_in->data + i;
        *to = factors[i] * ((const float *)call->grad_out[0].data)[i] +
              (grad_in->beta == 0.0f ? 0.0f : *to);
    }
    return 0;
}

typedef struct chain {
    ms_model *first, *second;
    ms_tensor out, gradient; // of the first: what it hands over, and an input
    ms_tensor in;            // of the second
    float *values;           // as large as these: memory of the trainer
} chain;

/* The layers of both are registered, and out, in and values are set. */
static ms_result chain_wrap(chain *c) {
    ms_layer_desc d = {0};
    const ms_shape shape = ms_tensor_shape(c->first, c->out);
    c->gradient = ms_input(c->first, "gradient", MS_DTYPE_F32, shape);
    d.name = "product", d.forward = product_forward, d.backward = product_backward;
    d.in[0] = c->out, d.in[1] = c->gradient;
    d.out[0] = ms_activation(c->first, "products", MS_DTYPE_F32, shape);
    d.backward_reads.in = 2;
    ms_register_layer(c->first, &d);
    ms_set_loss(c->first, d.out[0]);
    ms_set_loss_factor(c->first, 1.0f);
    ms_add_eval_output(c->first, c->out);
    ms_want_gradient(c->second, c->in);
    ms_result result = ms_wrap(c->first);
    result = result == MS_RESULT_OK ? ms_wrap(c->second) : result;
    memset(c->values, 0, (size_t)ms_tensor_bytes(c->first, c->out));
    return result == MS_RESULT_OK ? ms_write(c->first, c->gradient, c->values) : result;
}

/* Once the batch is written: one step of both, as if they were one model. */
static ms_result chained_step(chain *c, double *loss_of) {
    ms_result result = ms_eval(c->first, NULL);
    result = result == MS_RESULT_OK ? ms_read(c->first, c->out, c->values) : result;
    result = result == MS_RESULT_OK ? ms_write(c->second, c->in, c->values) : result;
    result = result == MS_RESULT_OK ? ms_step(c->second, loss_of) : result;
    const ms_tensor gradient = ms_gradient(c->second, c->in);
    result = result == MS_RESULT_OK ? ms_read(c->second, gradient, c->values) : result;
    result = result == MS_RESULT_OK ? ms_write(c->first, c->gradient, c->values) : result;
    return result == MS_RESULT_OK ? ms_step(c->first, NULL) : result;
}

// ------------------------------------------------------------------------------------------------
// a loader on a thread

/* A thread makes the next batch while the model trains on the one before. */
typedef struct loader {
    void (*make)(void *user, uint64_t number, float *batch);
    void *user;
    float *batch; // where it is made: memory of the trainer
    uint64_t made, taken;
    bool stop;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    pthread_t thread;
} loader;

static void *loader_run(void *argument) {
    loader *l = (loader *)argument;
    pthread_mutex_lock(&l->lock);
    while (!l->stop) {
        if (l->made > l->taken) {
            pthread_cond_wait(&l->changed, &l->lock);
            continue;
        }
        const uint64_t number = l->made;
        pthread_mutex_unlock(&l->lock);
        l->make(l->user, number, l->batch);
        pthread_mutex_lock(&l->lock);
        l->made++;
        pthread_cond_signal(&l->changed);
    }
    pthread_mutex_unlock(&l->lock);
    return NULL;
}

/* make, user and batch are set, all else is zero. Returns 0, or the error of pthread_create. */
static int loader_start(loader *l) {
    pthread_mutex_init(&l->lock, NULL);
    pthread_cond_init(&l->changed, NULL);
    return pthread_create(&l->thread, NULL, loader_run, l);
}

/* Gives the next batch to a model: ms_write copies it, so that the thread can go on at once. */
static ms_result loader_feed(loader *l, ms_model *to, ms_tensor input) {
    pthread_mutex_lock(&l->lock);
    while (l->made == l->taken) {
        pthread_cond_wait(&l->changed, &l->lock);
    }
    pthread_mutex_unlock(&l->lock);
    const ms_result result = ms_write(to, input, l->batch);
    pthread_mutex_lock(&l->lock);
    l->taken++;
    pthread_cond_signal(&l->changed);
    pthread_mutex_unlock(&l->lock);
    return result;
}

static void loader_end(loader *l) {
    pthread_mutex_lock(&l->lock);
    l->stop = true;
    pthread_cond_signal(&l->changed);
    pthread_mutex_unlock(&l->lock);
    pthread_join(l->thread, NULL);
    pthread_mutex_destroy(&l->lock);
    pthread_cond_destroy(&l->changed);
}

// ------------------------------------------------------------------------------------------------
// lengths that vary

/* out (B, T, n) = mask (in - target)^2; mask (B, T) is 1, or 0 where a sequence has ended */
static int masked_forward(const ms_call *call) {
    const float *in = (const float *)call->in[0].data, *target = (const float *)call->in[1].data;
    const float *mask = (const float *)call->in[2].data;
    const int64_t cols = call->in[0].shape.dim[2];
    for (int64_t i = 0; i < (int64_t)ms_shape_count(&call->in[0].shape); ++i) {
        const float error = in[i] - target[i];
        ((float *)call->out[0].data)[i] = mask[i / cols] != 0.0f ? error * error : 0.0f;
    }
    return 0;
}

static int masked_backward(const ms_call *call) {
    const ms_view *grad_in = &call->grad_in[0];
    const float *in = (const float *)call->in[0].data, *target = (const float *)call->in[1].data;
    const float *mask = (const float *)call->in[2].data;
    const float *grad_out = (const float *)call->grad_out[0].data;
    const int64_t cols = grad_in->shape.dim[2];
    for (int64_t i = 0; grad_in->data && i < (int64_t)ms_shape_count(&grad_in->shape); ++i) {
        const float slope = 2.0f * (in[i] - target[i]) * grad_out[i];
        float *to = (float *)grad_in->data + i;
        *to = (mask[i / cols] != 0.0f ? slope : 0.0f) + (grad_in->beta == 0.0f ? 0.0f : *to);
    }
    return 0;
}

typedef struct sequences {
    ms_axis length;
    ms_tensor in, target, mask; // (B, T, k), (B, T, n), (B, T)
    int64_t batch, k, n;
} sequences;

/* The inputs, at the largest length: the arena is made for that. */
static void add_sequences(ms_model *to, sequences *s, int64_t batch, int64_t longest, int64_t k,
                          int64_t n) {
    s->batch = batch, s->k = k, s->n = n;
    s->length = ms_add_axis(to, "length", longest, longest);
    s->in = ms_input(to, "in", MS_DTYPE_F32, ms_along(ms_shape3(batch, longest, k), 1, s->length));
    s->target =
        ms_input(to, "target", MS_DTYPE_F32, ms_along(ms_shape3(batch, longest, n), 1, s->length));
    s->mask = ms_input(to, "mask", MS_DTYPE_F32, ms_along(ms_shape2(batch, longest), 1, s->length));
}

static ms_tensor add_masked_error(ms_model *to, const sequences *s, ms_tensor out) {
    ms_layer_desc d = {0};
    d.name = "masked error", d.forward = masked_forward, d.backward = masked_backward;
    d.in[0] = out, d.in[1] = s->target, d.in[2] = s->mask;
    d.out[0] = ms_activation(to, "errors", MS_DTYPE_F32, ms_tensor_shape(to, out));
    d.backward_reads.in = 7;
    ms_register_layer(to, &d);
    return d.out[0];
}

/* A step on a batch that is padded to `length`; mask says what counts. */
static ms_result step_of_length(ms_model *of, const sequences *s, int64_t length, const float *in,
                                const float *target, const float *mask, double *loss_of) {
    float real = 0.0f;
    for (int64_t i = 0; i < s->batch * length; ++i) {
        real += mask[i];
    }
    ms_result result = ms_reshape(of, &length); /* of all axes, of which there is one */
    ms_set_loss_factor(of, 1.0f / (real * (float)s->n));
    result = result == MS_RESULT_OK ? ms_write(of, s->in, in) : result;
    result = result == MS_RESULT_OK ? ms_write(of, s->target, target) : result;
    result = result == MS_RESULT_OK ? ms_write(of, s->mask, mask) : result;
    return result == MS_RESULT_OK ? ms_step(of, loss_of) : result;
}

// ------------------------------------------------------------------------------------------------
// references

/* A loss in float64, written as plain loops over all params, one after the other. */
typedef double (*reference_fn)(const double *params, const void *user);

enum {
    WAYS = 4,
    MOST = 128,
    ROWS = 6,
    IN = 4,
    HIDDEN = 5,
    OUT = 3,
    NET = IN * HIDDEN + HIDDEN * OUT
};

static int warnings;

static void count_warnings(ms_log_level level, const char *tag, const char *text, void *user) {
    (void)user;
    if (level <= MS_LOG_WARNING) {
        print_message("%s: %s\n", tag, text);
        ++warnings;
    }
}

/* The plain plan, the smallest one, the same with homes on the host, and debug mode. */
static ms_config way_config(int way) {
    ms_config config = t_config();
    config.log = count_warnings;
    config.force_optimize = way == 1 || way == 2;
    config.offloading = way == 2 ? MS_SWITCH_ON : MS_SWITCH_DEFAULT;
    config.debug = way == 3;
    return config;
}

static ms_optimizer_desc descent(float rate) {
    ms_optimizer_desc optimizer = ms_optimizer_defaults(MS_OPTIMIZER_SGD);
    optimizer.learning_rate = rate;
    return optimizer;
}

static void reference_gradient(double *gradient, const double *params, int count, reference_fn loss,
                               const void *user) {
    double moved[MOST];
    memcpy(moved, params, (size_t)count * sizeof *params);
    for (int i = 0; i < count; ++i) {
        moved[i] = params[i] + 1e-5;
        const double above = loss(moved, user);
        moved[i] = params[i] - 1e-5;
        gradient[i] = (above - loss(moved, user)) / 2e-5;
        moved[i] = params[i];
    }
}

static void reference_step(double *params, int count, reference_fn loss, const void *user,
                           double rate) {
    double gradient[MOST];
    reference_gradient(gradient, params, count, loss, user);
    for (int i = 0; i < count; ++i) {
        params[i] -= rate * gradient[i];
    }
}

static void near_all(const float *values, const double *expected, int count, double most) {
    for (int i = 0; i < count; ++i) {
        if (!(fabs((double)values[i] - expected[i]) <= most)) {
            fail_msg("value %d is %.9g, expected %.9g", i, (double)values[i], expected[i]);
        }
    }
}

static void same_value(double value, double expected, double most) {
    if (!(fabs(value - expected) <= most)) {
        fail_msg("%.9g, expected %.9g", value, expected);
    }
}

static void params_near(ms_model *m, const ms_tensor *params, int count, const double *expected,
                        double most) {
    for (int i = 0; i < count; ++i) {
        float values[MOST];
        assert_true(ms_tensor_count(m, params[i]) <= MOST);
        t_ok(m, ms_read(m, params[i], values));
        near_all(values, expected, (int)ms_tensor_count(m, params[i]), most);
        expected += ms_tensor_count(m, params[i]);
    }
}

static void widen(double *to, const float *from, int count) {
    for (int i = 0; i < count; ++i) {
        to[i] = (double)from[i];
    }
}

/* out = tanh(x W1) W2 of one row, and the hidden values */
static void reference_row(const double *x, const double *W1, const double *W2, int in, int hidden,
                          int out, double *a, double *y) {
    for (int h = 0; h < hidden; ++h) {
        double sum = 0.0;
        for (int i = 0; i < in; ++i) {
            sum += x[i] * W1[i * hidden + h];
        }
        a[h] = tanh(sum);
    }
    for (int o = 0; o < out; ++o) {
        y[o] = 0.0;
        for (int h = 0; h < hidden; ++h) {
            y[o] += a[h] * W2[h * out + o];
        }
    }
}

typedef struct batch {
    float x[ROWS * IN], target[ROWS * OUT];
} batch;

static double net_loss(const double *params, const void *user) {
    const batch *b = (const batch *)user;
    double total = 0.0, x[IN], a[HIDDEN], y[OUT];
    for (int r = 0; r < ROWS; ++r) {
        widen(x, b->x + r * IN, IN);
        reference_row(x, params, params + IN * HIDDEN, IN, HIDDEN, OUT, a, y);
        for (int o = 0; o < OUT; ++o) {
            const double error = y[o] - (double)b->target[r * OUT + o];
            total += error * error;
        }
    }
    return total / (ROWS * OUT);
}

typedef struct net {
    ms_model *m;
    ms_tensor x, target, W[2];
} net;

/* Without a loss; returns its output. */
static ms_tensor net_layers(net *n, const ms_config *config) {
    assert_int_equal(ms_create(config, &n->m), MS_RESULT_OK);
    n->x = ms_input(n->m, "x", MS_DTYPE_F32, ms_shape2(ROWS, IN));
    n->target = ms_input(n->m, "target", MS_DTYPE_F32, ms_shape2(ROWS, OUT));
    n->W[0] = ms_param(n->m, "W0", MS_DTYPE_F32, ms_shape2(IN, HIDDEN));
    n->W[1] = ms_param(n->m, "W1", MS_DTYPE_F32, ms_shape2(HIDDEN, OUT));
    return add_dense(n->m, add_tanh(n->m, add_dense(n->m, n->x, n->W[0])), n->W[1]);
}

static void net_create(net *n, const ms_config *config, float rate) {
    const ms_optimizer_desc optimizer = descent(rate);
    const ms_tensor out = net_layers(n, config);
    ms_set_loss(n->m, add_error(n->m, out, n->target));
    ms_set_optimizer(n->m, &optimizer);
}

static void net_start(net *n, const float *params) {
    t_ok(n->m, ms_wrap(n->m));
    t_ok(n->m, ms_write(n->m, n->W[0], params));
    t_ok(n->m, ms_write(n->m, n->W[1], params + IN * HIDDEN));
}

static void net_feed(const net *n, const batch *b) {
    t_ok(n->m, ms_write(n->m, n->x, b->x));
    t_ok(n->m, ms_write(n->m, n->target, b->target));
}

static void draw(t_rng *rng, batch *b) {
    t_fill(rng, b->x, ROWS * IN, 1.0f);
    t_fill(rng, b->target, ROWS * OUT, 1.0f);
}

// ------------------------------------------------------------------------------------------------
// tests

static void a_schedule_sets_the_rate_of_each_step(void **state) {
    (void)state;
    const schedule s = {3, 11, 0.5f, 0.05f};
    same_value((double)rate_at(&s, 0), 0.5 / 3.0, 1e-7);
    same_value((double)rate_at(&s, 2), 0.5, 1e-7);
    same_value((double)rate_at(&s, 3), 0.5, 1e-7);
    same_value((double)rate_at(&s, 7), 0.275, 1e-7);
    same_value((double)rate_at(&s, 11), 0.05, 1e-7);
    same_value((double)rate_at(&s, 1000), 0.05, 1e-7);
    for (int way = 0; way < WAYS; ++way) {
        const ms_config config = way_config(way);
        t_rng rng = t_seed(1);
        float start[NET];
        double params[MOST], loss;
        batch b;
        net n;
        t_fill(&rng, start, NET, 0.5f);
        widen(params, start, NET);
        net_create(&n, &config, 1.0f);
        net_start(&n, start);
        for (int step = 0; step < 14; ++step) {
            draw(&rng, &b);
            net_feed(&n, &b);
            t_ok(n.m, scheduled_step(n.m, &s, &loss));
            same_value(loss, net_loss(params, &b), 1e-5);
            const double part = step < 3 ? 0.0 : step > 11 ? 1.0 : (step - 3) / 8.0;
            const double rate = step < 3 ? 0.5 * (step + 1) / 3.0
                                         : 0.05 + 0.45 * 0.5 * (1.0 + cos(acos(-1.0) * part));
            reference_step(params, NET, net_loss, &b, rate);
        }
        params_near(n.m, n.W, 2, params, 1e-5);
        ms_destroy(n.m);
    }
}

static void groups_follow_schedules_of_their_own(void **state) {
    (void)state;
    enum { FIRST_W = IN * HIDDEN };
    const schedule rest = {0, 8, 0.5f, 0.1f};
    for (int way = 0; way < WAYS; ++way) {
        const ms_config config = way_config(way);
        ms_optimizer_desc heavy = descent(1.0f);
        t_rng rng = t_seed(10);
        float start[NET];
        double params[MOST], gradient[MOST], momentum[FIRST_W] = {0}, loss;
        scheduled_group group;
        batch b;
        net n;
        heavy.momentum = 0.5f;
        group.rates.warmup = 4, group.rates.steps = 12;
        group.rates.peak = 0.2f, group.rates.last = 0.0f;
        t_fill(&rng, start, NET, 0.5f);
        widen(params, start, NET);
        net_create(&n, &config, 1.0f);
        add_group(n.m, &group, &heavy, n.W, 1);
        net_start(&n, start);
        for (int step = 0; step < 14; ++step) {
            draw(&rng, &b);
            net_feed(&n, &b);
            t_ok(n.m, grouped_step(n.m, &rest, &group, 1, &loss));
            same_value(loss, net_loss(params, &b), 1e-5);
            reference_gradient(gradient, params, NET, net_loss, &b);
            const double pi = acos(-1.0);
            const double of_group =
                step < 4 ? 0.05 * (step + 1)
                         : 0.1 * (1.0 + cos(pi * (step > 12 ? 1.0 : (step - 4) / 8.0)));
            const double of_rest = 0.1 + 0.2 * (1.0 + cos(pi * (step > 8 ? 1.0 : step / 8.0)));
            for (int i = 0; i < NET; ++i) {
                if (i < FIRST_W) {
                    momentum[i] = 0.5 * momentum[i] + gradient[i];
                    params[i] -= of_group * momentum[i];
                } else {
                    params[i] -= of_rest * gradient[i];
                }
            }
        }
        params_near(n.m, n.W, 2, params, 1e-5);
        ms_destroy(n.m);
    }
}

/* The bytes of 12 layers of 128 x 128 on 256 rows, with params that are borrowed. */
static uint64_t deep_bytes(bool has_loss) {
    enum { DEPTH = 12, WIDTH = 128, DEEP_ROWS = 256 };
    const ms_config config = t_config();
    const ms_optimizer_desc optimizer = descent(0.1f);
    const ms_shape shape = ms_shape2(DEEP_ROWS, WIDTH);
    float *weights = (float *)calloc(DEPTH * WIDTH * WIDTH, sizeof *weights);
    ms_memory_report report;
    ms_model *m;
    assert_non_null(weights);
    assert_int_equal(ms_create(&config, &m), MS_RESULT_OK);
    ms_tensor at = ms_input(m, "in", MS_DTYPE_F32, shape);
    for (int i = 0; i < DEPTH; ++i) {
        const ms_tensor W = ms_param(m, "W", MS_DTYPE_F32, ms_shape2(WIDTH, WIDTH));
        t_ok(m, ms_borrow(m, W, weights + i * WIDTH * WIDTH));
        at = add_dense(m, at, W);
    }
    if (has_loss) {
        ms_set_loss(m, at);
        ms_set_optimizer(m, &optimizer);
    } else {
        ms_add_eval_output(m, at);
    }
    t_ok(m, ms_wrap(m));
    t_ok(m, ms_report(m, &report));
    ms_destroy(m);
    free(weights);
    return report.arena_bytes;
}

static void a_model_without_a_loss_takes_less(void **state) {
    (void)state;
    const uint64_t trained = deep_bytes(true), evaluated = deep_bytes(false);
    print_message("12 layers: with a loss %.2f MB, without %.2f MB\n", (double)trained / 1e6,
                  (double)evaluated / 1e6);
    /* The input and what two successive layers hand over, to which nothing is added for each layer. */
    assert_true(evaluated <= 3 * 256 * 128 * sizeof(float) + 4096);
    assert_true(trained > 12 * 256 * 128 * sizeof(float));
}

static void net_outputs(const double *params, const batch *b, double *outputs) {
    double x[IN], a[HIDDEN];
    for (int r = 0; r < ROWS; ++r) {
        widen(x, b->x + r * IN, IN);
        reference_row(x, params, params + IN * HIDDEN, IN, HIDDEN, OUT, a, outputs + r * OUT);
    }
}

/* The errors that it makes are none that nothing_has_warned counts. */
static void has_no_steps(ms_model *m) {
    const int before = warnings;
    t_error(m, ms_step(m, NULL), MS_RESULT_ORDER);
    warnings = before;
}

/* By a model without a loss, and by one that has the loss, with params that are frozen. */
static void averages_follow_and_are_evaluated(void **state) {
    (void)state;
    for (int way = 0; way < WAYS; ++way) {
        ms_config config = way_config(way);
        ms_arena *arena;
        t_rng rng = t_seed(2);
        float start[NET], values[ROWS * OUT];
        double params[MOST], average[MOST], outputs[ROWS * OUT], loss;
        batch b;
        net n, evaluated[2];
        averages a;
        assert_int_equal(ms_arena_create(NULL, NULL, &arena), MS_RESULT_OK);
        config.arena = arena;
        t_fill(&rng, start, NET, 0.5f);
        widen(params, start, NET);
        widen(average, start, NET);
        net_create(&n, &config, 0.3f);
        net_start(&n, start);
        t_ok(n.m, averages_begin(&a, n.m, n.W, 2));
        const ms_tensor out = net_layers(&evaluated[0], &config);
        ms_add_eval_output(evaluated[0].m, out);
        net_create(&evaluated[1], &config, 0.3f);
        for (int k = 0; k < 2; ++k) {
            averages_lend(&a, evaluated[k].m, evaluated[k].W);
            ms_set_frozen(evaluated[1].m, evaluated[1].W[k], true);
        }
        t_ok(evaluated[0].m, ms_wrap(evaluated[0].m));
        t_ok(evaluated[1].m, ms_wrap(evaluated[1].m));
        for (int step = 0; step < 12; ++step) {
            draw(&rng, &b);
            net_feed(&n, &b);
            t_ok(n.m, ms_step(n.m, NULL));
            t_ok(n.m, averages_follow(&a, n.m, 0.9f));
            reference_step(params, NET, net_loss, &b, 0.3);
            for (int i = 0; i < NET; ++i) {
                average[i] = 0.9 * average[i] + 0.1 * params[i];
            }
            t_ok(evaluated[0].m, ms_write(evaluated[0].m, evaluated[0].x, b.x));
            t_ok(evaluated[0].m, ms_eval(evaluated[0].m, &loss));
            assert_true(isnan(loss));
            t_ok(evaluated[0].m, ms_read(evaluated[0].m, out, values));
            net_outputs(average, &b, outputs);
            near_all(values, outputs, ROWS * OUT, 1e-5);
            net_feed(&evaluated[1], &b);
            t_ok(evaluated[1].m, ms_eval(evaluated[1].m, &loss));
            same_value(loss, net_loss(average, &b), 1e-5);
        }
        params_near(n.m, n.W, 2, params, 1e-5);
        ms_destroy(n.m);
        for (int k = 0; k < 2; ++k) {
            params_near(evaluated[k].m, evaluated[k].W, 2, average, 1e-5);
            has_no_steps(evaluated[k].m);
            ms_destroy(evaluated[k].m);
        }
        ms_arena_destroy(arena);
        averages_end(&a);
    }
}

enum { TEACHER = 7, TEACHER_NET = IN * TEACHER + TEACHER * OUT };

typedef struct distilled {
    batch b;
    double teacher[TEACHER_NET], T;
} distilled;

static void reference_softmax(double *p, const double *logits, double T) {
    double sum = 0.0;
    for (int c = 0; c < OUT; ++c) {
        p[c] = exp(logits[c] / T);
        sum += p[c];
    }
    for (int c = 0; c < OUT; ++c) {
        p[c] /= sum;
    }
}

static double distilled_loss(const double *params, const void *user) {
    const distilled *d = (const distilled *)user;
    double total = 0.0, x[IN], a[TEACHER], y[OUT], wanted[OUT], given[OUT];
    for (int r = 0; r < ROWS; ++r) {
        widen(x, d->b.x + r * IN, IN);
        reference_row(x, d->teacher, d->teacher + IN * TEACHER, IN, TEACHER, OUT, a, y);
        reference_softmax(wanted, y, d->T);
        reference_row(x, params, params + IN * HIDDEN, IN, HIDDEN, OUT, a, y);
        reference_softmax(given, y, d->T);
        for (int c = 0; c < OUT; ++c) {
            total += d->T * d->T * wanted[c] * log(wanted[c] / given[c]);
        }
    }
    return total / ROWS;
}

static void a_student_learns_from_a_teacher_that_does_not(void **state) {
    (void)state;
    const float large[3] = {-1000.0f, 1000.0f, 999.0f};
    same_value((double)log_sum(large, 3, 2.0f), 500.0 + log(1.0 + exp(-0.5)), 1e-4);
    for (int way = 0; way < WAYS; ++way) {
        ms_config config = way_config(way);
        t_rng rng = t_seed(11);
        float start[NET], of_teacher[TEACHER_NET], logits[ROWS * OUT], T = 2.5f;
        double params[MOST], loss, first = 0.0;
        distilled reference;
        distillation d;
        net n;
        ms_arena *arena;
        ms_tensor W[2];
        assert_int_equal(ms_arena_create(NULL, NULL, &arena), MS_RESULT_OK);
        config.arena = arena;
        assert_int_equal(ms_create(&config, &d.teacher), MS_RESULT_OK);
        d.teacher_in = ms_input(d.teacher, "x", MS_DTYPE_F32, ms_shape2(ROWS, IN));
        W[0] = ms_param(d.teacher, "W0", MS_DTYPE_F32, ms_shape2(IN, TEACHER));
        W[1] = ms_param(d.teacher, "W1", MS_DTYPE_F32, ms_shape2(TEACHER, OUT));
        d.teacher_logits = add_dense(
            d.teacher, add_tanh(d.teacher, add_dense(d.teacher, d.teacher_in, W[0])), W[1]);
        ms_add_eval_output(d.teacher, d.teacher_logits);
        t_ok(d.teacher, ms_wrap(d.teacher));
        t_fill(&rng, of_teacher, TEACHER_NET, 2.0f);
        widen(reference.teacher, of_teacher, TEACHER_NET);
        t_ok(d.teacher, ms_write(d.teacher, W[0], of_teacher));
        t_ok(d.teacher, ms_write(d.teacher, W[1], of_teacher + IN * TEACHER));

        const ms_optimizer_desc optimizer = descent(0.5f);
        const ms_tensor out = net_layers(&n, &config);
        d.student = n.m, d.in = n.x, d.soft_targets = n.target;
        d.logits = logits;
        ms_set_loss(n.m, add_soft_error(n.m, out, n.target, &T));
        ms_set_optimizer(n.m, &optimizer);
        t_fill(&rng, start, NET, 0.5f);
        widen(params, start, NET);
        net_start(&n, start);
        reference.T = (double)T;
        for (int step = 0; step < 12; ++step) {
            draw(&rng, &reference.b);
            assert_int_equal(distil(&d, reference.b.x, &loss), MS_RESULT_OK);
            same_value(loss, distilled_loss(params, &reference), 1e-5);
            reference_step(params, NET, distilled_loss, &reference, 0.5);
            first = step == 0 ? loss : first;
        }
        assert_true(loss < 0.7 * first);
        params_near(n.m, n.W, 2, params, 1e-5);
        ms_destroy(n.m);
        ms_destroy(d.teacher);
        ms_arena_destroy(arena);
    }
}

enum { DQN_NET = CELLS * (STATE + ACTIONS) };

typedef struct replay {
    float states[MOST_ACTED * STATE], next_states[REPLAYED * STATE], rewards[REPLAYED];
    int32_t taken[REPLAYED];
    bool ends[REPLAYED];
    double target[DQN_NET];
} replay;

static int reference_values(const double *params, const float *state_of, double *values) {
    double x[STATE], a[CELLS];
    int best = 0;
    widen(x, state_of, STATE);
    reference_row(x, params, params + STATE * CELLS, STATE, CELLS, ACTIONS, a, values);
    for (int k = 1; k < ACTIONS; ++k) {
        best = values[k] > values[best] ? k : best;
    }
    return best;
}

static double dqn_loss(const double *params, const void *user) {
    const replay *p = (const replay *)user;
    double total = 0.0, values[ACTIONS];
    for (int r = 0; r < REPLAYED; ++r) {
        const int best = reference_values(p->target, p->next_states + r * STATE, values);
        const double wanted = (double)p->rewards[r] + (p->ends[r] ? 0.0 : 0.75 * values[best]);
        (void)reference_values(params, p->states + r * STATE, values);
        const double error = values[p->taken[r]] - wanted;
        total += error * error;
    }
    return total / REPLAYED;
}

static void a_net_learns_from_the_values_of_its_target(void **state) {
    (void)state;
    for (int way = 0; way < WAYS; ++way) {
        ms_config config = way_config(way);
        const ms_optimizer_desc optimizer = descent(0.2f);
        t_rng rng = t_seed(12);
        float start[DQN_NET];
        double params[MOST], values[ACTIONS], loss;
        int32_t actions[MOST_ACTED];
        ms_arena *arena;
        replay p;
        dqn q;
        assert_int_equal(ms_arena_create(NULL, NULL, &arena), MS_RESULT_OK);
        config.arena = arena;
        assert_int_equal(dqn_create(&q, &config, &optimizer), MS_RESULT_OK);
        t_fill(&rng, start, DQN_NET, 1.0f);
        widen(params, start, DQN_NET);
        t_ok(q.net, ms_write(q.net, q.weight[0], start));
        t_ok(q.net, ms_write(q.net, q.weight[1], start + STATE * CELLS));
        for (int step = 0; step < 20; ++step) {
            static const int64_t counts[] = {1, MOST_ACTED, REPLAYED, 13};
            if (step % 6 == 0) {
                assert_int_equal(replace_target(&q), MS_RESULT_OK);
                memcpy(p.target, params, sizeof p.target);
            }
            t_fill(&rng, p.states, MOST_ACTED * STATE, 1.0f);
            assert_int_equal(act(&q, p.states, counts[step % 4], actions), MS_RESULT_OK);
            for (int64_t r = 0; r < counts[step % 4]; ++r) {
                const int best = reference_values(params, p.states + r * STATE, values);
                same_value(values[actions[r]], values[best], 1e-5);
            }
            t_fill(&rng, p.next_states, REPLAYED * STATE, 1.0f);
            t_fill(&rng, p.rewards, REPLAYED, 1.0f);
            for (int r = 0; r < REPLAYED; ++r) {
                p.taken[r] = (int32_t)t_below(&rng, ACTIONS);
                p.ends[r] = t_below(&rng, 4) == 0;
            }
            t_ok(q.net,
                 learn(&q, p.states, p.taken, p.rewards, p.next_states, p.ends, 0.75f, &loss));
            same_value(loss, dqn_loss(params, &p), 1e-5);
            reference_step(params, DQN_NET, dqn_loss, &p, 0.2);
        }
        params_near(q.net, q.weight, 2, params, 1e-5);
        params_near(q.target, q.target_weight, 2, p.target, 1e-5);
        assert_int_equal(act(&q, p.states, MOST_ACTED, actions), MS_RESULT_OK);
        has_no_steps(q.net); // at sizes for evals
        ms_destroy(q.net);
        ms_destroy(q.target);
        ms_arena_destroy(arena);
    }
}

/* A table by its rows alone, or, to compare, trained as a whole. */
typedef struct lookup {
    ms_model *m;
    ms_tensor ids, target;
    sparse_table sparse;
    ms_tensor table; // of the dense one
} lookup;

static int dense_rows_backward(const ms_call *call) {
    const int32_t *ids = (const int32_t *)call->in[0].data;
    const int64_t cols = call->param[0].shape.dim[1];
    for (int64_t i = 0; i < call->in[0].shape.dim[0] * cols; ++i) {
        ((float *)call->grad_param[0].data)[ids[i / cols] * cols + i % cols] +=
            ((const float *)call->grad_out[0].data)[i];
        ((float *)call->grad_param[1].data)[i % cols] += ((const float *)call->grad_out[0].data)[i];
    }
    return 0;
}

static ms_tensor add_dense_table(ms_model *to, ms_tensor table, ms_tensor ids, int64_t cols) {
    ms_layer_desc d = {0};
    d.name = "rows", d.forward = rows_forward, d.backward = dense_rows_backward;
    d.in[0] = ids, d.param[0] = table;
    d.param[1] = ms_param(to, "bias", MS_DTYPE_F32, ms_shape1(cols));
    d.out[0] =
        ms_activation(to, "rows", MS_DTYPE_F32, ms_shape2(ms_tensor_shape(to, ids).dim[0], cols));
    d.backward_reads.in = 1;
    d.accumulates.param = 3;
    ms_register_layer(to, &d);
    return d.out[0];
}

static void lookup_create(lookup *l, const ms_config *config, bool is_sparse, int64_t rows,
                          int64_t cols, int64_t count, const ms_optimizer_desc *optimizer) {
    memset(l, 0, sizeof *l);
    assert_int_equal(ms_create(config, &l->m), MS_RESULT_OK);
    l->ids = ms_input(l->m, "ids", MS_DTYPE_I32, ms_shape1(count));
    l->target = ms_input(l->m, "target", MS_DTYPE_F32, ms_shape2(count, cols));
    ms_tensor out;
    if (is_sparse) {
        out = add_sparse_table(l->m, &l->sparse, l->ids, rows, cols);
        l->table = l->sparse.table;
    } else {
        l->table = ms_param(l->m, "table", MS_DTYPE_F32, ms_shape2(rows, cols));
        out = add_dense_table(l->m, l->table, l->ids, cols);
    }
    ms_set_loss(l->m, add_error(l->m, out, l->target));
    ms_set_optimizer(l->m, optimizer);
    t_ok(l->m, ms_wrap(l->m));
}

static void a_sparse_table_learns_the_rows_that_it_reads(void **state) {
    (void)state;
    enum { TABLE = 20, COLS = 4, READ = 6 };
    for (int way = 0; way < WAYS; ++way) {
        const ms_config config = way_config(way);
        const ms_optimizer_desc optimizer = descent(0.2f);
        t_rng rng = t_seed(3);
        lookup l;
        float values[TABLE * COLS], bias[COLS] = {0}, sums[TABLE] = {0}, target[READ * COLS];
        double table[TABLE * COLS], offset[COLS] = {0}, sum[TABLE] = {0}, loss;
        lookup_create(&l, &config, true, TABLE, COLS, READ, &optimizer);
        t_fill(&rng, values, TABLE * COLS, 1.0f);
        widen(table, values, TABLE * COLS);
        t_ok(l.m, ms_write(l.m, l.table, values));
        t_ok(l.m, ms_write(l.m, l.sparse.bias, bias));
        for (int step = 0; step < 8; ++step) {
            double gradient[TABLE * COLS] = {0}, of_bias[COLS] = {0}, expected = 0.0;
            int32_t ids[READ];
            for (int r = 0; r < READ; ++r) {
                ids[r] = (int32_t)t_below(&rng, step % 2 == 0 ? TABLE : 3); // 3: rows come twice
            }
            t_fill(&rng, target, READ * COLS, 1.0f);
            t_ok(l.m, ms_write(l.m, l.ids, ids));
            t_ok(l.m, ms_write(l.m, l.target, target));
            t_ok(l.m, ms_step(l.m, &loss));
            t_ok(l.m, sparse_update(l.m, &l.sparse, 0.1f, sums));
            for (int r = 0; r < READ; ++r) {
                for (int c = 0; c < COLS; ++c) {
                    const double error =
                        table[ids[r] * COLS + c] + offset[c] - (double)target[r * COLS + c];
                    expected += error * error / (READ * COLS);
                    gradient[ids[r] * COLS + c] += 2.0 * error / (READ * COLS);
                    of_bias[c] += 2.0 * error / (READ * COLS);
                }
            }
            same_value(loss, expected, 1e-5);
            for (int row = 0; row < TABLE; ++row) {
                double square = 0.0;
                for (int c = 0; c < COLS; ++c) {
                    square += gradient[row * COLS + c] * gradient[row * COLS + c];
                }
                sum[row] += square / COLS;
                for (int c = 0; c < COLS && square > 0.0; ++c) {
                    table[row * COLS + c] -= 0.1 * gradient[row * COLS + c] / sqrt(sum[row]);
                }
            }
            for (int c = 0; c < COLS; ++c) {
                offset[c] -= 0.2 * of_bias[c];
            }
        }
        params_near(l.m, &l.table, 1, table, 1e-4);
        params_near(l.m, &l.sparse.bias, 1, offset, 1e-5);
        ms_destroy(l.m);
    }
}

static double seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Adam's state and the gradient of a table against the rows that a batch has read: bytes, and the time
   of a step, the shortest of some. docs/recipes.md has those of long sweeps. */
static void a_sparse_table_takes_less(void **state) {
    (void)state;
    const int64_t rows = (int64_t)t_size(500, 50000), cols = (int64_t)t_size(64, 1024);
    for (int64_t count = (int64_t)t_size(32, 512); count <= (int64_t)t_size(32, 4096); count *= 8) {
        const uint64_t table_bytes = (uint64_t)(rows * cols) * sizeof(float);
        const uint64_t read_bytes = (uint64_t)(count * cols) * sizeof(float);
        float *target = (float *)calloc((size_t)(count * cols), sizeof *target);
        float *sums = (float *)calloc((size_t)rows, sizeof *sums);
        int32_t *ids = (int32_t *)malloc((size_t)count * sizeof *ids);
        assert_true(target != NULL && sums != NULL && ids != NULL);
        ms_memory_report report[2];
        for (int is_sparse = 0; is_sparse < 2; ++is_sparse) {
            const ms_config config = t_config();
            const ms_optimizer_desc optimizer = ms_optimizer_defaults(MS_OPTIMIZER_ADAMW);
            lookup l;
            t_rng rng = t_seed(4);
            double shortest = 1e9;
            lookup_create(&l, &config, is_sparse == 1, rows, cols, count, &optimizer);
            t_write_zeros(l.m);
            for (uint64_t step = 0; step < t_size(2, 12); ++step) {
                for (int64_t i = 0; i < count; ++i) {
                    ids[i] = (int32_t)t_below(&rng, (uint32_t)rows);
                }
                t_fill(&rng, target, (uint64_t)(count * cols), 1.0f);
                t_ok(l.m, ms_write(l.m, l.ids, ids));
                t_ok(l.m, ms_write(l.m, l.target, target));
                const double begin = seconds();
                t_ok(l.m, ms_step(l.m, NULL));
                if (is_sparse == 1) {
                    t_ok(l.m, sparse_update(l.m, &l.sparse, 0.1f, sums));
                }
                shortest = fmin(shortest, seconds() - begin);
            }
            t_ok(l.m, ms_report(l.m, &report[is_sparse]));
            print_message("%d rows read, %s: arena %.1f MB, a step %.1f ms\n", (int)count,
                          is_sparse == 1 ? "sparse" : "dense",
                          (double)report[is_sparse].arena_bytes / 1e6, 1e3 * shortest);
            ms_destroy(l.m);
        }
        /* The rows that were read, and at the peak the output with its gradient, which the dense plan
           has not at its own. */
        assert_true(report[0].arena_bytes - report[1].arena_bytes + 3 * read_bytes +
                        (uint64_t)rows * sizeof(int32_t) + 1024 >
                    3 * table_bytes);
        free(target);
        free(sums);
        free(ids);
    }
}

typedef struct two_tasks {
    float x[ROWS * IN], target[2][ROWS * OUT];
    double weights[2];
} two_tasks;

enum { FIRST = 2, SECOND = 3, TASKS = IN * HIDDEN + HIDDEN * (FIRST + SECOND) };

static double tasks_loss(const double *params, const void *user) {
    const two_tasks *t = (const two_tasks *)user;
    double total = 0.0, x[IN], a[HIDDEN], y[OUT];
    for (int r = 0; r < ROWS; ++r) {
        for (int task = 0; task < 2; ++task) {
            const int cols = task == 0 ? FIRST : SECOND;
            const double *W = params + IN * HIDDEN + (task == 0 ? 0 : HIDDEN * FIRST);
            double sum = 0.0;
            widen(x, t->x + r * IN, IN);
            reference_row(x, params, W, IN, HIDDEN, cols, a, y);
            for (int o = 0; o < cols; ++o) {
                const double error = y[o] - (double)t->target[task][r * cols + o];
                sum += error * error;
            }
            total += t->weights[task] * sum / cols;
        }
    }
    return total / (2 * ROWS);
}

static void two_tasks_are_balanced_by_their_gradients(void **state) {
    (void)state;
    for (int way = 0; way < WAYS; ++way) {
        ms_config config = way_config(way);
        config.early_update = MS_SWITCH_OFF;
        const ms_optimizer_desc optimizer = descent(0.3f);
        t_rng rng = t_seed(5);
        two_tasks t;
        float start[TASKS], gradient[IN * HIDDEN], balance[2];
        double params[MOST], expected[2][MOST], loss;
        ms_model *m;
        ms_tensor target[2], out[2], W[3];
        assert_int_equal(ms_create(&config, &m), MS_RESULT_OK);
        const ms_tensor x = ms_input(m, "x", MS_DTYPE_F32, ms_shape2(ROWS, IN));
        const ms_tensor weights = ms_input(m, "weights", MS_DTYPE_F32, ms_shape1(2));
        W[0] = ms_param(m, "shared", MS_DTYPE_F32, ms_shape2(IN, HIDDEN));
        const ms_tensor a = add_tanh(m, add_dense(m, x, W[0]));
        for (int task = 0; task < 2; ++task) {
            const int64_t cols = task == 0 ? FIRST : SECOND;
            target[task] = ms_input(m, "target", MS_DTYPE_F32, ms_shape2(ROWS, cols));
            W[1 + task] = ms_param(m, "head", MS_DTYPE_F32, ms_shape2(HIDDEN, cols));
            out[task] = add_dense(m, a, W[1 + task]);
        }
        ms_set_loss(m, add_tasks(m, out, target, weights));
        ms_set_optimizer(m, &optimizer);
        t_ok(m, ms_wrap(m));
        t_fill(&rng, start, TASKS, 0.5f);
        widen(params, start, TASKS);
        t_ok(m, ms_write(m, W[0], start));
        t_ok(m, ms_write(m, W[1], start + IN * HIDDEN));
        t_ok(m, ms_write(m, W[2], start + IN * HIDDEN + HIDDEN * FIRST));
        for (int step = 0; step < 6; ++step) {
            double length[2] = {0.0, 0.0};
            t_fill(&rng, t.x, ROWS * IN, 1.0f);
            t_fill(&rng, t.target[0], ROWS * FIRST, 5.0f); // the larger gradient
            t_fill(&rng, t.target[1], ROWS * SECOND, 1.0f);
            t_ok(m, ms_write(m, x, t.x));
            t_ok(m, ms_write(m, target[0], t.target[0]));
            t_ok(m, ms_write(m, target[1], t.target[1]));
            for (int task = 0; task < 2; ++task) {
                t.weights[task] = 1.0, t.weights[1 - task] = 0.0;
                reference_gradient(expected[task], params, TASKS, tasks_loss, &t);
                t_ok(m, task_gradient(m, weights, task, W[0], gradient));
                near_all(gradient, expected[task], IN * HIDDEN, 1e-5);
                for (int i = 0; i < IN * HIDDEN; ++i) {
                    length[task] += expected[task][i] * expected[task][i];
                }
                length[task] = sqrt(length[task]);
            }
            t_ok(m, balanced_step(m, weights, W[0], gradient, balance, &loss));
            t.weights[0] = 2.0 * length[1] / (length[0] + length[1]);
            t.weights[1] = 2.0 * length[0] / (length[0] + length[1]);
            same_value((double)balance[0], t.weights[0], 1e-4);
            same_value((double)balance[1], t.weights[1], 1e-4);
            assert_true(balance[0] < 1.0f);
            same_value(loss, tasks_loss(params, &t), 1e-4);
            reference_step(params, TASKS, tasks_loss, &t, 0.3);
        }
        params_near(m, W, 3, params, 1e-4);
        ms_memory_report report;
        t_ok(m, ms_report(m, &report));
        assert_int_equal(report.step_count, 6);
        ms_destroy(m);
    }
}

typedef struct gan_reference {
    double critic[POINT * CRITIC + CRITIC], points[2 * PAIRS * POINT], noise[PAIRS * NOISE];
} gan_reference;

static double critic_loss(const double *params, const void *user) {
    const gan_reference *g = (const gan_reference *)user;
    double total = 0.0, a[CRITIC], score;
    for (int r = 0; r < 2 * PAIRS; ++r) {
        reference_row(g->points + r * POINT, params, params + POINT * CRITIC, POINT, CRITIC, 1, a,
                      &score);
        total += (score - (r < PAIRS)) * (score - (r < PAIRS));
    }
    return total / (2 * PAIRS);
}

static double generator_loss(const double *params, const void *user) {
    const gan_reference *g = (const gan_reference *)user;
    double total = 0.0, a[CRITIC], point[POINT], score;
    for (int r = 0; r < PAIRS; ++r) {
        reference_row(g->noise + r * NOISE, params, params + NOISE * GENERATOR, NOISE, GENERATOR,
                      POINT, a, point);
        reference_row(point, g->critic, g->critic + POINT * CRITIC, POINT, CRITIC, 1, a, &score);
        total += (score - 1.0) * (score - 1.0);
    }
    return total / PAIRS;
}

static void a_generator_learns_through_the_critic_as_it_is(void **state) {
    (void)state;
    enum {
        CRITIC_PARAMS = POINT * CRITIC + CRITIC,
        MADE_PARAMS = NOISE * GENERATOR + GENERATOR * POINT
    };
    for (int way = 0; way < WAYS; ++way) {
        const ms_config config = way_config(way);
        const ms_optimizer_desc optimizer = descent(0.2f);
        t_rng rng = t_seed(6);
        float start[MADE_PARAMS], noise[PAIRS * NOISE], points[2 * PAIRS * POINT];
        double params[MOST], losses[2];
        gan_reference reference;
        ms_memory_report reports[2];
        gan g;
        memset(&g, 0, sizeof g);
        for (int i = 0; i < 2; ++i) {
            const int count = i == 0 ? POINT * CRITIC : CRITIC;
            t_fill(&rng, g.critic_weight[i], (uint64_t)count, 1.0f);
            widen(reference.critic + (i == 0 ? 0 : POINT * CRITIC), g.critic_weight[i], count);
        }
        assert_int_equal(gan_create(&g, &config, &optimizer), MS_RESULT_OK);
        t_fill(&rng, start, MADE_PARAMS, 1.0f);
        widen(params, start, MADE_PARAMS);
        t_ok(g.generator, ms_write(g.generator, g.weight[0], start));
        t_ok(g.generator, ms_write(g.generator, g.weight[1], start + NOISE * GENERATOR));
        for (int step = 0; step < 8; ++step) {
            double a[GENERATOR];
            t_fill(&rng, noise, PAIRS * NOISE, 1.0f);
            t_fill(&rng, points, PAIRS * POINT, 1.0f);
            widen(reference.noise, noise, PAIRS * NOISE);
            widen(reference.points, points, PAIRS * POINT);
            for (int r = 0; r < PAIRS; ++r) {
                reference_row(reference.noise + r * NOISE, params, params + NOISE * GENERATOR,
                              NOISE, GENERATOR, POINT, a, reference.points + (PAIRS + r) * POINT);
            }
            assert_int_equal(gan_step(&g, noise, points, &losses[0], &losses[1]), MS_RESULT_OK);
            same_value(losses[0], critic_loss(reference.critic, &reference), 1e-4);
            reference_step(reference.critic, CRITIC_PARAMS, critic_loss, &reference, 0.2);
            same_value(losses[1], generator_loss(params, &reference), 1e-4);
            reference_step(params, MADE_PARAMS, generator_loss, &reference, 0.2);
        }
        params_near(g.generator, g.weight, 2, params, 1e-4);
        near_all(g.critic_weight[0], reference.critic, POINT * CRITIC, 1e-4);
        near_all(g.critic_weight[1], reference.critic + POINT * CRITIC, CRITIC, 1e-4);
        /* What is shared is counted in both reports, and is as large as one of the two needs. */
        t_ok(g.critic, ms_report(g.critic, &reports[0]));
        t_ok(g.generator, ms_report(g.generator, &reports[1]));
        assert_true(ms_arena_bytes(g.arena) > 0 &&
                    ms_arena_bytes(g.arena) < reports[0].arena_bytes + reports[1].arena_bytes);
        gan_destroy(&g);
    }
}

typedef struct penalized {
    float real[ROWS * IN], made[ROWS * IN], between[ROWS * IN];
} penalized;

static double penalized_loss(const double *params, const void *user) {
    const penalized *p = (const penalized *)user;
    const double *W = params, *v = params + IN * HIDDEN;
    double total = 0.0, x[IN], a[HIDDEN], score;
    for (int r = 0; r < ROWS; ++r) {
        widen(x, p->made + r * IN, IN);
        reference_row(x, W, v, IN, HIDDEN, 1, a, &score);
        total += score;
        widen(x, p->real + r * IN, IN);
        reference_row(x, W, v, IN, HIDDEN, 1, a, &score);
        total -= score;
        /* The gradient by the point, as differences of the score. */
        double square = 0.0;
        widen(x, p->between + r * IN, IN);
        for (int i = 0; i < IN; ++i) {
            double above, below;
            const double here = x[i];
            x[i] = here + 1e-4;
            reference_row(x, W, v, IN, HIDDEN, 1, a, &above);
            x[i] = here - 1e-4;
            reference_row(x, W, v, IN, HIDDEN, 1, a, &below);
            x[i] = here;
            square += (above - below) / 2e-4 * (above - below) / 2e-4;
        }
        total += 10.0 * (sqrt(square) - 1.0) * (sqrt(square) - 1.0);
    }
    return total / ROWS;
}

static void a_gradient_penalty_is_differentiated(void **state) {
    (void)state;
    enum { COUNT = IN * HIDDEN + HIDDEN };
    for (int way = 0; way < WAYS; ++way) {
        const ms_config config = way_config(way);
        const ms_optimizer_desc optimizer = descent(0.02f);
        t_rng rng = t_seed(7);
        penalized p;
        float start[COUNT], weight = 10.0f;
        double params[MOST], loss;
        ms_model *m;
        ms_tensor in[3], W[2];
        assert_int_equal(ms_create(&config, &m), MS_RESULT_OK);
        for (int k = 0; k < 3; ++k) {
            in[k] = ms_input(m, "points", MS_DTYPE_F32, ms_shape2(ROWS, IN));
        }
        W[0] = ms_param(m, "W", MS_DTYPE_F32, ms_shape2(IN, HIDDEN));
        W[1] = ms_param(m, "v", MS_DTYPE_F32, ms_shape2(HIDDEN, 1));
        ms_set_loss(m, add_penalized_critic(m, in[0], in[1], in[2], W[0], W[1], &weight));
        ms_set_optimizer(m, &optimizer);
        t_ok(m, ms_wrap(m));
        t_fill(&rng, start, COUNT, 1.0f);
        widen(params, start, COUNT);
        t_ok(m, ms_write(m, W[0], start));
        t_ok(m, ms_write(m, W[1], start + IN * HIDDEN));
        for (int step = 0; step < 8; ++step) {
            t_fill(&rng, p.real, ROWS * IN, 1.0f);
            t_fill(&rng, p.made, ROWS * IN, 1.0f);
            for (int i = 0; i < ROWS * IN; ++i) {
                p.between[i] = 0.3f * p.real[i] + 0.7f * p.made[i];
            }
            t_ok(m, ms_write(m, in[0], p.real));
            t_ok(m, ms_write(m, in[1], p.made));
            t_ok(m, ms_write(m, in[2], p.between));
            t_ok(m, ms_step(m, &loss));
            same_value(loss, penalized_loss(params, &p), 1e-4);
            reference_step(params, COUNT, penalized_loss, &p, 0.02);
        }
        params_near(m, W, 2, params, 1e-4);
        ms_destroy(m);
    }
}

static void pixels_move_by_the_sign_of_their_gradients(void **state) {
    (void)state;
    for (int way = 0; way < WAYS; ++way) {
        const ms_config config = way_config(way);
        t_rng rng = t_seed(13);
        float start[NET], gradient[ROWS * IN], values[NET];
        double params[MOST], loss[2];
        batch b, moved;
        net n;
        t_fill(&rng, start, NET, 0.5f);
        widen(params, start, NET);
        net_create(&n, &config, 0.3f);
        ms_want_gradient(n.m, n.x);
        ms_set_frozen(n.m, n.W[0], true);
        ms_set_frozen(n.m, n.W[1], true);
        net_start(&n, start);
        draw(&rng, &b);
        net_feed(&n, &b);
        for (int step = 0; step < 5; ++step) {
            const batch old = b;
            loss[0] = net_loss(params, &b);
            t_ok(n.m, perturb(n.m, n.x, b.x, gradient, 0.01f));
            loss[1] = net_loss(params, &b);
            assert_true(loss[1] > loss[0]);
            for (int i = 0; i < ROWS * IN; ++i) {
                moved = old;
                moved.x[i] = old.x[i] + 1.0f / 256.0f;
                const double above = net_loss(params, &moved), at = (double)moved.x[i];
                moved.x[i] = old.x[i] - 1.0f / 256.0f;
                const double slope = (above - net_loss(params, &moved)) / (at - (double)moved.x[i]);
                same_value((double)gradient[i], slope, 2e-5);
                if (fabs(slope) > 1e-4) {
                    same_value((double)b.x[i], (double)old.x[i] + (slope > 0.0 ? 0.01 : -0.01),
                               1e-6);
                }
            }
        }
        t_ok(n.m, ms_read(n.m, n.W[0], values));
        t_ok(n.m, ms_read(n.m, n.W[1], values + IN * HIDDEN));
        assert_memory_equal(values, start, sizeof start);
        ms_destroy(n.m);
    }
}

/* Both halves of the net as models of their own: in float64, and to the bit those of the whole net. */
static void a_chain_of_models_trains_as_one(void **state) {
    (void)state;
    for (int way = 0; way < WAYS; ++way) {
        ms_config config = way_config(way);
        const ms_optimizer_desc optimizer = descent(0.3f);
        t_rng rng = t_seed(14);
        float start[NET], handed[ROWS * HIDDEN], values[2][NET];
        double params[MOST], loss, of_whole;
        ms_arena *arena;
        ms_tensor W[2];
        batch b;
        chain c;
        net n;
        t_fill(&rng, start, NET, 0.5f);
        widen(params, start, NET);
        net_create(&n, &config, 0.3f);
        net_start(&n, start);
        assert_int_equal(ms_arena_create(NULL, NULL, &arena), MS_RESULT_OK);
        config.arena = arena;
        assert_int_equal(ms_create(&config, &c.first), MS_RESULT_OK);
        assert_int_equal(ms_create(&config, &c.second), MS_RESULT_OK);
        const ms_tensor x = ms_input(c.first, "x", MS_DTYPE_F32, ms_shape2(ROWS, IN));
        W[0] = ms_param(c.first, "W0", MS_DTYPE_F32, ms_shape2(IN, HIDDEN));
        c.out = add_tanh(c.first, add_dense(c.first, x, W[0]));
        c.in = ms_input(c.second, "a", MS_DTYPE_F32, ms_shape2(ROWS, HIDDEN));
        c.values = handed;
        for (int i = 0; i < ROWS * HIDDEN; ++i) {
            handed[i] = NAN; // what it held before must not count
        }
        const ms_tensor target = ms_input(c.second, "target", MS_DTYPE_F32, ms_shape2(ROWS, OUT));
        W[1] = ms_param(c.second, "W1", MS_DTYPE_F32, ms_shape2(HIDDEN, OUT));
        ms_set_loss(c.second, add_error(c.second, add_dense(c.second, c.in, W[1]), target));
        ms_set_optimizer(c.first, &optimizer);
        ms_set_optimizer(c.second, &optimizer);
        assert_int_equal(chain_wrap(&c), MS_RESULT_OK);
        t_ok(c.first, ms_write(c.first, W[0], start));
        t_ok(c.second, ms_write(c.second, W[1], start + IN * HIDDEN));
        for (int step = 0; step < 12; ++step) {
            draw(&rng, &b);
            net_feed(&n, &b);
            t_ok(n.m, ms_step(n.m, &of_whole));
            t_ok(c.first, ms_write(c.first, x, b.x));
            t_ok(c.second, ms_write(c.second, target, b.target));
            assert_int_equal(chained_step(&c, &loss), MS_RESULT_OK);
            assert_true(loss == of_whole);
            same_value(loss, net_loss(params, &b), 1e-5);
            reference_step(params, NET, net_loss, &b, 0.3);
        }
        t_ok(c.first, ms_read(c.first, W[0], values[0]));
        t_ok(c.second, ms_read(c.second, W[1], values[0] + IN * HIDDEN));
        near_all(values[0], params, NET, 1e-5);
        t_ok(n.m, ms_read(n.m, n.W[0], values[1]));
        t_ok(n.m, ms_read(n.m, n.W[1], values[1] + IN * HIDDEN));
        assert_memory_equal(values[0], values[1], sizeof values[0]);
        ms_destroy(n.m);
        ms_destroy(c.first);
        ms_destroy(c.second);
        ms_arena_destroy(arena);
    }
}

static void make_batch(void *user, uint64_t number, float *batch_of) {
    const struct timespec a_while = {0, number % 3 == 0 ? 300000 : 0};
    t_rng rng = t_seed(*(const uint64_t *)user + number);
    t_fill(&rng, batch_of, ROWS * IN, 1.0f);
    nanosleep(&a_while, NULL);
}

static void a_loader_gives_each_batch_once_and_in_order(void **state) {
    (void)state;
    float params[2][NET];
    for (int threaded = 0; threaded < 2; ++threaded) {
        const ms_config config = t_config();
        t_rng rng = t_seed(8);
        uint64_t seed = 77;
        batch b;
        net n;
        loader l;
        float made[ROWS * IN];
        net_create(&n, &config, 0.3f);
        t_fill(&rng, params[threaded], NET, 0.5f);
        net_start(&n, params[threaded]);
        draw(&rng, &b);
        net_feed(&n, &b);
        memset(&l, 0, sizeof l);
        l.make = make_batch;
        l.user = &seed;
        l.batch = made;
        if (threaded == 1) {
            assert_int_equal(loader_start(&l), 0);
        }
        for (uint64_t step = 0; step < 60; ++step) {
            if (threaded == 1) {
                t_ok(n.m, loader_feed(&l, n.m, n.x));
            } else {
                make_batch(&seed, step, made);
                t_ok(n.m, ms_write(n.m, n.x, made));
            }
            t_ok(n.m, ms_step(n.m, NULL));
        }
        if (threaded == 1) {
            loader_end(&l);
        }
        t_ok(n.m, ms_read(n.m, n.W[0], params[threaded]));
        t_ok(n.m, ms_read(n.m, n.W[1], params[threaded] + IN * HIDDEN));
        ms_destroy(n.m);
    }
    assert_memory_equal(params[0], params[1], sizeof params[0]);
}

enum { SEQUENCES = 3, LONGEST = 8 };

typedef struct padded {
    int length, real[SEQUENCES]; // of the batch; of each sequence
    float in[SEQUENCES * LONGEST * IN], target[SEQUENCES * LONGEST * OUT],
        mask[SEQUENCES * LONGEST];
} padded;

static double padded_loss(const double *params, const void *user) {
    const padded *p = (const padded *)user;
    double total = 0.0, x[IN], a[HIDDEN], y[OUT];
    int count = 0;
    for (int s = 0; s < SEQUENCES; ++s) {
        for (int t = 0; t < p->real[s]; ++t) {
            const int row = s * p->length + t;
            widen(x, p->in + row * IN, IN);
            reference_row(x, params, params + IN * HIDDEN, IN, HIDDEN, OUT, a, y);
            for (int o = 0; o < OUT; ++o) {
                const double error = y[o] - (double)p->target[row * OUT + o];
                total += error * error;
                ++count;
            }
        }
    }
    return total / count;
}

static void batches_of_other_lengths_count_what_is_real(void **state) {
    (void)state;
    for (int way = 0; way < WAYS; ++way) {
        const ms_config config = way_config(way);
        const ms_optimizer_desc optimizer = descent(0.3f);
        t_rng rng = t_seed(9);
        sequences s;
        padded p;
        float start[NET];
        double params[MOST], loss;
        ms_model *m;
        ms_tensor W[2];
        ms_memory_report report;
        assert_int_equal(ms_create(&config, &m), MS_RESULT_OK);
        add_sequences(m, &s, SEQUENCES, LONGEST, IN, OUT);
        W[0] = ms_param(m, "W0", MS_DTYPE_F32, ms_shape2(IN, HIDDEN));
        W[1] = ms_param(m, "W1", MS_DTYPE_F32, ms_shape2(HIDDEN, OUT));
        const ms_tensor out = add_dense(m, add_tanh(m, add_dense(m, s.in, W[0])), W[1]);
        ms_set_loss(m, add_masked_error(m, &s, out));
        ms_set_optimizer(m, &optimizer);
        t_ok(m, ms_wrap(m));
        t_ok(m, ms_report(m, &report));
        const uint64_t arena_bytes = report.arena_bytes;
        t_fill(&rng, start, NET, 0.5f);
        widen(params, start, NET);
        t_ok(m, ms_write(m, W[0], start));
        t_ok(m, ms_write(m, W[1], start + IN * HIDDEN));
        for (int step = 0; step < 10; ++step) {
            static const int lengths[] = {5, 8, 1, 3, 5};
            p.length = lengths[step % 5];
            t_fill(&rng, p.in, SEQUENCES * LONGEST * IN, 1.0f);
            t_fill(&rng, p.target, SEQUENCES * LONGEST * OUT, 1.0f);
            for (int q = 0; q < SEQUENCES; ++q) {
                p.real[q] = q == 0 ? p.length : 1 + (int)t_below(&rng, (uint32_t)p.length);
                for (int t = 0; t < p.length; ++t) {
                    p.mask[q * p.length + t] = t < p.real[q] ? 1.0f : 0.0f;
                    p.target[(q * p.length + t) * OUT] =
                        t < p.real[q] ? 0.5f : 1e6f; // must not count
                }
            }
            t_ok(m, step_of_length(m, &s, p.length, p.in, p.target, p.mask, &loss));
            same_value(loss, padded_loss(params, &p), 1e-5);
            reference_step(params, NET, padded_loss, &p, 0.3);
        }
        params_near(m, W, 2, params, 1e-5);
        t_ok(m, ms_report(m, &report));
        assert_int_equal(report.arena_bytes, arena_bytes);
        ms_destroy(m);
    }
}

static void nothing_has_warned(void **state) {
    (void)state;
    assert_int_equal(warnings, 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_schedule_sets_the_rate_of_each_step),
        cmocka_unit_test(groups_follow_schedules_of_their_own),
        cmocka_unit_test(a_model_without_a_loss_takes_less),
        cmocka_unit_test(averages_follow_and_are_evaluated),
        cmocka_unit_test(a_student_learns_from_a_teacher_that_does_not),
        cmocka_unit_test(a_net_learns_from_the_values_of_its_target),
        cmocka_unit_test(a_sparse_table_learns_the_rows_that_it_reads),
        cmocka_unit_test(a_sparse_table_takes_less),
        cmocka_unit_test(two_tasks_are_balanced_by_their_gradients),
        cmocka_unit_test(a_generator_learns_through_the_critic_as_it_is),
        cmocka_unit_test(a_gradient_penalty_is_differentiated),
        cmocka_unit_test(pixels_move_by_the_sign_of_their_gradients),
        cmocka_unit_test(a_chain_of_models_trains_as_one),
        cmocka_unit_test(a_loader_gives_each_batch_once_and_in_order),
        cmocka_unit_test(batches_of_other_lengths_count_what_is_real),
        cmocka_unit_test(nothing_has_warned),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
