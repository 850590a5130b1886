/*  weights.h - published weights, by their names, for the params of a net of nn.h, and back.

    weights_find_family   whose names a file has
    weights_layout_of     how the params are laid out, from the settings of the model and these names
    weights_lend          lends the model what the file has as frozen params need it (ms_borrow)
    weights_read          writes all other params from the file
    weights_write         writes a safetensors file with the names of Hugging Face's transformers

    weights_config.h reads the settings of a model, and writes them beside its weights.

    The names are those of checkpoints of GPT-2, BERT, Llama, Mistral, Qwen2, Qwen3, SmolLM2, Gemma 2 and
    3, and Phi-3 as transformers saves them, and those of GGUF files of the architectures llama, qwen2,
    qwen3, gemma2 and gemma3, as convert_hf_to_gguf.py of llama.cpp makes them. One table has them all.

    Every tensor of a file must have its place and every param its tensors: what is missing, unknown,
    there twice or of another shape is an error, before anything is written. Params of adapters need
    not be in a file and are then left alone.

    Include memscale.h and nn.h first. It is C and C++; for cJSON see safetensors.h. */
#ifndef MEMSCALE_WEIGHTS_H
#define MEMSCALE_WEIGHTS_H

#include "safetensors.h"

#include <math.h>
#include <stddef.h>

// ---- names --------------------------------------------------------------------------------------

typedef enum weights_family {
    WEIGHTS_GPT2,
    WEIGHTS_BERT,
    WEIGHTS_LLAMA, // also Mistral, Qwen2, Qwen3, SmolLM2
    WEIGHTS_GEMMA, // 2 and 3
    WEIGHTS_PHI3,
    WEIGHTS_GGUF_LLAMA,
    WEIGHTS_GGUF_QWEN, // 2 and 3
    WEIGHTS_GGUF_GEMMA,
    WEIGHTS_FAMILIES
} weights_family;

/* Which rows of ours a tensor of theirs is; or which of its rows are all of ours. */
typedef enum weights_part {
    WEIGHTS_ALL,
    WEIGHTS_QUERIES,
    WEIGHTS_KEYS,
    WEIGHTS_VALUES,
    WEIGHTS_FIRST_HALF, // of theirs
    WEIGHTS_SECOND_HALF
} weights_part;

enum {
    WEIGHTS_TRANSPOSED = 1, // matrices are (in, out)
    WEIGHTS_PERMUTED = 2,   // the two halves of each head are interleaved, row by row
    WEIGHTS_PLUS_ONE = 4,   // has the 1 that a net with offset norms adds
    WEIGHTS_OTHER_NAME = 8, // another name of what has one: it is read, not written
    WEIGHTS_TIED = 16       // may be in a file though the net has none: it is the token table
};

/* In a pattern, % is the number of a block, * is weight or bias, and what is in brackets may be left
   out in a file. Tensors without a param (NULL) are passed over. */
typedef struct weights_row {
    uint32_t families; // bits
    const char *theirs, *ours;
    weights_part part;
    uint32_t flags;
} weights_row;

enum {
    W_GPT2 = 1 << WEIGHTS_GPT2,
    W_BERT = 1 << WEIGHTS_BERT,
    W_LLAMA = 1 << WEIGHTS_LLAMA,
    W_GEMMA = 1 << WEIGHTS_GEMMA,
    W_PHI3 = 1 << WEIGHTS_PHI3,
    W_GGUF_LLAMA = 1 << WEIGHTS_GGUF_LLAMA,
    W_GGUF_QWEN = 1 << WEIGHTS_GGUF_QWEN,
    W_GGUF_GEMMA = 1 << WEIGHTS_GGUF_GEMMA,
    W_LLAMAS = W_LLAMA | W_GEMMA | W_PHI3,
    W_GGUF_PLAIN = W_GGUF_QWEN | W_GGUF_GEMMA, // not permuted
    W_GGUF_OTHERS = W_GGUF_LLAMA | W_GGUF_QWEN,
    W_GGUF = W_GGUF_OTHERS | W_GGUF_GEMMA
};

