/*  fuzz_weights.c - files of published weights, decoded from bytes: the first byte of an input chooses
    which of the readers of examples/ gets the rest, in memory of exactly its size. A file that is
    refused must have a reason, and leave the params of a small net as they were; one that is read must
    have all its tensors within it, and all numbers of tokens below their count; a tokenizer that is
    written and read again has the same tokens for a text. A sanitizer looks at the rest. With FUZZ_READER=NAME in the environment only the inputs of that reader run.

    With clang's fuzzer (make fuzz-weights) this is LLVMFuzzerTestOneInput; without FUZZ_LIBRARY, a
    program that runs the files it is given, and with --seeds FOLDER writes inputs to begin with. */
#include "private.h"

#include "nn.h"
#include "tokenizer.h"
#include "weights.h"
#include "weights_config.h"

#include "fuzz_check.h"
#include "made_weights.h"

enum {
    READ_GGUF,
    READ_SAFETENSORS,
    READ_INDEX,
    READ_TOKENS_GGUF,
    READ_TOKENS_JSON,
    READ_CONFIG,
    READERS
};

enum { LARGEST_FILE = 1 << 20, LARGEST_PARAM = 64 * 32 };

// ------------------------------------------------------------------------------------------------
// a net to read into

typedef struct small {
    ms_model *model;
    nn_net *net;
    nn_llama_config config;
} small;

static void make(small *s, const nn_llama_config *config) {
    s->config = *config;
    CHECK(ms_create(NULL, &s->model) == MS_RESULT_OK);
    s->net = nn_create(s->model);
    CHECK(s->net != NULL);
    nn_llama(s->net, config);
    static const float zeros[LARGEST_PARAM] = {0.0f};
    for (int64_t i = 0; i < nn_param_count(s->net); ++i) {
        CHECK(ms_write(s->model, nn_param_at(s->net, i)->tensor, zeros) == MS_RESULT_OK);
    }
}

/* One block; rows of 32, so that weights can be in codes. */
static nn_llama_config small_config(void) {
    nn_llama_config c = made_llama_config();
    c.vocabulary = c.heads = 2;
    c.layers = c.kv_heads = 1;
    c.feed_forward = c.head_size = 4;
    return c;
}

static void end(small *s) {
    ms_destroy(s->model);
    nn_destroy(s->net);
}

static bool is_untouched(const small *s) {
    static float values[LARGEST_PARAM];
    for (int64_t i = 0; i < nn_param_count(s->net); ++i) {
        const ms_tensor tensor = nn_param_at(s->net, i)->tensor;
        CHECK(ms_read(s->model, tensor, values) == MS_RESULT_OK);
        for (uint64_t k = 0; k < ms_tensor_count(s->model, tensor); ++k) {
            if (values[k] < 0.0f || values[k] > 0.0f) {
                return false;
            }
        }
    }
    return true;
}

/* Reads into a net of one block, as long as it has as many params as the file is likely to fit. */
static void read_into_net(weight_file *f) {
    nn_llama_config config = small_config();
    weights_family family = WEIGHTS_FAMILIES;
    small s;
    config.qkv_bias = weight_find(f, "blk.0.attn_q.bias") != NULL;
    config.tied =
        weight_find(f, "output.weight") == NULL && weight_find(f, "lm_head.weight") == NULL;
    if (!weights_find_family(f, &family)) {
        CHECK(f->error[0] != 0);
        return;
    }
    config.post_norms = config.offset_norms =
        family == WEIGHTS_GEMMA || family == WEIGHTS_GGUF_GEMMA;
    make(&s, &config);
    const weights_layout layout = weights_layout_of(&config, family);
    f->error[0] = 0;
    if (!weights_read(s.model, s.net, f, &layout)) {
        CHECK(f->error[0] != 0 && is_untouched(&s));
    }
    end(&s);
}

// ------------------------------------------------------------------------------------------------
// the readers

