/*  llmc_style - a GPT-2 trainer of plain C functions on raw pointers, and the adapter that runs it
    inside a byte budget.

        build/examples/llmc_style                      the plain program
        build/examples/llmc_style --wrap --budget 8M   the same functions, called by memscale.h
        build/examples/llmc_style --compare            both, step by step by turns

    The programs before this one are written on memscale.h. This one and darknet_style.c are ports: the
    trainer was there first.

    The shape is that of Karpathy's llm.c: one block of params, one of activations, one of gradients
    for each, and a forward and a backward function per operation whose gradients are all +=. The
    plain program knows nothing of memscale.h. The adapter is the marked section after it. Its
    callbacks call the plain functions as they are: same data, same bits.

    WHO OWNS WHAT. What is kept between steps stays the trainer's: params and batch are borrowed, so
    that its initialization, batches and checkpoints work as before. So does its AdamW, which
    updates one param at a time, with moments that memscale.h need not know. What exists within a
    step is the plan's: activations, which are recomputed in a small budget, and gradients. Those of
    params are then free as soon as their param is updated. The blocks that the plain program has
    for these, by far the largest, are never allocated.

    LETTERS. B batch, T sequence, C channels, NH heads, L layers, V vocabulary. Row-major; a weight
    is (out, in). */
#ifndef _POSIX_C_SOURCE
#define _POSIX_C_SOURCE 200809L
#endif
#define MEMSCALE_IMPLEMENTATION
#include "memscale.h"
#include "options.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#ifdef MEMSCALE_CBLAS
#include <cblas.h>
#endif

/* The iterations of the next loop may run on several threads, where the work, in elements, is worth
   waking them. */
#ifdef _OPENMP
#define PRAGMA(text) _Pragma(#text)
#define PARALLEL(work) PRAGMA(omp parallel for schedule(static) if ((work) >= 16384))
#else
#define PARALLEL(work)
#endif

static void *allocate(int64_t count, size_t size) {
    void *memory = calloc((size_t)count, size);
    if (!memory) {
        fprintf(stderr, "llmc_style: no memory for %.1f MB\n", (double)count * (double)size / 1e6);
        exit(1);
    }
    return memory;
}

// ---- operations ---------------------------------------------------------------------------------

/* Eight partial sums in a fixed order, since a compiler must not reorder a float sum. */
static float dot(const float *a, const float *b, int64_t count) {
    float lane[8] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
    int64_t i = 0;
    for (; i + 8 <= count; i += 8) {
        for (int l = 0; l < 8; l++) {
            lane[l] += a[i + l] * b[i + l];
        }
    }
    float rest = 0.0f;
    for (; i < count; i++) {
        rest += a[i] * b[i];
    }
    return (((lane[0] + lane[4]) + (lane[1] + lane[5])) +
            ((lane[2] + lane[6]) + (lane[3] + lane[7]))) +
           rest;
}

/* y += factor * x */
static void add_scaled(float *y, const float *x, float factor, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        y[i] += factor * x[i];
    }
}

/* out (B, T, C) = wte[inp] + wpe */
static void encoder_forward(float *out, const int32_t *inp, const float *wte, const float *wpe,
                            int64_t B, int64_t T, int64_t C) {
    for (int64_t r = 0; r < B * T; r++) {
        const float *token = wte + inp[r] * C;
        const float *position = wpe + r % T * C;
        for (int64_t i = 0; i < C; i++) {
            out[r * C + i] = token[i] + position[i];
        }
    }
}

static void encoder_backward(float *dwte, float *dwpe, const float *dout, const int32_t *inp,
                             int64_t B, int64_t T, int64_t C) {
    for (int64_t r = 0; r < B * T; r++) {
        add_scaled(dwte + inp[r] * C, dout + r * C, 1.0f, C);
        add_scaled(dwpe + r % T * C, dout + r * C, 1.0f, C);
    }
}

/* out (B, T, C) = (inp - mean) * rstd * weight + bias; mean and rstd (B, T) */
static void layernorm_forward(float *out, float *mean, float *rstd, const float *inp,
                              const float *weight, const float *bias, int64_t B, int64_t T,
                              int64_t C) {
    PARALLEL(B * T * C)
    for (int64_t r = 0; r < B * T; r++) {
        const float *x = inp + r * C;
        float sum = 0.0f;
        float squares = 0.0f;
        for (int64_t i = 0; i < C; i++) {
            sum += x[i];
        }
        const float m = sum / (float)C;
        for (int64_t i = 0; i < C; i++) {
            squares += (x[i] - m) * (x[i] - m);
        }
        const float s = 1.0f / sqrtf(squares / (float)C + 1e-5f);
        for (int64_t i = 0; i < C; i++) {
            out[r * C + i] = (x[i] - m) * s * weight[i] + bias[i];
        }
        mean[r] = m;
        rstd[r] = s;
    }
}

static void layernorm_backward(float *dinp, float *dweight, float *dbias, const float *dout,
                               const float *inp, const float *weight, const float *mean,
                               const float *rstd, int64_t B, int64_t T, int64_t C) {
    for (int64_t r = 0; r < B * T; r++) {
        const float *x = inp + r * C;
        const float *dy = dout + r * C;
        float dnorm_sum = 0.0f;
        float dnorm_norm_sum = 0.0f;
        for (int64_t i = 0; i < C; i++) {
            const float norm = (x[i] - mean[r]) * rstd[r];
            dnorm_sum += weight[i] * dy[i];
            dnorm_norm_sum += weight[i] * dy[i] * norm;
        }
        const float dnorm_mean = dnorm_sum / (float)C;
        const float dnorm_norm_mean = dnorm_norm_sum / (float)C;
        for (int64_t i = 0; i < C; i++) {
            const float norm = (x[i] - mean[r]) * rstd[r];
            dweight[i] += norm * dy[i];
            dbias[i] += dy[i];
            dinp[r * C + i] += (weight[i] * dy[i] - dnorm_mean - norm * dnorm_norm_mean) * rstd[r];
        }
    }
}

/* out (B, T, OC) = inp (B, T, C) * transpose(weight (OC, C)) + bias (OC); bias may be NULL */
static void matmul_forward(float *out, const float *inp, const float *weight, const float *bias,
                           int64_t B, int64_t T, int64_t C, int64_t OC) {
    const int64_t rows = B * T;
#ifdef MEMSCALE_CBLAS
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, (int)rows, (int)OC, (int)C, 1.0f, inp,
                (int)C, weight, (int)C, 0.0f, out, (int)OC);
