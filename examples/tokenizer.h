/*  tokenizer.h - text to tokens and back, as published models of the family of GPT-2 have it: byte-pair
    encoding, from the metadata of a GGUF file or from a tokenizer.json of Hugging Face, and to such a
    tokenizer.json.

    Sennrich, Haddow and Birch, "Neural Machine Translation of Rare Words with Subword Units", 2016,
    algorithm 1, on bytes: Radford et al., "Language Models are Unsupervised Multitask Learners", 2019,
    section 2.2. Text is first cut into pieces, by a regular expression that each model has of its own;
    those of GPT-2, SmolLM2, Llama 3 and Qwen2 are here, as functions. The rest of a tokenizer.json, such
    as a token at the beginning, is left to the caller; text is taken as it is, which for Qwen2 is that
    of its own tokenizer if it is in Unicode's normal form C.

    Compiled with MODEL_SHAPE_CJSON, and linked with cJSON (-lcjson), it reads and writes tokenizer.json.
    It is C and C++. */
#ifndef MEMSCALE_TOKENIZER_H
#define MEMSCALE_TOKENIZER_H

#include "gguf.h"
#include "unicode_classes.h"

#ifdef MODEL_SHAPE_CJSON
#include <cjson/cJSON.h>
#endif

/* Whose pieces. */
typedef enum tokenizer_kind {
    TOKENIZER_GPT2,
    TOKENIZER_SMOLLM, // digits apart, then as GPT-2
    TOKENIZER_LLAMA3,
    TOKENIZER_QWEN2, // as Llama 3, digits one by one
    TOKENIZER_KINDS
} tokenizer_kind;

typedef enum tokenizer_role {
    TOKENIZER_NORMAL,
    TOKENIZER_ADDED,   // found in text as it is, before anything else
    TOKENIZER_CONTROL, // the same, if the caller wants that
    TOKENIZER_UNUSED   // never the result
} tokenizer_role;

typedef struct tokenizer_token {
    uint64_t begin; // in tokenizer.text
    uint32_t length;
    tokenizer_role role;
} tokenizer_token;

typedef struct tokenizer_merge {
    int32_t left, right; // left < 0: an empty place of the table
    int32_t rank, merged;
} tokenizer_merge;

typedef struct tokenizer {
    tokenizer_kind kind;
    bool whole_pieces; // a piece that is a token is this token, whatever merges say (Llama 3)
    tokenizer_token *tokens;
    int32_t count;
    char *text; // the bytes of all tokens
    uint64_t text_bytes;
    int32_t *by_text; // hash tables, of a power of 2; -1: empty
    uint64_t text_places;
    tokenizer_merge *merges;
    uint64_t merge_places;
    int32_t of_byte[256];
    int32_t *added; // tokens of the roles ADDED and CONTROL, the longest first
    int32_t added_count;
    bool begins_added[256]; // by the first byte
    int32_t begin, end;     // of a text; -1: there is none
    char error[WEIGHT_ERROR];
} tokenizer;

typedef struct tokenizer_ids {
    int32_t *ids;
    int64_t count, capacity;
} tokenizer_ids;

// ---- Unicode ------------------------------------------------------------------------------------

typedef enum tokenizer_class {
    TOKENIZER_OTHER,
    TOKENIZER_LETTER,
    TOKENIZER_NUMBER,
    TOKENIZER_SPACE
} tokenizer_class;

GGUF_API bool tokenizer_in(uint32_t point, const uint32_t *ranges, size_t count) {
    size_t first = 0, end = count / 2;
    while (first < end) {
        const size_t middle = first + (end - first) / 2;
        if (point < ranges[2 * middle]) {
            end = middle;
        } else if (point > ranges[2 * middle + 1]) {
            first = middle + 1;
        } else {
            return true;
        }
    }
    return false;
}

#define TOKENIZER_IN(point, ranges)                                                                \
    tokenizer_in(point, ranges, sizeof(ranges) / sizeof((ranges)[0]))

GGUF_API tokenizer_class tokenizer_class_of(uint32_t point) {
    return TOKENIZER_IN(point, unicode_letters)   ? TOKENIZER_LETTER
           : TOKENIZER_IN(point, unicode_numbers) ? TOKENIZER_NUMBER
           : TOKENIZER_IN(point, unicode_spaces)  ? TOKENIZER_SPACE
                                                  : TOKENIZER_OTHER;
}

/* The code point at a place before `end`, and its bytes; a byte that is not UTF-8 is one for itself. */
GGUF_API uint32_t tokenizer_point(const uint8_t *at, const uint8_t *end, int *bytes) {
    static const uint32_t least[5] = {0, 0, 0x80, 0x800, 0x10000};
    const int length = *at < 0x80   ? 1
                       : *at < 0xc0 ? 0
                       : *at < 0xe0 ? 2
                       : *at < 0xf0 ? 3
                       : *at < 0xf8 ? 4
                                    : 0;
    uint32_t point = length > 1 ? (uint32_t)*at & (0x7fu >> length) : *at;
    bool is_valid = length > 0 && length <= end - at;
    for (int i = 1; i < length && is_valid; i++) {
        is_valid = (at[i] & 0xc0) == 0x80;
        point = point << 6 | (at[i] & 0x3fu);
    }
    is_valid = is_valid && point >= least[length] && point <= 0x10ffff &&
               (point < 0xd800 || point > 0xdfff);
    *bytes = is_valid ? length : 1;
    return is_valid ? point : 0xfffd;
}

// ---- pieces -------------------------------------------------------------------------------------

/* Text that is being cut; of SmolLM2, up to the next digit. */
typedef struct tokenizer_cut {
    const uint8_t *at, *end, *whole_end;
} tokenizer_cut;

/* A character: its class is OTHER and it has no bytes at the end of text. */
typedef struct tokenizer_char {
    tokenizer_class of;
    uint32_t point;
    int bytes;
} tokenizer_char;

GGUF_API tokenizer_char tokenizer_char_at(const uint8_t *at, const uint8_t *end) {
    tokenizer_char c = {TOKENIZER_OTHER, 0, 0};
    if (at < end) {
        c.point = tokenizer_point(at, end, &c.bytes);
        c.of = tokenizer_class_of(c.point);
    }
    return c;
}

/* Past at most so many characters of a class. */
GGUF_API const uint8_t *tokenizer_run(const uint8_t *at, const uint8_t *end, tokenizer_class of,
                                      int64_t most) {
    for (tokenizer_char c = tokenizer_char_at(at, end); c.bytes > 0 && c.of == of && most > 0;
         c = tokenizer_char_at(at, end)) {
        at += c.bytes;
        most--;
    }
    return at;
}

/* Past 's 't 're 've 'm 'll 'd, or not; in any case of letters, if that is asked for, and then with the
   long s, which is an s in capitals. */
