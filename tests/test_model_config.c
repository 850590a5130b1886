/*  test_model_config.c - examples/model_config.h: the published params of models by the facts of their
    config.json, what holds where a file leaves a key out, windows, rotary positions, and what is
    refused. The params were counted, too, by building each model with transformers 5.24 on torch's
    meta device. */
#ifndef _XOPEN_SOURCE
#define _XOPEN_SOURCE 700
#endif
#include "private.h"

#include "nn.h"
#include "model_config.h"
#include "testing.h"

#include <unistd.h>

#ifdef MODEL_SHAPE_CJSON

// ------------------------------------------------------------------------------------------------
// reading a text

/* A file with a text in which ' stands for ", read. */
static bool read_as(const char *text, const char *family, model_config *c, char *error) {
    char path[] = "/tmp/memscale-config-XXXXXX", quoted[4096];
    snprintf(quoted, sizeof quoted, "%s", text);
    for (char *at = quoted; *at; at++) {
        *at = *at == '\'' ? '"' : *at;
    }
    const int descriptor = mkstemp(path);
    assert_true(descriptor >= 0);
    FILE *file = fdopen(descriptor, "w");
    assert_non_null(file);
    assert_true(fputs(quoted, file) >= 0);
    assert_int_equal(fclose(file), 0);
    const bool is_read = model_config_read(path, family, c, error);
    remove(path);
    return is_read;
}

static model_config read_text(const char *text) {
    model_config c;
    char error[MODEL_CONFIG_ERROR] = "";
    if (!read_as(text, NULL, &c, error)) {
        print_error("%s\n%s\n", text, error);
        fail();
    }
    return c;
}

/* The params that nn_llama registers. */
static uint64_t params_of(const nn_llama_config *settings) {
    ms_model *model;
    nn_llama_config c = *settings;
    ms_config config = t_config();
    config.dry_run = true;
    assert_int_equal(ms_create(&config, &model), MS_RESULT_OK);
    nn_net *net = nn_create(model);
    assert_non_null(net);
    c.batch = 1;
    c.sequence = 16;
    assert_true(nn_llama(net, &c).losses.id != 0);
    uint64_t count = 0;
    for (int64_t i = 0; i < nn_param_count(net); i++) {
        count += ms_shape_count(&nn_param_at(net, i)->shape);
    }
    ms_destroy(model);
    nn_destroy(net);
    return count;
}

// ------------------------------------------------------------------------------------------------
// published models

#define SIZES(vocabulary, layers, channels, heads, keys, feed)                                     \
    "'vocab_size': " #vocabulary ", 'num_hidden_layers': " #layers ", 'hidden_size': " #channels   \
    ", 'num_attention_heads': " #heads ", 'num_key_value_heads': " #keys                           \
    ", 'intermediate_size': " #feed
#define LLAMA "{'model_type': 'llama', 'rms_norm_eps': 1e-05, "
#define LLAMA32                                                                                    \
    ", 'rope_theta': 500000.0, 'rope_scaling': {'factor': 32.0, 'high_freq_factor': 4.0, "         \
    "'low_freq_factor': 1.0, 'original_max_position_embeddings': 8192, 'rope_type': 'llama3'}, "   \
    "'tie_word_embeddings': true}"
#define MISTRAL "{'model_type': 'mistral', 'rms_norm_eps': 1e-05, "
#define QWEN2                                                                                      \
    "{'model_type': 'qwen2', 'rms_norm_eps': 1e-06, 'rope_theta': 1000000.0, "                     \
    "'sliding_window': 32768, 'use_sliding_window': false, "
#define QWEN3                                                                                      \
    "{'model_type': 'qwen3', 'rms_norm_eps': 1e-06, 'rope_theta': 1000000, 'head_dim': 128, "      \
    "'attention_bias': false, 'sliding_window': null, 'use_sliding_window': false, "
#define GEMMA2                                                                                     \
    "{'model_type': 'gemma2', 'head_dim': 256, 'sliding_window': 4096, 'rope_theta': 10000.0, "    \
    "'hidden_act': 'gelu_pytorch_tanh', 'attn_logit_softcapping': 50.0, "                          \
    "'final_logit_softcapping': 30.0, 'query_pre_attn_scalar': 256, "