static void check_entries(weight_file *f, const weight_bytes *bytes) {
    static float values[LARGEST_PARAM];
    for (int64_t i = 0; i < f->count; ++i) {
        const weight_entry *e = &f->entries[i];
        CHECK(weight_find(f, e->name) == e);
        CHECK(e->bytes <= bytes->size);
        CHECK(e->data >= bytes->data && e->data <= bytes->data + (bytes->size - e->bytes));
        const int64_t count = e->count < LARGEST_PARAM ? e->count : LARGEST_PARAM / 256 * 256;
        weight_decode(f, e, 0, count, values);
        weight_decode(f, e, e->count - count, count, values);
    }
}

static void read_gguf(const weight_bytes *bytes) {
    weight_file f;
    nn_llama_config config;
    memset(&f, 0, sizeof f);
    memset(&config, 0, sizeof config);
    if (gguf_open(&f, bytes)) {
        check_entries(&f, bytes);
        f.error[0] = 0;
        CHECK(weights_config(&f, "", &config) ? config.heads > 0 && config.head_size > 0
                                              : f.error[0] != 0);
        read_into_net(&f);
    } else {
        CHECK(f.error[0] != 0);
    }
    weight_close(&f);
}

#ifdef MODEL_SHAPE_CJSON

enum { MOST_TOKENS = 64 * 4096 }; // that tokenizer_of_json takes with any merges

static void write_and_read(const tokenizer *t, const char *text, size_t length,
                           const tokenizer_ids *wanted) {
    char error[WEIGHT_ERROR] = "";
    tokenizer back;
    tokenizer_ids ids;
    memset(&ids, 0, sizeof ids);
    char *json = tokenizer_write_json(t, error);
    CHECK(json != NULL || error[0] != 0);
    if (json && t->count <= MOST_TOKENS) {
        CHECK(tokenizer_of_json(&back, json, strlen(json)) && back.count <= t->count);
        CHECK(tokenizer_encode(&back, text, length, true, &ids) && ids.count == wanted->count);
        CHECK(memcmp(ids.ids, wanted->ids, (size_t)ids.count * sizeof *ids.ids) == 0);
        tokenizer_close(&back);
    }
    free(ids.ids);
    free(json);
}

#else

static void write_and_read(const tokenizer *t, const char *text, size_t length,
                           const tokenizer_ids *wanted) {
    char error[WEIGHT_ERROR] = "";
    (void)text, (void)length, (void)wanted;
    CHECK(tokenizer_write_json(t, error) == NULL && error[0] != 0);
}

#endif

static void read_tokens(tokenizer *t, bool is_read) {
    static const char text[] =
        "hello hello,  <|end|> \n12345 it's IT'S \xc3\xa9\xe4\xb8\x80\xf0\x9f\x98\x80"
        "\xff\xc3<added>  \t\r\n\r\n   x";
    tokenizer_ids ids;
    memset(&ids, 0, sizeof ids);
    if (is_read) {
        CHECK(tokenizer_encode(t, text, sizeof text - 1, true, &ids));
        write_and_read(t, text, sizeof text - 1, &ids);
        CHECK(tokenizer_encode(t, t->text, t->text_bytes, false, &ids));
    } else {
        CHECK(t->error[0] != 0);
    }
    for (int64_t i = 0; i < ids.count; ++i) {
        CHECK(ids.ids[i] >= 0 && ids.ids[i] < t->count && tokenizer_text(t, ids.ids[i]).length > 0);
    }
    free(ids.ids);
    tokenizer_close(t);
}

static void read_tokens_gguf(const weight_bytes *bytes) {
    weight_file f;
    tokenizer t;
    memset(&f, 0, sizeof f);
    if (gguf_open(&f, bytes)) {
        read_tokens(&t, tokenizer_of_gguf(&t, &f));
    }
    weight_close(&f);
}

#ifdef MODEL_SHAPE_CJSON

static void read_safetensors(const weight_bytes *bytes) {
    weight_file f;
    memset(&f, 0, sizeof f);
    if (safetensors_add(&f, bytes, "input") && weight_sort(&f)) {
        check_entries(&f, bytes);
        read_into_net(&f);
    } else {
        CHECK(f.error[0] != 0);
    }
    weight_close(&f);
}