#else
    enum { BLOCK = 8 }; // rows that share a row of the weight while it is in the cache
    PARALLEL(rows * OC)
    for (int64_t begin = 0; begin < rows; begin += BLOCK) {
        const int64_t end = begin + BLOCK < rows ? begin + BLOCK : rows;
        for (int64_t o = 0; o < OC; o++) {
            for (int64_t r = begin; r < end; r++) {
                out[r * OC + o] = dot(inp + r * C, weight + o * C, C);
            }
        }
    }
#endif
    for (int64_t r = 0; bias && r < rows; r++) {
        add_scaled(out + r * OC, bias, 1.0f, OC);
    }
}

static void matmul_backward(float *dinp, float *dweight, float *dbias, const float *dout,
                            const float *inp, const float *weight, int64_t B, int64_t T, int64_t C,
                            int64_t OC) {
    const int64_t rows = B * T;
#ifdef MEMSCALE_CBLAS
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, (int)rows, (int)C, (int)OC, 1.0f, dout,
                (int)OC, weight, (int)C, 1.0f, dinp, (int)C);
    cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, (int)OC, (int)C, (int)rows, 1.0f, dout,
                (int)OC, inp, (int)C, 1.0f, dweight, (int)C);
#else
    PARALLEL(rows * C)
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t o = 0; o < OC; o++) {
            add_scaled(dinp + r * C, weight + o * C, dout[r * OC + o], C);
        }
    }
    PARALLEL(OC * C)
    for (int64_t o = 0; o < OC; o++) {
        for (int64_t r = 0; r < rows; r++) {
            add_scaled(dweight + o * C, inp + r * C, dout[r * OC + o], C);
        }
    }
#endif
    for (int64_t r = 0; dbias && r < rows; r++) {
        add_scaled(dbias, dout + r * OC, 1.0f, OC);
    }
}

/* qkv (B, T, 3C) holds queries, keys and values; preatt and att (B, NH, T, T) are the scores before
   and after the softmax, out is (B, T, C). Row t sees the keys 0 ... t. */
static void attention_forward(float *out, float *preatt, float *att, const float *qkv, int64_t B,
                              int64_t T, int64_t C, int64_t NH) {
    const int64_t size = C / NH;
    const float scale = 1.0f / sqrtf((float)size);
    PARALLEL(B * NH * T * T)
    for (int64_t row = 0; row < B * NH * T; row++) { // row of the scores: (b, h, t)
        const int64_t b = row / (NH * T), h = row / T % NH, t = row % T;
        const float *query = qkv + (b * T + t) * 3 * C + h * size;
        const float *key = qkv + b * T * 3 * C + C + h * size;
        float *y = out + (b * T + t) * C + h * size;
        float most = -INFINITY;
        float sum = 0.0f;
        for (int64_t k = 0; k <= t; k++) {
            preatt[row * T + k] = dot(query, key + k * 3 * C, size) * scale;
            most = preatt[row * T + k] > most ? preatt[row * T + k] : most;
        }
        for (int64_t k = 0; k <= t; k++) {
            att[row * T + k] = expf(preatt[row * T + k] - most);
            sum += att[row * T + k];
        }
        for (int64_t k = 0; k < T; k++) {
            att[row * T + k] = k <= t ? att[row * T + k] / sum : 0.0f;
        }
        memset(y, 0, (size_t)size * sizeof *y);
        for (int64_t k = 0; k <= t; k++) {
            add_scaled(y, key + C + k * 3 * C, att[row * T + k], size);
        }
    }
}

static void attention_backward(float *dqkv, float *dpreatt, float *datt, const float *dout,
                               const float *qkv, const float *att, int64_t B, int64_t T, int64_t C,
                               int64_t NH) {
    const int64_t size = C / NH;
    const float scale = 1.0f / sqrtf((float)size);
    PARALLEL(B * NH * T * T)
    for (int64_t head = 0; head < B * NH; head++) {
        const int64_t first = head / NH * T * 3 * C + head % NH * size; // its query for t = 0
        for (int64_t t = 0; t < T; t++) {
            const int64_t row = (head * T + t) * T;
            const int64_t query = first + t * 3 * C;
            const float *dy = dout + (head / NH * T + t) * C + head % NH * size;
            for (int64_t k = 0; k <= t; k++) {
                const int64_t value = first + k * 3 * C + 2 * C;
                datt[row + k] += dot(dy, qkv + value, size);
                add_scaled(dqkv + value, dy, att[row + k], size);
            }
            const float mean = dot(att + row, datt + row, t + 1);
            for (int64_t k = 0; k <= t; k++) {
                const int64_t key = first + k * 3 * C + C;
                dpreatt[row + k] += att[row + k] * (datt[row + k] - mean);
                add_scaled(dqkv + query, qkv + key, dpreatt[row + k] * scale, size);
                add_scaled(dqkv + key, qkv + query, dpreatt[row + k] * scale, size);
            }
        }
    }
}

/* Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016, section 2, the tanh form. */
static void gelu_forward(float *out, const float *inp, int64_t count) {
    PARALLEL(count)
    for (int64_t i = 0; i < count; i++) {
        const float x = inp[i];
        out[i] = 0.5f * x * (1.0f + tanhf(0.797884561f * (x + 0.044715f * x * x * x)));
    }
}

static void gelu_backward(float *dinp, const float *dout, const float *inp, int64_t count) {
    PARALLEL(count)
    for (int64_t i = 0; i < count; i++) {
        const float x = inp[i];
        const float tangent = tanhf(0.797884561f * (x + 0.044715f * x * x * x));
        const float inner = 0.797884561f * (1.0f + 0.134145f * x * x);
        dinp[i] += dout[i] * 0.5f * (1.0f + tangent + x * (1.0f - tangent * tangent) * inner);
    }
}

static void residual_forward(float *out, const float *inp1, const float *inp2, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        out[i] = inp1[i] + inp2[i];
    }
}

static void residual_backward(float *dinp1, float *dinp2, const float *dout, int64_t count) {
    add_scaled(dinp1, dout, 1.0f, count);
    add_scaled(dinp2, dout, 1.0f, count);
}

/* probs (B, T, V) = softmax(logits); losses (B, T) = -log(probs[target]) */
static void classifier_forward(float *losses, float *probs, const float *logits,
                               const int32_t *targets, int64_t B, int64_t T, int64_t V) {
    PARALLEL(B * T * V)
    for (int64_t r = 0; r < B * T; r++) {
        float most = logits[r * V];
        float sum = 0.0f;
        for (int64_t i = 1; i < V; i++) {
            most = logits[r * V + i] > most ? logits[r * V + i] : most;
        }
        for (int64_t i = 0; i < V; i++) {
            probs[r * V + i] = expf(logits[r * V + i] - most);
            sum += probs[r * V + i];
        }
        for (int64_t i = 0; i < V; i++) {
            probs[r * V + i] /= sum;
        }
        losses[r] = -logf(probs[r * V + targets[r]]);
    }
}