// clang-format off
static const weights_row weights_rows[] = {
    {W_GPT2, "(transformer.)wte.weight",          "wte",          WEIGHTS_ALL, 0},
    {W_GPT2, "(transformer.)wpe.weight",          "wpe",          WEIGHTS_ALL, 0},
    {W_GPT2, "(transformer.)h.%.ln_1.*",          "h%.ln1.*",     WEIGHTS_ALL, 0},
    {W_GPT2, "(transformer.)h.%.attn.c_attn.*",   "h%.qkv.*",     WEIGHTS_ALL, WEIGHTS_TRANSPOSED},
    {W_GPT2, "(transformer.)h.%.attn.c_proj.*",   "h%.proj.*",    WEIGHTS_ALL, WEIGHTS_TRANSPOSED},
    {W_GPT2, "(transformer.)h.%.ln_2.*",          "h%.ln2.*",     WEIGHTS_ALL, 0},
    {W_GPT2, "(transformer.)h.%.mlp.c_fc.*",      "h%.fc.*",      WEIGHTS_ALL, WEIGHTS_TRANSPOSED},
    {W_GPT2, "(transformer.)h.%.mlp.c_proj.*",    "h%.fcproj.*",  WEIGHTS_ALL, WEIGHTS_TRANSPOSED},
    {W_GPT2, "(transformer.)ln_f.*",              "lnf.*",        WEIGHTS_ALL, 0},
    {W_GPT2, "lm_head.weight",                    "head.weight",  WEIGHTS_ALL, WEIGHTS_TIED},
    {W_GPT2, "(transformer.)h.%.attn.bias",       NULL,           WEIGHTS_ALL, 0}, // the causal mask
    {W_GPT2, "(transformer.)h.%.attn.masked_bias", NULL,          WEIGHTS_ALL, 0},

    {W_BERT, "(bert.)embeddings.word_embeddings.weight",       "wte",         WEIGHTS_ALL, 0},
    {W_BERT, "(bert.)embeddings.position_embeddings.weight",   "wpe",         WEIGHTS_ALL, 0},
    {W_BERT, "(bert.)embeddings.token_type_embeddings.weight", "wse",         WEIGHTS_ALL, 0},
    {W_BERT, "(bert.)embeddings.LayerNorm.*",                  "lne.*",       WEIGHTS_ALL, 0},
    {W_BERT, "(bert.)encoder.layer.%.attention.self.query.*",  "h%.qkv.*",    WEIGHTS_QUERIES, 0},
    {W_BERT, "(bert.)encoder.layer.%.attention.self.key.*",    "h%.qkv.*",    WEIGHTS_KEYS, 0},
    {W_BERT, "(bert.)encoder.layer.%.attention.self.value.*",  "h%.qkv.*",    WEIGHTS_VALUES, 0},
    {W_BERT, "(bert.)encoder.layer.%.attention.output.dense.*", "h%.proj.*",  WEIGHTS_ALL, 0},
    {W_BERT, "(bert.)encoder.layer.%.attention.output.LayerNorm.*", "h%.ln1.*", WEIGHTS_ALL, 0},
    {W_BERT, "(bert.)encoder.layer.%.intermediate.dense.*",    "h%.fc.*",     WEIGHTS_ALL, 0},
    {W_BERT, "(bert.)encoder.layer.%.output.dense.*",          "h%.fcproj.*", WEIGHTS_ALL, 0},
    {W_BERT, "(bert.)encoder.layer.%.output.LayerNorm.*",      "h%.ln2.*",    WEIGHTS_ALL, 0},
    {W_BERT, "cls.predictions.transform.dense.*",              "mlm.dense.*", WEIGHTS_ALL, 0},
    {W_BERT, "cls.predictions.transform.LayerNorm.*",          "mlm.ln.*",    WEIGHTS_ALL, 0},
    {W_BERT, "cls.predictions.bias",                           "mlm.bias",    WEIGHTS_ALL, 0},
    {W_BERT, "cls.predictions.decoder.*",                      NULL,          WEIGHTS_ALL, 0}, // tied
    {W_BERT, "(bert.)embeddings.position_ids",                 NULL,          WEIGHTS_ALL, 0},
    {W_BERT, "(bert.)pooler.dense.*",                          NULL,          WEIGHTS_ALL, 0},
    {W_BERT, "cls.seq_relationship.*",                         NULL,          WEIGHTS_ALL, 0},
    // of the first checkpoints
    {W_BERT, "(bert.)embeddings.LayerNorm.gamma",   "lne.weight",    WEIGHTS_ALL, WEIGHTS_OTHER_NAME},
    {W_BERT, "(bert.)embeddings.LayerNorm.beta",    "lne.bias",      WEIGHTS_ALL, WEIGHTS_OTHER_NAME},
    {W_BERT, "(bert.)encoder.layer.%.attention.output.LayerNorm.gamma", "h%.ln1.weight", WEIGHTS_ALL, WEIGHTS_OTHER_NAME},
    {W_BERT, "(bert.)encoder.layer.%.attention.output.LayerNorm.beta",  "h%.ln1.bias",   WEIGHTS_ALL, WEIGHTS_OTHER_NAME},
    {W_BERT, "(bert.)encoder.layer.%.output.LayerNorm.gamma", "h%.ln2.weight", WEIGHTS_ALL, WEIGHTS_OTHER_NAME},
    {W_BERT, "(bert.)encoder.layer.%.output.LayerNorm.beta",  "h%.ln2.bias",   WEIGHTS_ALL, WEIGHTS_OTHER_NAME},
    {W_BERT, "cls.predictions.transform.LayerNorm.gamma", "mlm.ln.weight",   WEIGHTS_ALL, WEIGHTS_OTHER_NAME},
    {W_BERT, "cls.predictions.transform.LayerNorm.beta",  "mlm.ln.bias",     WEIGHTS_ALL, WEIGHTS_OTHER_NAME},

    {W_LLAMAS, "(model.)embed_tokens.weight",                      "tokens.weight",   WEIGHTS_ALL, 0},
    {W_LLAMAS, "(model.)layers.%.input_layernorm.weight",          "h%.norm1.weight", WEIGHTS_ALL, 0},
    {W_LLAMA | W_GEMMA, "(model.)layers.%.self_attn.q_proj.*",     "h%.qkv.*",        WEIGHTS_QUERIES, 0},
    {W_LLAMA | W_GEMMA, "(model.)layers.%.self_attn.k_proj.*",     "h%.qkv.*",        WEIGHTS_KEYS, 0},
    {W_LLAMA | W_GEMMA, "(model.)layers.%.self_attn.v_proj.*",     "h%.qkv.*",        WEIGHTS_VALUES, 0},
    {W_PHI3, "(model.)layers.%.self_attn.qkv_proj.weight",         "h%.qkv.weight",   WEIGHTS_ALL, 0},
    {W_LLAMA | W_GEMMA, "(model.)layers.%.self_attn.q_norm.weight", "h%.qnorm.weight", WEIGHTS_ALL, 0},
    {W_LLAMA | W_GEMMA, "(model.)layers.%.self_attn.k_norm.weight", "h%.knorm.weight", WEIGHTS_ALL, 0},
    {W_LLAMAS, "(model.)layers.%.self_attn.o_proj.weight",         "h%.proj.weight",  WEIGHTS_ALL, 0},
    {W_GEMMA, "(model.)layers.%.post_attention_layernorm.weight",  "h%.post1.weight", WEIGHTS_ALL, 0},
    {W_LLAMA | W_PHI3, "(model.)layers.%.post_attention_layernorm.weight", "h%.norm2.weight", WEIGHTS_ALL, 0},
    {W_GEMMA, "(model.)layers.%.pre_feedforward_layernorm.weight", "h%.norm2.weight", WEIGHTS_ALL, 0},
    {W_LLAMA | W_GEMMA, "(model.)layers.%.mlp.gate_proj.weight",   "h%.gate.weight",  WEIGHTS_ALL, 0},
    {W_LLAMA | W_GEMMA, "(model.)layers.%.mlp.up_proj.weight",     "h%.up.weight",    WEIGHTS_ALL, 0},
    {W_PHI3, "(model.)layers.%.mlp.gate_up_proj.weight",           "h%.gate.weight",  WEIGHTS_FIRST_HALF, 0},
    {W_PHI3, "(model.)layers.%.mlp.gate_up_proj.weight",           "h%.up.weight",    WEIGHTS_SECOND_HALF, 0},
    {W_LLAMAS, "(model.)layers.%.mlp.down_proj.weight",            "h%.down.weight",  WEIGHTS_ALL, 0},
    {W_GEMMA, "(model.)layers.%.post_feedforward_layernorm.weight", "h%.post2.weight", WEIGHTS_ALL, 0},
    {W_LLAMAS, "(model.)norm.weight",                              "norm.weight",     WEIGHTS_ALL, 0},
    {W_LLAMAS, "lm_head.weight",                                   "head.weight",     WEIGHTS_ALL, WEIGHTS_TIED},
    {W_LLAMAS, "(model.)layers.%.self_attn.rotary_emb.inv_freq",   NULL,              WEIGHTS_ALL, 0},

    {W_GGUF, "token_embd.weight",                     "tokens.weight",   WEIGHTS_ALL, 0},
    {W_GGUF, "blk.%.attn_norm.weight",                "h%.norm1.weight", WEIGHTS_ALL, WEIGHTS_PLUS_ONE},
    {W_GGUF_LLAMA, "blk.%.attn_q.*",                  "h%.qkv.*",        WEIGHTS_QUERIES, WEIGHTS_PERMUTED},
    {W_GGUF_LLAMA, "blk.%.attn_k.*",                  "h%.qkv.*",        WEIGHTS_KEYS, WEIGHTS_PERMUTED},
    {W_GGUF_PLAIN, "blk.%.attn_q.*",                  "h%.qkv.*",        WEIGHTS_QUERIES, 0},
    {W_GGUF_PLAIN, "blk.%.attn_k.*",                  "h%.qkv.*",        WEIGHTS_KEYS, 0},
    {W_GGUF, "blk.%.attn_v.*",                        "h%.qkv.*",        WEIGHTS_VALUES, 0},
    {W_GGUF_PLAIN, "blk.%.attn_q_norm.weight",        "h%.qnorm.weight", WEIGHTS_ALL, WEIGHTS_PLUS_ONE},
    {W_GGUF_PLAIN, "blk.%.attn_k_norm.weight",        "h%.knorm.weight", WEIGHTS_ALL, WEIGHTS_PLUS_ONE},
    {W_GGUF, "blk.%.attn_output.weight",              "h%.proj.weight",  WEIGHTS_ALL, 0},
    {W_GGUF_GEMMA, "blk.%.post_attention_norm.weight", "h%.post1.weight", WEIGHTS_ALL, WEIGHTS_PLUS_ONE},
    {W_GGUF, "blk.%.ffn_norm.weight",                 "h%.norm2.weight", WEIGHTS_ALL, WEIGHTS_PLUS_ONE},
    {W_GGUF, "blk.%.ffn_gate.weight",                 "h%.gate.weight",  WEIGHTS_ALL, 0},
    {W_GGUF, "blk.%.ffn_up.weight",                   "h%.up.weight",    WEIGHTS_ALL, 0},
    {W_GGUF, "blk.%.ffn_down.weight",                 "h%.down.weight",  WEIGHTS_ALL, 0},
    {W_GGUF_GEMMA, "blk.%.post_ffw_norm.weight",      "h%.post2.weight", WEIGHTS_ALL, WEIGHTS_PLUS_ONE},
    {W_GGUF, "output_norm.weight",                    "norm.weight",     WEIGHTS_ALL, WEIGHTS_PLUS_ONE},
    {W_GGUF, "output.weight",                         "head.weight",     WEIGHTS_ALL, WEIGHTS_TIED},
    {W_GGUF, "rope_freqs.weight",                     NULL,              WEIGHTS_ALL, 0}, // see weights_config
};
// clang-format on
enum { WEIGHTS_ROWS = sizeof weights_rows / sizeof weights_rows[0] };

