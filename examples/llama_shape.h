/*  llama_shape.h - the tensors and layers of models in the shape of Llama, Mistral and Qwen2.5, for
    dry runs: every operator is a layer that declares what it reads, writes, saves and computes, but
    that has no callbacks.

    Include nn.h first: the token table, products, sums and the loss are its layers. A model with
    ms_config.dry_run takes them; to train one, give the layers of this file kernels.

    Touvron et al., "Llama 2: Open Foundation and Fine-Tuned Chat Models", 2023, section 2.2 and
    "LLaMA", 2023, section 2.2: a norm by the root of the mean square before attention and before
    the feed-forward net, SwiGLU, rotary positions, no biases, and, in larger models, several heads
    of queries to one of keys and values. Qwen Team, "Qwen2.5 Technical Report", 2024, section 2:
    the same with biases of queries, keys and values.

    16 BITS as in nn.h: activations, their gradients and weight matrices can have them; biases,
    weights of norms, statistics of rows and losses stay F32.

    LETTERS. B batch, T sequence, C channels, H heads of queries, K heads of keys and of values, D
    size of a head = C / H, F width of the feed-forward net, V vocabulary. */
#ifndef MEMSCALE_LLAMA_SHAPE_H
#define MEMSCALE_LLAMA_SHAPE_H

typedef struct llama_config {
    int64_t vocabulary, layers, channels, heads, kv_heads, feed_forward;
    bool tied;     // the head is the token table
    bool qkv_bias; // queries, keys and values have biases
    int64_t batch, sequence;
    int64_t adapter_rank; // as in nn_transformer_config
} llama_config;

typedef struct llama_preset {
    const char *name;
    int64_t vocabulary, layers, channels, heads, kv_heads, feed_forward;
    bool tied, qkv_bias;
} llama_preset;

/* Llama 2: Touvron et al., 2023, table 1 and the published configurations (7B and 13B as in LLaMA,
   2023, table 2). Llama 3: Grattafiori et al., "The Llama 3 Herd of Models", 2024, table 3; 3.2:
   the model cards of Meta, 2024. TinyLlama: Zhang et al., "TinyLlama", 2024, table 1. Mistral:
   Jiang et al., "Mistral 7B", 2023, table 1. Qwen2.5: Qwen Team, "Qwen2.5 Technical Report", 2024,
   table 1, and the published config.json for what that leaves out (widths and rows of the token
   table, which has more rows than there are tokens). */
static const llama_preset llama_presets[] = {
    {"tinyllama-1.1B", 32000, 22, 2048, 32, 4, 5632, false, false},
    {"llama3.2-1B", 128256, 16, 2048, 32, 8, 8192, true, false},
    {"llama3.2-3B", 128256, 28, 3072, 24, 8, 8192, true, false},
    {"llama2-7B", 32000, 32, 4096, 32, 32, 11008, false, false},
    {"mistral-7B", 32000, 32, 4096, 32, 8, 14336, false, false},
    {"llama3-8B", 128256, 32, 4096, 32, 8, 14336, false, false},
    {"llama2-13B", 32000, 40, 5120, 40, 40, 13824, false, false},
    {"llama2-70B", 32000, 80, 8192, 64, 8, 28672, false, false},
    {"llama3-70B", 128256, 80, 8192, 64, 8, 28672, false, false},
    {"qwen2.5-0.5B", 151936, 24, 896, 14, 2, 4864, true, true},
    {"qwen2.5-1.5B", 151936, 28, 1536, 12, 2, 8960, true, true},
    {"qwen2.5-3B", 151936, 36, 2048, 16, 2, 11008, true, true},
    {"qwen2.5-7B", 152064, 28, 3584, 28, 4, 18944, false, true},
    {"qwen2.5-14B", 152064, 48, 5120, 40, 8, 13824, false, true},
};
enum { LLAMA_PRESETS = sizeof llama_presets / sizeof llama_presets[0] };

// ---- layers without callbacks -------------------------------------------------------------------

static ms_layer_desc llama_desc(const char *name, ms_tensor x) {
    ms_layer_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.name = name;
    desc.in[0] = x;
    return desc;
}

/* Registers desc with a new activation as its output, in the shape of x except for the last dim. As
   nn_register, but without callbacks. */
static ms_tensor llama_register(nn_net *net, ms_layer_desc *desc, int64_t width) {
    const ms_shape shape = nn_with_last(ms_tensor_shape(net->model, desc->in[0]), width);
    desc->out[0] = ms_activation(net->model, desc->name, MS_DTYPE_F32, shape);
    desc->dtypes.accepts = 1u << MS_DTYPE_BF16 | 1u << MS_DTYPE_F16;
    const ms_layer layer = ms_register_layer(net->model, desc);
    if (layer.id && net->forces_half) {
        ms_set_layer_technique(net->model, layer, MS_TECHNIQUE_MIXED_PRECISION, MS_SWITCH_ON);
    }
    return desc->out[0];
}