static void classifier_backward(float *dlogits, const float *dlosses, const float *probs,
                                const int32_t *targets, int64_t B, int64_t T, int64_t V) {
    PARALLEL(B * T * V)
    for (int64_t r = 0; r < B * T; r++) {
        add_scaled(dlogits + r * V, probs + r * V, dlosses[r], V);
        dlogits[r * V + targets[r]] -= dlosses[r];
    }
}

typedef struct adamw_options {
    float learning_rate, beta1, beta2, epsilon, weight_decay;
} adamw_options;

/* Loshchilov and Hutter, "Decoupled weight decay regularization", 2019, algorithm 2. t is the
   number of this update, from 1. */
static void adamw_update(float *params, const float *grads, float *m, float *v, int64_t count,
                         const adamw_options *o, int64_t t) {
    const float correct1 = 1.0f / (1.0f - powf(o->beta1, (float)t));
    const float correct2 = 1.0f / (1.0f - powf(o->beta2, (float)t));
    PARALLEL(count)
    for (int64_t i = 0; i < count; i++) {
        m[i] = o->beta1 * m[i] + (1.0f - o->beta1) * grads[i];
        v[i] = o->beta2 * v[i] + (1.0f - o->beta2) * grads[i] * grads[i];
        const float direction = m[i] * correct1 / (sqrtf(v[i] * correct2) + o->epsilon);
        params[i] -= o->learning_rate * (direction + o->weight_decay * params[i]);
    }
}

// ---- GPT-2 --------------------------------------------------------------------------------------

typedef struct gpt2_config {
    int64_t V, max_T, L, NH, C;
    int64_t B, T;
} gpt2_config;

/* Pointers into one block of params, or of their gradients. */
typedef struct gpt2_params {
    float *wte, *wpe;           // (V, C), (max_T, C)
    float *ln1w, *ln1b;         // (L, C)
    float *qkvw, *qkvb;         // (L, 3C, C), (L, 3C)
    float *attprojw, *attprojb; // (L, C, C), (L, C)
    float *ln2w, *ln2b;         // (L, C)
    float *fcw, *fcb;           // (L, 4C, C), (L, 4C)
    float *fcprojw, *fcprojb;   // (L, C, 4C), (L, C)
    float *lnfw, *lnfb;         // (C)
} gpt2_params;

/* Pointers into one block of activations, or of their gradients. */
typedef struct gpt2_acts {
    float *encoded;                   // (B, T, C)
    float *ln1, *ln1_mean, *ln1_rstd; // (L, B, T, C), (L, B, T), (L, B, T)
    float *qkv;                       // (L, B, T, 3C)
    float *preatt, *att;              // (L, B, NH, T, T)
    float *atty, *attproj, *middle;   // (L, B, T, C): attention, its projection, the sum with it
    float *ln2, *ln2_mean, *ln2_rstd; // as ln1
    float *fc, *fc_gelu;              // (L, B, T, 4C)
    float *fcproj, *residual;         // (L, B, T, C); residual is the output of a block
    float *lnf, *lnf_mean, *lnf_rstd; // (B, T, C), (B, T), (B, T)
    float *logits, *probs;            // (B, T, V)
    float *losses;                    // (B, T)
} gpt2_acts;

typedef struct gpt2 {
    gpt2_config config;
    adamw_options adamw;
    int64_t step; // completed updates
    gpt2_params params, grads;
    float *params_memory, *grads_memory, *m_memory, *v_memory;
    int64_t param_count;
    gpt2_acts acts, acts_grads;
    float *acts_memory, *acts_grads_memory;
    int64_t act_count;
    int32_t *inputs, *targets; // (B, T)
    double mean_loss;
} gpt2;

typedef struct part {
    float **field;
    int64_t count;
} part;

/* Divides a block among the fields; with memory NULL it only counts. */
static int64_t deal(const part *parts, size_t part_count, float *memory) {
    int64_t total = 0;
    for (size_t i = 0; i < part_count; i++) {
        if (memory) {
            *parts[i].field = memory + total;
        }
        total += parts[i].count;
    }
    return total;
}

static int64_t deal_params(gpt2_params *p, const gpt2_config *c, float *memory) {
    const int64_t LC = c->L * c->C, LCC = LC * c->C;
    const part parts[] = {{&p->wte, c->V * c->C}, {&p->wpe, c->max_T * c->C}, {&p->ln1w, LC},
                          {&p->ln1b, LC},         {&p->qkvw, 3 * LCC},        {&p->qkvb, 3 * LC},
                          {&p->attprojw, LCC},    {&p->attprojb, LC},         {&p->ln2w, LC},
                          {&p->ln2b, LC},         {&p->fcw, 4 * LCC},         {&p->fcb, 4 * LC},
                          {&p->fcprojw, 4 * LCC}, {&p->fcprojb, LC},          {&p->lnfw, c->C},
                          {&p->lnfb, c->C}};
    return deal(parts, sizeof parts / sizeof parts[0], memory);
}

static int64_t deal_acts(gpt2_acts *a, const gpt2_config *c, float *memory) {
    const int64_t BT = c->B * c->T, BTC = BT * c->C, scores = c->L * BT * c->NH * c->T;
    const part parts[] = {{&a->encoded, BTC},
                          {&a->ln1, c->L * BTC},
                          {&a->ln1_mean, c->L * BT},
                          {&a->ln1_rstd, c->L * BT},
                          {&a->qkv, c->L * 3 * BTC},
                          {&a->preatt, scores},
                          {&a->att, scores},
                          {&a->atty, c->L * BTC},
                          {&a->attproj, c->L * BTC},
                          {&a->middle, c->L * BTC},
                          {&a->ln2, c->L * BTC},
                          {&a->ln2_mean, c->L * BT},
                          {&a->ln2_rstd, c->L * BT},
                          {&a->fc, c->L * 4 * BTC},
                          {&a->fc_gelu, c->L * 4 * BTC},
                          {&a->fcproj, c->L * BTC},
                          {&a->residual, c->L * BTC},
                          {&a->lnf, BTC},
                          {&a->lnf_mean, BT},
                          {&a->lnf_rstd, BT},
                          {&a->logits, BT * c->V},
                          {&a->probs, BT * c->V},
                          {&a->losses, BT}};
    return deal(parts, sizeof parts / sizeof parts[0], memory);
}

static uint64_t next_random(uint64_t *state) {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

/* Box and Muller, "A note on the generation of random normal deviates", 1958. */
static void fill_normal(float *values, int64_t count, double deviation, uint64_t *random) {
    for (int64_t i = 0; i < count; i++) {
        const double u = (double)((next_random(random) >> 11) + 1) / 9007199254740992.0;
        const double angle = (double)(next_random(random) >> 11) / 9007199254740992.0 * 6.283185307;
        values[i] = (float)(deviation * sqrt(-2.0 * log(u)) * cos(angle));
    }
}

static void fill_ones(float *values, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        values[i] = 1.0f;
    }
}

