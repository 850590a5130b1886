/*  test_gpt2.c - whole training steps of GPT-2 against an implementation in float64 that is written
    from the formulas and shares no code; and GPT-2 and BERT, with dropout, equal bit for bit under
    every budget. */
#include "private.h"
#include "testing.h"
#include "nn.h"
#include "testing_nn.h"
#include "orders.h"

// ------------------------------------------------------------------------------------------------
// GPT-2 in float64, by naive loops

enum {
    REF_B = 2,
    REF_T = 10,
    REF_N = REF_B * REF_T, // rows
    REF_C = 24,
    REF_H = 3,
    REF_D = REF_C / REF_H,
    REF_F = 4 * REF_C,
    REF_V = 37,
    REF_CONTEXT = 16,
    REF_L = 2,
    REF_STEPS = 4
};

enum { REF_WTE, REF_WPE, REF_FIRST, REF_EACH = 12, REF_LNF = REF_FIRST + REF_EACH * REF_L };
enum { REF_PARAMS = REF_LNF + 2, REF_LARGEST = REF_C * REF_F };

/* Order of the params of one block. */
enum { P_LN1, P_QKV = 2, P_PROJ = 4, P_LN2 = 6, P_FC = 8, P_FCPROJ = 10 };

typedef struct ref_param {
    double value[REF_LARGEST], grad[REF_LARGEST], m[REF_LARGEST], v[REF_LARGEST];
    int count;
    bool is_matrix; // and so decays
} ref_param;

typedef struct ref_norm {
    double mean[REF_N], rstd[REF_N];
} ref_norm;

typedef struct ref_block {
    double x[REF_N * REF_C], norm1[REF_N * REF_C], qkv[REF_N * 3 * REF_C];
    double weights[REF_B * REF_H * REF_T * REF_T], mixed[REF_N * REF_C], middle[REF_N * REF_C];
    double norm2[REF_N * REF_C], fc[REF_N * REF_F], active[REF_N * REF_F];
    ref_norm stats1, stats2;
} ref_block;

typedef struct ref_gpt2 {
    ref_param param[REF_PARAMS];
    ref_block block[REF_L];
    ref_norm stats;
    double last[REF_N * REF_C], normed[REF_N * REF_C], logits[REF_N * REF_V];
    int32_t tokens[REF_N], targets[REF_N];
    double loss;
} ref_gpt2;

/* y = x w^T + b, with w (out, in). */
static void ref_linear(double *y, const double *x, const ref_param *w, const ref_param *b, int in,
                       int out) {
    for (int r = 0; r < REF_N; ++r) {
        for (int o = 0; o < out; ++o) {
            double sum = b == NULL ? 0.0 : b->value[o];
            for (int i = 0; i < in; ++i) {
                sum += x[r * in + i] * w->value[o * in + i];
            }
            y[r * out + o] = sum;
        }
    }
}

/* Adds to dx and to the gradients of w and b. */
static void ref_linear_back(double *dx, const double *dy, const double *x, ref_param *w,
                            ref_param *b, int in, int out) {
    for (int r = 0; r < REF_N; ++r) {
        for (int o = 0; o < out; ++o) {
            double g = dy[r * out + o];
            for (int i = 0; i < in; ++i) {
                dx[r * in + i] += g * w->value[o * in + i];
                w->grad[o * in + i] += g * x[r * in + i];
            }
            if (b != NULL) {
                b->grad[o] += g;
            }
        }
    }
}

static void ref_layernorm(double *y, ref_norm *stats, const double *x, const ref_param *w) {
    for (int r = 0; r < REF_N; ++r) {
        double mean = 0.0, variance = 0.0;
        for (int c = 0; c < REF_C; ++c) {
            mean += x[r * REF_C + c] / (double)REF_C;
        }
        for (int c = 0; c < REF_C; ++c) {
            variance += (x[r * REF_C + c] - mean) * (x[r * REF_C + c] - mean) / (double)REF_C;
        }
        stats->mean[r] = mean;
        stats->rstd[r] = 1.0 / sqrt(variance + 1e-5);
        for (int c = 0; c < REF_C; ++c) {
            y[r * REF_C + c] =
                (x[r * REF_C + c] - mean) * stats->rstd[r] * w[0].value[c] + w[1].value[c];
        }
    }
}

