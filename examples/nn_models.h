/*  nn_models.h - whole models of the layers of nn.h, which includes this file at its end: GPT-2, BERT,
    and the family of Llama, which Mistral, Qwen, Gemma, Phi-3 and SmolLM2 belong to.

        >>nn transformers   GPT-2 and BERT: settings, sizes of published ones, blocks
        >>nn llama          the same of the family of Llama

    A model function registers inputs, params, layers and losses, and calls ms_set_loss. Names of params
    begin with the number of their block: "h0.qkv.weight". */
#ifndef MEMSCALE_NN_MODELS_H
#define MEMSCALE_NN_MODELS_H

#ifndef MEMSCALE_NN_H
#error "include nn.h, which includes nn_models.h"
#endif

// ------------------------------------------------------------------------------------------------
// >>nn transformers

typedef enum nn_granularity {
    NN_OPERATORS, // every operator is a layer
    NN_BLOCKS     // every transformer block is one layer; its inner values are saved tensors
} nn_granularity;

typedef struct nn_transformer_config {
    int64_t vocabulary;
    int64_t context; // rows of the position table; at least the (largest) sequence
    int64_t layers, heads, channels;
    int64_t batch, sequence;
    /* The largest size for ms_reshape, along an axis of its own; 0: no axis, the size is fixed. The
       axes are added in the order batch, sequence. */
    int64_t largest_batch, largest_sequence;
    float dropout; // 0: no dropout layers are registered
    nn_granularity granularity;
    bool save_scores; // keep the attention probabilities for backward; else compute them in tiles
    /* The heads of a block in so many equal groups, one after the other, each with a qkv and a proj
       layer of its own, named qkv0, proj0 and so on: only one group's queries, keys, values and their
       gradients need to be in memory at a time. 0: one group, named qkv and proj. The initial
       weights are drawn per group. Not with NN_BLOCKS. */
    int64_t head_groups;
    /* 0: none; else every linear layer of a block has an adapter of this rank, and all other params
       are frozen. Not with NN_BLOCKS. */
    int64_t adapter_rank;
} nn_transformer_config;

typedef struct nn_transformer {
    ms_tensor tokens;   // I32 (B, T)
    ms_tensor segments; // I32 (B, T), 0 or 1; only BERT has it
    ms_tensor targets;  // I32 (B, T), below 0: ignored
    ms_tensor logits;   // (B, T, V)
    ms_tensor losses;   // (B, T)
} nn_transformer;

/* Sizes of a published model: "gpt2-124M", "gpt2-355M", "gpt2-774M", "gpt2-1558M", "bert-base",
   "bert-large". Sets vocabulary, context, layers, heads and channels, nothing else; false: unknown
   name. */
NN_API bool nn_preset(const char *name, nn_transformer_config *config);

/* GPT-2: token and position embedding, pre-norm blocks, a last normalization, and a head tied to
   the token table. Radford et al., "Language Models are Unsupervised Multitask Learners", 2019,
   section 2.3: initial weights of the projections into the residual stream have the deviation
   0.02 / sqrt(2 * layers). Registers inputs, params, layers and losses, and calls ms_set_loss. */
NN_API nn_transformer nn_gpt2(nn_net *net, const nn_transformer_config *config);

/* BERT with its masked-language-model head: token, position and segment embedding, normalization,
   post-norm blocks; dense, gelu, normalization, and a decoder tied to the token table with a bias
   of its own. Devlin et al., "BERT", 2018, sections 3 and A.2. No pooler, no next-sentence head. */
NN_API nn_transformer nn_bert(nn_net *net, const nn_transformer_config *config);

/* What GPT-2 and BERT differ in within a block. */
typedef struct nn_style {
    bool post_norm, causal, erf_form;
    float epsilon;
    float projection_deviation; // of the projections into the residual stream
} nn_style;

NN_API void nn_block_params(nn_net *net, const char *prefix, const nn_transformer_config *config,
                            const nn_style *style, ms_tensor param[NN_P_COUNT]) {
    const int64_t channels = config->channels;
    const float deviation = style->projection_deviation;
    nn_pair pair[6]; // in the order of the slots
    memset(pair, 0, sizeof pair);
    if (!style->post_norm) {
        pair[0] = nn_layernorm_params(net, nn_join(prefix, "ln1").text, channels);
    }
    if (config->head_groups == 0) { // groups have params of their own
        pair[1] = nn_linear_params(net, nn_join(prefix, "qkv").text, channels, 3 * channels, 0.02f);
        pair[2] =
            nn_linear_params(net, nn_join(prefix, "proj").text, channels, channels, deviation);
    }
    pair[style->post_norm ? 0 : 3] =
        nn_layernorm_params(net, nn_join(prefix, style->post_norm ? "ln1" : "ln2").text, channels);
    pair[4] = nn_linear_params(net, nn_join(prefix, "fc").text, channels, 4 * channels, 0.02f);
    pair[5] =
        nn_linear_params(net, nn_join(prefix, "fcproj").text, 4 * channels, channels, deviation);
    if (style->post_norm) {
        pair[3] = nn_layernorm_params(net, nn_join(prefix, "ln2").text, channels);
    }
    for (int i = 0; i < 6; i++) {
        param[2 * i] = pair[i].weight;
        param[2 * i + 1] = pair[i].bias;
    }
}

/* A block under construction. */
typedef struct nn_builder {
    nn_net *net;
    const char *prefix;
    const nn_transformer_config *config;
    const nn_style *style;
    ms_tensor param[NN_P_COUNT];
} nn_builder;