/* Params with GPT-2's initial values, moments of zero. What only a plain step needs, activations
   and gradients, is allocated by the first such step. */
static void gpt2_create(gpt2 *g, const gpt2_config *c, uint64_t seed) {
    const adamw_options adamw = {1e-3f, 0.9f, 0.95f, 1e-8f, 0.1f};
    uint64_t random = seed * 0x9e3779b97f4a7c15u + 1;
    memset(g, 0, sizeof *g);
    g->config = *c;
    g->adamw = adamw;
    g->param_count = deal_params(&g->params, c, NULL);
    g->act_count = deal_acts(&g->acts, c, NULL);
    g->params_memory = (float *)allocate(g->param_count, sizeof(float));
    g->m_memory = (float *)allocate(g->param_count, sizeof(float));
    g->v_memory = (float *)allocate(g->param_count, sizeof(float));
    g->inputs = (int32_t *)allocate(c->B * c->T, sizeof(int32_t));
    g->targets = (int32_t *)allocate(c->B * c->T, sizeof(int32_t));
    deal_params(&g->params, c, g->params_memory);
    const int64_t LC = c->L * c->C, LCC = LC * c->C;
    const double into_residual = 0.02 / sqrt(2.0 * (double)c->L);
    fill_normal(g->params.wte, c->V * c->C, 0.02, &random);
    fill_normal(g->params.wpe, c->max_T * c->C, 0.02, &random);
    fill_normal(g->params.qkvw, 3 * LCC, 0.02, &random);
    fill_normal(g->params.attprojw, LCC, into_residual, &random);
    fill_normal(g->params.fcw, 4 * LCC, 0.02, &random);
    fill_normal(g->params.fcprojw, 4 * LCC, into_residual, &random);
    fill_ones(g->params.ln1w, LC);
    fill_ones(g->params.ln2w, LC);
    fill_ones(g->params.lnfw, c->C);
}

static void gpt2_free(gpt2 *g) {
    free(g->params_memory);
    free(g->grads_memory);
    free(g->m_memory);
    free(g->v_memory);
    free(g->acts_memory);
    free(g->acts_grads_memory);
    free(g->inputs);
    free(g->targets);
    memset(g, 0, sizeof *g);
}

/* What block l reads, or the gradient of that: the output of the block before it. */
static float *block_input(const gpt2_acts *a, const gpt2_config *c, int64_t l) {
    return l == 0 ? a->encoded : a->residual + (l - 1) * c->B * c->T * c->C;
}

static void block_forward(const gpt2 *g, int64_t l) {
    const gpt2_params *p = &g->params;
    const gpt2_acts *a = &g->acts;
    const int64_t B = g->config.B, T = g->config.T, C = g->config.C, NH = g->config.NH;
    const int64_t r = l * B * T, s = r * NH * T; // first row and first score of this block
    const float *x = block_input(a, &g->config, l);
    layernorm_forward(a->ln1 + r * C, a->ln1_mean + r, a->ln1_rstd + r, x, p->ln1w + l * C,
                      p->ln1b + l * C, B, T, C);
    matmul_forward(a->qkv + r * 3 * C, a->ln1 + r * C, p->qkvw + l * 3 * C * C, p->qkvb + l * 3 * C,
                   B, T, C, 3 * C);
    attention_forward(a->atty + r * C, a->preatt + s, a->att + s, a->qkv + r * 3 * C, B, T, C, NH);
    matmul_forward(a->attproj + r * C, a->atty + r * C, p->attprojw + l * C * C,
                   p->attprojb + l * C, B, T, C, C);
    residual_forward(a->middle + r * C, x, a->attproj + r * C, B * T * C);
    layernorm_forward(a->ln2 + r * C, a->ln2_mean + r, a->ln2_rstd + r, a->middle + r * C,
                      p->ln2w + l * C, p->ln2b + l * C, B, T, C);
    matmul_forward(a->fc + r * 4 * C, a->ln2 + r * C, p->fcw + l * 4 * C * C, p->fcb + l * 4 * C, B,
                   T, C, 4 * C);
    gelu_forward(a->fc_gelu + r * 4 * C, a->fc + r * 4 * C, B * T * 4 * C);
    matmul_forward(a->fcproj + r * C, a->fc_gelu + r * 4 * C, p->fcprojw + l * 4 * C * C,
                   p->fcprojb + l * C, B, T, 4 * C, C);
    residual_forward(a->residual + r * C, a->middle + r * C, a->fcproj + r * C, B * T * C);
}

static void gpt2_forward(gpt2 *g) {
    const gpt2_config *c = &g->config;
    const int64_t B = c->B, T = c->T, C = c->C, V = c->V;
    if (!g->acts_memory) {
        g->acts_memory = (float *)allocate(g->act_count, sizeof(float));
        deal_acts(&g->acts, c, g->acts_memory);
    }
    const gpt2_params *p = &g->params;
    const gpt2_acts *a = &g->acts;
    encoder_forward(a->encoded, g->inputs, p->wte, p->wpe, B, T, C);
    for (int64_t l = 0; l < c->L; l++) {
        block_forward(g, l);
    }
    layernorm_forward(a->lnf, a->lnf_mean, a->lnf_rstd, block_input(a, c, c->L), p->lnfw, p->lnfb,
                      B, T, C);
    matmul_forward(a->logits, a->lnf, p->wte, NULL, B, T, C, V);
    classifier_forward(a->losses, a->probs, a->logits, g->targets, B, T, V);
    double sum = 0.0;
    for (int64_t r = 0; r < B * T; r++) {
        sum += (double)a->losses[r];
    }
    g->mean_loss = sum * (double)(1.0f / (float)(B * T));
}

static void gpt2_zero_grad(gpt2 *g) {
    if (!g->grads_memory) {
        g->grads_memory = (float *)allocate(g->param_count, sizeof(float));
        deal_params(&g->grads, &g->config, g->grads_memory);
        g->acts_grads_memory = (float *)allocate(g->act_count, sizeof(float));
        deal_acts(&g->acts_grads, &g->config, g->acts_grads_memory);
    }
    memset(g->grads_memory, 0, (size_t)g->param_count * sizeof(float));
    memset(g->acts_grads_memory, 0, (size_t)g->act_count * sizeof(float));
}