static void ref_layernorm_back(double *dx, const double *dy, const ref_norm *stats, const double *x,
                               ref_param *w) {
    for (int r = 0; r < REF_N; ++r) {
        double mean_g = 0.0, mean_gx = 0.0;
        for (int c = 0; c < REF_C; ++c) {
            double hat = (x[r * REF_C + c] - stats->mean[r]) * stats->rstd[r];
            double g = dy[r * REF_C + c] * w[0].value[c];
            mean_g += g / (double)REF_C;
            mean_gx += g * hat / (double)REF_C;
            w[0].grad[c] += dy[r * REF_C + c] * hat;
            w[1].grad[c] += dy[r * REF_C + c];
        }
        for (int c = 0; c < REF_C; ++c) {
            double hat = (x[r * REF_C + c] - stats->mean[r]) * stats->rstd[r];
            double g = dy[r * REF_C + c] * w[0].value[c];
            dx[r * REF_C + c] += (g - mean_g - hat * mean_gx) * stats->rstd[r];
        }
    }
}

/* Where component d of the query (0), key (1) or value (2) of row t, head h, batch b stands. */
static int at(int which, int b, int h, int t, int d) {
    return (b * REF_T + t) * 3 * REF_C + which * REF_C + h * REF_D + d;
}

static int weight_at(int b, int h, int t, int s) {
    return ((b * REF_H + h) * REF_T + t) * REF_T + s;
}

static void ref_attend_row(ref_block *k, int b, int h, int t) {
    double largest = -1e300, total = 0.0;
    double score[REF_T];
    for (int s = 0; s <= t; ++s) {
        score[s] = 0.0;
        for (int d = 0; d < REF_D; ++d) {
            score[s] += k->qkv[at(0, b, h, t, d)] * k->qkv[at(1, b, h, s, d)];
        }
        score[s] /= sqrt((double)REF_D);
        largest = score[s] > largest ? score[s] : largest;
    }
    for (int s = 0; s <= t; ++s) {
        total += exp(score[s] - largest);
    }
    for (int d = 0; d < REF_D; ++d) {
        k->mixed[(b * REF_T + t) * REF_C + h * REF_D + d] = 0.0;
    }
    for (int s = 0; s < REF_T; ++s) {
        double p = s <= t ? exp(score[s <= t ? s : 0] - largest) / total : 0.0;
        k->weights[weight_at(b, h, t, s)] = p;
        for (int d = 0; d < REF_D; ++d) {
            k->mixed[(b * REF_T + t) * REF_C + h * REF_D + d] += p * k->qkv[at(2, b, h, s, d)];
        }
    }
}

static void ref_attend_row_back(const ref_block *k, double *dqkv, const double *dmixed, int b,
                                int h, int t) {
    double dp[REF_T], mean = 0.0;
    for (int s = 0; s <= t; ++s) {
        double p = k->weights[weight_at(b, h, t, s)];
        dp[s] = 0.0;
        for (int d = 0; d < REF_D; ++d) {
            double g = dmixed[(b * REF_T + t) * REF_C + h * REF_D + d];
            dp[s] += g * k->qkv[at(2, b, h, s, d)];
            dqkv[at(2, b, h, s, d)] += g * p;
        }
        mean += dp[s] * p;
    }
    for (int s = 0; s <= t; ++s) {
        double ds = k->weights[weight_at(b, h, t, s)] * (dp[s] - mean) / sqrt((double)REF_D);
        for (int d = 0; d < REF_D; ++d) {
            dqkv[at(0, b, h, t, d)] += ds * k->qkv[at(1, b, h, s, d)];
            dqkv[at(1, b, h, s, d)] += ds * k->qkv[at(0, b, h, t, d)];
        }
    }
}

static void ref_rows_of_heads(ref_block *k, double *dqkv, const double *dmixed) {
    for (int i = 0; i < REF_B * REF_H * REF_T; ++i) {
        int b = i / (REF_H * REF_T), h = i / REF_T % REF_H, t = i % REF_T;
        if (dqkv == NULL) {
            ref_attend_row(k, b, h, t);
        } else {
            ref_attend_row_back(k, dqkv, dmixed, b, h, t);
        }
    }
}

static double ref_gelu(double x, double *slope) {
    double c = sqrt(2.0 / 3.14159265358979323846);
    double inner = tanh(c * (x + 0.044715 * x * x * x));
    *slope =
        0.5 * (1.0 + inner) + 0.5 * x * (1.0 - inner * inner) * c * (1.0 + 3.0 * 0.044715 * x * x);
    return 0.5 * x * (1.0 + inner);
}

