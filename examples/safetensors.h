/*  safetensors.h - opens published weights: a file of the format safetensors, several with their index
    (model.safetensors.index.json), or a GGUF file.

    Format: the public README of the safetensors repository. A file is the length of a header in 8
    bytes, the header in JSON, and the data that it describes. ms_load of memscale.h reads what
    ms_save has written; this reads what others have, in place.

    Compiled with MODEL_SHAPE_CJSON, and linked with cJSON (-lcjson), it reads headers; without, only
    GGUF. It is C and C++. */
#ifndef MEMSCALE_SAFETENSORS_H
#define MEMSCALE_SAFETENSORS_H

#include "gguf.h"

#ifdef MODEL_SHAPE_CJSON
#include <cjson/cJSON.h>
#endif

enum { SAFETENSORS_HEADER = 100000000, SAFETENSORS_PATH = 4096 };

#ifdef MODEL_SHAPE_CJSON

// ---- a file -------------------------------------------------------------------------------------

/* A whole number of JSON that a double holds exactly. */
GGUF_API bool safetensors_number(const cJSON *item, uint64_t *number) {
    const double value = cJSON_IsNumber(item) ? item->valuedouble : -1.0;
    if (!(value >= 0.0 && value <= 9007199254740992.0)) {
        return false;
    }
    *number = (uint64_t)value;
    return value - (double)*number <= 0.0;
}

GGUF_API bool safetensors_read_shape(weight_file *f, weight_entry *e, const cJSON *shape) {
    const int rank = cJSON_GetArraySize(shape);
    if (!cJSON_IsArray(shape) || rank > WEIGHT_RANK) {
        return weight_fail(f->error, "%s: its shape is no list of at most %d dims", e->name,
                           WEIGHT_RANK);
    }
    for (const cJSON *dim = shape->child; dim; dim = dim->next) {
        uint64_t number;
        if (!safetensors_number(dim, &number)) {
            return weight_fail(f->error, "%s: its shape has what is no whole number", e->name);
        }
        e->dim[e->rank++] = (int64_t)number;
    }
    return true;
}

/* One item of the header; data is what follows the header. */
GGUF_API bool safetensors_read_entry(weight_file *f, const cJSON *item, const uint8_t *data,
                                     uint64_t size) {
    const char *type = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(item, "dtype"));
    const cJSON *offsets = cJSON_GetObjectItemCaseSensitive(item, "data_offsets");
    uint64_t begin = 0, end = 0;
    weight_entry *e = weight_append(f);
    if (!e || !weight_set_name(f, e, item->string, strlen(item->string))) {
        return false;
    }
    for (int i = 0; i < WEIGHT_TYPES && type; i++) {
        const bool is_of_json = weight_types[i].elements == 1;
        e->type =
            is_of_json && strcmp(type, weight_types[i].name) == 0 ? &weight_types[i] : e->type;
    }
    if (!e->type) {
        return weight_fail(f->error, "%s is of type %s, which is unknown", e->name,
                           type ? type : "(none)");
    }
    if (!safetensors_read_shape(f, e, cJSON_GetObjectItemCaseSensitive(item, "shape")) ||
        !weight_measure(f, e)) {
        return false;
    }
    if (cJSON_GetArraySize(offsets) != 2 || !safetensors_number(offsets->child, &begin) ||
        !safetensors_number(offsets->child->next, &end) || begin > end || end > size) {
        return weight_fail(f->error,
                           "%s: its data_offsets are no two within the %llu bytes of data", e->name,
                           (unsigned long long)size);
    }
    if (end - begin != e->bytes) {
        return weight_fail(f->error, "%s has %llu bytes; its shape and type need %llu", e->name,
                           (unsigned long long)(end - begin), (unsigned long long)e->bytes);
    }
    e->data = data + begin;
    return true;
}

/* Adds what is in these bytes, which must stay where they are until weight_close, and which sorting
   must follow. `what` is for errors: the name of the file. */