/* The whole name of the layer tells it from those of other blocks. */
NN_API ms_tensor nn_build_linear_of(const nn_builder *b, const char *whole, nn_pair pair,
                                    ms_tensor x) {
    const ms_tensor y = nn_linear_tied(b->net, whole, x, pair.weight, pair.bias);
    const int64_t rank = b->config->adapter_rank;
    return rank > 0 ? nn_adapter(b->net, whole, x, y, rank) : y;
}

NN_API ms_tensor nn_build_linear(const nn_builder *b, const char *name, int param, ms_tensor x) {
    nn_pair pair;
    pair.weight = b->param[param];
    pair.bias = b->param[param + 1];
    return nn_build_linear_of(b, nn_join(b->prefix, name).text, pair, x);
}

NN_API ms_tensor nn_build_norm(const nn_builder *b, const char *name, int param, ms_tensor x) {
    return nn_layernorm_tied(b->net, nn_join(b->prefix, name).text, x, b->param[param],
                             b->param[param + 1], b->style->epsilon);
}

/* "h0.qkv2" of the third group. */
NN_API nn_name nn_group_name(const nn_builder *b, const char *part, int64_t group) {
    nn_name name;
    snprintf(name.text, sizeof name.text, "%s.%s%lld", b->prefix, part, (long long)group);
    return name;
}

/* The heads of a group: what they add to the projection of all. Only the first group has a bias in
   that projection. */
NN_API ms_tensor nn_build_heads(const nn_builder *b, int64_t group, ms_tensor x) {
    const nn_transformer_config *config = b->config;
    const int64_t channels = config->channels / config->head_groups;
    const nn_name qkv_name = nn_group_name(b, "qkv", group);
    const nn_name proj_name = nn_group_name(b, "proj", group);
    const ms_tensor none = {0};
    const ms_tensor qkv = nn_build_linear_of(
        b, qkv_name.text,
        nn_linear_params(b->net, qkv_name.text, config->channels, 3 * channels, 0.02f), x);
    const ms_tensor attention =
        nn_attention(b->net, nn_group_name(b, "attention", group).text, qkv,
                     config->heads / config->head_groups, b->style->causal, config->save_scores);
    const float deviation = b->style->projection_deviation;
    nn_pair proj;
    if (group == 0) {
        proj = nn_linear_params(b->net, proj_name.text, channels, config->channels, deviation);
    } else {
        proj.weight = nn_param(b->net, nn_join(proj_name.text, "weight").text,
                               ms_shape2(config->channels, channels), NN_INIT_NORMAL, deviation);
        proj.bias = none;
    }
    return nn_build_linear_of(b, proj_name.text, proj, attention);
}

NN_API ms_tensor nn_build_dropout1(const nn_builder *b, ms_tensor proj) {
    return nn_dropout(b->net, nn_join(b->prefix, "dropout1").text, proj, b->config->dropout);
}

/* residual + what all groups of heads make of x. The groups add to the residual one after the other,
   so that backward has one gradient of all these sums; but what dropout is for must be summed up
   first. */
NN_API ms_tensor nn_build_head_groups(const nn_builder *b, ms_tensor residual, ms_tensor x) {
    const int64_t groups = b->config->head_groups;
    if (groups < 1 || b->config->heads % groups != 0 || b->config->channels % groups != 0) {
        return nn_refuse(b->net, "nn: heads must be a multiple of head_groups");
    }
    const bool drops = b->config->dropout > 0.0f;
    ms_tensor sum = drops ? nn_build_heads(b, 0, x) : residual;
    for (int64_t i = drops ? 1 : 0; i < groups; i++) {
        sum = nn_add(b->net, nn_group_name(b, "sum", i).text, sum, nn_build_heads(b, i, x));
    }
    return !drops ? sum
                  : nn_add(b->net, nn_join(b->prefix, "add1").text, residual,
                           nn_build_dropout1(b, sum));
}

/* residual + attention of x. */
NN_API ms_tensor nn_build_attend(const nn_builder *b, ms_tensor residual, ms_tensor x) {
    if (b->config->head_groups != 0) {
        return nn_build_head_groups(b, residual, x);
    }
    const ms_tensor qkv = nn_build_linear(b, "qkv", NN_P_QKV, x);
    const ms_tensor attention =
        nn_attention(b->net, nn_join(b->prefix, "attention").text, qkv, b->config->heads,
                     b->style->causal, b->config->save_scores);
    const ms_tensor proj = nn_build_linear(b, "proj", NN_P_PROJ, attention);
    return nn_add(b->net, nn_join(b->prefix, "add1").text, residual, nn_build_dropout1(b, proj));
}

NN_API ms_tensor nn_build_mlp(const nn_builder *b, ms_tensor x) {
    const ms_tensor fch = nn_build_linear(b, "fc", NN_P_FC, x);
    const ms_tensor gelu =
        nn_gelu_of_form(b->net, nn_join(b->prefix, "gelu").text, fch, b->style->erf_form);
    const ms_tensor proj = nn_build_linear(b, "fcproj", NN_P_FCPROJ, gelu);
    return nn_dropout(b->net, nn_join(b->prefix, "dropout2").text, proj, b->config->dropout);
}

NN_API ms_tensor nn_build_operators(const nn_builder *b, ms_tensor x) {
    const nn_name add2 = nn_join(b->prefix, "add2");
    if (b->style->post_norm) {
        const ms_tensor sum1 = nn_build_attend(b, x, x);
        const ms_tensor norm1 = nn_build_norm(b, "ln1", NN_P_NORM1, sum1);
        const ms_tensor sum2 = nn_add(b->net, add2.text, norm1, nn_build_mlp(b, norm1));
        return nn_build_norm(b, "ln2", NN_P_NORM2, sum2);
    }
    const ms_tensor norm1 = nn_build_norm(b, "ln1", NN_P_NORM1, x);
    const ms_tensor sum1 = nn_build_attend(b, x, norm1);
    const ms_tensor norm2 = nn_build_norm(b, "ln2", NN_P_NORM2, sum1);
    return nn_add(b->net, add2.text, sum1, nn_build_mlp(b, norm2));
}