#define GEMMA3                                                                                     \
    "{'model_type': 'gemma3_text', 'head_dim': 256, 'query_pre_attn_scalar': 256, "                \
    "'rope_theta': 1000000, 'rope_local_base_freq': 10000, 'sliding_window': 512, "                \
    "'rope_scaling': null, 'hidden_activation': 'gelu_pytorch_tanh', "
#define SIX                                                                                        \
    "'sliding_attention', 'sliding_attention', 'sliding_attention', 'sliding_attention', "         \
    "'sliding_attention', 'full_attention'"
#define PHI3 "{'model_type': 'phi3', 'rms_norm_eps': 1e-05, 'attention_bias': false, "
#define TIED ", 'tie_word_embeddings': true}"
#define OWN  ", 'tie_word_embeddings': false}"

/* preset: the name in nn_models.h, whose settings must be the same; NULL: it is not there. */
static const struct {
    const char *preset, *text;
    uint64_t params;
} published[] = {
    {"llama2-7B", LLAMA SIZES(32000, 32, 4096, 32, 32, 11008) OWN, 6738415616u},
    {"llama3.2-1B", LLAMA SIZES(128256, 16, 2048, 32, 8, 8192) LLAMA32, 1235814400u},
    {"llama3.2-3B", LLAMA SIZES(128256, 28, 3072, 24, 8, 8192) LLAMA32, 3212749824u},
    {"llama3-8B", LLAMA SIZES(128256, 32, 4096, 32, 8, 14336) ", 'rope_theta': 500000.0" OWN,
     8030261248u},
    {"llama3-70B", LLAMA SIZES(128256, 80, 8192, 64, 8, 28672) ", 'rope_theta': 500000.0" OWN,
     70553706496u},
    {"smollm2-135M", LLAMA SIZES(49152, 30, 576, 9, 3, 1536) ", 'rope_theta': 100000" TIED,
     134515008u},
    {"smollm2-360M", LLAMA SIZES(49152, 32, 960, 15, 5, 2560) ", 'rope_theta': 100000" TIED,
     361821120u},
    {"smollm2-1.7B", LLAMA SIZES(49152, 24, 2048, 32, 32, 8192) ", 'rope_theta': 130000" TIED,
     1711376384u},
    {"mistral-7B", MISTRAL SIZES(32000, 32, 4096, 32, 8, 14336) ", 'sliding_window': 4096" OWN,
     7241732096u},
    {"mistral-7B-v0.3",
     MISTRAL SIZES(32768, 32, 4096, 32, 8,
                   14336) ", 'rope_theta': 1000000.0, 'sliding_window': null" OWN,
     7248023552u},
    {"mistral-nemo-12B",
     MISTRAL SIZES(131072, 40, 5120, 32, 8, 14336) ", 'head_dim': 128, 'rope_theta': 1000000.0, "
                                                   "'sliding_window': null" OWN,
     12247782400u},
    {"qwen2.5-0.5B", QWEN2 SIZES(151936, 24, 896, 14, 2, 4864) TIED, 494032768u},
    {"qwen2.5-1.5B", QWEN2 SIZES(151936, 28, 1536, 12, 2, 8960) TIED, 1543714304u},
    {"qwen2.5-3B", QWEN2 SIZES(151936, 36, 2048, 16, 2, 11008) TIED, 3085938688u},
    {"qwen2.5-7B", QWEN2 SIZES(152064, 28, 3584, 28, 4, 18944) OWN, 7615616512u},
    {NULL, QWEN2 SIZES(152064, 48, 5120, 40, 8, 13824) OWN, 14770033664u},
    {"qwen3-0.6B", QWEN3 SIZES(151936, 28, 1024, 16, 8, 3072) TIED, 596049920u},
    {"qwen3-1.7B", QWEN3 SIZES(151936, 28, 2048, 16, 8, 6144) TIED, 1720574976u},
    {"qwen3-4B", QWEN3 SIZES(151936, 36, 2560, 32, 8, 9728) TIED, 4022468096u},
    {"qwen3-8B", QWEN3 SIZES(151936, 36, 4096, 32, 8, 12288) OWN, 8190735360u},
    {"qwen3-14B", QWEN3 SIZES(151936, 40, 5120, 40, 8, 17408) OWN, 14768307200u},
    {"qwen3-32B", QWEN3 SIZES(151936, 64, 5120, 64, 8, 25600) OWN, 32762123264u},
    {"gemma2-2B", GEMMA2 SIZES(256000, 26, 2304, 8, 4, 9216) "}", 2614341888u},
    {"gemma2-9B", GEMMA2 SIZES(256000, 42, 3584, 16, 8, 14336) "}", 9241705984u},
    {"gemma2-27B",
     "{'model_type': 'gemma2', 'head_dim': 128, 'query_pre_attn_scalar': 144, " //
     SIZES(256000, 46, 4608, 32, 16, 36864) "}",
     27227128320u},
    {"gemma3-270M",
     GEMMA3 SIZES(262144, 18, 640, 4, 1, 2048) ", 'layer_types': [" SIX ", " SIX ", " SIX "]}",
     268098176u},
    {"gemma3-1B", GEMMA3 SIZES(262144, 26, 1152, 4, 1, 6912) ", 'sliding_window_pattern': 6}",
     999885952u},
    {NULL,
     "{'model_type': 'gemma3', 'vision_config': {'hidden_size': 1152}, 'text_config': "
     "{'model_type': 'gemma3_text', 'hidden_size': 2560, 'intermediate_size': 10240, "
     "'num_hidden_layers': 34, 'rope_scaling': {'factor': 8.0, 'rope_type': 'linear'}, "
     "'sliding_window': 1024}}",
     3880263168u},
    {"phi3-mini", PHI3 SIZES(32064, 32, 3072, 32, 32, 8192) ", 'sliding_window': 2047" OWN,
     3821079552u},
    {"phi4",
     PHI3 SIZES(100352, 40, 5120, 40, 10,
                17920) ", 'rope_theta': 250000, 'sliding_window': null" OWN,
     14659507200u},
    {NULL,
     PHI3 SIZES(200064, 32, 3072, 24, 8, 8192) ", 'partial_rotary_factor': 0.75, 'rope_scaling': "
                                               "{'type': 'longrope'}" TIED,
     3836021760u}};