/* What % and * stand for in a name. */
typedef struct weights_holes {
    long block;
    const char *suffix;
} weights_holes;

GGUF_API bool weights_match_from(const char *pattern, const char *name, weights_holes *holes) {
    for (; *pattern; pattern++) {
        const char c = *pattern;
        if (c == '%') {
            const size_t digits = strspn(name, "0123456789");
            if (digits == 0 || digits > 6 || (digits > 1 && *name == '0')) {
                return false;
            }
            holes->block = strtol(name, NULL, 10);
            name += digits;
        } else if (c == '*') {
            holes->suffix = strcmp(name, "weight") == 0 ? "weight" : "bias";
            return strcmp(name, holes->suffix) == 0;
        } else if (c != '(' && c != ')' && c != *name++) {
            return false;
        }
    }
    return *name == 0;
}

/* A pattern after what may be left out at its start. */
GGUF_API const char *weights_shortened(const char *pattern) {
    return *pattern == '(' ? strchr(pattern, ')') + 1 : pattern;
}

GGUF_API bool weights_match(const char *pattern, const char *name, weights_holes *holes) {
    holes->block = 0;
    holes->suffix = "";
    return weights_match_from(pattern, name, holes) ||
           weights_match_from(weights_shortened(pattern), name, holes);
}

GGUF_API void weights_fill(const char *pattern, weights_holes holes, char name[WEIGHT_NAME]) {
    size_t length = 0;
    for (; *pattern && length + 24 < WEIGHT_NAME; pattern++) {
        if (*pattern == '%') {
            length += (size_t)snprintf(name + length, 24, "%ld", holes.block);
        } else if (*pattern == '*') {
            length += (size_t)snprintf(name + length, 24, "%s", holes.suffix);
        } else if (*pattern != '(' && *pattern != ')') {
            name[length++] = *pattern;
        }
    }
    name[length] = 0;
}

// ---- layouts ------------------------------------------------------------------------------------

/* What tells which rows of ours are which. */
typedef struct weights_layout {
    weights_family family;              // of the names
    int64_t heads, kv_heads, head_size; // of queries, keys and values
    bool offset_norms;                  // the net's norms add 1 to their weights
} weights_layout;