/* Registers the saved tensors of a block, width columns per row of the input; backward reads
   all. */
NN_API void nn_build_saved(const nn_builder *b, ms_shape x, ms_layer_desc *desc) {
    const int64_t channels = b->config->channels;
    const struct {
        int slot;
        const char *name;
        int64_t width;
        bool used;
    } rows[] = {
        {NN_S_NORM1, "ln1", channels, true},
        {NN_S_MEAN1, "mean1", 1, true},
        {NN_S_RSTD1, "rstd1", 1, true},
        {NN_S_QKV, "qkv", 3 * channels, true},
        {NN_S_ATTENTION, "attention", channels, true},
        {NN_S_SUM1, "sum1", channels, true},
        {NN_S_MEAN2, "mean2", 1, true},
        {NN_S_RSTD2, "rstd2", 1, true},
        {NN_S_FCH, "fc", 4 * channels, true},
        {NN_S_GELU, "gelu", 4 * channels, true},
        {NN_S_SCORES, "scores", 0, b->config->save_scores},
        {NN_S_LOG_SUMS, "log_sums", 0, !b->config->save_scores},
        {NN_S_NORM2, "ln2", channels, !b->style->post_norm},
        {NN_S_SUM2, "sum2", channels, b->style->post_norm},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        if (rows[i].used) {
            const ms_shape shape =
                rows[i].slot == NN_S_SCORES     ? nn_scores_shape(x, b->config->heads)
                : rows[i].slot == NN_S_LOG_SUMS ? nn_log_sums_shape(x, b->config->heads)
                                                : nn_with_last(x, rows[i].width);
            desc->saved[rows[i].slot] = nn_saved(b->net, b->prefix, rows[i].name, shape);
            desc->backward_reads.saved = desc->backward_reads.saved | 1u << rows[i].slot;
        }
    }
}

NN_API ms_tensor nn_build_block(const nn_builder *b, ms_tensor x) {
    const nn_transformer_config *config = b->config;
    const nn_style *style = b->style;
    const ms_tensor none = {0};
    const ms_shape shape = ms_tensor_shape(b->net->model, x);
    if (shape.rank != 3 || config->heads < 1 || config->channels % config->heads != 0) {
        return nn_refuse(b->net, "nn: channels must be a multiple of heads");
    }
    if (config->adapter_rank > 0 || config->head_groups != 0) {
        return nn_refuse(b->net,
                         "nn: a block that is one layer has no adapters or groups of heads");
    }
    nn_block_options options;
    memset(&options, 0, sizeof options);
    options.attention =
        nn_plain_attention(config->heads, config->channels / config->heads, style->causal);
    options.dropout = config->dropout;
    options.epsilon = style->epsilon;
    options.post_norm = style->post_norm;
    options.erf_form = style->erf_form;
    options.keeps_scores = config->save_scores;
    const nn_attention_size attention = nn_attention_size_of(options.attention, shape);
    const nn_attention_size largest =
        nn_attention_size_of(options.attention, nn_largest(b->net, shape));
    if (!nn_check_width(b->net, b->prefix, config->channels) ||
        (config->save_scores && !nn_check_width(b->net, b->prefix, largest.sequence))) {
        return none;
    }
    ms_layer_desc desc =
        nn_desc(b->prefix, style->post_norm ? nn_block_post_forward : nn_block_pre_forward,
                style->post_norm ? nn_block_post_backward : nn_block_pre_backward,
                nn_attach(b->net, &options, sizeof options));
    desc.in[0] = x;
    memcpy(desc.param, b->param, sizeof b->param);
    nn_build_saved(b, shape, &desc);
    desc.backward_reads.in = 1;
    desc.backward_reads.param = 0x555; // weights, no bias
    desc.dtypes.f32_param = NN_P_FLOATS;
    desc.dtypes.f32_saved = NN_S_FLOATS;
    desc.dtypes.half_gradients = b->net->half_gradients ? (uint32_t)NN_P_MATRICES : 0;
    desc.in_place[0] = 1;
    desc.grad_in_place[0].in = 1;
    desc.grad_in_place[0].grad_out = 1;
    const bool keeps_scores = config->save_scores;
    desc.optional_saved = keeps_scores ? 1u << NN_S_SCORES : 1u << NN_S_LOG_SUMS;
    desc.forward_workspace = nn_attention_workspace(b->net->device, largest, keeps_scores, false);
    nn_scratch scratch = nn_sequences_of(b->net->device, largest, keeps_scores, true);
    scratch.floats = nn_blocks_scratch;
    scratch.columns = 4 * config->channels;
    desc.backward_workspace = nn_workspace_by_rows(&scratch);
    desc.backward_workspace.row_bytes += nn_block_row_bytes(
        largest.sequence, config->channels, 4 * config->channels, config->dropout > 0.0f);
    const double rest = nn_elements(shape) * (24.0 * (double)config->channels + 120.0);
    desc.flops = rest + nn_attention_flops(b->net->device, attention, keeps_scores, false);
    desc.backward_flops =
        2.0 * rest + nn_attention_flops(b->net->device, attention, keeps_scores, true);
    desc.tile.axes = 1; // sequences
    return nn_register(b->net, &desc, shape);
}