enum { PUBLISHED = sizeof published / sizeof published[0] };

static bool is_near(float a, float b) {
    return a - b <= 1e-6f * a && b - a <= 1e-6f * a;
}

/* Whether a preset is as its file says; prints what differs. */
static bool is_preset(const char *name, const nn_llama_config *c) {
    nn_llama_config p;
    memset(&p, 0, sizeof p);
    if (!nn_llama_preset(name, &p)) {
        print_error("there is no preset %s\n", name);
        return false;
    }
    const bool is_same =
        p.vocabulary == c->vocabulary && p.layers == c->layers && p.channels == c->channels &&
        p.feed_forward == c->feed_forward && p.heads == c->heads && p.kv_heads == c->kv_heads &&
        p.head_size == c->head_size && p.turned == c->turned && p.tied == c->tied &&
        p.qkv_bias == c->qkv_bias && p.qk_norm == c->qk_norm && p.post_norms == c->post_norms &&
        p.offset_norms == c->offset_norms && p.scaled_tokens == c->scaled_tokens &&
        p.gelu == c->gelu && p.window == c->window && p.full_every == c->full_every;
    const bool is_alike =
        is_near(p.epsilon, c->epsilon) && is_near(p.theta, c->theta) &&
        is_near(p.local_theta, c->local_theta) && is_near(p.attention_cap, c->attention_cap) &&
        is_near(p.logit_cap, c->logit_cap) && is_near(p.query_scale, c->query_scale) &&
        p.scaling.kind == c->scaling.kind && is_near(p.scaling.factor, c->scaling.factor) &&
        is_near(p.scaling.low, c->scaling.low) && is_near(p.scaling.high, c->scaling.high) &&
        p.scaling.original == c->scaling.original;
    if (!is_same || !is_alike) {
        print_error("%s: the preset is not as its file: %s\n", name,
                    is_same ? "real numbers" : "sizes and switches");
    }
    return is_same && is_alike;
}