GGUF_API bool safetensors_add(weight_file *f, const weight_bytes *bytes, const char *what) {
    const uint64_t length = bytes->size >= 8 ? gguf_load(bytes->data, 8) : 0;
    if (length < 2 || length > SAFETENSORS_HEADER || length > bytes->size - 8 ||
        bytes->data[8] != '{') {
        return weight_fail(f->error, "%s is neither safetensors nor GGUF, or is cut off", what);
    }
    const uint8_t *data = bytes->data + 8 + length;
    const uint64_t size = bytes->size - 8 - length;
    cJSON *header = cJSON_ParseWithLength((const char *)bytes->data + 8, (size_t)length);
    bool is_read =
        cJSON_IsObject(header) ? true : weight_fail(f->error, "%s: its header is not JSON", what);
    uint64_t sum = 0;
    for (const cJSON *item = header ? header->child : NULL; item && is_read; item = item->next) {
        if (item->string && strcmp(item->string, "__metadata__") != 0) {
            is_read = safetensors_read_entry(f, item, data, size);
            sum += is_read ? f->entries[f->count - 1].bytes : 0;
        }
    }
    cJSON_Delete(header);
    return !is_read || sum == size
               ? is_read
               : weight_fail(f->error, "%s has %llu bytes of data, its tensors %llu", what,
                             (unsigned long long)size, (unsigned long long)sum);
}

// ---- several, by their index --------------------------------------------------------------------

/* Opens the file of this name in the folder of the index. */
typedef struct safetensors_opener {
    weight_bytes *(*open)(weight_file *f, const char *name, void *user);
    void *user;
} safetensors_opener;

/* Whether the item before has named the same file: entries of a file are mostly together, and any
   file is opened once. */
GGUF_API bool safetensors_is_named_before(const cJSON *item) {
    for (const cJSON *other = item->prev; other->next; other = other->prev) {
        if (cJSON_IsString(other) && strcmp(other->valuestring, item->valuestring) == 0) {
            return true;
        }
    }
    return false;
}

GGUF_API bool safetensors_add_named(weight_file *f, const cJSON *item, safetensors_opener opener) {
    const char *name = cJSON_GetStringValue(item);
    if (!name || !*name || strpbrk(name, "/\\") || strcmp(name, "..") == 0) {
        return weight_fail(f->error, "the index has %s in no file of its folder", item->string);
    }
    if (safetensors_is_named_before(item)) {
        return true;
    }
    const weight_bytes *bytes = opener.open(f, name, opener.user);
    return bytes && safetensors_add(f, bytes, name);
}

/* Whether the files have what the index says. */
GGUF_API bool safetensors_check_index(weight_file *f, const cJSON *map) {
    for (const cJSON *item = map->child; item; item = item->next) {
        if (!weight_find(f, item->string)) {
            return weight_fail(f->error, "%s, which the index says has %s, does not",
                               item->valuestring, item->string);
        }
    }
    return true;
}

GGUF_API bool safetensors_add_index(weight_file *f, const char *text, uint64_t length,
                                    safetensors_opener opener) {
    cJSON *index = cJSON_ParseWithLength(text, (size_t)length);
    const cJSON *map = cJSON_GetObjectItemCaseSensitive(index, "weight_map");
    bool is_read = cJSON_IsObject(map) && map->child
                       ? true
                       : weight_fail(f->error, "the index is no JSON with a \"weight_map\"");
    for (const cJSON *item = map ? map->child : NULL; item && is_read; item = item->next) {
        is_read = safetensors_add_named(f, item, opener);
    }
    is_read = is_read && weight_sort(f) && safetensors_check_index(f, map);
    cJSON_Delete(index);
    return is_read;
}