/* The first file that an index names is what follows the index, after a byte of 0; others are empty. */
typedef struct beside {
    const uint8_t *data;
    uint64_t size;
    bool is_taken;
} beside;

static weight_bytes *open_beside(weight_file *f, const char *name, void *user) {
    static uint8_t other[] = {2, 0, 0, 0, 0, 0, 0, 0, '{', '}'};
    beside *b = (beside *)user;
    weight_bytes *bytes = weight_add_part(f);
    CHECK(bytes != NULL && strpbrk(name, "/\\") == NULL && *name != 0);
    bytes->data = b->is_taken ? other : (uint8_t *)(uintptr_t)b->data;
    bytes->size = b->is_taken ? sizeof other : b->size;
    b->is_taken = true;
    return bytes;
}

static void read_index(const weight_bytes *bytes) {
    const uint8_t *zero = (const uint8_t *)memchr(bytes->data, 0, (size_t)bytes->size);
    const uint64_t length = zero ? (uint64_t)(zero - bytes->data) : bytes->size;
    beside b = {bytes->data + length + (zero != NULL), bytes->size - length - (zero != NULL),
                false};
    const safetensors_opener opener = {open_beside, &b};
    weight_file f;
    memset(&f, 0, sizeof f);
    if (safetensors_add_index(&f, (const char *)bytes->data, length, opener)) {
        read_into_net(&f);
    } else {
        CHECK(f.error[0] != 0);
    }
    weight_close(&f);
}

static void read_tokens_json(const weight_bytes *bytes) {
    tokenizer t;
    read_tokens(&t, tokenizer_of_json(&t, (const char *)bytes->data, bytes->size));
}

static void read_config(const weight_bytes *bytes) {
    char error[MODEL_CONFIG_ERROR] = "";
    model_config config;
    cJSON *json = cJSON_ParseWithLength((const char *)bytes->data, (size_t)bytes->size);
    config_reader r = {"input", json, json, NULL, &config, error};
    memset(&config, 0, sizeof config);
    if (json && config_read(&r, NULL)) {
        CHECK(config.llama.layers > 0 && config.llama.channels > 0 && config.llama.heads > 0);
    } else {
        CHECK(!json || error[0] != 0);
    }
    cJSON_Delete(json);
}

#else

static void read_safetensors(const weight_bytes *bytes) {
    weight_file f;
    memset(&f, 0, sizeof f);
    CHECK(!safetensors_add(&f, bytes, "input") && f.error[0] != 0);
}
#define read_index       read_safetensors
#define read_tokens_json read_safetensors
#define read_config      read_safetensors

#endif

typedef struct input_reader {
    const char *name; // of FUZZ_READER
    void (*read)(const weight_bytes *bytes);
} input_reader;

static const input_reader readers[READERS] = {{"gguf", read_gguf},
                                              {"safetensors", read_safetensors},
                                              {"index", read_index},
                                              {"tokens-gguf", read_tokens_gguf},
                                              {"tokens-json", read_tokens_json},
                                              {"config", read_config}};

static void run_input(const uint8_t *data, size_t size) {
    const char *only = getenv("FUZZ_READER");
    weight_bytes bytes;
    memset(&bytes, 0, sizeof bytes);
    if (size < 1 || size > LARGEST_FILE) {
        return;
    }
    const input_reader *r = &readers[data[0] % READERS];
    if (only && strcmp(only, r->name) != 0) {
        return;
    }
    bytes.size = size - 1;
    bytes.data = (uint8_t *)malloc(size);
    CHECK(bytes.data != NULL);
    memcpy(bytes.data, data + 1, size - 1);
    bytes.data =
        (uint8_t *)realloc(bytes.data, size > 1 ? size - 1 : 1); // nothing is beyond its end
    CHECK(bytes.data != NULL);
    r->read(&bytes);
    free(bytes.data);
}