static void published_models_have_their_params_and_presets(void **state) {
    (void)state;
    int differing = 0;
    for (int i = 0; i < PUBLISHED; i++) {
        const model_config c = read_text(published[i].text);
        assert_int_equal(c.family, MODEL_LLAMA);
        assert_int_equal(c.positions, 0);
        assert_int_equal(params_of(&c.llama), published[i].params);
        if (published[i].preset) {
            differing += !is_preset(published[i].preset, &c.llama);
            assert_int_equal(c.untrained[0], 0);
        }
    }
    assert_int_equal(differing, 0);
}

// ------------------------------------------------------------------------------------------------
// what a file leaves out

#define FEW "'num_hidden_layers': 12, 'hidden_size': 512, 'intermediate_size': 1024"
#define ONE FEW ", 'num_attention_heads': 8, 'vocab_size': 100"

/* By transformers' configuration_*.py. */
static void what_is_left_out_is_as_transformers_has_it(void **state) {
    (void)state;
    static const struct {
        const char *text;
        int64_t heads, kv_heads, head_size, vocabulary, window, full_every;
        bool tied;
        double epsilon, theta;
    } all[] = {
        {"{'model_type': 'llama', " ONE "}", 8, 8, 64, 100, 0, 0, false, 1e-6, 1e4},
        {"{'model_type': 'llama', " ONE ", 'sliding_window': 8}", 8, 8, 64, 100, 0, 0, false, 1e-6,
         1e4},
        {"{'model_type': 'mistral', " ONE "}", 8, 8, 64, 100, 4096, 0, false, 1e-6, 1e4},
        {"{'model_type': 'mistral', " FEW ", 'num_attention_heads': 16, 'vocab_size': 9}", 16, 8,
         32, 9, 4096, 0, false, 1e-6, 1e4},
        {"{'model_type': 'mistral', " FEW ", 'num_attention_heads': 16, 'vocab_size': 9, "
         "'num_key_value_heads': null, 'sliding_window': null, 'head_dim': null}",
         16, 16, 32, 9, 0, 0, false, 1e-6, 1e4},
        {"{'model_type': 'qwen2', " FEW ", 'num_attention_heads': 32, 'vocab_size': 9}", 32, 32, 16,
         9, 0, 0, false, 1e-6, 1e4},
        {"{'model_type': 'qwen3', " FEW ", 'num_attention_heads': 32, 'vocab_size': 9}", 32, 32,
         128, 9, 0, 0, false, 1e-6, 1e4},
        {"{'model_type': 'gemma2', " FEW "}", 8, 4, 256, 256000, 4096, 2, true, 1e-6, 1e4},
        {"{'model_type': 'gemma3_text', " FEW "}", 8, 4, 256, 262208, 4096, 6, true, 1e-6, 1e6},
        {"{'model_type': 'gemma3', 'text_config': {" FEW "}}", 8, 4, 256, 262208, 4096, 6, true,
         1e-6, 1e6},
        {"{'model_type': 'gemma3', 'tie_word_embeddings': false, 'text_config': {" FEW "}}", 8, 4,
         256, 262208, 4096, 6, false, 1e-6, 1e6},
        {"{'model_type': 'phi3', " ONE "}", 8, 8, 64, 100, 0, 0, false, 1e-5, 1e4},
        {"{'architectures': ['Qwen3ForCausalLM'], " ONE ", 'num_key_value_heads': 2}", 8, 2, 128,
         100, 0, 0, false, 1e-6, 1e4}};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        const model_config c = read_text(all[i].text);
        assert_int_equal(c.llama.heads, all[i].heads);
        assert_int_equal(c.llama.kv_heads, all[i].kv_heads);
        assert_int_equal(c.llama.head_size, all[i].head_size);
        assert_int_equal(c.llama.vocabulary, all[i].vocabulary);
        assert_int_equal(c.llama.window, all[i].window);
        assert_int_equal(c.llama.full_every, all[i].full_every);
        assert_int_equal(c.llama.tied, all[i].tied);
        assert_true(is_near(c.llama.epsilon, (float)all[i].epsilon));
        assert_true(is_near(c.llama.theta, (float)all[i].theta));
    }
    const model_config two = read_text("{'model_type': 'gemma2', " FEW "}");
    assert_true(two.llama.attention_cap > 49.0f && two.llama.logit_cap > 29.0f);
    const model_config open =
        read_text("{'model_type': 'gemma2', " FEW ", 'attn_logit_softcapping': "
                  "null, 'final_logit_softcapping': null}");
    assert_true(open.llama.attention_cap <= 0.0f && open.llama.logit_cap <= 0.0f);
    assert_true(open.llama.gelu && open.llama.post_norms && open.llama.offset_norms &&
                open.llama.scaled_tokens && !open.llama.qk_norm);
    const model_config qwen =
        read_text("{'model_type': 'qwen2', " ONE ", 'num_key_value_heads': 2}");
    assert_true(qwen.llama.qkv_bias && !qwen.llama.gelu && !qwen.llama.qk_norm);
}