/* Finds out whose names a file has; an error if it has those of no family. */
GGUF_API bool weights_find_family(weight_file *f, weights_family *family) {
    static const struct {
        const char *name;
        weights_family family;
    } known[] = {
        {"h.0.attn.c_attn.weight", WEIGHTS_GPT2},
        {"transformer.h.0.attn.c_attn.weight", WEIGHTS_GPT2},
        {"encoder.layer.0.attention.self.query.weight", WEIGHTS_BERT},
        {"bert.encoder.layer.0.attention.self.query.weight", WEIGHTS_BERT},
        {"layers.0.self_attn.qkv_proj.weight", WEIGHTS_PHI3},
        {"model.layers.0.self_attn.qkv_proj.weight", WEIGHTS_PHI3},
        {"layers.0.pre_feedforward_layernorm.weight", WEIGHTS_GEMMA},
        {"model.layers.0.pre_feedforward_layernorm.weight", WEIGHTS_GEMMA},
        {"layers.0.self_attn.q_proj.weight", WEIGHTS_LLAMA},
        {"model.layers.0.self_attn.q_proj.weight", WEIGHTS_LLAMA},
        {"blk.0.post_ffw_norm.weight", WEIGHTS_GGUF_GEMMA},
        {"blk.0.attn_q.weight", WEIGHTS_GGUF_LLAMA},
    };
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
        if (weight_find(f, known[i].name)) {
            const gguf_text architecture = gguf_text_of(gguf_find(f, "general.architecture"));
            *family = known[i].family;
            if (*family == WEIGHTS_GGUF_LLAMA && !gguf_equals(architecture, "llama")) {
                *family = WEIGHTS_GGUF_QWEN;
            }
            return true;
        }
    }
    return weight_fail(f->error, "its names are of no model that can be read: the first is %s",
                       f->count > 0 ? f->entries[0].name : "missing");
}

/* The layout of nn_llama; and below of nn_gpt2 and nn_bert. */
GGUF_API weights_layout weights_layout_of(const nn_llama_config *c, weights_family family) {
    weights_layout layout;
    layout.family = family;
    layout.heads = c->heads;
    layout.kv_heads = c->kv_heads ? c->kv_heads : c->heads;
    layout.head_size = c->head_size || c->heads == 0 ? c->head_size : c->channels / c->heads;
    layout.offset_norms = c->offset_norms;
    return layout;
}

GGUF_API weights_layout weights_layout_of_transformer(const nn_transformer_config *c,
                                                      weights_family family) {
    weights_layout layout;
    layout.family = family;
    layout.heads = layout.kv_heads = c->heads;
    layout.head_size = c->heads > 0 ? c->channels / c->heads : 0;
    layout.offset_norms = false;
    return layout;
}

// ---- pieces -------------------------------------------------------------------------------------

/* Rows of a param that are one tensor of theirs, or a half of one. */
typedef struct weights_piece {
    const weights_row *row;
    const nn_param_info *param;
    char name[WEIGHT_NAME]; // theirs
    weight_entry *entry;    // NULL when writing
    int64_t first, rows;    // of ours
    int64_t their_first, their_rows;
    int64_t columns; // 1: the param is a vector, if its rank is 1
} weights_piece;

typedef struct weights_list {
    weights_piece *items;
    int64_t count, capacity;
} weights_list;

/* A shape for errors: "(3, 4)". */
typedef struct weights_text {
    char text[96];
} weights_text;

GGUF_API weights_text weights_shape_text(const int64_t *dim, int32_t rank) {
    weights_text t;
    size_t length = (size_t)snprintf(t.text, sizeof t.text, "(");
    for (int32_t i = 0; i < rank && length < 64; i++) {
        length +=
            (size_t)snprintf(t.text + length, 24, "%s%lld", i > 0 ? ", " : "", (long long)dim[i]);
    }
    snprintf(t.text + length, 2, ")");
    return t;
}

/* The shape that theirs must have. */
GGUF_API int32_t weights_their_shape(const weights_piece *p, int64_t dim[2]) {
    const bool is_matrix = p->param->shape.rank > 1;
    const bool is_turned = is_matrix && (p->row->flags & WEIGHTS_TRANSPOSED) != 0;
    dim[0] = is_turned ? p->columns : p->their_rows;
    dim[1] = is_turned ? p->their_rows : p->columns;
    return is_matrix ? 2 : 1;
}

/* Sets which rows it is. */
GGUF_API bool weights_measure(char *error, const weights_layout *l, weights_piece *p) {
    const int64_t all = p->param->shape.dim[0];
    const int64_t queries = l->heads * l->head_size, keys = l->kv_heads * l->head_size;
    const weights_part part = p->row->part;
    const bool is_split = part >= WEIGHTS_QUERIES && part <= WEIGHTS_VALUES;
    if (p->param->shape.rank < 1 || p->param->shape.rank > 2 ||
        (is_split && (l->heads < 1 || l->kv_heads < 1 || queries + 2 * keys != all))) {
        return weight_fail(error,
                           "%s has %lld rows, which are not the queries of %lld heads and the keys "
                           "and values of %lld, of %lld each",
                           p->param->name, (long long)all, (long long)l->heads,
                           (long long)l->kv_heads, (long long)l->head_size);
    }
    p->columns = p->param->shape.rank > 1 ? p->param->shape.dim[1] : 1;
    p->rows = part == WEIGHTS_QUERIES ? queries : is_split ? keys : all;
    p->first = part == WEIGHTS_KEYS ? queries : part == WEIGHTS_VALUES ? queries + keys : 0;
    p->their_first = part == WEIGHTS_SECOND_HALF ? all : 0;
    p->their_rows = part == WEIGHTS_FIRST_HALF || part == WEIGHTS_SECOND_HALF ? 2 * all : p->rows;
    return true;
}

GGUF_API weights_piece *weights_add(char *error, weights_list *list) {
    if (list->count == list->capacity) {
        const int64_t capacity = 2 * list->capacity + 64;
        weights_piece *items =
            (weights_piece *)realloc(list->items, (size_t)capacity * sizeof *items);
        if (!items) {
            weight_fail(error, "no memory");
            return NULL;
        }
        list->items = items;
        list->capacity = capacity;
    }
    memset(&list->items[list->count], 0, sizeof list->items[0]);
    return &list->items[list->count++];
}

/* Whether a row is of this family and param. */
GGUF_API bool weights_is_row_of(const weights_row *row, weights_family family,
                                const nn_param_info *param, weights_holes *holes) {
    return (row->families >> family & 1) != 0 && row->ours &&
           weights_match(row->ours, param->name, holes);
}