GGUF_API const uint8_t *tokenizer_contraction(const uint8_t *at, const uint8_t *end,
                                              bool any_case) {
    static const char *const endings[] = {"s", "t", "re", "ve", "m", "ll", "d"};
    if (at == end || *at != '\'') {
        return at;
    }
    for (int i = 0; i < 7; i++) {
        const char *e = endings[i];
        const uint8_t *c = at + 1;
        for (; *e && c < end; e++, c++) {
            const bool is_capital = any_case && *c >= 'A' && *c <= 'Z';
            if ((is_capital ? *c + 32 : *c) != *e) {
                break;
            }
        }
        if (*e == 0) {
            return c;
        }
    }
    return any_case && end - at >= 3 && at[1] == 0xc5 && at[2] == 0xbf ? at + 3 : at;
}

/* \s+(?!\S)|\s+ of white space: all of it but the last, if something follows and that is not all. */
GGUF_API const uint8_t *tokenizer_spaces(const uint8_t *at, const uint8_t *end) {
    const uint8_t *last = at, *next = at;
    for (tokenizer_char c = tokenizer_char_at(at, end); c.bytes > 0 && c.of == TOKENIZER_SPACE;
         c = tokenizer_char_at(next, end)) {
        last = next;
        next += c.bytes;
    }
    return next == end || last == at ? next : last;
}

/* '(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+ */
GGUF_API const uint8_t *tokenizer_gpt2_piece(const uint8_t *at, const uint8_t *end) {
    const uint8_t *next = tokenizer_contraction(at, end, false);
    if (next > at) {
        return next;
    }
    next += *at == ' ';
    const tokenizer_char c = tokenizer_char_at(next, end);
    return c.bytes > 0 && c.of != TOKENIZER_SPACE ? tokenizer_run(next, end, c.of, INT64_MAX)
                                                  : tokenizer_spaces(at, end);
}

GGUF_API bool tokenizer_is_newline(uint32_t point) {
    return point == '\r' || point == '\n';
}

/* \s*[\r\n]+ or nothing. */
GGUF_API const uint8_t *tokenizer_newlines(const uint8_t *at, const uint8_t *end) {
    const uint8_t *past = at;
    for (tokenizer_char c = tokenizer_char_at(at, end); c.bytes > 0 && c.of == TOKENIZER_SPACE;
         c = tokenizer_char_at(at, end)) {
        at += c.bytes;
        past = tokenizer_is_newline(c.point) ? at : past;
    }
    return past;
}

/* (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|
   \s*[\r\n]+|\s+(?!\S)|\s+ , with so many digits. */
GGUF_API const uint8_t *tokenizer_llama3_piece(const uint8_t *at, const uint8_t *end, int digits) {
    const uint8_t *next = tokenizer_contraction(at, end, true);
    if (next > at) {
        return next;
    }
    const tokenizer_char c = tokenizer_char_at(at, end);
    const tokenizer_char second = tokenizer_char_at(at + c.bytes, end);
    if (c.of == TOKENIZER_LETTER || (second.of == TOKENIZER_LETTER && c.of != TOKENIZER_NUMBER &&
                                     !tokenizer_is_newline(c.point))) {
        return tokenizer_run(at + c.bytes, end, TOKENIZER_LETTER, INT64_MAX);
    }
    if (c.of == TOKENIZER_NUMBER) {
        return tokenizer_run(at, end, TOKENIZER_NUMBER, digits);
    }
    next = tokenizer_run(at + (*at == ' '), end, TOKENIZER_OTHER, INT64_MAX);
    if (next > at + (*at == ' ')) {
        while (next < end && tokenizer_is_newline(*next)) {
            next++;
        }
        return next;
    }
    next = tokenizer_newlines(at, end);
    return next > at ? next : tokenizer_spaces(at, end);
}

/* The end of the piece that begins at cut->at. */
GGUF_API const uint8_t *tokenizer_piece(tokenizer_kind kind, tokenizer_cut *cut) {
    const uint8_t *at = cut->at;
    switch (kind) {
    case TOKENIZER_LLAMA3:
        return tokenizer_llama3_piece(at, cut->end, 3);
    case TOKENIZER_QWEN2:
        return tokenizer_llama3_piece(at, cut->end, 1);
    case TOKENIZER_SMOLLM:
        if (at >= cut->end) {
            tokenizer_char c = tokenizer_char_at(at, cut->whole_end);
            cut->end = at + c.bytes;
            while (c.of != TOKENIZER_NUMBER && cut->end < cut->whole_end) {
                c = tokenizer_char_at(cut->end, cut->whole_end);
                cut->end += c.of != TOKENIZER_NUMBER ? c.bytes : 0;
            }
        }
        return tokenizer_gpt2_piece(at, cut->end);
    case TOKENIZER_GPT2:
    case TOKENIZER_KINDS:
        break;
    }
    return tokenizer_gpt2_piece(at, cut->end);
}

// ---- tables -------------------------------------------------------------------------------------

/* FNV-1a: Fowler, Noll and Vo, 1991; RFC 9923. */
GGUF_API uint64_t tokenizer_hash(const char *text, uint64_t length) {
    uint64_t hash = 0xcbf29ce484222325u;
    for (uint64_t i = 0; i < length; i++) {
        hash = (hash ^ (uint8_t)text[i]) * 0x100000001b3u;
    }
    return hash ^ hash >> 32;
}

/* The place of a text, or the empty one where it belongs. */
GGUF_API uint64_t tokenizer_place(const tokenizer *t, const char *text, uint64_t length) {
    uint64_t place = tokenizer_hash(text, length) & (t->text_places - 1);
    while (t->by_text[place] >= 0) {
        const tokenizer_token *token = &t->tokens[t->by_text[place]];
        if (token->length == length && memcmp(t->text + token->begin, text, (size_t)length) == 0) {
            break;
        }
        place = (place + 1) & (t->text_places - 1);
    }
    return place;
}

/* The token whose bytes these are; -1: there is none. Those that are added are not found here. */
GGUF_API int32_t tokenizer_find(const tokenizer *t, const char *text, uint64_t length) {
    return t->by_text[tokenizer_place(t, text, length)];
}

GGUF_API tokenizer_merge *tokenizer_merge_of(const tokenizer *t, int32_t left, int32_t right) {
    const uint64_t pair = (uint64_t)(uint32_t)left << 32 | (uint32_t)right;
    const uint64_t mixed = (pair ^ pair >> 29) * 0x9e3779b97f4a7c15u;
    uint64_t place = mixed >> 20 & (t->merge_places - 1);
    while (t->merges[place].left >= 0 &&
           (t->merges[place].left != left || t->merges[place].right != right)) {
        place = (place + 1) & (t->merge_places - 1);
    }
    return &t->merges[place];
}

/* A power of 2, at least twice the count. */
GGUF_API uint64_t tokenizer_places(uint64_t count) {
    uint64_t places = 16;
    while (places < 2 * count) {
        places *= 2;
    }
    return places;
}

/* The byte that a character in the text of a token stands for; -1: none. Printable bytes are
   characters of their own, the others follow one another from 256 on. */
GGUF_API int tokenizer_byte_of(uint32_t point) {
    const uint32_t shifted = point - 256;
    if ((point >= 33 && point <= 126) || (point >= 161 && point <= 255 && point != 173)) {
        return (int)point;
    }
    return point < 256 || shifted > 67 ? -1
           : shifted < 33              ? (int)shifted
           : shifted < 67              ? (int)(shifted - 33 + 127)
                                       : 173;
}