static void gpt2_and_bert_have_a_table_of_positions(void **state) {
    (void)state;
    const model_config gpt2 =
        read_text("{'model_type': 'gpt2', 'n_embd': 768, 'n_layer': 12, 'n_head': "
                  "12, 'vocab_size': 50257, 'n_ctx': 1024, 'n_inner': null}");
    assert_int_equal(gpt2.family, MODEL_GPT2);
    assert_int_equal(gpt2.positions, 1024);
    assert_int_equal(gpt2.llama.feed_forward, 4 * 768);
    assert_true(gpt2.llama.tied && gpt2.llama.kv_heads == 12);
    const model_config bert =
        read_text("{'model_type': 'bert', 'max_position_embeddings': 128, 'hidden_size': 512, "
                  "'num_hidden_layers': 2, 'num_attention_heads': 8, 'intermediate_size': 2048, "
                  "'vocab_size': 100}");
    assert_int_equal(bert.positions, 128);
}

// ------------------------------------------------------------------------------------------------
// windows and rotary positions

static void windows_are_those_of_the_layers(void **state) {
    (void)state;
    static const struct {
        const char *type, *more;
        int64_t window, full_every;
        bool is_trained;
    } all[] = {
        {"qwen3", "'use_sliding_window': true, 'sliding_window': 64, 'max_window_layers': 12", 0, 0,
         true},
        {"qwen3", "'use_sliding_window': true, 'sliding_window': 64, 'max_window_layers': 0", 64, 0,
         true},
        {"qwen3", "'use_sliding_window': true, 'sliding_window': 64, 'max_window_layers': 6", 0, 0,
         false},
        {"qwen3", "'use_sliding_window': true, 'sliding_window': 64", 0, 0, true},
        {"qwen3", "'sliding_window': 64, 'max_window_layers': 0", 0, 0, true},
        {"gemma3_text", "'sliding_window': 64, 'sliding_window_pattern': 4", 64, 4, true},
        {"gemma3_text", "'sliding_window': 64, 'sliding_window_pattern': 1", 0, 0, true},
        {"gemma3_text", "'sliding_window': null", 0, 0, true},
        {"gemma2", "'sliding_window': 64, 'sliding_window_pattern': 4", 64, 2, true},
        {"gemma3_text", "'sliding_window': 64, 'layer_types': [" SIX ", " SIX "]", 64, 6, true},
        {"gemma3_text",
         "'sliding_window': 64, 'layer_types': ['full_attention', 'full_attention', "
         "'full_attention', 'full_attention', 'full_attention', 'full_attention', " SIX "]",
         0, 0, false},
        {"mistral", "'sliding_window': 64", 64, 0, true},
    };
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        char text[1024];
        snprintf(text, sizeof text, "{'model_type': '%s', " ONE ", 'num_key_value_heads': 8, %s}",
                 all[i].type, all[i].more);
        const model_config c = read_text(text);
        assert_int_equal(c.llama.window, all[i].window);
        assert_int_equal(c.llama.full_every, all[i].full_every);
        assert_int_equal(c.untrained[0] == 0, all[i].is_trained);
    }
}