NN_API ms_tensor nn_build_blocks(nn_net *net, const nn_transformer_config *config,
                                 const nn_style *style, ms_tensor x) {
    for (int64_t l = 0; l < config->layers; l++) {
        nn_name prefix;
        snprintf(prefix.text, sizeof prefix.text, "h%lld", (long long)l);
        nn_builder b;
        memset(&b, 0, sizeof b);
        b.net = net;
        b.prefix = prefix.text;
        b.config = config;
        b.style = style;
        nn_block_params(net, prefix.text, config, style, b.param);
        x = config->granularity == NN_BLOCKS ? nn_build_block(&b, x) : nn_build_operators(&b, x);
    }
    return x;
}

NN_API bool nn_preset(const char *name, nn_transformer_config *config) {
    static const struct {
        const char *name;
        int64_t vocabulary, context, layers, heads, channels;
    } presets[] = {
        {"gpt2-124M", 50257, 1024, 12, 12, 768},  {"gpt2-355M", 50257, 1024, 24, 16, 1024},
        {"gpt2-774M", 50257, 1024, 36, 20, 1280}, {"gpt2-1558M", 50257, 1024, 48, 25, 1600},
        {"bert-base", 30522, 512, 12, 12, 768},   {"bert-large", 30522, 512, 24, 16, 1024},
    };
    for (size_t i = 0; i < sizeof presets / sizeof presets[0]; i++) {
        if (strcmp(presets[i].name, name) == 0) {
            config->vocabulary = presets[i].vocabulary;
            config->context = presets[i].context;
            config->layers = presets[i].layers;
            config->heads = presets[i].heads;
            config->channels = presets[i].channels;
            return true;
        }
    }
    return false;
}

/* (B, T), along axes of their own where there is a largest size. */
NN_API ms_shape nn_ids_shape(nn_net *net, int64_t batch, int64_t sequence, int64_t largest_batch,
                             int64_t largest_sequence) {
    ms_shape ids = ms_shape2(batch, sequence);
    if (largest_batch != 0) {
        ids = ms_along(ids, 0, nn_axis(net, "batch", batch, largest_batch));
    }
    if (largest_sequence != 0) {
        ids = ms_along(ids, 1, nn_axis(net, "sequence", sequence, largest_sequence));
    }
    return ids;
}

NN_API nn_transformer nn_gpt2(nn_net *net, const nn_transformer_config *config) {
    const ms_shape ids = nn_ids_shape(net, config->batch, config->sequence, config->largest_batch,
                                      config->largest_sequence);
    const ms_tensor none = {0};
    nn_transformer t;
    memset(&t, 0, sizeof t);
    t.tokens = ms_input(net->model, "tokens", MS_DTYPE_I32, ids);
    t.targets = ms_input(net->model, "targets", MS_DTYPE_I32, ids);
    const ms_tensor wte = nn_param(net, "wte", ms_shape2(config->vocabulary, config->channels),
                                   NN_INIT_NORMAL, 0.02f);
    const ms_tensor wpe =
        nn_param(net, "wpe", ms_shape2(config->context, config->channels), NN_INIT_NORMAL, 0.01f);
    nn_style style;
    memset(&style, 0, sizeof style);
    style.causal = true;
    style.epsilon = 1e-5f;
    style.projection_deviation = 0.02f / sqrtf(2.0f * (float)config->layers);
    ms_tensor x = nn_embedding(net, "embedding", t.tokens, wte, wpe, none, none);
    x = nn_dropout(net, "dropout", x, config->dropout);
    x = nn_build_blocks(net, config, &style, x);
    x = nn_layernorm(net, "lnf", x);
    t.logits = nn_linear_tied(net, "head", x, wte, none);
    t.losses = nn_cross_entropy(net, "loss", t.logits, t.targets);
    ms_set_loss(net->model, t.losses);
    if (config->adapter_rank > 0) {
        nn_freeze(net);
    }
    return t;
}

NN_API nn_transformer nn_bert(nn_net *net, const nn_transformer_config *config) {
    const ms_shape ids = nn_ids_shape(net, config->batch, config->sequence, config->largest_batch,
                                      config->largest_sequence);
    const int64_t channels = config->channels;
    nn_style style;
    memset(&style, 0, sizeof style);
    style.post_norm = true;
    style.erf_form = true;
    style.epsilon = 1e-12f;
    style.projection_deviation = 0.02f;
    nn_transformer t;
    memset(&t, 0, sizeof t);
    t.tokens = ms_input(net->model, "tokens", MS_DTYPE_I32, ids);
    t.segments = ms_input(net->model, "segments", MS_DTYPE_I32, ids);
    t.targets = ms_input(net->model, "targets", MS_DTYPE_I32, ids);
    const ms_tensor wte =
        nn_param(net, "wte", ms_shape2(config->vocabulary, channels), NN_INIT_NORMAL, 0.02f);
    const ms_tensor wpe =
        nn_param(net, "wpe", ms_shape2(config->context, channels), NN_INIT_NORMAL, 0.02f);
    const ms_tensor wse = nn_param(net, "wse", ms_shape2(2, channels), NN_INIT_NORMAL, 0.02f);
    const nn_pair lne = nn_layernorm_params(net, "lne", channels);
    ms_tensor x = nn_embedding(net, "embedding", t.tokens, wte, wpe, t.segments, wse);
    x = nn_layernorm_tied(net, "lne", x, lne.weight, lne.bias, style.epsilon);
    x = nn_dropout(net, "dropout", x, config->dropout);
    x = nn_build_blocks(net, config, &style, x);
    x = nn_linear(net, "mlm.dense", x, channels, 0.02f);
    x = nn_gelu_erf(net, "mlm.gelu", x);
    const nn_pair ln = nn_layernorm_params(net, "mlm.ln", channels);
    x = nn_layernorm_tied(net, "mlm.ln", x, ln.weight, ln.bias, style.epsilon);
    const ms_tensor bias =
        nn_param(net, "mlm.bias", ms_shape1(config->vocabulary), NN_INIT_ZEROS, 0.0f);
    t.logits = nn_linear_tied(net, "mlm.decoder", x, wte, bias);
    t.losses = nn_cross_entropy(net, "loss", t.logits, t.targets);
    ms_set_loss(net->model, t.losses);
    if (config->adapter_rank > 0) {
        nn_freeze(net);
    }
    return t;
}