// ---- reading ------------------------------------------------------------------------------------

enum { WEIGHTS_LENT = 1 << 16 }; // of weight_entry.used, which also has a bit of each part

GGUF_API bool weights_check_shape(weight_file *f, const weights_piece *p) {
    int64_t dim[2];
    const weight_entry *e = p->entry;
    const int32_t rank = weights_their_shape(p, dim);
    if (e->rank != rank || e->dim[0] != dim[0] || (rank > 1 && e->dim[1] != dim[1])) {
        return weight_fail(f->error, "%s is %s: %s %s needs %s", e->name,
                           weights_shape_text(e->dim, e->rank).text, p->param->name,
                           weights_shape_text(p->param->shape.dim, p->param->shape.rank).text,
                           weights_shape_text(dim, rank).text);
    }
    return weight_decode(f, e, 0, 0, NULL); // whether it can be
}

/* Adds the tensor of this name, if the file has it, to the list; *parts are the parts of the param that
   are there already. */
GGUF_API bool weights_take(weight_file *f, const weights_layout *l, const weights_piece *like,
                           const char *pattern, weights_holes holes, weights_list *list,
                           uint32_t *parts) {
    char name[WEIGHT_NAME];
    weights_fill(pattern, holes, name);
    weight_entry *e = weight_find(f, name);
    const uint32_t part = 1u << like->row->part;
    if (!e) {
        return true;
    }
    if ((*parts & part) != 0 || (e->used & part) != 0) {
        return weight_fail(f->error, "%s is there twice: %s and one with another name",
                           like->param->name, name);
    }
    weights_piece *p = weights_add(f->error, list);
    if (!p) {
        return false;
    }
    *p = *like;
    p->entry = e;
    memcpy(p->name, name, sizeof name);
    *parts |= part;
    e->used |= part;
    return weights_measure(f->error, l, p) && weights_check_shape(f, p);
}

/* All pieces of a param; an error if some of its rows have none. */
GGUF_API bool weights_find_param(weight_file *f, const weights_layout *l,
                                 const nn_param_info *param, weights_list *list) {
    char missing[WEIGHT_NAME] = "";
    uint32_t parts = 0;
    const int64_t before = list->count;
    for (int i = 0; i < WEIGHTS_ROWS; i++) {
        weights_holes holes;
        weights_piece like;
        memset(&like, 0, sizeof like);
        like.row = &weights_rows[i];
        like.param = param;
        if (!weights_is_row_of(like.row, l->family, param, &holes)) {
            continue;
        }
        const char *whole = like.row->theirs, *shortened = weights_shortened(whole);
        if (!weights_take(f, l, &like, whole, holes, list, &parts) ||
            (shortened != whole && !weights_take(f, l, &like, shortened, holes, list, &parts))) {
            return false;
        }
        if ((parts >> like.row->part & 1) == 0 && *missing == 0) {
            weights_fill(whole, holes, missing);
        }
    }
    int64_t rows = 0;
    for (int64_t i = before; i < list->count; i++) {
        rows += list->items[i].rows;
    }
    return rows == param->shape.dim[0]
               ? true
               : weight_fail(f->error, "%s %s needs %s, which is not there", param->name,
                             weights_shape_text(param->shape.dim, param->shape.rank).text,
                             *missing ? missing : "a tensor that such files do not have");
}

/* Whether a tensor that no param has may be passed over. */
GGUF_API bool weights_may_pass(const weight_entry *e, const weights_layout *l, const nn_net *net) {
    weights_holes holes;
    for (int i = 0; i < WEIGHTS_ROWS; i++) {
        const weights_row *row = &weights_rows[i];
        if ((row->families >> l->family & 1) != 0 && weights_match(row->theirs, e->name, &holes) &&
            (!row->ours || ((row->flags & WEIGHTS_TIED) != 0 && !nn_find_param(net, row->ours)))) {
            return true;
        }
    }
    return false;
}

/* The pieces of all params, checked. list is to be freed in any case. */
GGUF_API bool weights_find_all(weight_file *f, const nn_net *net, const weights_layout *l,
                               weights_list *list) {
    memset(list, 0, sizeof *list);
    for (int64_t i = 0; i < f->count; i++) {
        f->entries[i].used &= (uint32_t)WEIGHTS_LENT;
    }
    for (int64_t i = 0; i < nn_param_count(net); i++) {
        const nn_param_info *param = nn_param_at(net, i);
        if (!nn_is_adapter(param) && !weights_find_param(f, l, param, list)) {
            return false;
        }
    }
    for (int64_t i = 0; i < f->count; i++) {
        const weight_entry *e = &f->entries[i];
        if (e->used == 0 && !weights_may_pass(e, l, net)) {
            return weight_fail(f->error, "%s %s is in the file, and no param of the net needs it",
                               e->name, weights_shape_text(e->dim, e->rank).text);
        }
    }
    return true;
}

/* The row of theirs that is row i of a piece, of which two halves of each head are interleaved. */
GGUF_API int64_t weights_permuted_row(int64_t i, int64_t head_size) {
    const int64_t half = head_size / 2, in_head = i % head_size;
    return i - in_head + (in_head < half ? 2 * in_head : 2 * (in_head - half) + 1);
}

/* to (rows, columns) = the transpose of from; some columns at a time, so that what is read stays in the
   cache. */
GGUF_API void weights_transpose(const float *from, int64_t rows, int64_t columns, float *to) {
    for (int64_t first = 0; first < columns; first += 16) {
        const int64_t end = first + 16 < columns ? first + 16 : columns;
        for (int64_t i = 0; i < rows; i++) {
            for (int64_t k = first; k < end; k++) {
                to[i * columns + k] = from[k * rows + i];
            }
        }
    }
}