static void ref_block_forward(ref_block *k, const ref_param *p, double *out) {
    double slope;
    ref_layernorm(k->norm1, &k->stats1, k->x, p + P_LN1);
    ref_linear(k->qkv, k->norm1, p + P_QKV, p + P_QKV + 1, REF_C, 3 * REF_C);
    ref_rows_of_heads(k, NULL, NULL);
    ref_linear(k->middle, k->mixed, p + P_PROJ, p + P_PROJ + 1, REF_C, REF_C);
    for (int i = 0; i < REF_N * REF_C; ++i) {
        k->middle[i] += k->x[i];
    }
    ref_layernorm(k->norm2, &k->stats2, k->middle, p + P_LN2);
    ref_linear(k->fc, k->norm2, p + P_FC, p + P_FC + 1, REF_C, REF_F);
    for (int i = 0; i < REF_N * REF_F; ++i) {
        k->active[i] = ref_gelu(k->fc[i], &slope);
    }
    ref_linear(out, k->active, p + P_FCPROJ, p + P_FCPROJ + 1, REF_F, REF_C);
    for (int i = 0; i < REF_N * REF_C; ++i) {
        out[i] += k->middle[i];
    }
}

/* dx holds the gradient of the block's output, and then that of its input. */
static void ref_block_back(ref_block *k, ref_param *p, double *dx) {
    static double dwide[REF_N * REF_F], dnarrow[REF_N * REF_C], dqkv[REF_N * 3 * REF_C];
    double slope;
    memset(dwide, 0, sizeof dwide);
    memset(dnarrow, 0, sizeof dnarrow);
    memset(dqkv, 0, sizeof dqkv);
    ref_linear_back(dwide, dx, k->active, p + P_FCPROJ, p + P_FCPROJ + 1, REF_F, REF_C);
    for (int i = 0; i < REF_N * REF_F; ++i) {
        (void)ref_gelu(k->fc[i], &slope);
        dwide[i] *= slope;
    }
    ref_linear_back(dnarrow, dwide, k->norm2, p + P_FC, p + P_FC + 1, REF_C, REF_F);
    ref_layernorm_back(dx, dnarrow, &k->stats2, k->middle, p + P_LN2);
    memset(dnarrow, 0, sizeof dnarrow);
    ref_linear_back(dnarrow, dx, k->mixed, p + P_PROJ, p + P_PROJ + 1, REF_C, REF_C);
    ref_rows_of_heads(k, dqkv, dnarrow);
    memset(dnarrow, 0, sizeof dnarrow);
    ref_linear_back(dnarrow, dqkv, k->norm1, p + P_QKV, p + P_QKV + 1, REF_C, 3 * REF_C);
    ref_layernorm_back(dx, dnarrow, &k->stats1, k->x, p + P_LN1);
}

static void ref_forward(ref_gpt2 *g) {
    for (int i = 0; i < REF_N * REF_C; ++i) {
        int row = i / REF_C, c = i % REF_C;
        g->block[0].x[i] = g->param[REF_WTE].value[g->tokens[row] * REF_C + c] +
                           g->param[REF_WPE].value[row % REF_T * REF_C + c];
    }
    for (int l = 0; l < REF_L; ++l) {
        ref_block_forward(&g->block[l], &g->param[REF_FIRST + REF_EACH * l],
                          l + 1 < REF_L ? g->block[l + 1].x : g->last);
    }
    ref_layernorm(g->normed, &g->stats, g->last, &g->param[REF_LNF]);
    ref_linear(g->logits, g->normed, &g->param[REF_WTE], NULL, REF_C, REF_V);
}

/* The loss is the mean over the rows that count; logits become their gradient. */
static void ref_cross_entropy(ref_gpt2 *g, double factor) {
    g->loss = 0.0;
    for (int r = 0; r < REF_N; ++r) {
        double *row = g->logits + r * REF_V;
        double total = 0.0;
        for (int v = 0; v < REF_V; ++v) {
            total += exp(row[v]);
        }
        bool counts = g->targets[r] >= 0;
        g->loss += counts ? factor * (log(total) - row[counts ? g->targets[r] : 0]) : 0.0;
        for (int v = 0; v < REF_V; ++v) {
            row[v] = counts ? factor * (exp(row[v]) / total - (v == g->targets[r])) : 0.0;
        }
    }
}

static void ref_backward(ref_gpt2 *g) {
    static double dx[REF_N * REF_C], dnormed[REF_N * REF_C];
    memset(dx, 0, sizeof dx);
    memset(dnormed, 0, sizeof dnormed);
    for (int i = 0; i < REF_PARAMS; ++i) {
        memset(g->param[i].grad, 0, sizeof g->param[i].grad);
    }
    ref_linear_back(dnormed, g->logits, g->normed, &g->param[REF_WTE], NULL, REF_C, REF_V);
    ref_layernorm_back(dx, dnormed, &g->stats, g->last, &g->param[REF_LNF]);
    for (int l = REF_L; l-- > 0;) {
        ref_block_back(&g->block[l], &g->param[REF_FIRST + REF_EACH * l], dx);
    }
    for (int i = 0; i < REF_N * REF_C; ++i) {
        int row = i / REF_C, c = i % REF_C;
        g->param[REF_WTE].grad[g->tokens[row] * REF_C + c] += dx[i];
        g->param[REF_WPE].grad[row % REF_T * REF_C + c] += dx[i];
    }
}