// ------------------------------------------------------------------------------------------------
// >>nn llama

/* A model of the family of Llama: pre-norm blocks with norms by the root mean square, rotary
   positions, grouped queries and a gated feed-forward net, without biases. Touvron et al., "LLaMA",
   2023, section 2.2, and "Llama 2", 2023, section 2.2. What others change is off at 0: Qwen Team,
   "Qwen2.5 Technical Report", 2024, section 2; Yang et al., "Qwen3 Technical Report", 2025, section
   2; Jiang et al., "Mistral 7B", 2023, section 2; Gemma Team, "Gemma 2", 2024, section 2, and
   "Gemma 3 Technical Report", 2025, section 2. */
typedef struct nn_llama_config {
    int64_t vocabulary, layers, channels, feed_forward;
    int64_t heads, kv_heads, head_size; // kv_heads 0: as heads; head_size 0: channels / heads
    int64_t positions;                  // of the longest sequence it is meant for; 0: any
    int64_t turned; // elements of a head that have a rotary position (Phi-4-mini); 0: all
    bool tied;      // the head is the token table
    bool qkv_bias;  // queries, keys and values have biases (Qwen2.5)
    bool
        qk_norm; // heads of queries and keys are normalized before they are turned (Qwen3, Gemma 3)
    bool post_norms;    // what attention and the feed-forward net give is normalized, too (Gemma)
    bool offset_norms;  // norms multiply by 1 + weight (Gemma)
    bool scaled_tokens; // embeddings are multiplied by sqrt(channels) (Gemma)
    bool gelu;     // the tanh form of gelu is the gate, not x times its logistic function (Gemma)
    float epsilon; // of norms; 0: 1e-5
    float theta;   // base of the rotary angles; 0: 10000
    float local_theta; // that of layers with a window, without scaling (Gemma 3); 0: as the others
    nn_rotary_scaling scaling;
    int64_t window;     // keys that a query sees, that of its own token among them; 0: all
    int64_t full_every; // every so many-th layer has no window (Gemma 2: 2, Gemma 3: 6); 0: none
    float attention_cap, logit_cap; // soft caps (Gemma 2); 0: none
    float query_scale; // scores are divided by its square root; 0: by that of head_size
    /* As in nn_transformer_config. */
    int64_t batch, sequence, largest_batch, largest_sequence;
    int64_t adapter_rank;
    blocks_kind base;  // all matrices in such blocks of codes, which needs adapters; NONE: in F32
    int64_t head_rows; // rows of the tiles of head and loss, in every plan; 0: as the plan sees fit
} nn_llama_config;

/* Registers a model. Params: "tokens.weight" (V, C); of block 0 "h0.norm1.weight", "h0.qkv.weight"
   ((H + 2 K) D, C), whose rows are those of the queries, of the keys and of the values, "h0.qkv.bias",
   "h0.qnorm.weight" and "h0.knorm.weight" (D), "h0.proj.weight" (C, H D), "h0.post1.weight",
   "h0.norm2.weight", "h0.gate.weight" and "h0.up.weight" (F, C), "h0.down.weight" (C, F),
   "h0.post2.weight"; "norm.weight", "head.weight" (V, C): those that the settings ask for. */
NN_API nn_transformer nn_llama(nn_net *net, const nn_llama_config *config);

/* The settings of a published model; false: unknown name. Sets nothing that is not the model's: not
   batch, sequence and adapter_rank. nn_llama_name: of model number i, from 0; NULL: there are no more. */
NN_API bool nn_llama_preset(const char *name, nn_llama_config *config);
NN_API const char *nn_llama_name(int i);

/* Sizes of published models. Llama 2: Touvron et al., 2023, table 1 and the published configurations
   (7B and 13B as in LLaMA, 2023, table 2). Llama 3: Grattafiori et al., "The Llama 3 Herd of Models",
   2024, table 3; 3.2: the model cards of Meta, 2024. TinyLlama: Zhang et al., "TinyLlama", 2024, table
   1. Mistral: Jiang et al., "Mistral 7B", 2023, table 1. Qwen2.5: Qwen Team, "Qwen2.5 Technical
   Report", 2024, table 1; Qwen3: Yang et al., "Qwen3 Technical Report", 2025, tables 1 and 2; SmolLM2:
   Allal et al., "SmolLM2", 2025, section 4; Gemma 2 and 3: the reports above, tables 1; Phi-3: Abdin
   et al., "Phi-3 Technical Report", 2024, section 2; Phi-4: the same, "Phi-4 Technical Report", 2024,
   section 3. What these
   leave out (widths, rows of the token table, bases of the rotary angles): the published
   config.json. */
typedef struct nn_llama_row {
    const char *name;
    int64_t vocabulary, layers, channels, heads, kv_heads, head_size, feed_forward;
    float theta;
    int64_t window; // 0: none
    int flags;      // NN_TIED and others
} nn_llama_row;