/* Decodes a piece to its rows of the param; scratch has room for the piece. */
GGUF_API bool weights_decode(weight_file *f, const weights_piece *p, const weights_layout *l,
                             float *param, float *scratch) {
    float *to = param + p->first * p->columns;
    const int64_t begin = p->their_first * p->columns, count = p->rows * p->columns;
    const uint32_t flags = p->row->flags;
    const bool is_turned = p->param->shape.rank > 1 && (flags & WEIGHTS_TRANSPOSED) != 0;
    const bool is_permuted = (flags & WEIGHTS_PERMUTED) != 0;
    if (!weight_decode(f, p->entry, begin, count, is_turned || is_permuted ? scratch : to)) {
        return false;
    }
    if (is_turned) {
        weights_transpose(scratch, p->rows, p->columns, to);
    }
    for (int64_t i = 0; i < p->rows && is_permuted; i++) {
        memcpy(to + i * p->columns, scratch + weights_permuted_row(i, l->head_size) * p->columns,
               (size_t)p->columns * sizeof *to);
    }
    if (l->family == WEIGHTS_GGUF_GEMMA && l->offset_norms && (flags & WEIGHTS_PLUS_ONE) != 0) {
        for (int64_t i = 0; i < count; i++) {
            to[i] -= 1.0f;
        }
    }
    return true;
}

/* The blocks that the tensors of a file consist of. */
GGUF_API blocks_kind weights_blocks_of(const weight_type *type) {
    return strcmp(type->name, "Q8_0") == 0   ? BLOCKS_Q8_0
           : strcmp(type->name, "Q4_1") == 0 ? BLOCKS_Q4_1
                                             : BLOCKS_NONE;
}

/* The rows of a piece of a param in blocks: as they are in the file, if it has the same blocks; or decoded
   and encoded, one after the other, by way of `row`. */
GGUF_API bool weights_encode(weight_file *f, const weights_piece *p, const weights_layout *l,
                             uint8_t *param, float *row) {
    const blocks_kind kind = p->param->blocks;
    const int64_t row_bytes = blocks_row_bytes(kind, p->columns);
    const uint32_t flags = p->row->flags;
    bool fits = (flags & WEIGHTS_TRANSPOSED) == 0;
    for (int64_t i = 0; i < p->rows && fits; i++) {
        const bool is_permuted = (flags & WEIGHTS_PERMUTED) != 0;
        const int64_t their =
            p->their_first + (is_permuted ? weights_permuted_row(i, l->head_size) : i);
        uint8_t *to = param + (p->first + i) * row_bytes;
        if (weights_blocks_of(p->entry->type) == kind) {
            memcpy(to, p->entry->data + their * row_bytes, (size_t)row_bytes);
            continue;
        }
        if (!weight_decode(f, p->entry, their * p->columns, p->columns, row)) {
            return false;
        }
        for (int64_t k = 0; k < p->columns; k++) {
            if (!(fabsf(row[k]) < 32768.0f)) { // the difference of two must fit binary16
                return weight_fail(f->error, "%s has %g, which blocks of codes cannot hold",
                                   p->entry->name, (double)row[k]);
            }
        }
        blocks_encode(kind, row, p->columns, to);
    }
    return fits || weight_fail(f->error, "%s is transposed: it cannot be had in blocks of codes",
                               p->entry->name);
}

/* Two buffers that each hold the largest param of a list. */
GGUF_API float *weights_buffers(char *error, const nn_net *net, int64_t *elements) {
    *elements = 1;
    for (int64_t i = 0; i < nn_param_count(net); i++) {
        const ms_shape shape = nn_param_at(net, i)->shape;
        const int64_t count = shape.dim[0] * (shape.rank > 1 ? shape.dim[1] : 1);
        *elements = count > *elements ? count : *elements;
    }
    float *buffers = (float *)malloc(2 * (size_t)*elements * sizeof *buffers);
    if (!buffers) {
        weight_fail(error, "no memory for two params of %lld elements", (long long)*elements);
    }
    return buffers;
}

/* Writes all params that have not been lent, except those of adapters, from a file; those in blocks are
   encoded where the file has other ones. Nothing is written
   if the file does not fit the net; f->error then says why. */
GGUF_API bool weights_read(ms_model *model, const nn_net *net, weight_file *f,
                           const weights_layout *l) {
    weights_list list;
    int64_t elements;
    float *buffers = NULL;
    bool is_read = weights_find_all(f, net, l, &list);
    is_read = is_read && (buffers = weights_buffers(f->error, net, &elements)) != NULL;
    for (int64_t i = 0; i < list.count && is_read; i++) {
        const weights_piece *p = &list.items[i];
        const bool is_last = i + 1 == list.count || list.items[i + 1].param != p->param;
        if ((p->entry->used & (uint32_t)WEIGHTS_LENT) != 0) {
            continue;
        }
        is_read = p->param->blocks == BLOCKS_NONE
                      ? weights_decode(f, p, l, buffers, buffers + elements)
                      : weights_encode(f, p, l, (uint8_t *)buffers, buffers + elements);
        weight_forget(f, p->entry);
        if (is_read && is_last && ms_write(model, p->param->tensor, buffers) != MS_RESULT_OK) {
            is_read = weight_fail(f->error, "%s", ms_last_error(model));
        }
    }
    free(buffers);
    free(list.items);
    return is_read;
}

/* Lends the model those params of a file that it can use where they are: whole float32 tensors, in the
   order of ours. For nets on the CPU whose params are frozen, such as those with adapters, before
   ms_wrap; the file must stay open as long as the model. weights_read writes the rest. *bytes: how much
   was lent. */
GGUF_API bool weights_lend(ms_model *model, const nn_net *net, weight_file *f,
                           const weights_layout *l, uint64_t *bytes) {
    weights_list list;
    bool is_lent = weights_find_all(f, net, l, &list);
    *bytes = 0;
    for (int64_t i = 0; i < list.count && is_lent; i++) {
        const weights_piece *p = &list.items[i];
        const bool is_turned =
            p->param->shape.rank > 1 && (p->row->flags & WEIGHTS_TRANSPOSED) != 0;
        const bool is_changed = l->family == WEIGHTS_GGUF_GEMMA && l->offset_norms &&
                                (p->row->flags & WEIGHTS_PLUS_ONE) != 0;
        if (p->row->part != WEIGHTS_ALL || is_turned || is_changed ||
            p->param->blocks != BLOCKS_NONE || strcmp(p->entry->type->name, "F32") != 0 ||
            (uintptr_t)p->entry->data % 4 != 0) {
            continue;
        }
        void *data = (void *)(uintptr_t)p->entry->data; // of a private mapping
        if (ms_borrow(model, p->param->tensor, data) != MS_RESULT_OK) {
            is_lent = weight_fail(f->error, "%s", ms_last_error(model));
        } else {
            p->entry->used |= (uint32_t)WEIGHTS_LENT;
            *bytes += p->entry->bytes;
        }
    }
    free(list.items);
    return is_lent;
}