/* Bytes of a token's text, to `to`; false if it has characters that are none. */
GGUF_API bool tokenizer_to_bytes(gguf_text text, char *to, uint32_t *length) {
    const uint8_t *at = (const uint8_t *)text.data, *end = at + text.length;
    *length = 0;
    while (at < end) {
        int bytes;
        const int byte = tokenizer_byte_of(tokenizer_point(at, end, &bytes));
        if (byte < 0) {
            return false;
        }
        to[(*length)++] = (char)byte;
        at += bytes;
    }
    return true;
}

// ---- making one ---------------------------------------------------------------------------------

GGUF_API void tokenizer_close(tokenizer *t) {
    free(t->tokens);
    free(t->text);
    free(t->by_text);
    free(t->merges);
    free(t->added);
    t->tokens = NULL;
    t->text = NULL;
    t->by_text = NULL;
    t->merges = NULL;
    t->added = NULL;
    t->count = t->added_count = 0;
}

/* Memory for so many tokens, of so many bytes in all, and so many merges. */
GGUF_API bool tokenizer_reserve(tokenizer *t, uint64_t tokens, uint64_t bytes, uint64_t merges) {
    if (tokens < 1 || tokens > (1u << 26) || merges > (1u << 26)) {
        return weight_fail(t->error,
                           "it has %llu tokens and %llu merges: it may have 1 to 67108864",
                           (unsigned long long)tokens, (unsigned long long)merges);
    }
    t->text_places = tokenizer_places(tokens);
    t->merge_places = tokenizer_places(merges);
    t->tokens = (tokenizer_token *)calloc((size_t)tokens, sizeof *t->tokens);
    t->text = (char *)malloc((size_t)bytes + 1);
    t->by_text = (int32_t *)malloc((size_t)t->text_places * sizeof *t->by_text);
    t->merges = (tokenizer_merge *)malloc((size_t)t->merge_places * sizeof *t->merges);
    t->added = (int32_t *)malloc((size_t)tokens * sizeof *t->added);
    if (!t->tokens || !t->text || !t->by_text || !t->merges || !t->added) {
        return weight_fail(t->error, "no memory for %llu tokens", (unsigned long long)tokens);
    }
    memset(t->by_text, 0xff, (size_t)t->text_places * sizeof *t->by_text); // -1
    memset(t->merges, 0xff, (size_t)t->merge_places * sizeof *t->merges);
    return true;
}

/* Adds the next token, or for a JSON file that with this number; its text fits. */
GGUF_API void tokenizer_add(tokenizer *t, int32_t id, gguf_text text, tokenizer_role role) {
    tokenizer_token *token = &t->tokens[id];
    char *to = t->text + t->text_bytes;
    const bool is_bytes = role == TOKENIZER_NORMAL && tokenizer_to_bytes(text, to, &token->length);
    if (!is_bytes) { // added tokens are plain text
        memcpy(to, text.data, (size_t)text.length);
        token->length = (uint32_t)text.length;
    }
    token->begin = t->text_bytes;
    token->role =
        role == TOKENIZER_NORMAL && (!is_bytes || token->length == 0) ? TOKENIZER_UNUSED : role;
    t->text_bytes += token->length;
    if (token->role == TOKENIZER_NORMAL) {
        const uint64_t place = tokenizer_place(t, to, token->length);
        t->by_text[place] = t->by_text[place] < 0 ? id : t->by_text[place];
    } else if (token->role != TOKENIZER_UNUSED && token->length > 0) {
        t->added[t->added_count++] = id;
        t->begins_added[(uint8_t)*to] = true;
    }
}

GGUF_API bool tokenizer_add_merge(tokenizer *t, gguf_text left, gguf_text right, int32_t rank) {
    uint32_t length = 0, more = 0;
    char *bytes = (char *)malloc((size_t)(left.length + right.length) + 1);
    if (!bytes) {
        return weight_fail(t->error, "no memory");
    }
    const bool is_bytes = tokenizer_to_bytes(left, bytes, &length) &&
                          tokenizer_to_bytes(right, bytes + length, &more);
    const int32_t first = is_bytes ? tokenizer_find(t, bytes, length) : -1;
    const int32_t second = is_bytes ? tokenizer_find(t, bytes + length, more) : -1;
    const int32_t merged = is_bytes ? tokenizer_find(t, bytes, length + more) : -1;
    free(bytes);
    if (first < 0 || second < 0 || merged < 0) {
        return weight_fail(t->error, "merge %d, of %.*s and %.*s, has what is no token", (int)rank,
                           (int)(left.length < 64 ? left.length : 64), left.data,
                           (int)(right.length < 64 ? right.length : 64), right.data);
    }
    tokenizer_merge *m = tokenizer_merge_of(t, first, second);
    if (m->left < 0) {
        m->left = first;
        m->right = second;
        m->rank = rank;
        m->merged = merged;
    }
    return true;
}

/* "left right", neither of which has spaces. */
GGUF_API bool tokenizer_add_merge_text(tokenizer *t, gguf_text text, int32_t rank) {
    const char *space =
        text.length > 2 ? (const char *)memchr(text.data + 1, ' ', (size_t)text.length - 1) : NULL;
    gguf_text left = text, right = text;
    if (!space) {
        return weight_fail(t->error, "merge %d, %.*s, is not of two tokens", (int)rank,
                           (int)(text.length < 64 ? text.length : 64), text.data);
    }
    left.length = (uint64_t)(space - text.data);
    right.data = space + 1;
    right.length = text.length - left.length - 1;
    return tokenizer_add_merge(t, left, right, rank);
}

/* Once all tokens are there: those of single bytes, and the added ones by length. */
GGUF_API bool tokenizer_finish(tokenizer *t) {
    for (int byte = 0; byte < 256; byte++) {
        const char text = (char)byte;
        t->of_byte[byte] = tokenizer_find(t, &text, 1);
        if (t->of_byte[byte] < 0 && byte >= 32 && byte < 127) {
            return weight_fail(
                t->error, "it has no token for the character '%c': it is not byte-level", byte);
        }
    }
    for (int32_t gap = t->added_count / 2; gap > 0; gap /= 2) { // Shell, 1959; it keeps to integers
        for (int32_t i = gap; i < t->added_count; i++) {
            const int32_t id = t->added[i];
            int32_t k = i;
            for (; k >= gap && t->tokens[t->added[k - gap]].length < t->tokens[id].length;
                 k -= gap) {
                t->added[k] = t->added[k - gap];
            }
            t->added[k] = id;
        }
    }
    return true;
}

// ---- from GGUF ----------------------------------------------------------------------------------

static const struct {
    const char *name;
    tokenizer_kind kind;
} tokenizer_names[] = {
    {"gpt-2", TOKENIZER_GPT2},       {"smollm", TOKENIZER_SMOLLM},
    {"llama-bpe", TOKENIZER_LLAMA3}, {"llama3", TOKENIZER_LLAMA3},
    {"qwen2", TOKENIZER_QWEN2},      {"deepseek-r1-qwen", TOKENIZER_QWEN2},
};