enum {
    NN_TIED = 1,
    NN_QKV_BIAS = 2,
    NN_QK_NORM = 4,
    NN_LLAMA3 = 8, // angles scaled by 32 (Llama 3.2) for 8192 positions
    NN_GEMMA = 16, // what all of Gemma have, Gemma 2 with caps
    NN_GEMMA3 = 32,
    NN_FINE_NORMS = 64, // epsilon 1e-6
    NN_QWEN2 = NN_QKV_BIAS | NN_FINE_NORMS,
    NN_QWEN3 = NN_QK_NORM | NN_FINE_NORMS
};

static const nn_llama_row nn_llama_rows[] = {
    {"smollm2-135M", 49152, 30, 576, 9, 3, 64, 1536, 1e5f, 0, NN_TIED},
    {"smollm2-360M", 49152, 32, 960, 15, 5, 64, 2560, 1e5f, 0, NN_TIED},
    {"smollm2-1.7B", 49152, 24, 2048, 32, 32, 64, 8192, 1.3e5f, 0, NN_TIED},
    {"tinyllama-1.1B", 32000, 22, 2048, 32, 4, 64, 5632, 1e4f, 0, 0},
    {"llama3.2-1B", 128256, 16, 2048, 32, 8, 64, 8192, 5e5f, 0, NN_TIED | NN_LLAMA3},
    {"llama3.2-3B", 128256, 28, 3072, 24, 8, 128, 8192, 5e5f, 0, NN_TIED | NN_LLAMA3},
    {"llama2-7B", 32000, 32, 4096, 32, 32, 128, 11008, 1e4f, 0, 0},
    {"mistral-7B", 32000, 32, 4096, 32, 8, 128, 14336, 1e4f, 4096, 0},
    {"phi3-mini", 32064, 32, 3072, 32, 32, 96, 8192, 1e4f, 2047, 0},
    {"mistral-7B-v0.3", 32768, 32, 4096, 32, 8, 128, 14336, 1e6f, 0, 0},
    {"mistral-nemo-12B", 131072, 40, 5120, 32, 8, 128, 14336, 1e6f, 0, 0},
    {"llama3-8B", 128256, 32, 4096, 32, 8, 128, 14336, 5e5f, 0, 0},
    {"llama2-13B", 32000, 40, 5120, 40, 40, 128, 13824, 1e4f, 0, 0},
    {"phi4", 100352, 40, 5120, 40, 10, 128, 17920, 2.5e5f, 0, 0},
    {"llama2-70B", 32000, 80, 8192, 64, 8, 128, 28672, 1e4f, 0, 0},
    {"llama3-70B", 128256, 80, 8192, 64, 8, 128, 28672, 5e5f, 0, 0},
    {"qwen2.5-0.5B", 151936, 24, 896, 14, 2, 64, 4864, 1e6f, 0, NN_TIED | NN_QWEN2},
    {"qwen2.5-1.5B", 151936, 28, 1536, 12, 2, 128, 8960, 1e6f, 0, NN_TIED | NN_QWEN2},
    {"qwen2.5-3B", 151936, 36, 2048, 16, 2, 128, 11008, 1e6f, 0, NN_TIED | NN_QWEN2},
    {"qwen2.5-7B", 152064, 28, 3584, 28, 4, 128, 18944, 1e6f, 0, NN_QWEN2},
    {"qwen2.5-14B", 152064, 48, 5120, 40, 8, 128, 13824, 1e6f, 0, NN_QWEN2},
    {"qwen2.5-32B", 152064, 64, 5120, 40, 8, 128, 27648, 1e6f, 0, NN_QWEN2},
    {"qwen3-0.6B", 151936, 28, 1024, 16, 8, 128, 3072, 1e6f, 0, NN_TIED | NN_QWEN3},
    {"qwen3-1.7B", 151936, 28, 2048, 16, 8, 128, 6144, 1e6f, 0, NN_TIED | NN_QWEN3},
    {"qwen3-4B", 151936, 36, 2560, 32, 8, 128, 9728, 1e6f, 0, NN_TIED | NN_QWEN3},
    {"qwen3-8B", 151936, 36, 4096, 32, 8, 128, 12288, 1e6f, 0, NN_QWEN3},
    {"qwen3-14B", 151936, 40, 5120, 40, 8, 128, 17408, 1e6f, 0, NN_QWEN3},
    {"qwen3-32B", 151936, 64, 5120, 64, 8, 128, 25600, 1e6f, 0, NN_QWEN3},
    {"gemma2-2B", 256000, 26, 2304, 8, 4, 256, 9216, 1e4f, 4096, NN_TIED | NN_GEMMA},
    {"gemma2-9B", 256000, 42, 3584, 16, 8, 256, 14336, 1e4f, 4096, NN_TIED | NN_GEMMA},
    {"gemma2-27B", 256000, 46, 4608, 32, 16, 128, 36864, 1e4f, 4096, NN_TIED | NN_GEMMA},
    {"gemma3-270M", 262144, 18, 640, 4, 1, 256, 2048, 1e6f, 512, NN_TIED | NN_GEMMA | NN_GEMMA3},
    {"gemma3-1B", 262144, 26, 1152, 4, 1, 256, 6912, 1e6f, 512, NN_TIED | NN_GEMMA | NN_GEMMA3},
};

NN_API const char *nn_llama_name(int i) {
    const int count = (int)(sizeof nn_llama_rows / sizeof nn_llama_rows[0]);
    return i >= 0 && i < count ? nn_llama_rows[i].name : NULL;
}

/* What all of Gemma have; Gemma 2 with caps and every other layer without a window, Gemma 3 with
   norms of heads and every sixth. */