static void rotary_positions_are_read_in_both_spellings(void **state) {
    (void)state;
    static const char *const llama3[] = {
        ", 'rope_theta': 5e5, 'rope_scaling': {'rope_type': 'llama3', 'factor': 8, "
        "'low_freq_factor': 1, 'high_freq_factor': 4, 'original_max_position_embeddings': 8192}}",
        ", 'rope_parameters': {'rope_type': 'llama3', 'rope_theta': 5e5, 'factor': 8, "
        "'low_freq_factor': 1, 'high_freq_factor': 4, 'original_max_position_embeddings': 8192}}"};
    char text[1024];
    for (int i = 0; i < 2; i++) {
        snprintf(text, sizeof text, "{'model_type': 'llama', " ONE "%s", llama3[i]);
        const nn_llama_config c = read_text(text).llama;
        assert_int_equal(c.scaling.kind, NN_ROTARY_LLAMA3);
        assert_true(is_near(c.theta, 5e5f) && is_near(c.scaling.factor, 8.0f));
        assert_true(is_near(c.scaling.low, 1.0f) && is_near(c.scaling.high, 4.0f));
        assert_int_equal(c.scaling.original, 8192);
    }
    const nn_llama_config linear = read_text("{'model_type': 'llama', " ONE
                                             ", 'rope_scaling': {'type': 'linear', 'factor': 4.0}}")
                                       .llama;
    assert_true(linear.scaling.kind == NN_ROTARY_LINEAR && is_near(linear.scaling.factor, 4.0f));
    const nn_llama_config gemma =
        read_text("{'model_type': 'gemma3_text', " FEW ", 'rope_parameters': {'full_attention': "
                  "{'rope_type': 'linear', 'factor': 8, 'rope_theta': 2e6}, 'sliding_attention': "
                  "{'rope_type': 'default', 'rope_theta': 3e4}}}")
            .llama;
    assert_true(is_near(gemma.theta, 2e6f) && is_near(gemma.local_theta, 3e4f));
    assert_true(gemma.scaling.kind == NN_ROTARY_LINEAR && is_near(gemma.scaling.factor, 8.0f));
    static const char *const others[] = {"'rope_scaling': {'rope_type': 'yarn', 'factor': 4.0}",
                                         "'rope_scaling': {'type': 'longrope', 'factor': 4.0}",
                                         "'rope_scaling': {'type': 'dynamic', 'factor': 2.0}",
                                         "'hidden_act': 'relu'"};
    for (size_t i = 0; i < sizeof others / sizeof others[0]; i++) {
        snprintf(text, sizeof text, "{'model_type': 'llama', " ONE ", %s}", others[i]);
        const model_config c = read_text(text);
        assert_int_equal(c.llama.scaling.kind, NN_ROTARY_PLAIN);
        assert_true(c.untrained[0] != 0);
    }
    snprintf(text, sizeof text, "{'model_type': 'phi3', " ONE ", 'partial_rotary_factor': 0.5}");
    assert_int_equal(read_text(text).llama.turned, 32);
}

// ------------------------------------------------------------------------------------------------
// what is refused