#include "fuzz.h"

#ifndef FUZZ_LIBRARY

// ------------------------------------------------------------------------------------------------
// inputs to begin with

static const char *folder;
static int seed_count;

static void write_seed(int reader, const void *data, size_t size) {
    char path[512];
    const uint8_t first = (uint8_t)reader;
    snprintf(path, sizeof path, "%s/seed-%03d", folder, seed_count++);
    FILE *file = fopen(path, "wb");
    CHECK(file != NULL && fwrite(&first, 1, 1, file) == 1);
    CHECK(fwrite(data, 1, size, file) == size && fclose(file) == 0);
}

static void write_made(int reader, made *m) {
    write_seed(reader, m->data, m->size);
    free(m->data);
}

/* Models of each architecture, without the weights of a second block. */
static void write_models(void) {
    static const char *const architectures[] = {"llama", "qwen2", "qwen3", "gemma2", "gemma3"};
    for (int i = 0; i < 5; ++i) {
        made_gguf g;
        nn_llama_config config = small_config();
        memset(&g, 0, sizeof g);
        config.tied = i > 1;
        config.qkv_bias = i == 1;
        config.post_norms = i > 2;
        made_settings(&g, architectures[i], &config);
        made_gguf_tensors(&g, &config);
        made file = made_gguf_file(&g);
        write_made(READ_GGUF, &file);
    }
}

/* One tensor of each type. */
static void write_types(void) {
    static const int64_t dim[2] = {2, 256};
    uint8_t data[4096];
    made_gguf g;
    memset(&g, 0, sizeof g);
    for (size_t i = 0; i < sizeof data; ++i) {
        data[i] = (uint8_t)(7 * i);
    }
    for (int i = 0; i < WEIGHT_TYPES; ++i) {
        const weight_type *t = &weight_types[i];
        if (t->number >= 0) {
            made_tensor(&g, t->name, (uint32_t)t->number, 2, dim, data,
                        (size_t)(512 / t->elements * t->bytes));
        }
    }
    made file = made_gguf_file(&g);
    write_made(READ_GGUF, &file);
    for (int type = 0; type < GGUF_TYPES; ++type) { // and a value of each
        made_key(&g, "general.alignment", (gguf_type)type);
        made_number(&g.values, 32, type < GGUF_U64 && gguf_sizes[type] > 0 ? gguf_sizes[type] : 8);
        file = made_gguf_file(&g);
        write_made(READ_GGUF, &file);
    }
}

/* And what is written of one that is read. */
static void write_written(const made *file) {
#ifdef MODEL_SHAPE_CJSON
    const weight_bytes bytes = made_bytes(file);
    char error[WEIGHT_ERROR];
    weight_file f;
    tokenizer t;
    memset(&f, 0, sizeof f);
    CHECK(gguf_open(&f, &bytes));
    if (tokenizer_of_gguf(&t, &f)) {
        char *json = tokenizer_write_json(&t, error);
        CHECK(json != NULL);
        write_seed(READ_TOKENS_JSON, json, strlen(json));
        free(json);
    }
    tokenizer_close(&t);
    weight_close(&f);
#else
    (void)file;
#endif
}

static void write_tokenizers(void) {
    static const char *const pres[] = {"gpt-2", "smollm", "llama-bpe", "qwen2", "other"};
    for (int i = 0; i < 5; ++i) {
        made_gguf g;
        memset(&g, 0, sizeof g);
        made_tokenizer(&g, pres[i]);
        made file = made_gguf_file(&g);
        write_written(&file);
        write_made(READ_TOKENS_GGUF, &file);
    }
}

static void write_json(int reader, const char *text) {
    write_seed(reader, text, strlen(text));
}

#define MODEL(more)                                                                                \
    "{\"type\":\"BPE\",\"vocab\":{\"h\":0,\"e\":1,\"he\":2,\"\xc4\xa0\":3},"                       \
    "\"merges\":[\"h e\"]" more "}"