static ms_tensor llama_weight(nn_net *net, const char *name, int64_t out, int64_t in) {
    return nn_param(net, nn_join(name, "weight").text, ms_shape2(out, in), NN_INIT_NORMAL, 0.02f);
}

/* x (B, T, in) times the transpose of a new weight (out, in). */
static ms_tensor llama_linear(nn_net *net, const char *name, ms_tensor x, int64_t out) {
    const ms_tensor none = {0};
    const int64_t in = nn_last(ms_tensor_shape(net->model, x));
    return nn_linear_tied(net, name, x, llama_weight(net, name, out, in), none);
}

/* A linear layer of a block, with an adapter if the model has them. */
static ms_tensor llama_project(nn_net *net, const char *prefix, const char *name, bool has_bias,
                               ms_tensor x, int64_t out, const llama_config *config) {
    const nn_name whole = nn_join(prefix, name);
    const ms_tensor y = has_bias ? nn_linear(net, whole.text, x, out, 0.02f)
                                 : llama_linear(net, whole.text, x, out);
    const int64_t rank = config->adapter_rank;
    return rank > 0 ? nn_adapter(net, whole.text, x, y, rank) : y;
}

/* out (B, T, C) = x / sqrt(mean of x^2 over C) * weight (C). Saves 1 / sqrt(...), (B * T, 1);
   backward reads x, that and the weight, and sums the gradient of the weight over rows as that of a
   layernorm. Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019, equation 4. */
static ms_tensor llama_norm(nn_net *net, const char *name, ms_tensor x) {
    const ms_shape shape = ms_tensor_shape(net->model, x);
    ms_layer_desc desc = llama_desc(name, x);
    desc.param[0] =
        nn_param(net, nn_join(name, "weight").text, ms_shape1(nn_last(shape)), NN_INIT_ONES, 0.0f);
    desc.saved[0] = nn_saved(net, name, "rstd", nn_per_row(shape, 1));
    desc.dtypes.f32_saved = 1;
    desc.dtypes.f32_param = 1;
    desc.backward_reads.in = 1;
    desc.backward_reads.saved = 1;
    desc.backward_reads.param = 1;
    desc.in_place[0] = 1;
    desc.grad_in_place[0].in = 1;
    desc.grad_in_place[0].grad_out = 1;
    desc.backward_workspace =
        nn_workspace(net->device->column_floats(nn_rows(shape), nn_last(shape)));
    desc.flops = nn_elements(shape) * 4.0;
    desc.backward_flops = nn_elements(shape) * 10.0;
    return llama_register(net, &desc, nn_last(shape));
}

/* qkv (B, T, (H + 2 K) D): pairs of queries and of keys are turned by an angle that depends on t
   alone, so backward turns the gradient back and reads nothing. Su et al., "RoFormer", 2021,
   equation 34. */
static ms_tensor llama_rotate(nn_net *net, const char *name, ms_tensor qkv,
                              const llama_config *config) {
    const ms_shape shape = ms_tensor_shape(net->model, qkv);
    const int64_t turned = config->heads + config->kv_heads;
    ms_layer_desc desc = llama_desc(name, qkv);
    desc.backward_reads.nothing = true;
    desc.in_place[0] = 1;
    desc.grad_in_place[0].grad_out = 1;
    desc.flops = nn_elements(shape) * 3.0 * (double)turned / (double)(turned + config->kv_heads);
    desc.backward_flops = desc.flops;
    return llama_register(net, &desc, nn_last(shape));
}

enum { LLAMA_TILE = 128 };

/* Causal attention in tiles: out (B, T, C) from qkv (B, T, (H + 2 K) D), H / K heads of queries to
   one of keys and values. Saves the logarithm of the sum of exponentials of each row, (B, H, T);
   backward reads qkv, out and these, computes the probabilities again tile by tile, and needs the
   row sums of out times its gradient, (B, H, T), as workspace. Dao, "FlashAttention-2", 2023,
   algorithms 1 and 2; a tile of keys that no query of its rows sees is left out (section 3.1).
   Ainslie et al., "GQA", 2023, section 2.2. */