GGUF_API bool tokenizer_find_kind(tokenizer *t, const weight_file *f) {
    const gguf_value *named = gguf_find(f, "tokenizer.ggml.pre");
    const gguf_text model = gguf_text_of(gguf_find(f, "tokenizer.ggml.model"));
    const gguf_text name = gguf_text_of(named);
    if (!gguf_equals(model, "gpt2")) {
        return weight_fail(t->error,
                           "its tokenizer is %s%.*s: only byte-pair encoding (gpt2) can be read",
                           gguf_equals(model, "llama") ? "SentencePiece, " : "",
                           (int)(model.length < 64 ? model.length : 64), model.data);
    }
    t->kind = named ? TOKENIZER_KINDS : TOKENIZER_GPT2;
    for (size_t i = 0; i < sizeof tokenizer_names / sizeof tokenizer_names[0]; i++) {
        t->kind = gguf_equals(name, tokenizer_names[i].name) ? tokenizer_names[i].kind : t->kind;
    }
    t->whole_pieces = t->kind == TOKENIZER_LLAMA3;
    return t->kind != TOKENIZER_KINDS
               ? true
               : weight_fail(t->error,
                             "its text is cut into pieces as by %.*s: there are gpt-2, smollm, "
                             "llama-bpe and qwen2",
                             (int)(name.length < 64 ? name.length : 64), name.data);
}

/* A number of the metadata that is a token; -1: there is none. */
GGUF_API int32_t tokenizer_gguf_id(const tokenizer *t, const weight_file *f, const char *key) {
    const gguf_value *v = gguf_find(f, key);
    const double number = gguf_is_number(v) ? gguf_number_at(v, 0) : -1.0;
    return number >= 0.0 && number < (double)t->count ? (int32_t)number : -1;
}

GGUF_API tokenizer_role tokenizer_gguf_role(const gguf_value *types, uint64_t i) {
    const int type = types ? (int)gguf_number_at(types, i) : 1;
    return type == 1   ? TOKENIZER_NORMAL
           : type == 3 ? TOKENIZER_CONTROL
           : type == 4 ? TOKENIZER_ADDED
                       : TOKENIZER_UNUSED;
}

/* The tokenizer of a GGUF file, which may then be closed. tokenizer_close follows in any case. */
GGUF_API bool tokenizer_of_gguf(tokenizer *t, const weight_file *f) {
    const gguf_value *tokens = gguf_find(f, "tokenizer.ggml.tokens");
    const gguf_value *merges = gguf_find(f, "tokenizer.ggml.merges");
    const gguf_value *types = gguf_find(f, "tokenizer.ggml.token_type");
    memset(t, 0, sizeof *t);
    if (!tokenizer_find_kind(t, f)) {
        return false;
    }
    gguf_cursor texts = gguf_texts_of(tokens), pairs = gguf_texts_of(merges);
    if (texts.failed || pairs.failed ||
        (types && (!types->is_array || types->type != GGUF_I32 || types->count != tokens->count))) {
        return weight_fail(t->error,
                           "it has no list of tokens with their types, or none of merges");
    }
    if (!tokenizer_reserve(t, tokens->count, (uint64_t)(texts.end - texts.at), merges->count)) {
        return false;
    }
    for (uint64_t i = 0; i < tokens->count; i++) {
        tokenizer_add(t, t->count++, gguf_take_text(&texts), tokenizer_gguf_role(types, i));
    }
    for (uint64_t i = 0; i < merges->count; i++) {
        if (!tokenizer_add_merge_text(t, gguf_take_text(&pairs), (int32_t)i)) {
            return false;
        }
    }
    t->begin = tokenizer_gguf_id(t, f, "tokenizer.ggml.bos_token_id");
    t->end = tokenizer_gguf_id(t, f, "tokenizer.ggml.eos_token_id");
    return tokenizer_finish(t);
}

// ---- from tokenizer.json ------------------------------------------------------------------------

#ifdef MODEL_SHAPE_CJSON

/* How text is cut before its bytes are mapped to characters. */
typedef struct tokenizer_cutter {
    const char *type;       // of the pre-tokenizer before ByteLevel; NULL: there is none
    const char *regex;      // of a Split
    bool cuts_bytes;        // ByteLevel itself cuts text as GPT-2 does
    const char *normalizer; // that published files of this kind have; NULL: none
} tokenizer_cutter;

#define TOKENIZER_SPLIT(numbers)                                                                   \
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|" numbers                          \
    "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"

static const tokenizer_cutter tokenizer_cutters[TOKENIZER_KINDS] = {
    {NULL, NULL, true, NULL},                               // GPT-2
    {"Digits", NULL, true, NULL},                           // SmolLM2
    {"Split", TOKENIZER_SPLIT("\\p{N}{1,3}"), false, NULL}, // Llama 3
    {"Split", TOKENIZER_SPLIT("\\p{N}"), false, "NFC"},     // Qwen2
};

GGUF_API bool tokenizer_is_type(const cJSON *object, const char *type) {
    const char *is = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(object, "type"));
    return is && strcmp(is, type) == 0;
}

GGUF_API bool tokenizer_says(const cJSON *object, const char *name, bool otherwise) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(object, name);
    return cJSON_IsBool(item) ? cJSON_IsTrue(item) != 0 : otherwise;
}

/* Whether this is the pre-tokenizer before ByteLevel; NULL: there is none. */
GGUF_API bool tokenizer_is_cutter(const cJSON *first, const tokenizer_cutter *c) {
    const char *regex = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(
        cJSON_GetObjectItemCaseSensitive(first, "pattern"), "Regex"));
    if (!c->type || !tokenizer_is_type(first, c->type)) {
        return !c->type && !first;
    }
    return c->regex
               ? regex && strcmp(regex, c->regex) == 0 && !tokenizer_says(first, "invert", false)
               : tokenizer_says(first, "individual_digits", false);
}

GGUF_API bool tokenizer_json_kind(tokenizer *t, const cJSON *root) {
    const cJSON *cut = cJSON_GetObjectItemCaseSensitive(root, "pre_tokenizer");
    const cJSON *list = cJSON_GetObjectItemCaseSensitive(cut, "pretokenizers");
    const cJSON *first = list ? cJSON_GetArrayItem(list, 0) : NULL;
    const cJSON *bytes = list ? cJSON_GetArrayItem(list, 1) : cut;
    const bool is_cut = tokenizer_says(bytes, "use_regex", true);
    t->kind = TOKENIZER_KINDS;
    if (!tokenizer_is_type(bytes, "ByteLevel") || cJSON_GetArraySize(list) > 2 ||
        tokenizer_says(bytes, "add_prefix_space", true)) {
        return weight_fail(t->error,
                           "its pre_tokenizer is not one of bytes without a space before the text");
    }
    for (int i = 0; i < TOKENIZER_KINDS; i++) {
        const tokenizer_cutter *c = &tokenizer_cutters[i];
        const bool is_it = c->cuts_bytes == is_cut && tokenizer_is_cutter(first, c);
        t->kind = is_it ? (tokenizer_kind)i : t->kind;
    }
    return t->kind != TOKENIZER_KINDS
               ? true
               : weight_fail(t->error,
                             "its pre_tokenizer is not that of GPT-2, SmolLM2, Llama 3 or Qwen2");
}