static void ref_update(ref_gpt2 *g, const ms_optimizer_desc *o, int t) {
    double b1 = (double)o->beta1, b2 = (double)o->beta2, rate = (double)o->learning_rate;
    for (int i = 0; i < REF_PARAMS; ++i) {
        ref_param *p = &g->param[i];
        double decay = p->is_matrix ? (double)o->weight_decay : 0.0;
        for (int k = 0; k < p->count; ++k) {
            p->m[k] = b1 * p->m[k] + (1.0 - b1) * p->grad[k];
            p->v[k] = b2 * p->v[k] + (1.0 - b2) * p->grad[k] * p->grad[k];
            double m = p->m[k] / (1.0 - pow(b1, t)), v = p->v[k] / (1.0 - pow(b2, t));
            p->value[k] -= rate * (m / (sqrt(v) + (double)o->epsilon) + decay * p->value[k]);
        }
    }
}

// ------------------------------------------------------------------------------------------------
// the library's step against it

typedef struct trained {
    ms_model *model;
    nn_net *net;
    nn_transformer t;
    bool is_bert;
    nn_transformer_config config;
} trained;

static trained train_create(const ms_config *config, const nn_transformer_config *sizes,
                            bool is_bert) {
    trained n;
    memset(&n, 0, sizeof n);
    n.config = *sizes;
    n.is_bert = is_bert;
    assert_int_equal(ms_create(config, &n.model), MS_RESULT_OK);
    n.net = nn_create_on(n.model, t_nn_device());
    assert_non_null(n.net);
    n.t = is_bert ? nn_bert(n.net, sizes) : nn_gpt2(n.net, sizes);
    return n;
}

static void train_destroy(trained *n) {
    ms_destroy(n->model);
    nn_destroy(n->net);
}

static nn_transformer_config ref_sizes(int variant) {
    nn_transformer_config sizes;
    memset(&sizes, 0, sizeof sizes);
    sizes.vocabulary = REF_V;
    sizes.context = REF_CONTEXT;
    sizes.layers = REF_L;
    sizes.heads = REF_H;
    sizes.channels = REF_C;
    sizes.batch = REF_B;
    sizes.sequence = REF_T;
    sizes.granularity = (variant & 1) != 0 ? NN_BLOCKS : NN_OPERATORS;
    sizes.save_scores = (variant & 2) != 0;
    return sizes;
}

/* Random values, far from the flat start that nn_init gives, in both. */
static void ref_share_params(ref_gpt2 *g, trained *n) {
    t_rng rng = t_seed(21);
    float data[REF_LARGEST];
    assert_int_equal(nn_param_count(n->net), REF_PARAMS);
    for (int i = 0; i < REF_PARAMS; ++i) {
        const nn_param_info *info = nn_param_at(n->net, i);
        ref_param *p = &g->param[i];
        p->count = (int)ms_shape_count(&info->shape);
        p->is_matrix = info->shape.rank == 2;
        assert_true(p->count <= REF_LARGEST);
        t_fill(&rng, data, (uint64_t)p->count, 0.3f);
        for (int k = 0; k < p->count; ++k) {
            data[k] += info->init == NN_INIT_ONES ? 1.0f : 0.0f;
            p->value[k] = (double)data[k];
        }
        t_ok(n->model, ms_write(n->model, info->tensor, data));
    }
}

static void ref_share_batch(ref_gpt2 *g, trained *n, uint64_t seed, double *factor) {
    t_rng rng = t_seed(seed);
    int counted = 0;
    for (int r = 0; r < REF_N; ++r) {
        g->tokens[r] = (int32_t)t_below(&rng, REF_V);
        g->targets[r] = r % 3 == 1 ? -1 : (int32_t)t_below(&rng, REF_V);
        counted += g->targets[r] >= 0;
    }
    *factor = 1.0 / counted;
    t_ok(n->model, ms_write(n->model, n->t.tokens, g->tokens));
    t_ok(n->model, ms_write(n->model, n->t.targets, g->targets));
    ms_set_loss_factor(n->model, (float)*factor);
}