static ms_tensor llama_attention(nn_net *net, const char *name, ms_tensor qkv,
                                 const llama_config *config) {
    const int64_t rows = config->batch * config->heads * config->sequence;
    const int64_t size = config->channels / config->heads;
    const int64_t keys =
        config->sequence > LLAMA_TILE ? (config->sequence + LLAMA_TILE) / 2 : config->sequence;
    ms_layer_desc desc = llama_desc(name, qkv);
    desc.saved[0] =
        nn_saved(net, name, "sums", ms_shape3(config->batch, config->heads, config->sequence));
    desc.optional_saved = 1;
    desc.dtypes.f32_saved = 1;
    desc.backward_reads.in = 1;
    desc.backward_reads.out = 1;
    desc.backward_reads.saved = 1;
    desc.backward_workspace = nn_workspace(rows);
    /* Flops: for each pair of a query and a key two products, in backward five, and the softmax. */
    desc.flops = (double)rows * (double)keys * (4.0 * (double)size + 10.0);
    desc.backward_flops = (double)rows * (double)keys * (10.0 * (double)size + 15.0);
    return llama_register(net, &desc, config->channels);
}

/* out (B, T, F) = gate / (1 + exp(-gate)) * up, of gate and up (B, T, F); backward reads both.
   Shazeer, "GLU Variants Improve Transformer", 2020, equation 5. */
static ms_tensor llama_swiglu(nn_net *net, const char *name, ms_tensor gate, ms_tensor up) {
    const ms_shape shape = ms_tensor_shape(net->model, gate);
    ms_layer_desc desc = llama_desc(name, gate);
    desc.in[1] = up;
    desc.backward_reads.in = 3;
    desc.in_place[0] = 3;
    desc.grad_in_place[0].in = 3;
    desc.grad_in_place[0].grad_out = 1;
    desc.grad_in_place[1].in = 3;
    desc.grad_in_place[1].grad_out = 1;
    desc.flops = nn_elements(shape) * 15.0;
    desc.backward_flops = nn_elements(shape) * 20.0;
    return llama_register(net, &desc, nn_last(shape));
}

// ---- the model ----------------------------------------------------------------------------------

/* x (B, T, C) through one block. */
static ms_tensor llama_block(nn_net *net, const char *prefix, ms_tensor x,
                             const llama_config *config) {
    const int64_t size = config->channels / config->heads, width = config->feed_forward;
    const int64_t wide = (config->heads + 2 * config->kv_heads) * size;
    ms_tensor y = llama_norm(net, nn_join(prefix, "norm1").text, x);
    y = llama_project(net, prefix, "qkv", config->qkv_bias, y, wide, config);
    y = llama_rotate(net, nn_join(prefix, "rotate").text, y, config);
    y = llama_attention(net, nn_join(prefix, "attention").text, y, config);
    y = llama_project(net, prefix, "proj", false, y, config->channels, config);
    x = nn_add(net, nn_join(prefix, "add1").text, x, y);
    y = llama_norm(net, nn_join(prefix, "norm2").text, x);
    const ms_tensor gate = llama_project(net, prefix, "gate", false, y, width, config);
    const ms_tensor up = llama_project(net, prefix, "up", false, y, width, config);
    y = llama_swiglu(net, nn_join(prefix, "swiglu").text, gate, up);
    y = llama_project(net, prefix, "down", false, y, config->channels, config);
    return nn_add(net, nn_join(prefix, "add2").text, x, y);
}

/* Registers inputs, params, layers and losses, and calls ms_set_loss. heads must divide channels,
   and kv_heads heads. */
static nn_transformer llama(nn_net *net, const llama_config *config) {
    const ms_shape ids = ms_shape2(config->batch, config->sequence);
    const ms_tensor none = {0};
    nn_transformer t;
    memset(&t, 0, sizeof t);
    t.tokens = ms_input(net->model, "tokens", MS_DTYPE_I32, ids);
    t.targets = ms_input(net->model, "targets", MS_DTYPE_I32, ids);
    const ms_tensor table = llama_weight(net, "tokens", config->vocabulary, config->channels);
    ms_tensor x = nn_embedding(net, "embedding", t.tokens, table, none, none, none);
    for (int64_t l = 0; l < config->layers; l++) {
        nn_name prefix;
        snprintf(prefix.text, sizeof prefix.text, "h%lld", (long long)l);
        x = llama_block(net, prefix.text, x, config);
    }
    x = llama_norm(net, "norm", x);
    t.logits = config->tied ? nn_linear_tied(net, "head", x, table, none)
                            : llama_linear(net, "head", x, config->vocabulary);
    t.losses = nn_cross_entropy(net, "loss", t.logits, t.targets);
    ms_set_loss(net->model, t.losses);
    if (config->adapter_rank > 0) {
        nn_freeze(net);
    }
    return t;
}

#endif // MEMSCALE_LLAMA_SHAPE_H