/* What else a tokenizer.json can have, and this file does not do. */
GGUF_API bool tokenizer_json_check(tokenizer *t, const cJSON *root, const cJSON *model) {
    static const char *const marks[] = {"continuing_subword_prefix", "end_of_word_suffix"};
    const cJSON *normalizer = cJSON_GetObjectItemCaseSensitive(root, "normalizer");
    if (!tokenizer_is_type(model, "BPE") || tokenizer_says(model, "byte_fallback", false)) {
        return weight_fail(t->error, "its model is not byte-level BPE");
    }
    if (cJSON_IsObject(normalizer) && !tokenizer_is_type(normalizer, "NFC")) {
        return weight_fail(t->error, "it has a normalizer other than NFC");
    }
    for (int i = 0; i < 2; i++) {
        const char *mark = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(model, marks[i]));
        if (mark && *mark) {
            return weight_fail(t->error, "it has a %s, %.64s", marks[i], mark);
        }
    }
    return tokenizer_json_kind(t, root);
}

/* A token as the file has it, before all are known. */
typedef struct tokenizer_draft {
    gguf_text text;
    tokenizer_role role;
} tokenizer_draft;

/* The number of a token in JSON; -1 if it is none. */
GGUF_API int32_t tokenizer_json_id(const cJSON *item) {
    const double value = cJSON_IsNumber(item) ? item->valuedouble : -1.0;
    return value >= 0.0 && value < (double)(1 << 26) ? (int32_t)value : -1;
}

/* Notes a token; with drafts NULL only counts: *count is one more than the largest number. */
GGUF_API bool tokenizer_json_note(tokenizer *t, const cJSON *number, const char *text,
                                  tokenizer_role role, tokenizer_draft *drafts, int64_t *count,
                                  uint64_t *bytes) {
    const int32_t id = tokenizer_json_id(number);
    if (id < 0 || !text) {
        return weight_fail(t->error, "token %.64s has no number from 0 to 67108863",
                           text ? text : "?");
    }
    if (drafts) {
        drafts[id].text.data = text;
        drafts[id].text.length = strlen(text);
        drafts[id].role = role;
    }
    *count = id >= *count ? (int64_t)id + 1 : *count;
    *bytes += strlen(text);
    return true;
}

GGUF_API bool tokenizer_json_tokens(tokenizer *t, const cJSON *root, const cJSON *model,
                                    tokenizer_draft *drafts, int64_t *count, uint64_t *bytes) {
    const cJSON *vocabulary = cJSON_GetObjectItemCaseSensitive(model, "vocab");
    const cJSON *added = cJSON_GetObjectItemCaseSensitive(root, "added_tokens");
    bool is_read = cJSON_IsObject(vocabulary) ? true : weight_fail(t->error, "it has no vocab");
    for (const cJSON *i = vocabulary ? vocabulary->child : NULL; i && is_read; i = i->next) {
        is_read = tokenizer_json_note(t, i, i->string, TOKENIZER_NORMAL, drafts, count, bytes);
    }
    for (const cJSON *i = added ? added->child : NULL; i && is_read; i = i->next) {
        const char *text = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(i, "content"));
        const tokenizer_role role =
            tokenizer_says(i, "special", false) ? TOKENIZER_CONTROL : TOKENIZER_ADDED;
        if (tokenizer_says(i, "lstrip", false) || tokenizer_says(i, "rstrip", false) ||
            tokenizer_says(i, "single_word", false)) {
            return weight_fail(t->error, "token %.64s takes spaces or words beside it",
                               text ? text : "?");
        }
        is_read = tokenizer_json_note(t, cJSON_GetObjectItemCaseSensitive(i, "id"), text, role,
                                      drafts, count, bytes);
    }
    return is_read;
}

GGUF_API gguf_text tokenizer_json_text(const cJSON *item) {
    gguf_text text = {"", 0};
    if (cJSON_IsString(item)) {
        text.data = item->valuestring;
        text.length = strlen(item->valuestring);
    }
    return text;
}

/* "left right", or in newer files ["left", "right"]. */
GGUF_API bool tokenizer_json_merges(tokenizer *t, const cJSON *merges) {
    int32_t rank = 0;
    for (const cJSON *i = merges->child; i; i = i->next, rank++) {
        const cJSON *left = cJSON_IsArray(i) ? i->child : NULL, *right = left ? left->next : NULL;
        if (left ? !tokenizer_add_merge(t, tokenizer_json_text(left), tokenizer_json_text(right),
                                        rank)
                 : !tokenizer_add_merge_text(t, tokenizer_json_text(i), rank)) {
            return false;
        }
    }
    return true;
}

GGUF_API bool tokenizer_of_root(tokenizer *t, const cJSON *root) {
    const cJSON *model = cJSON_GetObjectItemCaseSensitive(root, "model");
    const cJSON *merges = cJSON_GetObjectItemCaseSensitive(model, "merges");
    int64_t count = 0;
    uint64_t bytes = 0;
    if (!tokenizer_json_check(t, root, model) ||
        !tokenizer_json_tokens(t, root, model, NULL, &count, &bytes)) {
        return false;
    }
    if (!cJSON_IsArray(merges)) {
        return weight_fail(t->error, "it has no merges");
    }
    const int most = 64 * (cJSON_GetArraySize(merges) + 4096); // numbers far beyond are a mistake
    if (count > most) {
        return weight_fail(t->error, "a token has the number %lld", (long long)count - 1);
    }
    if (!tokenizer_reserve(t, (uint64_t)count, bytes, (uint64_t)cJSON_GetArraySize(merges))) {
        return false;
    }
    tokenizer_draft *drafts = (tokenizer_draft *)calloc((size_t)count, sizeof *drafts);
    bool is_read = drafts ? tokenizer_json_tokens(t, root, model, drafts, &count, &bytes)
                          : weight_fail(t->error, "no memory");
    for (int64_t i = 0; i < count && is_read; i++) {
        const gguf_text none = {"", 0};
        const bool has = drafts[i].text.data != NULL;
        tokenizer_add(t, t->count++, has ? drafts[i].text : none,
                      has ? drafts[i].role : TOKENIZER_UNUSED);
    }
    free(drafts);
    t->whole_pieces = tokenizer_says(model, "ignore_merges", false);
    t->begin = t->end = -1; // no part of such a file
    return is_read && tokenizer_json_merges(t, merges) && tokenizer_finish(t);
}

/* The tokenizer in the text of a tokenizer.json. tokenizer_close follows in any case. */
GGUF_API bool tokenizer_of_json(tokenizer *t, const char *text, uint64_t length) {
    memset(t, 0, sizeof *t);
    cJSON *root = cJSON_ParseWithLength(text, (size_t)length);
    const bool is_read = cJSON_IsObject(root) ? tokenizer_of_root(t, root)
                                              : weight_fail(t->error, "tokenizer.json is not JSON");
    cJSON_Delete(root);
    return is_read;
}

#else

GGUF_API bool tokenizer_of_json(tokenizer *t, const char *text, uint64_t length) {
    (void)text, (void)length;
    memset(t, 0, sizeof *t);
    return weight_fail(t->error,
                       "this program was built without cJSON (libcjson-dev), which reads it");
}

