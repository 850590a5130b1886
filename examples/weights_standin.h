/*  weights_standin.h - the config of nn_models.h, until that is here. */
#ifndef MEMSCALE_NN_MODELS_H
#define MEMSCALE_NN_MODELS_H

typedef enum nn_rotary_kind { NN_ROTARY_PLAIN, NN_ROTARY_LINEAR, NN_ROTARY_LLAMA3 } nn_rotary_kind;

typedef struct nn_rotary_scaling {
    nn_rotary_kind kind;
    float factor, low, high;
    int64_t original;
} nn_rotary_scaling;

typedef struct nn_llama_config {
    int64_t vocabulary, layers, channels, feed_forward;
    int64_t heads, kv_heads, head_size; // kv_heads 0: as heads; head_size 0: channels / heads
    int64_t turned;
    bool tied, qkv_bias, qk_norm, post_norms, offset_norms, scaled_tokens, gelu;
    float epsilon;
    float theta, local_theta;
    nn_rotary_scaling scaling;
    int64_t window, full_every;
    float attention_cap, logit_cap, query_scale;
    int64_t batch, sequence, largest_batch, largest_sequence;
    int64_t adapter_rank;
} nn_llama_config;

#endif // MEMSCALE_NN_MODELS_H