static void block_backward(const gpt2 *g, int64_t l) {
    const gpt2_params *p = &g->params, *dp = &g->grads;
    const gpt2_acts *a = &g->acts, *da = &g->acts_grads;
    const int64_t B = g->config.B, T = g->config.T, C = g->config.C, NH = g->config.NH;
    const int64_t r = l * B * T, s = r * NH * T;
    float *dx = block_input(da, &g->config, l);
    residual_backward(da->middle + r * C, da->fcproj + r * C, da->residual + r * C, B * T * C);
    matmul_backward(da->fc_gelu + r * 4 * C, dp->fcprojw + l * 4 * C * C, dp->fcprojb + l * C,
                    da->fcproj + r * C, a->fc_gelu + r * 4 * C, p->fcprojw + l * 4 * C * C, B, T,
                    4 * C, C);
    gelu_backward(da->fc + r * 4 * C, da->fc_gelu + r * 4 * C, a->fc + r * 4 * C, B * T * 4 * C);
    matmul_backward(da->ln2 + r * C, dp->fcw + l * 4 * C * C, dp->fcb + l * 4 * C,
                    da->fc + r * 4 * C, a->ln2 + r * C, p->fcw + l * 4 * C * C, B, T, C, 4 * C);
    layernorm_backward(da->middle + r * C, dp->ln2w + l * C, dp->ln2b + l * C, da->ln2 + r * C,
                       a->middle + r * C, p->ln2w + l * C, a->ln2_mean + r, a->ln2_rstd + r, B, T,
                       C);
    residual_backward(dx, da->attproj + r * C, da->middle + r * C, B * T * C);
    matmul_backward(da->atty + r * C, dp->attprojw + l * C * C, dp->attprojb + l * C,
                    da->attproj + r * C, a->atty + r * C, p->attprojw + l * C * C, B, T, C, C);
    attention_backward(da->qkv + r * 3 * C, da->preatt + s, da->att + s, da->atty + r * C,
                       a->qkv + r * 3 * C, a->att + s, B, T, C, NH);
    matmul_backward(da->ln1 + r * C, dp->qkvw + l * 3 * C * C, dp->qkvb + l * 3 * C,
                    da->qkv + r * 3 * C, a->ln1 + r * C, p->qkvw + l * 3 * C * C, B, T, C, 3 * C);
    layernorm_backward(dx, dp->ln1w + l * C, dp->ln1b + l * C, da->ln1 + r * C,
                       block_input(a, &g->config, l), p->ln1w + l * C, a->ln1_mean + r,
                       a->ln1_rstd + r, B, T, C);
}

/* To be called after gpt2_forward and gpt2_zero_grad. */
static void gpt2_backward(gpt2 *g) {
    const gpt2_config *c = &g->config;
    const gpt2_params *p = &g->params, *dp = &g->grads;
    const gpt2_acts *a = &g->acts, *da = &g->acts_grads;
    const int64_t B = c->B, T = c->T, C = c->C, V = c->V;
    for (int64_t r = 0; r < B * T; r++) {
        da->losses[r] = 1.0f / (float)(B * T);
    }
    classifier_backward(da->logits, da->losses, a->probs, g->targets, B, T, V);
    matmul_backward(da->lnf, dp->wte, NULL, da->logits, a->lnf, p->wte, B, T, C, V);
    layernorm_backward(block_input(da, c, c->L), dp->lnfw, dp->lnfb, da->lnf,
                       block_input(a, c, c->L), p->lnfw, a->lnf_mean, a->lnf_rstd, B, T, C);
    for (int64_t l = c->L - 1; l >= 0; l--) {
        block_backward(g, l);
    }
    encoder_backward(dp->wte, dp->wpe, da->encoded, g->inputs, B, T, C);
}

static void gpt2_update(gpt2 *g) {
    adamw_update(g->params_memory, g->grads_memory, g->m_memory, g->v_memory, g->param_count,
                 &g->adamw, g->step + 1);
}

static void gpt2_step(gpt2 *g) {
    gpt2_forward(g);
    gpt2_zero_grad(g);
    gpt2_backward(g);
    gpt2_update(g);
    g->step++;
}

// ---- text ---------------------------------------------------------------------------------------

enum { TEXT_BYTES = 1 << 16, SMALLEST_VOCABULARY = 128 };

/* Sums in words, such as "seven and five make twelve.": easy to begin, hard to complete. */
static void write_text(char *text, uint64_t seed) {
    static const char *const numbers[] = {
        "zero",     "one",     "two",     "three",     "four",     "five",    "six",
        "seven",    "eight",   "nine",    "ten",       "eleven",   "twelve",  "thirteen",
        "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"};
    uint64_t random = seed * 0x9e3779b97f4a7c15u + 1;
    int64_t used = 0;
    while (used < TEXT_BYTES) {
        char sentence[64];
        const uint64_t a = next_random(&random) % 10, b = next_random(&random) % 10;
        snprintf(sentence, sizeof sentence, "%s and %s make %s. ", numbers[a], numbers[b],
                 numbers[a + b]);
        for (const char *c = sentence; *c && used < TEXT_BYTES; c++) {
            text[used++] = *c;
        }
    }
}

/* Random windows of the text; the target of each byte is the next one. */
static void draw_batch(gpt2 *g, const char *text, uint64_t *random) {
    const int64_t T = g->config.T;
    for (int64_t b = 0; b < g->config.B; b++) {
        const char *window = text + next_random(random) % (uint64_t)(TEXT_BYTES - T);
        for (int64_t t = 0; t < T; t++) {
            g->inputs[b * T + t] = window[t];
            g->targets[b * T + t] = window[t + 1];
        }
    }
}

/* A byte, drawn by the probabilities of V. */
static int32_t sample_byte(const float *probs, int64_t V, uint64_t *random) {
    const float coin = (float)(next_random(random) >> 40) / 16777216.0f;
    float below = 0.0f;
    int32_t byte = 0;
    while (byte < V - 1 && (below += probs[byte]) <= coin) {
        byte++;
    }
    return byte;
}

/* Drops the first byte of the first row of inputs, and puts this one at its end. */
static void append_byte(gpt2 *g, int32_t byte) {
    const int64_t T = g->config.T;
    memmove(g->inputs, g->inputs + 1, (size_t)(T - 1) * sizeof *g->inputs);
    g->inputs[T - 1] = byte;
}

// ==== adapter, begin
// The program above, registered with memscale.h; see WHO OWNS WHAT at the top of this file.

typedef struct kind { // of layer
    const char *name;
    ms_layer_fn forward, backward;
    uint32_t in, saved, param; // masks of what backward reads
} kind;