NN_API void nn_gemma_settings(nn_llama_config *c, bool is_third) {
    c->post_norms = c->offset_norms = c->scaled_tokens = c->gelu = true;
    c->epsilon = 1e-6f;
    c->query_scale = c->head_size == 256 ? 256.0f : (float)c->channels / (float)c->heads; // of 27B
    c->qk_norm = is_third;
    c->full_every = is_third ? 6 : 2;
    c->local_theta = is_third ? 1e4f : 0.0f;
    c->attention_cap = is_third ? 0.0f : 50.0f;
    c->logit_cap = is_third ? 0.0f : 30.0f;
}

NN_API void nn_llama_settings(const nn_llama_row *row, nn_llama_config *c) {
    c->vocabulary = row->vocabulary;
    c->layers = row->layers;
    c->channels = row->channels;
    c->heads = row->heads;
    c->kv_heads = row->kv_heads;
    c->head_size = row->head_size;
    c->feed_forward = row->feed_forward;
    c->theta = row->theta;
    c->window = row->window;
    c->tied = (row->flags & NN_TIED) != 0;
    c->qkv_bias = (row->flags & NN_QKV_BIAS) != 0;
    c->qk_norm = (row->flags & NN_QK_NORM) != 0;
    c->epsilon = (row->flags & NN_FINE_NORMS) != 0 ? 1e-6f : 1e-5f;
    if ((row->flags & NN_LLAMA3) != 0) {
        const nn_rotary_scaling scaling = {NN_ROTARY_LLAMA3, 32.0f, 1.0f, 4.0f, 8192};
        c->scaling = scaling;
    }
    if ((row->flags & NN_GEMMA) != 0) {
        nn_gemma_settings(c, (row->flags & NN_GEMMA3) != 0);
    }
}

NN_API bool nn_llama_preset(const char *name, nn_llama_config *config) {
    for (int i = 0; nn_llama_name(i) != NULL; i++) {
        if (strcmp(nn_llama_name(i), name) == 0) {
            nn_llama_settings(&nn_llama_rows[i], config);
            return true;
        }
    }
    return false;
}

/* A block under construction, with the settings of which none is left to a default. */
typedef struct nn_llama_builder {
    nn_net *net;
    nn_name prefix;
    const nn_llama_config *config;
    bool has_window;
} nn_llama_builder;

NN_API ms_tensor nn_llama_weight(nn_net *net, const char *name, blocks_kind kind, int64_t out,
                                 int64_t in) {
    if (kind != BLOCKS_NONE) {
        return nn_param_in_blocks(net, nn_join(name, "weight").text, kind, out, in, 0.02f);
    }
    return nn_param(net, nn_join(name, "weight").text, ms_shape2(out, in), NN_INIT_NORMAL, 0.02f);
}

/* A linear layer of a block, with an adapter if the model has them. */
NN_API ms_tensor nn_llama_linear(const nn_llama_builder *b, const char *name, ms_tensor x,
                                 int64_t out, bool biased) {
    const nn_name whole = nn_join(b->prefix.text, name);
    const int64_t rank = b->config->adapter_rank;
    const int64_t in = nn_last(ms_tensor_shape(b->net->model, x));
    ms_tensor bias = {0};
    const ms_tensor weight = nn_llama_weight(b->net, whole.text, b->config->base, out, in);
    if (biased) {
        bias =
            nn_param(b->net, nn_join(whole.text, "bias").text, ms_shape1(out), NN_INIT_ZEROS, 0.0f);
    }
    const ms_tensor y = nn_linear_tied(b->net, whole.text, x, weight, bias);
    return rank > 0 ? nn_adapter(b->net, whole.text, x, y, rank) : y;
}

NN_API ms_tensor nn_llama_norm(const nn_llama_builder *b, const char *name, ms_tensor x) {
    return nn_rmsnorm(b->net, nn_join(b->prefix.text, name).text, x, b->config->epsilon,
                      b->config->offset_norms);
}

/* A weight of the norms of heads. */
NN_API ms_tensor nn_llama_head_weight(const nn_llama_builder *b, const char *name) {
    return nn_param(b->net, nn_join(nn_join(b->prefix.text, name).text, "weight").text,
                    ms_shape1(b->config->head_size),
                    b->config->offset_norms ? NN_INIT_ZEROS : NN_INIT_ONES, 0.0f);
}

/* Queries, keys and values of x (B, T, C), as attention takes them. */
NN_API ms_tensor nn_llama_heads(const nn_llama_builder *b, ms_tensor x) {
    const nn_llama_config *c = b->config;
    ms_tensor qkv =
        nn_llama_linear(b, "qkv", x, (c->heads + 2 * c->kv_heads) * c->head_size, c->qkv_bias);
    if (c->qk_norm) {
        nn_head_norm_desc norm;
        memset(&norm, 0, sizeof norm);
        norm.heads = c->heads;
        norm.kv_heads = c->kv_heads;
        norm.queries = nn_llama_head_weight(b, "qnorm");
        norm.keys = nn_llama_head_weight(b, "knorm");
        norm.epsilon = c->epsilon;
        norm.from_one = c->offset_norms;
        qkv = nn_head_norm(b->net, nn_join(b->prefix.text, "qknorm").text, qkv, &norm);
    }
    const bool is_local = b->has_window && c->local_theta > 0.0f;
    nn_rotary_desc turn;
    memset(&turn, 0, sizeof turn);
    turn.heads = c->heads + c->kv_heads;
    turn.size = c->head_size;
    turn.turned = c->turned;
    turn.theta = is_local ? c->local_theta : c->theta;
    if (!is_local) {
        turn.scaling = c->scaling;
    }
    return nn_rotary(b->net, nn_join(b->prefix.text, "rotary").text, qkv, &turn);
}