#endif

// ---- text to tokens -----------------------------------------------------------------------------

/* Two neighbours of a piece that can be one token. */
typedef struct tokenizer_pair {
    int32_t at; // the left one
    tokenizer_merge merge;
} tokenizer_pair;

/* A piece while its tokens are merged: a list of them, and a heap of pairs. */
typedef struct tokenizer_work {
    int32_t *id, *before, *after; // of each byte; id < 0: merged into the one before
    tokenizer_pair *heap;
    int64_t capacity, pairs;
} tokenizer_work;

GGUF_API bool tokenizer_grow(tokenizer *t, tokenizer_work *w, int64_t bytes) {
    if (bytes <= w->capacity) {
        return true;
    }
    free(w->id);
    free(w->heap);
    w->capacity = 2 * bytes + 64;
    w->id = (int32_t *)malloc(3 * (size_t)w->capacity * sizeof *w->id);
    w->heap = (tokenizer_pair *)malloc(3 * (size_t)w->capacity * sizeof *w->heap);
    if (!w->id || !w->heap) {
        w->capacity = 0;
        return weight_fail(t->error, "no memory for a piece of %lld bytes", (long long)bytes);
    }
    w->before = w->id + w->capacity;
    w->after = w->before + w->capacity;
    return true;
}

GGUF_API bool tokenizer_is_before(const tokenizer_pair *a, const tokenizer_pair *b) {
    return a->merge.rank != b->merge.rank ? a->merge.rank < b->merge.rank : a->at < b->at;
}

/* Adds the pair that begins at a token, if it can be merged. */
GGUF_API void tokenizer_push(const tokenizer *t, tokenizer_work *w, int32_t at) {
    const int32_t next = at < 0 ? -1 : w->after[at];
    if (next < 0) {
        return;
    }
    tokenizer_pair pair;
    pair.at = at;
    pair.merge = *tokenizer_merge_of(t, w->id[at], w->id[next]);
    if (pair.merge.left < 0) {
        return;
    }
    int64_t i = w->pairs++;
    for (; i > 0 && tokenizer_is_before(&pair, &w->heap[(i - 1) / 2]); i = (i - 1) / 2) {
        w->heap[i] = w->heap[(i - 1) / 2];
    }
    w->heap[i] = pair;
}

/* Takes the pair that comes first. */
GGUF_API tokenizer_pair tokenizer_pop(tokenizer_work *w) {
    const tokenizer_pair first = w->heap[0], last = w->heap[--w->pairs];
    int64_t i = 0;
    for (int64_t child = 1; child < w->pairs; child = 2 * i + 1) {
        child += child + 1 < w->pairs && tokenizer_is_before(&w->heap[child + 1], &w->heap[child]);
        if (!tokenizer_is_before(&w->heap[child], &last)) {
            break;
        }
        w->heap[i] = w->heap[child];
        i = child;
    }
    w->heap[i] = last;
    return first;
}

GGUF_API bool tokenizer_append(tokenizer *t, tokenizer_ids *to, int32_t id) {
    if (to->count == to->capacity) {
        const int64_t capacity = 2 * to->capacity + 256;
        int32_t *ids = (int32_t *)realloc(to->ids, (size_t)capacity * sizeof *ids);
        if (!ids) {
            return weight_fail(t->error, "no memory for %lld tokens", (long long)capacity);
        }
        to->ids = ids;
        to->capacity = capacity;
    }
    to->ids[to->count++] = id;
    return true;
}

/* Its bytes as a list; those that have no token are left out. */
GGUF_API int32_t tokenizer_spell(const tokenizer *t, tokenizer_work *w, const uint8_t *piece,
                                 int64_t bytes) {
    int32_t count = 0;
    for (int64_t i = 0; i < bytes; i++) {
        if (t->of_byte[piece[i]] >= 0) {
            w->id[count] = t->of_byte[piece[i]];
            w->before[count] = count - 1;
            w->after[count] = count + 1;
            count++;
        }
    }
    if (count > 0) {
        w->after[count - 1] = -1;
    }
    return count;
}

/* Merges neighbours, those of the lowest rank first and then from the left, until none is left. */
GGUF_API bool tokenizer_encode_piece(tokenizer *t, tokenizer_work *w, const uint8_t *piece,
                                     int64_t bytes, tokenizer_ids *to) {
    const int32_t whole =
        t->whole_pieces ? tokenizer_find(t, (const char *)piece, (uint64_t)bytes) : -1;
    if (whole >= 0) {
        return tokenizer_append(t, to, whole);
    }
    if (!tokenizer_grow(t, w, bytes)) {
        return false;
    }
    const int32_t count = tokenizer_spell(t, w, piece, bytes);
    w->pairs = 0;
    for (int32_t i = 0; i < count; i++) {
        tokenizer_push(t, w, i);
    }
    while (w->pairs > 0) {
        const tokenizer_pair pair = tokenizer_pop(w);
        const int32_t next = w->id[pair.at] == pair.merge.left ? w->after[pair.at] : -1;
        if (next < 0 || w->id[next] != pair.merge.right) {
            continue; // one of them has been merged with another
        }
        w->id[pair.at] = pair.merge.merged;
        w->id[next] = -1;
        w->after[pair.at] = w->after[next];
        if (w->after[next] >= 0) {
            w->before[w->after[next]] = pair.at;
        }
        tokenizer_push(t, w, w->before[pair.at]);
        tokenizer_push(t, w, pair.at);
    }
    bool is_done = true;
    for (int32_t i = count > 0 ? 0 : -1; i >= 0 && is_done; i = w->after[i]) {
        is_done = tokenizer_append(t, to, w->id[i]);
    }
    return is_done;
}

/* The added token that is at a place of a text; -1: none. */
GGUF_API int32_t tokenizer_added_at(const tokenizer *t, const uint8_t *at, const uint8_t *end,
                                    bool controls) {
    for (int32_t i = 0; i < t->added_count && t->begins_added[*at]; i++) {
        const tokenizer_token *token = &t->tokens[t->added[i]];
        if ((controls || token->role == TOKENIZER_ADDED) && token->length <= (uint64_t)(end - at) &&
            memcmp(t->text + token->begin, at, token->length) == 0) {
            return t->added[i];
        }
    }
    return -1;
}

GGUF_API bool tokenizer_encode_plain(tokenizer *t, tokenizer_work *w, const uint8_t *at,
                                     const uint8_t *end, tokenizer_ids *to) {
    tokenizer_cut cut = {at, t->kind == TOKENIZER_SMOLLM ? at : end, end};
    bool is_done = true;
    while (cut.at < end && is_done) {
        const uint8_t *next = tokenizer_piece(t->kind, &cut);
        is_done = tokenizer_encode_piece(t, w, cut.at, next - cut.at, to);
        cut.at = next;
    }
    return is_done;
}

/* Adds the tokens of a text to `to`, which is all 0 at first and whose ids are to be freed. With
   `controls`, tokens such as <|im_start|> are found in the text, which must then be one's own; without,
   they are text like any other. */