/* Largest difference over the largest value: an element that cancels to nothing has no digits. */
static void ref_compare(trained *n, ms_tensor tensor, const double *expected, int count,
                        double tolerance, const char *name) {
    float data[REF_LARGEST];
    double difference = 0.0, size = 1e-7;
    t_ok(n->model, ms_read(n->model, tensor, data));
    for (int k = 0; k < count; ++k) {
        double d = fabs((double)data[k] - expected[k]);
        difference = d <= difference ? difference : d; // a NaN gets through
        size = fabs(expected[k]) > size ? fabs(expected[k]) : size;
    }
    if (!(difference <= tolerance * size)) {
        print_error("%s: off by %g of %g\n", name, difference, size);
        fail();
    }
}

static void check_against_reference(int variant, bool tight) {
    ref_gpt2 *g = (ref_gpt2 *)calloc(1, sizeof(ref_gpt2));
    ms_optimizer_desc adamw = t_optimizer(MS_OPTIMIZER_ADAMW, 0.01f);
    adamw.beta1 = 0.9f;
    adamw.beta2 = 0.99f;
    adamw.epsilon = 1e-3f;
    adamw.weight_decay = 0.1f;
    nn_transformer_config sizes = ref_sizes(variant);
    ms_config config = t_device_config();
    config.early_update = MS_SWITCH_OFF;
    config.force_optimize = tight;
    config.debug = tight;
    ms_memory_report report;
    trained n = train_create(&config, &sizes, false);
    assert_non_null(g);
    ms_set_optimizer(n.model, &adamw);
    t_ok(n.model, ms_wrap(n.model));
    ref_share_params(g, &n);
    t_report(n.model, &report);
    assert_int_equal(report.recompute_count > 0, tight);
    for (int step = 1; step <= REF_STEPS; ++step) {
        double factor = 0.0, loss = 0.0;
        ref_share_batch(g, &n, (uint64_t)step, &factor);
        ref_forward(g);
        ref_cross_entropy(g, factor);
        ref_backward(g);
        t_ok(n.model, ms_forward(n.model, &loss));
        assert_true(fabs(loss - g->loss) <= 2e-6 * g->loss);
        t_ok(n.model, ms_backward(n.model));
        for (int i = 0; i < REF_PARAMS; ++i) {
            const nn_param_info *info = nn_param_at(n.net, i);
            ref_compare(&n, ms_gradient(n.model, info->tensor), g->param[i].grad, g->param[i].count,
                        1e-5 * step, info->name);
        }
        t_ok(n.model, ms_update(n.model));
        ref_update(g, &adamw, step);
        for (int i = 0; i < REF_PARAMS; ++i) {
            const nn_param_info *info = nn_param_at(n.net, i);
            ref_compare(&n, info->tensor, g->param[i].value, g->param[i].count, 1e-5, info->name);
        }
    }
    train_destroy(&n);
    free(g);
}

static void whole_steps_against_float64(void **state) {
    (void)state;
    for (int variant = 0; variant < 4; ++variant) {
        check_against_reference(variant, false);
        check_against_reference(variant, true);
    }
}

// ------------------------------------------------------------------------------------------------
// bit for bit under every budget

enum {
    VARIANT_BLOCKS = 1,
    VARIANT_SCORES = 2,
    VARIANT_LOGITS = 4,
    VARIANT_BERT = 8,
    VARIANTS = 16
};

static nn_transformer_config bit_sizes(int variant) {
    nn_transformer_config sizes;
    memset(&sizes, 0, sizeof sizes);
    sizes.vocabulary = 53;
    sizes.context = 24;
    sizes.layers = 3;
    sizes.heads = 2;
    sizes.channels = 16;
    sizes.batch = 2;
    sizes.sequence = 20;
    sizes.dropout = 0.1f;
    sizes.granularity = (variant & VARIANT_BLOCKS) != 0 ? NN_BLOCKS : NN_OPERATORS;
    sizes.save_scores = (variant & VARIANT_SCORES) != 0;
    return sizes;
}

static trained bit_create(int variant, const ms_config *config) {
    nn_transformer_config sizes = bit_sizes(variant);
    trained n = train_create(config, &sizes, (variant & VARIANT_BERT) != 0);
    if ((variant & VARIANT_LOGITS) != 0) {
        ms_add_output(n.model, n.t.logits);
    }
    return n;
}

static void bit_start(trained *n) {
    t_ok(n->model, ms_wrap(n->model));
    t_ok(n->model, nn_init(n->net, 5));
}