NN_API ms_tensor nn_llama_attend(const nn_llama_builder *b, ms_tensor x) {
    const nn_llama_config *c = b->config;
    nn_heads_desc heads;
    memset(&heads, 0, sizeof heads);
    heads.heads = c->heads;
    heads.kv_heads = c->kv_heads;
    heads.causal = true;
    heads.window = b->has_window ? c->window : 0;
    heads.cap = c->attention_cap;
    heads.scale = c->query_scale > 0.0f ? 1.0f / sqrtf(c->query_scale) : 0.0f;
    const ms_tensor y = nn_grouped_attention(b->net, nn_join(b->prefix.text, "attention").text,
                                             nn_llama_heads(b, x), &heads);
    return nn_llama_linear(b, "proj", y, c->channels, false);
}

NN_API ms_tensor nn_llama_feed(const nn_llama_builder *b, ms_tensor x) {
    const nn_llama_config *c = b->config;
    const ms_tensor gate = nn_llama_linear(b, "gate", x, c->feed_forward, false);
    const ms_tensor up = nn_llama_linear(b, "up", x, c->feed_forward, false);
    const ms_tensor y = nn_gated(b->net, nn_join(b->prefix.text, "gated").text, gate, up,
                                 c->gelu ? NN_GATE_GELU : NN_GATE_SILU);
    return nn_llama_linear(b, "down", y, c->channels, false);
}

NN_API ms_tensor nn_llama_block(const nn_llama_builder *b, ms_tensor x) {
    const bool post = b->config->post_norms;
    ms_tensor y = nn_llama_attend(b, nn_llama_norm(b, "norm1", x));
    y = post ? nn_llama_norm(b, "post1", y) : y;
    x = nn_add(b->net, nn_join(b->prefix.text, "add1").text, x, y);
    y = nn_llama_feed(b, nn_llama_norm(b, "norm2", x));
    y = post ? nn_llama_norm(b, "post2", y) : y;
    return nn_add(b->net, nn_join(b->prefix.text, "add2").text, x, y);
}

/* The settings with what 0 stands for. */
NN_API nn_llama_config nn_llama_filled(const nn_llama_config *config) {
    nn_llama_config c = *config;
    c.kv_heads = c.kv_heads != 0 ? c.kv_heads : c.heads;
    c.head_size = c.head_size != 0 ? c.head_size : c.channels / (c.heads > 0 ? c.heads : 1);
    c.epsilon = c.epsilon > 0.0f ? c.epsilon : 1e-5f;
    return c;
}

/* Settings whose mistakes no layer sees, since what is not above 0 is left out. NULL: there are none. */
NN_API const char *nn_llama_mistake(const nn_llama_config *c) {
    const float reals[] = {c->epsilon,       c->theta,     c->local_theta,
                           c->attention_cap, c->logit_cap, c->query_scale};
    bool are_sizes = c->layers >= 0 && c->window >= 0 && c->full_every >= 0 &&
                     c->adapter_rank >= 0 && c->head_rows >= 0;
    for (size_t i = 0; i < sizeof reals / sizeof reals[0]; i++) {
        are_sizes = are_sizes && nn_is_size(reals[i]);
    }
    return !are_sizes ? "nn_llama: a setting is below 0, or no number"
           : c->heads < 1 || (c->head_size == 0 && c->channels % c->heads != 0)
               ? "nn_llama: channels must be a multiple of heads, or head_size given"
           : c->base != BLOCKS_NONE && c->adapter_rank == 0
               ? "nn_llama: a base in blocks is frozen, so it needs adapters"
               : NULL;
}

NN_API nn_transformer nn_llama(nn_net *net, const nn_llama_config *config) {
    const nn_llama_config c = nn_llama_filled(config);
    const ms_tensor none = {0};
    const char *mistake = nn_llama_mistake(config);
    nn_transformer t;
    memset(&t, 0, sizeof t);
    if (mistake) {
        nn_refuse(net, mistake);
        return t;
    }
    const ms_shape ids =
        nn_ids_shape(net, c.batch, c.sequence, c.largest_batch, c.largest_sequence);
    t.tokens = ms_input(net->model, "tokens", MS_DTYPE_I32, ids);
    t.targets = ms_input(net->model, "targets", MS_DTYPE_I32, ids);
    const ms_tensor table = nn_llama_weight(net, "tokens", c.base, c.vocabulary, c.channels);
    ms_tensor x = nn_embedding(net, "embedding", t.tokens, table, none, none, none);
    x = c.scaled_tokens ? nn_scale(net, "scaled", x, sqrtf((float)c.channels)) : x;
    for (int64_t l = 0; l < c.layers; l++) {
        nn_llama_builder b;
        b.net = net;
        b.config = &c;
        b.has_window = c.window > 0 && (c.full_every == 0 || (l + 1) % c.full_every != 0);
        snprintf(b.prefix.text, sizeof b.prefix.text, "h%lld", (long long)l);
        x = nn_llama_block(&b, x);
    }
    x = nn_rmsnorm(net, "norm", x, c.epsilon, c.offset_norms);
    const ms_tensor head =
        c.tied ? table : nn_llama_weight(net, "head", c.base, c.vocabulary, c.channels);
    const int64_t others = net->tile_rows;
    nn_force_tiles(net, c.head_rows > 0 ? c.head_rows : others);
    t.logits = nn_linear_tied(net, "head", x, head, none);
    t.logits = c.logit_cap > 0.0f ? nn_softcap(net, "capped", t.logits, c.logit_cap) : t.logits;
    t.losses = nn_cross_entropy(net, "loss", t.logits, t.targets);
    nn_force_tiles(net, others);
    ms_set_loss(net->model, t.losses);
    if (c.adapter_rank > 0) {
        nn_freeze(net);
    }
    return t;
}

#endif // MEMSCALE_NN_MODELS_H