static void what_no_net_has_is_refused(void **state) {
    (void)state;
    static const struct {
        const char *text, *family, *error;
    } wrong[] = {
        {"{'model_type': 'mixtral', " ONE "}", NULL, "\"mixtral\" is a mixture of experts"},
        {"{'model_type': 'qwen3_moe', " ONE "}", "llama", "mixture of experts"},
        {"{'architectures': ['Qwen2MoeForCausalLM'], " ONE "}", "llama", "mixture of experts"},
        {"{'model_type': 'llama', " ONE ", 'num_local_experts': 2}", NULL, "with experts"},
        {"{'model_type': 'llama4', 'text_config': {'model_type': 'llama4_text', " ONE
         ", 'num_local_experts': 16}}",
         NULL, "\"num_local_experts\" is 16"},
        {"{'model_type': 'llava', 'text_config': {'model_type': 'clip_text', " ONE "}}", NULL,
         "\"clip_text\": there are gpt2, bert, llama, mistral, qwen2, qwen3, gemma2, gemma3_text "
         "and "
         "phi3"},
        {"{'model_type': 'gemma3', 'num_experts': 4, 'text_config': {" FEW "}}", NULL, "experts"},
        {"{'model_type': 'gemma3n', " ONE "}", NULL, "\"gemma3n\": there are"},
        {"{'model_type': 'gemma3_text', " FEW ", 'num_kv_shared_layers': 2}", NULL, "share keys"},
        {"{'model_type': 'llama', " ONE ", 'attention_bias': true}", NULL, "attention_bias"},
        {"{'model_type': 'llama', " ONE ", 'num_key_value_heads': 3}", NULL,
         "\"num_key_value_heads\" 3: the 8 heads"},
        {"{'model_type': 'qwen2', " ONE "}", NULL, "\"num_key_value_heads\" 32: the 8 heads"},
        {"{'model_type': 'llama', " FEW ", 'num_attention_heads': 7, 'vocab_size': 9}", NULL,
         "the 512 channels are not a multiple"},
        {"{'model_type': 'llama', " ONE ", 'head_dim': 31}", NULL, "a head of 31 channels"},
        {"{'model_type': 'llama', " FEW ", 'vocab_size': 9}", NULL,
         "\"num_attention_heads\" is missing"},
        {"{'model_type': 'llama', " ONE ", 'rope_scaling': {'rope_type': 'linear'}}", NULL,
         "lacks \"factor\""},
        {"{'model_type': 'llama', " ONE ", 'rope_scaling': {'rope_type': 'llama3', 'factor': 8}}",
         NULL, "\"low_freq_factor\""},
        {"{'model_type': 'llama', " ONE ", 'rope_parameters': {}, 'rope_scaling': 5}", NULL,
         "\"rope_scaling\" is no object"},
        {"{'model_type': 'llama', " ONE ", 'rope_parameters': 'default'}", NULL,
         "\"rope_parameters\" is no object"},
        {"{'model_type': 'llama', " ONE ", 'rope_theta': -1}", NULL,
         "\"rope_theta\" is not a number above 0"},
        {"{'model_type': 'llama', " ONE ", 'rms_norm_eps': 'small'}", NULL, "\"rms_norm_eps\""},
        {"{'model_type': 'gemma2', " FEW ", 'sliding_window': 2.5}", NULL, "\"sliding_window\""},
        {"{'model_type': 'gemma2', " FEW ", 'layer_types': ['full_attention']}", NULL,
         "\"layer_types\" has 1 layers, and \"num_hidden_layers\" is 12"},
        {"{'model_type': 'llama', " ONE "}", "gemma", "the family gemma: there are"}};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        model_config c;
        char error[MODEL_CONFIG_ERROR] = "";
        assert_false(read_as(wrong[i].text, wrong[i].family, &c, error));
        t_text_has(error, wrong[i].error);
        assert_null(strchr(error, '\n'));
    }
}

/* Whatever is cut off or changed: an error or settings, and no read outside (with a sanitizer). */
static void any_bytes_are_read_or_refused(void **state) {
    (void)state;
    const char *text = published[PUBLISHED - 4].text;
    uint64_t random = 1, read = 0, refused = 0;
    for (int i = 0; i < 400; i++) {
        char changed[1024], error[MODEL_CONFIG_ERROR];
        model_config c;
        snprintf(changed, sizeof changed, "%s", text);
        for (int k = 0; k < 1 + i % 3; k++) {
            random = random * 6364136223846793005u + 1442695040888963407u;
            changed[(random >> 33) % strlen(text)] = (char)(32 + (random >> 20) % 95);
        }
        *(read_as(changed, NULL, &c, error) ? &read : &refused) += 1;
    }
    assert_true(read > 20 && refused > 20);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(published_models_have_their_params_and_presets),
        cmocka_unit_test(what_is_left_out_is_as_transformers_has_it),
        cmocka_unit_test(gpt2_and_bert_have_a_table_of_positions),
        cmocka_unit_test(windows_are_those_of_the_layers),
        cmocka_unit_test(rotary_positions_are_read_in_both_spellings),
        cmocka_unit_test(what_no_net_has_is_refused),
        cmocka_unit_test(any_bytes_are_read_or_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

#else

static void without_cjson_no_file_is_read(void **state) {
    (void)state;
    model_config c;
    char error[MODEL_CONFIG_ERROR];
    assert_false(model_config_read("config.json", NULL, &c, error));
    t_text_has(error, "libcjson-dev");
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(without_cjson_no_file_is_read)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}

#endif