static void bit_batch(trained *n, uint64_t step) {
    t_rng rng = t_seed(step);
    int32_t ids[3][60];
    int rows = (int)(n->config.batch * n->config.sequence);
    assert_true(rows <= 60);
    for (int r = 0; r < rows; ++r) {
        ids[0][r] = (int32_t)t_below(&rng, (uint32_t)n->config.vocabulary);
        ids[1][r] = t_chance(&rng, 0.3) ? -1 : (int32_t)t_below(&rng, 50);
        ids[2][r] = r % n->config.sequence > 9;
    }
    t_ok(n->model, ms_write(n->model, n->t.tokens, ids[0]));
    t_ok(n->model, ms_write(n->model, n->t.targets, ids[1]));
    if (n->is_bert) {
        t_ok(n->model, ms_write(n->model, n->t.segments, ids[2]));
    }
}

static void same_bits(trained *a, ms_tensor of_a, trained *b, ms_tensor of_b) {
    static float data[2][4096];
    uint64_t bytes = ms_tensor_bytes(a->model, of_a);
    assert_true(bytes > 0 && bytes <= sizeof data[0]);
    t_ok(a->model, ms_read(a->model, of_a, data[0]));
    t_ok(b->model, ms_read(b->model, of_b, data[1]));
    assert_memory_equal(data[0], data[1], (size_t)bytes);
}

static void same_params(trained *a, trained *b) {
    for (int64_t i = 0; i < nn_param_count(a->net); ++i) {
        ms_tensor of_a = nn_param_at(a->net, i)->tensor, of_b = nn_param_at(b->net, i)->tensor;
        same_bits(a, of_a, b, of_b);
        for (int k = 0; k < 2; ++k) {
            same_bits(a, ms_optimizer_state(a->model, of_a, k), b,
                      ms_optimizer_state(b->model, of_b, k));
        }
    }
}

static void same_grads(trained *a, trained *b) {
    for (int64_t i = 0; i < nn_param_count(a->net); ++i) {
        same_bits(a, ms_gradient(a->model, nn_param_at(a->net, i)->tensor), b,
                  ms_gradient(b->model, nn_param_at(b->net, i)->tensor));
    }
}

/* One step of both; the plain one updates late, so that gradients are there to be compared. */
static void bit_step(trained *a, trained *b, uint64_t step, int variant) {
    double loss_a = 0.0, loss_b = 1.0;
    ms_memory_report report;
    bit_batch(a, step);
    bit_batch(b, step);
    t_report(b->model, &report);
    t_ok(a->model, ms_forward(a->model, &loss_a));
    t_ok(b->model, ms_forward(b->model, &loss_b));
    assert_memory_equal(&loss_a, &loss_b, sizeof loss_a);
    assert_true(loss_a > 0.5);
    t_ok(a->model, ms_backward(a->model));
    t_ok(b->model, ms_backward(b->model));
    if (!report.early_update) {
        same_grads(a, b);
    }
    t_ok(a->model, ms_update(a->model));
    t_ok(b->model, ms_update(b->model));
    same_params(a, b);
    same_bits(a, a->t.losses, b, b->t.losses);
    if ((variant & VARIANT_LOGITS) != 0) {
        same_bits(a, a->t.logits, b, b->t.logits);
    }
}

static void same_eval(trained *a, trained *b) {
    double loss_a = 0.0, loss_b = 1.0;
    t_ok(a->model, ms_eval(a->model, &loss_a));
    t_ok(b->model, ms_eval(b->model, &loss_b));
    assert_memory_equal(&loss_a, &loss_b, sizeof loss_a);
}

/* One variant from the plain plan down to the smallest, in tenths or twentieths (on an emulated
   GPU, which is slow, in fifths), two steps under each budget; returns recomputations. */
static uint32_t check_budgets(int variant, ms_switch early, bool debug) {
    uint32_t recomputations = 0;
    bool last = false;
    ms_memory_report report;
    uint64_t smallest = 0, step = 0;
    ms_config config = t_device_config();
    config.early_update = MS_SWITCH_OFF;
    trained plain = bit_create(variant, &config);
    config.early_update = early;
    config.debug = debug;
    trained planned = bit_create(variant, &config);
    bit_start(&plain);
    bit_start(&planned);
    t_ok(planned.model, ms_smallest_budget(planned.model, &smallest));
    t_report(planned.model, &report);
    for (uint64_t percent = 100; !last; percent -= t_on_cpu ? t_size(10, 5) : 20) {
        uint64_t budget = report.plain_bytes * percent / 100;
        last = budget <= smallest;
        ms_set_budget(planned.model, last ? smallest : budget);
        t_ok(planned.model, ms_wrap(planned.model));
        t_report(planned.model, &report);
        assert_true(report.arena_bytes <= report.budget_bytes);
        recomputations += report.recompute_count;
        assert_true(early != MS_SWITCH_OFF || !report.early_update); // then gradients are compared
        bit_step(&plain, &planned, step++, variant);
        bit_step(&plain, &planned, step++, variant);
    }
    train_destroy(&plain);
    train_destroy(&planned);
    return recomputations;
}