static void write_tokenizer_jsons(void) {
    write_json(READ_TOKENS_JSON,
               "{\"added_tokens\":[{\"id\":4,\"content\":\"<a>\",\"special\":true}],"
               "\"pre_tokenizer\":{\"type\":\"ByteLevel\",\"add_prefix_space\":false},"
               "\"model\":" MODEL("") "}");
    write_json(READ_TOKENS_JSON,
               "{\"normalizer\":{\"type\":\"NFC\"},\"pre_tokenizer\":{\"type\":\"Sequence\","
               "\"pretokenizers\":[{\"type\":\"Digits\",\"individual_digits\":true},{\"type\":"
               "\"ByteLevel\","
               "\"add_prefix_space\":false,\"use_regex\":true}]},\"model\":" MODEL(
                   ",\"ignore_merges\":true") "}");
    write_json(READ_TOKENS_JSON,
               "{\"pre_tokenizer\":{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":\"Split\","
               "\"pattern\":{\"Regex\":\"x\"}},{\"type\":\"ByteLevel\",\"add_prefix_space\":false,"
               "\"use_regex\":false}]},\"model\":{\"type\":\"BPE\",\"vocab\":{},\"merges\":[[\"h\","
               "\"e\"]]}}");
}

static void write_configs(void) {
    write_json(READ_CONFIG,
               "{\"model_type\":\"llama\",\"hidden_size\":64,\"intermediate_size\":96,"
               "\"num_hidden_layers\":2,\"num_attention_heads\":4,\"vocab_size\":9,"
               "\"rms_norm_eps\":1e-5,\"rope_scaling\":{\"rope_type\":\"llama3\",\"factor\":8,"
               "\"low_freq_factor\":1,\"high_freq_factor\":4,"
               "\"original_max_position_embeddings\":8192}}");
    write_json(READ_CONFIG,
               "{\"model_type\":\"gemma3_text\",\"rope_parameters\":{\"full_attention\":"
               "{\"rope_theta\":1e6},\"sliding_attention\":{\"rope_theta\":1e4}},"
               "\"sliding_window\":512,\"hidden_size\":64,\"num_attention_heads\":4}");
}

#define ENTRY(name, type, shape, begin, end)                                                       \
    "\"" name "\":{\"dtype\":\"" type "\",\"shape\":[" shape "],\"data_offsets\":[" begin "," end  \
    "]}"

static void write_safetensors(void) {
    static const char *const headers[] = {
        "{\"__metadata__\":{\"format\":\"pt\"}," ENTRY("model.layers.0.self_attn.q_proj.weight",
                                                       "F32", "2,3", "0", "24") "}",
        "{" ENTRY("a", "BF16", "2,3", "0", "12") "," ENTRY("b", "F16", "6", "12", "24") "}",
        "{" ENTRY("a", "I64", "", "0", "8") "," ENTRY("b", "F32", "0", "24", "24") "}",
        "{" ENTRY("h.0.attn.c_attn.weight", "F32", "2,3", "0", "24") "}",
    };
    static const char map[] = "{\"weight_map\":{\"a\":\"1.safetensors\",\"b\":\"1.safetensors\"}}";
    static const uint8_t data[24] = {1, 2, 3};
    for (size_t i = 0; i < sizeof headers / sizeof headers[0]; ++i) {
        made file = made_safetensors(headers[i], data, sizeof data);
        made index;
        memset(&index, 0, sizeof index);
        made_add(&index, map, sizeof map); // with its 0
        made_add(&index, file.data, file.size);
        write_made(READ_SAFETENSORS, &file);
        write_made(READ_INDEX, &index);
    }
}

int main(int argc, char **argv) {
    if (argc == 3 && strcmp(argv[1], "--seeds") == 0) {
        folder = argv[2];
        write_models();
        write_types();
        write_tokenizers();
        write_tokenizer_jsons();
        write_configs();
        write_safetensors();
        return 0;
    }
    return fuzz_files(argv + 1, argc - 1);
}

#endif