GGUF_API bool tokenizer_encode(tokenizer *t, const char *text, uint64_t length, bool controls,
                               tokenizer_ids *to) {
    const uint8_t *plain = (const uint8_t *)text, *end = plain + length;
    tokenizer_work w;
    memset(&w, 0, sizeof w);
    if (length > 1u << 30) {
        return weight_fail(t->error, "a text of %llu bytes is too long: give parts of up to 1 GiB",
                           (unsigned long long)length);
    }
    bool is_done = true;
    for (const uint8_t *at = plain; at < end && is_done;) {
        const int32_t id = tokenizer_added_at(t, at, end, controls);
        if (id >= 0) {
            is_done = tokenizer_encode_plain(t, &w, plain, at, to) && tokenizer_append(t, to, id);
            at += t->tokens[id].length;
            plain = at;
        } else {
            at++;
        }
    }
    is_done = is_done && tokenizer_encode_plain(t, &w, plain, end, to);
    free(w.id);
    free(w.heap);
    return is_done;
}

// ---- tokens to text -----------------------------------------------------------------------------

/* The bytes of a token, which need not be whole characters; none for what is no token. */
GGUF_API gguf_text tokenizer_text(const tokenizer *t, int32_t id) {
    gguf_text text = {"", 0};
    if (id >= 0 && id < t->count) {
        text.data = t->text + t->tokens[id].begin;
        text.length = t->tokens[id].length;
    }
    return text;
}

// ---- to tokenizer.json --------------------------------------------------------------------------

#ifdef MODEL_SHAPE_CJSON

/* The character that stands for a byte: the inverse of tokenizer_byte_of. */
GGUF_API uint32_t tokenizer_point_of(uint32_t byte) {
    const bool is_printable = (byte >= 33 && byte <= 126) || (byte >= 161 && byte != 173);
    return is_printable ? byte : 256 + (byte < 33 ? byte : byte < 161 ? byte - 127 + 33 : 67);
}

/* The text of a token in JSON, which has up to twice its bytes, with a 0 at its end, which is returned. */
GGUF_API char *tokenizer_spell_out(const tokenizer *t, int32_t id, char *to) {
    const gguf_text text = tokenizer_text(t, id);
    const bool is_bytes = t->tokens[id].role == TOKENIZER_NORMAL;
    for (uint64_t i = 0; i < text.length; i++) {
        const uint32_t point = is_bytes ? tokenizer_point_of((uint8_t)text.data[i]) : 0;
        if (point < 0x80) {
            *to++ = text.data[i];
        } else {
            *to++ = (char)(0xc0 | point >> 6);
            *to++ = (char)(0x80 | (point & 0x3f));
        }
    }
    *to = 0;
    return to;
}

/* Whether a string of JSON can have it: UTF-8, and no byte of 0, where those of cJSON end. */
GGUF_API bool tokenizer_is_string(gguf_text text) {
    const uint8_t *at = (const uint8_t *)text.data, *end = at + text.length;
    bool is_string = true;
    while (at < end && is_string) {
        int bytes;
        const uint32_t point = tokenizer_point(at, end, &bytes);
        is_string = point != 0 && (point != 0xfffd || bytes > 1);
        at += bytes;
    }
    return is_string;
}

/* A file that is being made. */
typedef struct tokenizer_writer {
    const tokenizer *t;
    char *error;
    char *text; // room for any token, or two that are merged
} tokenizer_writer;

/* Whether a token of the roles ADDED and CONTROL can be told from others by its text. */
GGUF_API bool tokenizer_check_added(const tokenizer_writer *w, int32_t id) {
    const gguf_text text = tokenizer_text(w->t, id);
    uint32_t length;
    const bool is_bytes = tokenizer_to_bytes(text, w->text, &length);
    const int32_t other = is_bytes ? tokenizer_find(w->t, w->text, length) : -1;
    if (other >= 0) {
        return weight_fail(w->error, "tokens %ld and %ld are both %.*s", (long)other, (long)id,
                           (int)(text.length < 64 ? text.length : 64), text.data);
    }
    return tokenizer_is_string(text)
               ? true
               : weight_fail(w->error, "added token %ld is not UTF-8, or has a byte of 0",
                             (long)id);
}

GGUF_API bool tokenizer_json_add_added(const tokenizer_writer *w, cJSON *list, int32_t id) {
    static const char *const nots[] = {"single_word", "lstrip", "rstrip", "normalized"};
    cJSON *token = cJSON_CreateObject();
    cJSON_AddItemToArray(list, token);
    cJSON_AddNumberToObject(token, "id", (double)id);
    cJSON_AddStringToObject(token, "content", w->text);
    for (int i = 0; i < 4; i++) {
        cJSON_AddFalseToObject(token, nots[i]);
    }
    return cJSON_AddBoolToObject(token, "special", w->t->tokens[id].role == TOKENIZER_CONTROL) !=
           NULL;
}

/* Added tokens are in the vocabulary, too: else tokenizers numbers them anew, after all others. What is
   never the result is left out, as in files that have fewer tokens than the model. */
GGUF_API bool tokenizer_json_add_tokens(const tokenizer_writer *w, cJSON *added, cJSON *model) {
    const tokenizer *t = w->t;
    cJSON *vocabulary = cJSON_AddObjectToObject(model, "vocab");
    for (int32_t i = 0; i < t->count; i++) {
        const tokenizer_token *token = &t->tokens[i];
        const bool is_normal = token->role == TOKENIZER_NORMAL;
        if (token->role == TOKENIZER_UNUSED ||
            (is_normal && tokenizer_find(t, t->text + token->begin, token->length) != i)) {
            continue;
        }
        if (!is_normal && !tokenizer_check_added(w, i)) {
            return false;
        }
        tokenizer_spell_out(t, i, w->text);
        if (!cJSON_AddNumberToObject(vocabulary, w->text, (double)i) ||
            (!is_normal && !tokenizer_json_add_added(w, added, i))) {
            return weight_fail(w->error, "no memory");
        }
    }
    return true;
}

/* By rank. */
GGUF_API bool tokenizer_json_add_merges(const tokenizer_writer *w, cJSON *model) {
    const tokenizer *t = w->t;
    cJSON *merges = cJSON_AddArrayToObject(model, "merges");
    int32_t ranks = 0;
    for (uint64_t i = 0; i < t->merge_places; i++) {
        ranks = t->merges[i].rank >= ranks ? t->merges[i].rank + 1 : ranks;
    }
    const tokenizer_merge **by_rank =
        (const tokenizer_merge **)calloc((size_t)ranks + 1, sizeof *by_rank);
    bool is_whole = by_rank != NULL;
    for (uint64_t i = 0; i < t->merge_places && is_whole; i++) {
        by_rank[t->merges[i].left < 0 ? ranks : t->merges[i].rank] = &t->merges[i];
    }
    for (int32_t i = 0; i < ranks && is_whole; i++) {
        if (by_rank[i]) {
            char *space = tokenizer_spell_out(t, by_rank[i]->left, w->text);
            *space = ' ';
            tokenizer_spell_out(t, by_rank[i]->right, space + 1);
            cJSON *merge = cJSON_CreateString(w->text);
            cJSON_AddItemToArray(merges, merge);
            is_whole = merge != NULL;
        }
    }
    free(by_rank);
    return is_whole ? true : weight_fail(w->error, "no memory");
}