// ---- writing ------------------------------------------------------------------------------------

/* A file that gets its name once it is whole. */
typedef struct weights_file {
    const char *path; // NULL: what is written is not kept
    char beside[SAFETENSORS_PATH];
    FILE *file;
    bool failed;
} weights_file;

GGUF_API bool weights_create(char *error, weights_file *w, const char *path) {
    const int length = path ? snprintf(w->beside, sizeof w->beside, "%s.tmp", path)
                            : snprintf(w->beside, sizeof w->beside, "/dev/null");
    const bool fits = length > 0 && (size_t)length < sizeof w->beside;
    w->path = path;
    w->failed = false;
    w->file = fits ? fopen(w->beside, "wb") : NULL;
    return w->file ? true
                   : weight_fail(error, "cannot write %s: %s", path ? path : w->beside,
                                 fits ? strerror(errno) : "its name is too long");
}

GGUF_API void weights_put(weights_file *w, const void *data, size_t bytes) {
    w->failed = w->failed || fwrite(data, 1, bytes, w->file) != bytes;
}

/* Closes it: under its name if it is whole, or else it is gone. */
GGUF_API bool weights_commit(char *error, weights_file *w, bool is_whole) {
    const bool is_full = w->failed, is_closed = fclose(w->file) == 0;
    const bool is_written = is_whole && !is_full && is_closed;
    if (!w->path) {
        return is_whole;
    }
    if (is_written && rename(w->beside, w->path) == 0) {
        return true;
    }
    const int reason = errno;
    remove(w->beside);
    return is_whole ? weight_fail(error, "cannot write %s: %s", w->path, strerror(reason)) : false;
}

GGUF_API bool weights_write_bytes(char *error, const char *path, const void *data, size_t bytes) {
    weights_file w;
    if (!weights_create(error, &w, path)) {
        return false;
    }
    weights_put(&w, data, bytes);
    return weights_commit(error, &w, true);
}

enum { WEIGHTS_ENDS = 2, WEIGHTS_END_TEXT = 256 };

/* How weights are written. */
typedef struct weights_output {
    const char *path; // NULL: params are read, and nothing is written
    const char *type; // "F32", "BF16" or "F16"
    bool merges;      // adapters are added to the weights beside which they are, or else left out
    char ends[WEIGHTS_ENDS][WEIGHTS_END_TEXT]; // for config.json: see weights_read_ends
    char error[WEIGHT_ERROR];
} weights_output;