static void every_budget_gives_the_same_bits(void **state) {
    (void)state;
    for (int variant = 0; variant < VARIANTS; ++variant) {
        assert_true(check_budgets(variant, MS_SWITCH_DEFAULT, variant % 3 == 0) > 0);
    }
}

static void every_budget_gives_the_same_gradients(void **state) {
    (void)state;
    for (int variant = 0; variant < VARIANTS; variant += 3) {
        assert_true(check_budgets(variant, MS_SWITCH_OFF, variant % 2 == 0) > 0);
    }
}

/* Budgets that change between steps, detached and back, evaluated in between: training does not
   notice. */
static void budgets_change_between_steps(void **state) {
    (void)state;
    uint32_t recomputations = 0;
    for (int variant = 0; variant < VARIANTS; variant += 5) {
        t_rng rng = t_seed((uint64_t)variant);
        uint64_t smallest = 0;
        ms_memory_report report, now;
        ms_config config = t_device_config();
        trained plain = bit_create(variant, &config);
        trained planned = bit_create(variant, &config);
        bit_start(&plain);
        bit_start(&planned);
        t_report(planned.model, &report);
        t_ok(planned.model, ms_smallest_budget(planned.model, &smallest));
        for (uint64_t step = 0; step < 10; ++step) {
            bit_step(&plain, &planned, step, variant);
            if (step % 4 == 3) {
                t_ok(planned.model, ms_detach(planned.model));
                same_params(&plain, &planned);
                continue;
            }
            uint64_t budget =
                smallest + (uint64_t)(t_unit(&rng) * (double)(report.plain_bytes - smallest));
            ms_set_budget(planned.model, budget);
            t_ok(planned.model, ms_wrap(planned.model));
            t_report(planned.model, &now);
            recomputations += now.recompute_count;
            same_params(&plain, &planned);
            same_eval(&plain, &planned);
        }
        train_destroy(&plain);
        train_destroy(&planned);
    }
    assert_true(recomputations > 0);
}

/* ms_eval in between, between the calls of a step's beginning too, changes no number of training. */
static void evaluation_leaves_training_alone(void **state) {
    (void)state;
    for (int variant = 0; variant < VARIANTS; variant += 7) {
        ms_config config = t_device_config();
        trained quiet = bit_create(variant, &config);
        trained evaluated = bit_create(variant, &config);
        bit_start(&quiet);
        bit_start(&evaluated);
        bit_batch(&evaluated, 0);
        double first = 0.0, second = 1.0;
        t_ok(evaluated.model, ms_eval(evaluated.model, &first));
        t_ok(evaluated.model, ms_eval(evaluated.model, &second));
        assert_memory_equal(&first, &second, sizeof first);
        for (uint64_t step = 0; step < 3; ++step) {
            bit_step(&quiet, &evaluated, step, variant);
            t_ok(evaluated.model, ms_eval(evaluated.model, NULL));
            t_ok(evaluated.model, ms_forward(evaluated.model, NULL));
            t_ok(evaluated.model, ms_eval(evaluated.model, NULL));
        }
        same_params(&quiet, &evaluated);
        train_destroy(&quiet);
        train_destroy(&evaluated);
    }
}

static void evaluation_gives_the_loss_of_the_step(void **state) {
    (void)state;
    for (int variant = 0; variant < 4; ++variant) {
        nn_transformer_config sizes = bit_sizes(variant);
        double evaluated = 0.0, stepped = 1.0;
        ms_config config = t_device_config();
        sizes.dropout = 0.0f;
        trained n = train_create(&config, &sizes, false);
        bit_start(&n);
        bit_batch(&n, 1);
        t_ok(n.model, ms_eval(n.model, &evaluated));
        t_ok(n.model, ms_step(n.model, &stepped));
        assert_memory_equal(&evaluated, &stepped, sizeof stepped);
        train_destroy(&n);
    }
}