/* A kind of layer whose callbacks call the plain functions with these arguments. */
#define KIND(name, in, saved, param, forward_args, backward_args)                                  \
    static int name##_on_forward(const ms_call *call) {                                            \
        const gpt2_config *c = (const gpt2_config *)call->user;                                    \
        return name##_forward forward_args, 0;                                                     \
    }                                                                                              \
    static int name##_on_backward(const ms_call *call) {                                           \
        const gpt2_config *c = (const gpt2_config *)call->user;                                    \
        return name##_backward backward_args, 0;                                                   \
    }                                                                                              \
    static const kind name = {#name, name##_on_forward, name##_on_backward, in, saved, param};
#define F(group, i)  ((float *)call->group[i].data)
#define IDS(i)       ((int32_t *)call->in[i].data)
#define WIDTH(group) (call->group[0].shape.dim[2])
#define SCRATCH      ((float *)call->workspace)

KIND(encoder, 1, 0, 0, (F(out, 0), IDS(0), F(param, 1), F(param, 0), c->B, c->T, c->C),
     (F(grad_param, 1), F(grad_param, 0), F(grad_out, 0), IDS(0), c->B, c->T, c->C))
KIND(layernorm, 1, 3, 2,
     (F(out, 0), F(saved, 0), F(saved, 1), F(in, 0), F(param, 1), F(param, 0), c->B, c->T, c->C),
     (F(grad_in, 0), F(grad_param, 1), F(grad_param, 0), F(grad_out, 0), F(in, 0), F(param, 1),
      F(saved, 0), F(saved, 1), c->B, c->T, c->C))
KIND(matmul, 1, 0, 2,
     (F(out, 0), F(in, 0), F(param, 1), F(param, 0), c->B, c->T, WIDTH(in), WIDTH(out)),
     (F(grad_in, 0), F(grad_param, 1), F(grad_param, 0), F(grad_out, 0), F(in, 0), F(param, 1),
      c->B, c->T, WIDTH(in), WIDTH(out)))
KIND(attention, 1, 1, 0, (F(out, 0), SCRATCH, F(saved, 0), F(in, 0), c->B, c->T, c->C, c->NH),
     (F(grad_in, 0), SCRATCH, SCRATCH + c->B * c->T * c->NH * c->T, F(grad_out, 0), F(in, 0),
      F(saved, 0), c->B, c->T, c->C, c->NH))
KIND(gelu, 1, 0, 0, (F(out, 0), F(in, 0), 4 * c->B * c->T * c->C),
     (F(grad_in, 0), F(grad_out, 0), F(in, 0), 4 * c->B * c->T * c->C))
KIND(residual, 0, 0, 0, (F(out, 0), F(in, 0), F(in, 1), c->B * c->T * c->C),
     (F(grad_in, 0), F(grad_in, 1), F(grad_out, 0), c->B * c->T * c->C))
KIND(classifier, 2, 0, 0, (F(out, 0), F(out, 1), F(in, 0), IDS(1), c->B, c->T, c->V),
     (F(grad_in, 0), F(grad_out, 0), F(out, 1), IDS(1), c->B, c->T, c->V))

static ms_tensor layer(ms_model *m, gpt2 *g, const kind *k, ms_tensor in0, ms_tensor in1,
                       ms_tensor weight, ms_tensor bias, int64_t width) {
    const gpt2_config *c = &g->config;
    const int64_t saved = k == &attention ? c->NH * c->T : 1; // each
    ms_layer_desc d = {0};
    d.name = k->name, d.forward = k->forward, d.backward = k->backward, d.user = &g->config;
    d.in[0] = in0, d.in[1] = in1;
    d.param[0] = bias, d.param[1] = weight; // an empty slot before a used one has a view too
    d.out[0] = ms_activation(m, k->name, MS_DTYPE_F32, ms_shape3(c->B, c->T, width));
    for (int i = 0; k->saved >> i & 1; i++) {
        d.saved[i] = ms_saved(m, k->name, MS_DTYPE_F32, ms_shape3(c->B, c->T, saved));
    }
    d.backward_reads.in = k->in, d.backward_reads.saved = k->saved;
    d.backward_reads.param = k->param, d.backward_reads.nothing = k == &residual;
    d.accumulates.in = d.accumulates.param = MS_ALL_SLOTS;
    d.in_place[0] = k == &residual ? 3 : 0;
    if (k == &attention) {
        d.forward_workspace.bytes = ms_tensor_bytes(m, d.saved[0]);
        d.backward_workspace.bytes = 2 * ms_tensor_bytes(m, d.saved[0]);
        d.backward_workspace.contents = MS_CONTENTS_ZERO; // for gradients that are += too
        d.flops = 2.0 * (double)(c->B * c->T * c->T * c->C);
    }
    if (k == &classifier) { // "weight" is probs: an output, since the sampler reads it
        d.out[1] = weight, d.param[1] = bias, d.backward_reads.out = 2;
    }
    ms_register_layer(m, &d);
    return d.out[0];
}

static ms_tensor borrow(ms_model *m, ms_tensor tensor, void *memory) {
    const ms_result sticks = ms_borrow(m, tensor, memory); // errors stick until ms_wrap
    return (void)sticks, tensor;
}

static int update(const ms_update_args *u) {
    gpt2 *g = (gpt2 *)u->user;
    const ptrdiff_t at = u->value - g->params_memory;
    adamw_update(u->value, u->gradient, g->m_memory + at, g->v_memory + at, (int64_t)u->count,
                 &g->adamw, g->step + 1);
    return 0;
}

/* Part l of a field as a param; a layer with two such params. */
#define PARAM(l, field, count)                                                                     \
    borrow(m, ms_param(m, #field, MS_DTYPE_F32, ms_shape1(count)), g->params.field + (l) * (count))
#define AFFINE(kind, x, l, weight, weight_count, bias, width)                                      \
    (w = PARAM(l, weight, weight_count), b = PARAM(l, bias, width),                                \
     layer(m, g, &kind, x, none, w, b, width))

/* Returns the probabilities, for the sampler. */
static ms_tensor register_gpt2(ms_model *m, gpt2 *g) {
    const gpt2_config *c = &g->config;
    const int64_t C = c->C;
    const ms_shape rows = ms_shape2(c->B, c->T);
    const ms_tensor none = {0};
    const ms_tensor tokens = borrow(m, ms_input(m, "tokens", MS_DTYPE_I32, rows), g->inputs);
    const ms_tensor targets = borrow(m, ms_input(m, "targets", MS_DTYPE_I32, rows), g->targets);
    const ms_tensor wte = PARAM(0, wte, c->V * C), wpe = PARAM(0, wpe, c->max_T * C);
    ms_tensor w, b, y, x = layer(m, g, &encoder, tokens, none, wte, wpe, C);
    for (int64_t l = 0; l < c->L; l++) {
        y = AFFINE(layernorm, x, l, ln1w, C, ln1b, C);
        y = AFFINE(matmul, y, l, qkvw, 3 * C * C, qkvb, 3 * C);
        y = layer(m, g, &attention, y, none, none, none, C);
        y = AFFINE(matmul, y, l, attprojw, C * C, attprojb, C);
        x = layer(m, g, &residual, x, y, none, none, C);
        y = AFFINE(layernorm, x, l, ln2w, C, ln2b, C);
        y = AFFINE(matmul, y, l, fcw, 4 * C * C, fcb, 4 * C);
        y = layer(m, g, &gelu, y, none, none, none, 4 * C);
        y = AFFINE(matmul, y, l, fcprojw, 4 * C * C, fcprojb, C);
        x = layer(m, g, &residual, x, y, none, none, C);
    }
    x = AFFINE(layernorm, x, 0, lnfw, C, lnfb, C);
    x = layer(m, g, &matmul, x, none, wte, none, c->V);
    const ms_tensor probs = ms_activation(m, "probs", MS_DTYPE_F32, ms_shape3(c->B, c->T, c->V));
    ms_set_loss(m, layer(m, g, &classifier, x, targets, probs, none, 1));
    ms_add_eval_output(m, probs);
    ms_optimizer_desc adamw = {0};
    adamw.kind = MS_OPTIMIZER_CUSTOM, adamw.update = update, adamw.user = g;
    ms_set_optimizer(m, &adamw);
    return probs;
}
// ==== adapter, end

// ---- main ---------------------------------------------------------------------------------------

enum { DEFAULT_STEPS = 100, COMPARE_STEPS = 21 };

typedef struct settings {
    bool wrap, compare, debug;
    option_budget budget;
    const char *size;
    int64_t steps, batch, sequence;
} settings;

typedef struct preset {
    const char *name;
    gpt2_config config;
} preset;

static const preset presets[] = {{"tiny", {128, 32, 2, 2, 32, 4, 16}},
                                 {"small", {128, 128, 4, 4, 128, 8, 64}},
                                 {"medium", {128, 256, 6, 6, 384, 4, 128}},
                                 {"124M", {50257, 1024, 12, 12, 768, 4, 64}}};
enum { PRESET_COUNT = sizeof presets / sizeof presets[0] };

enum { OPTIONS = 8 };

static void list_options(settings *o, option_spec *specs) {
    const option_spec all[OPTIONS] = {
        {"--wrap", NULL, OPTION_FLAG, &o->wrap, "let memscale.h run the step"},
        {"--budget", "SIZE", OPTION_BUDGET, &o->budget, OPTION_BUDGET_HELP ";\nimplies --wrap"},
        {"--compare", NULL, OPTION_FLAG, &o->compare,
         "the plain program, and wrapped with two plans, by turns: time and memory"},
        {"--size", "NAME", OPTION_TEXT, &o->size, "tiny, small, medium or 124M"},
        {"--steps", "N", OPTION_COUNT, &o->steps, "updates (100; with --compare 21)"},
        {"--batch", "N", OPTION_COUNT, &o->batch, "sequences in a batch"},
        {"--sequence", "N", OPTION_COUNT, &o->sequence, "bytes in a sequence"},
        {"--debug", NULL, OPTION_FLAG, &o->debug, OPTION_DEBUG_HELP ";\nimplies --wrap"},
    };
    memcpy(specs, all, sizeof all);
}

static bool parse_options(settings *o, int argc, char **argv) {
    option_spec specs[OPTIONS];
    memset(o, 0, sizeof *o);
    o->size = "small";
    list_options(o, specs);
    if (take_options(
            "[options]\nA GPT-2 trainer in the shape of llm.c, by itself or run by memscale.h.",
            specs, OPTIONS, argc, argv, NULL) != 0) {
        return false;
    }
    o->wrap = o->wrap || o->debug || has_budget(&o->budget);
    if (o->steps == 0) {
        o->steps = o->compare ? COMPARE_STEPS : DEFAULT_STEPS;
    }
    return true;
}

static bool choose_config(const settings *o, gpt2_config *config) {
    for (int i = 0; i < PRESET_COUNT; i++) {
        if (strcmp(o->size, presets[i].name) == 0) {
            *config = presets[i].config;
            config->B = o->batch ? o->batch : config->B;
            config->T = o->sequence ? o->sequence : config->T;
            if (config->T <= config->max_T) {
                return true;
            }
            fail("%s has %lld positions", o->size, (long long)config->max_T);
            return false;
        }
    }
    fail("there is no size %s; see --help", o->size);
    return false;
}

/* One way to train: the plain program, or a model of memscale.h around it. */
enum { SAMPLED_BYTES = 16 };

typedef struct run {
    const char *name;
    gpt2 g;
    ms_model *model; // NULL: plain
    ms_tensor probs;
    char sampled[SAMPLED_BYTES + 1];
    uint64_t random; // of its batches
    double *seconds, *losses;
} run;

/* Without a budget the choice is memscale.h's. */
static bool run_create(run *r, const char *name, const gpt2_config *config, bool wrap, bool debug,
                       const option_budget *budget) {
    memset(r, 0, sizeof *r);
    r->name = name;
    r->random = 1;
    gpt2_create(&r->g, config, 1);
    if (!wrap) {
        return true;
    }
    ms_config model_config = {0};
    model_config.log = log_warnings;
    model_config.debug = debug;
    model_config.memory_budget_bytes =
        has_budget(budget) && budget->bytes == 0 ? UINT64_MAX : budget->bytes;
    if (ms_create(&model_config, &r->model) == MS_RESULT_OK) {
        r->probs = register_gpt2(r->model, &r->g);
        if (wrap_in(budget, r->model) == MS_RESULT_OK) {
            return true;
        }
    }
    fail("%s", ms_last_error(r->model));
    return false;
}

static void run_free(run *r) {
    ms_destroy(r->model);
    gpt2_free(&r->g);
    free(r->seconds);
    free(r->losses);
    memset(r, 0, sizeof *r);
}

static bool run_step(run *r, const char *text) {
    draw_batch(&r->g, text, &r->random);
    if (!r->model) {
        gpt2_step(&r->g);
        return true;
    }
    if (ms_step(r->model, &r->g.mean_loss) != MS_RESULT_OK) {
        fail("%s", ms_last_error(r->model));
        return false;
    }
    r->g.step++;
    return true;
}

/* Lets the net write: each byte by a forward pass over those before it. The plain program's pointer
   to the probabilities is set to where they are after it. */
static bool run_sample(run *r) {
    const gpt2_config *c = &r->g.config;
    uint64_t random = 1;
    for (int i = 0; i < SAMPLED_BYTES; i++) {
        if (!r->model) {
            gpt2_forward(&r->g);
        } else if (ms_eval(r->model, NULL) == MS_RESULT_OK) {
            r->g.acts.probs = (float *)ms_data(r->model, r->probs);
        } else {
            fail("%s", ms_last_error(r->model));
            return false;
        }
        const float *last = r->g.acts.probs + (c->T - 1) * c->V;
        const int32_t byte = sample_byte(last, c->V, &random);
        r->sampled[i] = (char)(byte >= ' ' && byte < 127 ? byte : '.');
        append_byte(&r->g, byte);
    }
    return true;
}

static double seconds_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static bool run_report(const run *r, ms_memory_report *report) {
    memset(report, 0, sizeof *report);
    return !r->model || ms_report(r->model, report) == MS_RESULT_OK;
}

/* Bytes of activations and their gradients: the plain program's two blocks, or the plan's peak. */
static double activation_megabytes(const run *r, const ms_memory_report *report) {
    return r->model ? (double)report->activation_peak_bytes / 1e6
                    : 2.0 * sizeof(float) * (double)r->g.act_count / 1e6;
}

/* All that is allocated for the step. */
static double total_megabytes(const run *r, const ms_memory_report *report) {
    const double param_bytes = sizeof(float) * (double)r->g.param_count;
    return r->model ? (3.0 * param_bytes + (double)report->arena_bytes) / 1e6
                    : 4.0 * param_bytes / 1e6 + activation_megabytes(r, report);
}

static int train(const settings *o, const gpt2_config *config, const char *text) {
    run r;
    ms_memory_report report;
    const int64_t every = o->steps < 10 ? 1 : o->steps / 10;
    bool good =
        run_create(&r, "", config, o->wrap, o->debug, &o->budget) && run_report(&r, &report);
    if (good) {
        printf(
            "%lld params, batch %lld x %lld; activations %.1f MB, with params and AdamW %.1f MB\n",
            (long long)r.g.param_count, (long long)config->B, (long long)config->T,
            activation_megabytes(&r, &report), total_megabytes(&r, &report));
    }
    for (int64_t step = 1; good && step <= o->steps; step++) {
        const double start = seconds_now();
        good = run_step(&r, text);
        if (good && (step == 1 || step % every == 0)) {
            printf("step %4lld  loss %.6f  %.1f ms\n", (long long)step, r.g.mean_loss,
                   1e3 * (seconds_now() - start));
            fflush(stdout);
        }
    }
    if (good && run_sample(&r)) {
        print_debugged(o->debug);
        printf("the net writes: %s\n", r.sampled);
    }
    run_free(&r);
    return good ? 0 : 1;
}

// ---- compare ------------------------------------------------------------------------------------

enum { RUN_COUNT = 3 }; // plain program, plain plan, plan for a budget

static int compare_doubles(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *values, int64_t count) {
    qsort(values, (size_t)count, sizeof *values, compare_doubles);
    return 0.5 * (values[(count - 1) / 2] + values[count / 2]);
}

/* Losses of all steps, params and moments: bit for bit. */
static bool same_bits(const run *a, const run *b, int64_t steps) {
    const size_t bytes = (size_t)a->g.param_count * sizeof(float);
    return memcmp(a->losses, b->losses, (size_t)steps * sizeof *a->losses) == 0 &&
           memcmp(a->sampled, b->sampled, sizeof a->sampled) == 0 &&
           memcmp(a->g.params_memory, b->g.params_memory, bytes) == 0 &&
           memcmp(a->g.m_memory, b->g.m_memory, bytes) == 0 &&
           memcmp(a->g.v_memory, b->g.v_memory, bytes) == 0;
}

/* The budget of the last run: the one that was asked for, or the smallest. */
static bool compare_create(run *runs, const settings *o, const gpt2_config *config) {
    const option_budget plain = {0, 0.0, "plain"}, smallest = {0, 0.0, "smallest"};
    const bool asked = has_budget(&o->budget);
    memset(runs, 0, RUN_COUNT * sizeof *runs);
    return run_create(&runs[0], "plain program", config, false, false, &plain) &&
           run_create(&runs[1], "wrapped, plain plan", config, true, o->debug, &plain) &&
           run_create(&runs[2], asked ? "wrapped, budget" : "wrapped, smallest", config, true,
                      o->debug, asked ? &o->budget : &smallest);
}

static bool compare_print(run *runs, int64_t steps) {
    bool good = true;
    double plain_seconds = 0.0;
    printf("%-20s %9s %7s %14s %10s %9s  %s\n", "", "ms/step", "ratio", "activations MB",
           "arena MB", "all MB", "bits");
    for (int i = 0; i < RUN_COUNT; i++) {
        run *r = &runs[i];
        ms_memory_report report;
        const bool same = same_bits(&runs[0], r, steps);
        good = run_report(r, &report) && same && good;
        const double seconds = median(r->seconds, steps);
        plain_seconds = i == 0 ? seconds : plain_seconds;
        printf("%-20s %9.2f %7.3f %14.2f %10.2f %9.2f  %s\n", r->name, 1e3 * seconds,
               seconds / plain_seconds, activation_megabytes(r, &report),
               (double)report.arena_bytes / 1e6, total_megabytes(r, &report),
               i == 0 ? ""
               : same ? "equal"
                      : "DIFFERENT");
    }
    return good;
}

/* The runs take turns, so that other work on the machine slows all of them alike. */
static int compare(const settings *o, const gpt2_config *config, const char *text) {
    run runs[RUN_COUNT];
    bool good = compare_create(runs, o, config);
    for (int i = 0; good && i < RUN_COUNT; i++) {
        runs[i].seconds = (double *)allocate(o->steps, sizeof(double));
        runs[i].losses = (double *)allocate(o->steps, sizeof(double));
        good = run_step(&runs[i], text); // not timed: it allocates
    }
    for (int64_t step = 0; good && step < o->steps; step++) {
        for (int i = 0; good && i < RUN_COUNT; i++) {
            const double start = seconds_now();
            good = run_step(&runs[i], text);
            runs[i].seconds[step] = seconds_now() - start;
            runs[i].losses[step] = runs[i].g.mean_loss;
        }
    }
    for (int i = 0; good && i < RUN_COUNT; i++) {
        good = run_sample(&runs[i]);
    }
    print_debugged(good && o->debug);
    good = good && compare_print(runs, o->steps);
    for (int i = 0; i < RUN_COUNT; i++) {
        run_free(&runs[i]);
    }
    return good ? 0 : 1;
}

int main(int argc, char **argv) {
    settings o;
    gpt2_config config;
    if (!parse_options(&o, argc, argv)) {
        return 2;
    }
    if (!choose_config(&o, &config)) {
        return 2;
    }
    char *text = (char *)allocate(TEXT_BYTES, 1);
    write_text(text, 1);
    const int result = o.compare ? compare(&o, &config, text) : train(&o, &config, text);
    free(text);
    return result;
}