/* Rounded to nearest, ties to even, as IEEE 754 has it; NaN stays NaN. */
GGUF_API uint32_t weights_bf16(float value) {
    const uint32_t bits = blocks_bits_of(value);
    return (bits & 0x7fffffffu) > 0x7f800000u ? bits >> 16 | 0x40u
                                              : (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
}

/* Writes numbers in one of the three types. */
GGUF_API void weights_put_floats(weights_file *w, const char *type, const float *from,
                                 int64_t count) {
    const bool is_wide = strcmp(type, "F32") == 0, is_bf16 = strcmp(type, "BF16") == 0;
    uint8_t bytes[4 * 1024];
    for (int64_t i = 0; i < count; i += 1024) {
        const int64_t some = count - i < 1024 ? count - i : 1024;
        size_t length = 0;
        for (int64_t k = 0; k < some; k++) {
            const float x = from[i + k];
            const uint32_t code = is_wide   ? blocks_bits_of(x)
                                  : is_bf16 ? weights_bf16(x)
                                            : blocks_half_of(x);
            for (int b = 0; b < (is_wide ? 4 : 2); b++) {
                bytes[length++] = (uint8_t)(code >> (8 * b));
            }
        }
        weights_put(w, bytes, length);
    }
}

/* The pieces that the params of a net are written as. list is to be freed in any case. */
GGUF_API bool weights_list_all(char *error, const nn_net *net, const weights_layout *l,
                               weights_list *list) {
    memset(list, 0, sizeof *list);
    for (int64_t k = 0; k < nn_param_count(net); k++) {
        const nn_param_info *param = nn_param_at(net, k);
        const int64_t before = list->count;
        for (int i = 0; i < WEIGHTS_ROWS && !nn_is_adapter(param); i++) {
            const weights_row *row = &weights_rows[i];
            weights_holes holes;
            if (!weights_is_row_of(row, l->family, param, &holes) ||
                (row->flags & WEIGHTS_OTHER_NAME) != 0) {
                continue;
            }
            weights_piece *p = weights_add(error, list);
            if (!p) {
                return false;
            }
            p->row = row;
            p->param = param;
            weights_fill(row->theirs, holes, p->name);
            if (!weights_measure(error, l, p)) {
                return false;
            }
        }
        if (list->count == before && !nn_is_adapter(param)) {
            return weight_fail(error, "%s has no name in such files", param->name);
        }
    }
    return true;
}

#ifdef MODEL_SHAPE_CJSON

/* Adds a tensor to the header, where it begins; returns its bytes. */
GGUF_API uint64_t weights_describe(cJSON *header, const weights_piece *p, const char *type,
                                   uint64_t begin) {
    int64_t dim[2];
    const int32_t rank = weights_their_shape(p, dim);
    const uint64_t count = (uint64_t)(dim[0] * (rank > 1 ? dim[1] : 1));
    const uint64_t bytes = count * (strcmp(type, "F32") == 0 ? 4 : 2);
    cJSON *item = cJSON_AddObjectToObject(header, p->name);
    cJSON_AddStringToObject(item, "dtype", type);
    cJSON *shape = cJSON_AddArrayToObject(item, "shape");
    for (int32_t i = 0; i < rank; i++) {
        cJSON_AddItemToArray(shape, cJSON_CreateNumber((double)dim[i]));
    }
    cJSON *offsets = cJSON_AddArrayToObject(item, "data_offsets");
    cJSON_AddItemToArray(offsets, cJSON_CreateNumber((double)begin));
    cJSON_AddItemToArray(offsets, cJSON_CreateNumber((double)(begin + bytes)));
    return bytes;
}

GGUF_API bool weights_put_header(char *error, weights_file *w, const weights_list *list,
                                 const char *type) {
    cJSON *header = cJSON_CreateObject();
    uint64_t bytes = 0;
    cJSON_AddStringToObject(cJSON_AddObjectToObject(header, "__metadata__"), "format", "pt");
    for (int64_t i = 0; i < list->count; i++) {
        if (list->items[i].row->part != WEIGHTS_SECOND_HALF) { // which follows the first
            bytes += weights_describe(header, &list->items[i], type, bytes);
        }
    }
    char *text = cJSON_PrintUnformatted(header);
    cJSON_Delete(header);
    if (!text) {
        return weight_fail(error, "no memory");
    }
    const uint64_t length = strlen(text), padded = (length + 7) / 8 * 8;
    uint8_t prefix[8];
    for (int b = 0; b < 8; b++) {
        prefix[b] = (uint8_t)(padded >> (8 * b));
    }
    weights_put(w, prefix, sizeof prefix);
    weights_put(w, text, (size_t)length);
    weights_put(w, "       ", (size_t)(padded - length));
    cJSON_free(text);
    return true;
}

/* The param of an adapter beside a weight, read; NULL: there is none, or after an error. */
GGUF_API float *weights_read_adapter(char *error, ms_model *model, const nn_net *net,
                                     const nn_param_info *weight, const char *which,
                                     ms_shape *shape) {
    char name[2 * sizeof weight->name];
    const size_t length = strlen(weight->name), end = strlen(".weight");
    snprintf(name, sizeof name, "%.*s.adapter.%s.weight", length > end ? (int)(length - end) : 0,
             weight->name, which);
    const nn_param_info *param = nn_find_param(net, name);
    if (!param) {
        return NULL;
    }
    float *values = (float *)malloc((size_t)ms_tensor_bytes(model, param->tensor));
    *shape = param->shape;
    if (!values) {
        weight_fail(error, "no memory");
    } else if (ms_read(model, param->tensor, values) != MS_RESULT_OK) {
        weight_fail(error, "%s", ms_last_error(model));
        free(values);
        values = NULL;
    }
    return values;
}

/* weight (out, in) += up (out, rank) * down (rank, in). */
GGUF_API bool weights_merge(char *error, ms_model *model, const nn_net *net,
                            const nn_param_info *param, float *weight) {
    ms_shape up_shape, down_shape;
    memset(&up_shape, 0, sizeof up_shape);
    *error = 0;
    float *up = weights_read_adapter(error, model, net, param, "up", &up_shape);
    float *down = up ? weights_read_adapter(error, model, net, param, "down", &down_shape) : NULL;
    const int64_t rank = up_shape.dim[1], in = down ? down_shape.dim[1] : 0;
    for (int64_t o = 0; o < up_shape.dim[0] && down; o++) {
        for (int64_t r = 0; r < rank; r++) {
            const float factor = up[o * rank + r];
            for (int64_t i = 0; i < in; i++) {
                weight[o * in + i] += factor * down[r * in + i];
            }
        }
    }
    free(up);
    free(down);
    return *error == 0;
}

/* Reads a param, as it is to be written, to `values`. */
GGUF_API bool weights_fetch(ms_model *model, const nn_net *net, const nn_param_info *param,
                            weights_output *out, float *values) {
    if (nn_read_param(model, param, values) != MS_RESULT_OK) {
        return weight_fail(out->error, "%s", ms_last_error(model));
    }
    if (out->merges && !weights_merge(out->error, model, net, param, values)) {
        return false;
    }
    const int64_t count = (int64_t)ms_shape_count(&param->shape);
    for (int64_t i = 0; i < count && strcmp(out->type, "F16") == 0; i++) {
        if (values[i] >= 65520.0f || values[i] <= -65520.0f) {
            return weight_fail(out->error, "%s has %g, which F16 cannot hold: write BF16 or F32",
                               param->name, (double)values[i]);
        }
    }
    return true;
}

GGUF_API bool weights_put_all(ms_model *model, const nn_net *net, const weights_list *list,
                              weights_output *out, weights_file *w) {
    int64_t elements;
    float *buffers = weights_buffers(out->error, net, &elements);
    bool is_put = buffers && weights_put_header(out->error, w, list, out->type);
    for (int64_t i = 0; i < list->count && is_put && !w->failed; i++) {
        const weights_piece *p = &list->items[i];
        const bool is_turned =
            p->param->shape.rank > 1 && (p->row->flags & WEIGHTS_TRANSPOSED) != 0;
        if (i == 0 || p->param != list->items[i - 1].param) {
            is_put = weights_fetch(model, net, p->param, out, buffers);
        }
        const float *from = buffers + p->first * p->columns;
        if (is_put && is_turned) {
            weights_transpose(from, p->columns, p->rows, buffers + elements);
            from = buffers + elements;
        }
        if (is_put) {
            weights_put_floats(w, out->type, from, p->rows * p->columns);
        }
    }
    free(buffers);
    return is_put;
}

/* Writes all params except those of adapters to out->path, with the names of a family of transformers.
   out->error says why it could not, and what was at the path before is still there. */
GGUF_API bool weights_write(ms_model *model, const nn_net *net, const weights_layout *l,
                            weights_output *out) {
    weights_list list;
    weights_file w;
    if (l->family >= WEIGHTS_GGUF_LLAMA) {
        return weight_fail(out->error,
                           "GGUF files are read, not written: write a family of transformers");
    }
    if (strcmp(out->type, "F32") != 0 && strcmp(out->type, "BF16") != 0 &&
        strcmp(out->type, "F16") != 0) {
        return weight_fail(out->error, "weights are written as F32, BF16 or F16, not as %s",
                           out->type);
    }
    bool is_written =
        weights_list_all(out->error, net, l, &list) && weights_create(out->error, &w, out->path);
    if (is_written) {
        is_written = weights_put_all(model, net, &list, out, &w);
        is_written = weights_commit(out->error, &w, is_written);
    }
    free(list.items);
    return is_written;
}

#else

GGUF_API bool weights_write(ms_model *model, const nn_net *net, const weights_layout *l,
                            weights_output *out) {
    (void)model, (void)net, (void)l;
    return safetensors_refuse(out->error, out->path);
}

#endif
#endif // MEMSCALE_WEIGHTS_H