GGUF_API cJSON *tokenizer_json_bytes(bool has_space, bool cuts) {
    cJSON *bytes = cJSON_CreateObject();
    cJSON_AddStringToObject(bytes, "type", "ByteLevel");
    cJSON_AddBoolToObject(bytes, "add_prefix_space", has_space);
    cJSON_AddTrueToObject(bytes, "trim_offsets");
    cJSON_AddBoolToObject(bytes, "use_regex", cuts);
    return bytes;
}

GGUF_API cJSON *tokenizer_json_cutter(const tokenizer_cutter *c) {
    cJSON *bytes = tokenizer_json_bytes(false, c->cuts_bytes);
    if (!c->type) {
        return bytes;
    }
    cJSON *cut = cJSON_CreateObject(), *first = cJSON_CreateObject();
    cJSON_AddStringToObject(cut, "type", "Sequence");
    cJSON *list = cJSON_AddArrayToObject(cut, "pretokenizers");
    cJSON_AddItemToArray(list, first);
    cJSON_AddItemToArray(list, bytes);
    cJSON_AddStringToObject(first, "type", c->type);
    if (c->regex) {
        cJSON *pattern = cJSON_AddObjectToObject(first, "pattern");
        cJSON_AddStringToObject(pattern, "Regex", c->regex);
        cJSON_AddStringToObject(first, "behavior", "Isolated");
        cJSON_AddFalseToObject(first, "invert");
    } else {
        cJSON_AddTrueToObject(first, "individual_digits");
    }
    return cut;
}

/* Keys in the order in which tokenizers writes them. */
GGUF_API bool tokenizer_to_root(const tokenizer_writer *w, cJSON *root) {
    static const char *const nulls[] = {"dropout", "unk_token", "continuing_subword_prefix",
                                        "end_of_word_suffix"};
    const tokenizer_cutter *c = &tokenizer_cutters[w->t->kind];
    cJSON_AddStringToObject(root, "version", "1.0");
    cJSON_AddNullToObject(root, "truncation");
    cJSON_AddNullToObject(root, "padding");
    cJSON *added = cJSON_AddArrayToObject(root, "added_tokens");
    if (c->normalizer) {
        cJSON_AddStringToObject(cJSON_AddObjectToObject(root, "normalizer"), "type", c->normalizer);
    } else {
        cJSON_AddNullToObject(root, "normalizer");
    }
    cJSON_AddItemToObject(root, "pre_tokenizer", tokenizer_json_cutter(c));
    cJSON_AddNullToObject(root, "post_processor");
    cJSON_AddItemToObject(root, "decoder", tokenizer_json_bytes(true, true));
    cJSON *model = cJSON_AddObjectToObject(root, "model");
    cJSON_AddStringToObject(model, "type", "BPE");
    for (int i = 0; i < 4; i++) {
        cJSON_AddNullToObject(model, nulls[i]);
    }
    cJSON_AddFalseToObject(model, "fuse_unk");
    cJSON_AddFalseToObject(model, "byte_fallback");
    cJSON_AddBoolToObject(model, "ignore_merges", w->t->whole_pieces);
    return tokenizer_json_add_tokens(w, added, model) && tokenizer_json_add_merges(w, model);
}

/* The text of an object, which is deleted; NULL: it has an error, or there is no memory for one. */
GGUF_API char *tokenizer_print(cJSON *root, bool is_whole, char *error) {
    char *text = is_whole ? cJSON_PrintUnformatted(root) : NULL;
    if (is_whole && !text) {
        weight_fail(error, "no memory");
    }
    cJSON_Delete(root);
    return text;
}

/* The text of a tokenizer.json, which tokenizer_of_json reads as well as the Python packages tokenizers
   and transformers; to be freed. NULL: `error`, of WEIGHT_ERROR bytes, says why there is none. */
GGUF_API char *tokenizer_write_json(const tokenizer *t, char *error) {
    cJSON *root = cJSON_CreateObject();
    tokenizer_writer w = {t, error, NULL};
    w.text = (char *)malloc(2 * (size_t)t->text_bytes + 2);
    const bool is_whole =
        w.text && root ? tokenizer_to_root(&w, root) : weight_fail(error, "no memory");
    free(w.text);
    return tokenizer_print(root, is_whole, error);
}

/* A text of GGUF; nothing if it is empty. */
GGUF_API bool tokenizer_json_add_text(cJSON *to, const char *name, gguf_text text, char *error) {
    char *copy = tokenizer_is_string(text) ? (char *)malloc((size_t)text.length + 1) : NULL;
    if (!copy) {
        return weight_fail(error, "%s is not UTF-8, or there is no memory for it", name);
    }
    memcpy(copy, text.data, (size_t)text.length);
    copy[text.length] = 0;
    const bool is_added = text.length == 0 || cJSON_AddStringToObject(to, name, copy);
    free(copy);
    return is_added ? true : weight_fail(error, "no memory");
}

/* A token that has a name; one that is text like any other would become one that is found in text. */
GGUF_API bool tokenizer_json_add_named(const tokenizer *t, cJSON *to, const char *name, int32_t id,
                                       char *error) {
    const bool is_added = id >= 0 && (t->tokens[id].role == TOKENIZER_CONTROL ||
                                      t->tokens[id].role == TOKENIZER_ADDED);
    return !is_added || tokenizer_json_add_text(to, name, tokenizer_text(t, id), error);
}

/* The text of the tokenizer_config.json that belongs to it, for transformers, with what a GGUF file says
   of chats and of a token at the beginning; to be freed. Errors are as above. */
GGUF_API char *tokenizer_write_config(const tokenizer *t, const weight_file *f, char *error) {
    const gguf_text chat = gguf_text_of(gguf_find(f, "tokenizer.chat_template"));
    const gguf_value *adds = gguf_find(f, "tokenizer.ggml.add_bos_token");
    cJSON *root = cJSON_CreateObject();
    cJSON_AddStringToObject(root, "tokenizer_class", "PreTrainedTokenizerFast");
    cJSON_AddFalseToObject(root, "clean_up_tokenization_spaces");
    if (gguf_is_number(adds)) {
        cJSON_AddBoolToObject(root, "add_bos_token", gguf_number_at(adds, 0) > 0.0);
    }
    const bool is_whole = tokenizer_json_add_named(t, root, "bos_token", t->begin, error) &&
                          tokenizer_json_add_named(t, root, "eos_token", t->end, error) &&
                          tokenizer_json_add_text(root, "chat_template", chat, error);
    return tokenizer_print(root, is_whole, error);
}

#else

GGUF_API char *tokenizer_write_json(const tokenizer *t, char *error) {
    (void)t;
    weight_fail(error, "this program was built without cJSON (libcjson-dev), which writes it");
    return NULL;
}

GGUF_API char *tokenizer_write_config(const tokenizer *t, const weight_file *f, char *error) {
    (void)f;
    return tokenizer_write_json(t, error);
}

#endif

#endif // MEMSCALE_TOKENIZER_H