/* Another seed draws other masks; the same seed the same. */
static void dropout_follows_the_seed(void **state) {
    (void)state;
    double losses[3];
    for (int i = 0; i < 3; ++i) {
        ms_config config = t_device_config();
        config.seed = i == 2 ? 8 : 7;
        trained n = bit_create(0, &config);
        bit_start(&n);
        bit_batch(&n, 1);
        t_ok(n.model, ms_step(n.model, &losses[i]));
        train_destroy(&n);
    }
    assert_memory_equal(&losses[0], &losses[1], sizeof losses[0]);
    assert_true(memcmp(&losses[0], &losses[2], sizeof losses[0]) != 0);
}

// ------------------------------------------------------------------------------------------------
// published sizes

typedef struct size_limit {
    const char *preset;
    int64_t batch, sequence;
    bool save_scores;
    uint64_t plain_bytes, smallest_bytes; // of activations, their gradients and saved tensors
} size_limit;

static void plan_preset(const size_limit *limit, bool smallest, uint64_t *activation_bytes) {
    ms_memory_report report;
    nn_transformer_config sizes;
    ms_config config = t_device_config();
    memset(&sizes, 0, sizeof sizes);
    assert_true(nn_preset(limit->preset, &sizes));
    sizes.batch = limit->batch;
    sizes.sequence = limit->sequence;
    sizes.save_scores = limit->save_scores;
    config.dry_run = true;
    config.memory_budget_bytes = UINT64_MAX;
    config.force_optimize = smallest;
    trained n = train_create(&config, &sizes, strncmp(limit->preset, "bert", 4) == 0);
    t_ok(n.model, ms_wrap(n.model));
    t_report(n.model, &report);
    assert_true(report.arena_bytes * 100 <= report.lower_bound_bytes * 102);
    *activation_bytes = report.activation_peak_bytes;
    train_destroy(&n);
}

/* Activations of real sizes stay below what liveness and taking over memory should leave of them,
   and every layout within 2 % of its lower bound. */
static void published_models_stay_small(void **state) {
    (void)state;
    static const uint64_t mega = 1000000;
    static const size_limit limits[] = {
        {"gpt2-124M", 4, 64, false, 206 * mega, 58 * mega},
        {"gpt2-124M", 4, 64, true, 215 * mega, 64 * mega},
        {"gpt2-355M", 4, 512, true, 5270 * mega, 640 * mega},
        {"gpt2-774M", 2, 512, false, 3250 * mega, 320 * mega},
        {"gpt2-1558M", 1, 512, false, 2650 * mega, 225 * mega},
        {"bert-base", 16, 128, false, 1500 * mega, 315 * mega},
        {"bert-large", 16, 128, false, 3550 * mega, 410 * mega},
    };
    for (size_t i = 0; i < sizeof limits / sizeof limits[0]; ++i) {
        uint64_t bytes;
        plan_preset(&limits[i], false, &bytes);
        assert_in_range(bytes, limits[i].smallest_bytes, limits[i].plain_bytes);
        plan_preset(&limits[i], true, &bytes);
        assert_in_range(bytes, 1, limits[i].smallest_bytes);
    }
}

// ------------------------------------------------------------------------------------------------
// the order of copies and of what is computed

/* Plans that move all kinds of values, from large arenas to the smallest: what conflicts is ordered,
   and each wait is needed for that. */
static void every_wait_matters(void **state) {
    (void)state;
    o_tally t = {{0}, {0}};
    for (int variant = 0; variant < VARIANTS; variant += 3) {
        ms_config config = t_device_config();
        ms_memory_report report;
        uint64_t smallest = 0;
        config.offloading = MS_SWITCH_ON;
        config.accumulation_steps = variant % 2 == 0 ? 1 : 2;
        trained n = bit_create(variant, &config);
        bit_start(&n);
        t_report(n.model, &report);
        t_ok(n.model, ms_smallest_budget(n.model, &smallest));
        for (uint64_t fifths = 0; fifths < 4; fifths += t_size(3, 1)) {
            ms_set_budget(n.model, smallest + (report.plain_bytes - smallest) * fifths / 5);
            t_ok(n.model, ms_wrap(n.model));
            o_expect_ordered(n.model, "a transformer");
            o_leave_out_each(n.model, &t);
        }
        train_destroy(&n);
    }
    o_expect_needed(&t);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(published_models_stay_small),
        cmocka_unit_test(whole_steps_against_float64),
        cmocka_unit_test(every_budget_gives_the_same_bits),
        cmocka_unit_test(every_budget_gives_the_same_gradients),
        cmocka_unit_test(every_wait_matters),
        cmocka_unit_test(budgets_change_between_steps),
        cmocka_unit_test(evaluation_leaves_training_alone),
        cmocka_unit_test(evaluation_gives_the_loss_of_the_step),
        cmocka_unit_test(dropout_follows_the_seed),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