GGUF_API weight_bytes *safetensors_open_beside(weight_file *f, const char *name, void *user) {
    const char *index = (const char *)user, *slash = strrchr(index, '/');
    char path[SAFETENSORS_PATH];
    const int length =
        snprintf(path, sizeof path, "%.*s%s", slash ? (int)(slash + 1 - index) : 0, index, name);
    if (length < 0 || (size_t)length >= sizeof path) {
        weight_fail(f->error, "%s: the path is too long", name);
        return NULL;
    }
    return weight_add_file(f, path);
}

GGUF_API bool safetensors_open_index(weight_file *f, const char *path) {
    char copy[SAFETENSORS_PATH];
    safetensors_opener opener = {safetensors_open_beside, copy};
    weight_bytes text;
    memset(&text, 0, sizeof text);
    snprintf(copy, sizeof copy, "%s", path);
    const bool is_read = weight_slurp(f, path, &text) &&
                         safetensors_add_index(f, (const char *)text.data, text.size, opener);
    free(text.data);
    return is_read;
}

#else

GGUF_API bool safetensors_refuse(char *error, const char *what) {
    return weight_fail(
        error, "%s: this program was built without cJSON (libcjson-dev): it reads GGUF alone",
        what);
}

GGUF_API bool safetensors_add(weight_file *f, const weight_bytes *bytes, const char *what) {
    (void)bytes;
    return safetensors_refuse(f->error, what);
}

GGUF_API bool safetensors_open_index(weight_file *f, const char *path) {
    return safetensors_refuse(f->error, path);
}

#endif

// ---- any ----------------------------------------------------------------------------------------

GGUF_API bool weight_is_file(const char *path) {
    FILE *file = fopen(path, "rb");
    const bool is_there = file && fgetc(file) != EOF;
    if (file) {
        fclose(file);
    }
    return is_there;
}

/* False also where the platform does not tell. */
GGUF_API bool weight_is_folder(const char *path) {
#ifdef GGUF_MMAP
    struct stat found;
    return stat(path, &found) == 0 && S_ISDIR(found.st_mode);
#else
    (void)path;
    return false;
#endif
}

/* The path of a file that lies beside weights, or in their folder. */
GGUF_API void weight_path_beside(const char *path, const char *name,
                                 char beside[SAFETENSORS_PATH]) {
    const char *slash = strrchr(path, '/');
    snprintf(beside, SAFETENSORS_PATH, "%s/%s", path, name);
    if (!weight_is_folder(path) && !weight_is_file(beside)) {
        snprintf(beside, SAFETENSORS_PATH, "%.*s%s", slash ? (int)(slash + 1 - path) : 0, path,
                 name);
    }
}

GGUF_API bool weight_open_one(weight_file *f, const char *path) {
    const size_t length = strlen(path);
    if (length > 5 && strcmp(path + length - 5, ".json") == 0) {
        return safetensors_open_index(f, path);
    }
    const weight_bytes *bytes = weight_add_file(f, path);
    return bytes && (gguf_is(bytes) ? gguf_open(f, bytes)
                                    : safetensors_add(f, bytes, path) && weight_sort(f));
}

/* Opens a GGUF file, a safetensors file, an index, or a folder that has model.safetensors or its index.
   f need not have a value before; weight_close follows, also after an error. */
GGUF_API bool weight_open(weight_file *f, const char *path) {
    static const char *const names[] = {"model.safetensors.index.json", "model.safetensors"};
    char inner[SAFETENSORS_PATH];
    memset(f, 0, sizeof *f);
    for (int i = 0; i < 2; i++) {
        const int length = snprintf(inner, sizeof inner, "%s/%s", path, names[i]);
        if (length > 0 && (size_t)length < sizeof inner && weight_is_file(inner)) {
            return weight_open_one(f, inner);
        }
    }
    return weight_is_folder(path) ? weight_fail(f->error, "the folder %s has neither %s nor %s",
                                                path, names[1], names[0])
                                  : weight_open_one(f, path);
}

#endif // MEMSCALE_SAFETENSORS_H
