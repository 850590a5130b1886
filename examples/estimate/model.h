/*  model.h - which model is planned: a published one, one from a file, or one of the given sizes. */
#ifndef MEMSCALE_ESTIMATE_MODEL_H
#define MEMSCALE_ESTIMATE_MODEL_H

#include "llama_shape.h"
#include "model_shape.h"
#include "settings.h"

static int start_shape(const settings *o, shape *s) {
    const bool has_file = o->files.count > 0;
    if (o->files.count > 1 || (o->model && (o->family || has_file))) {
        return fail("--model, --family and a file: give one of them, or a file and its family");
    }
    if (has_file) {
        return read_model(o->files.items[0], o->family, s);
    }
    if (o->family) {
        const family kind = find_family(o->family);
        if (kind != FAMILY_COUNT) {
            start_family(s, kind);
        }
        return kind == FAMILY_COUNT;
    }
    return find_model(o->model ? o->model : "gpt2-124M", s);
}

/* Takes a given size; returns whether it differs from that of the model. */
static bool take_size(int64_t given, int64_t *size) {
    const bool differs = given != 0 && given != *size;
    *size = given ? given : *size;
    return differs;
}

/* Larger sizes make no sense, and their products would not fit 64 bits. */
static int check_sizes(const settings *o, const shape *s) {
    const struct {
        const char *name;
        int64_t value, most;
    } sizes[] = {{"--layers", s->layers, 1000},
                 {"--channels", s->channels, 1 << 20},
                 {"--heads", s->heads, 1 << 16},
                 {"--kv-heads", s->kv_heads, 1 << 16},
                 {"--feed-forward", s->feed_forward, 1 << 22},
                 {"--vocabulary", s->vocabulary, 1 << 24},
                 {"--positions", s->positions, 1 << 24},
                 {"--batch", o->batch, 1 << 20},
                 {"--sequence", o->sequence, 1 << 22},
                 {"--accumulate", o->accumulate, 1 << 20},
                 {"--rank", o->rank, 1 << 16}};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        if (sizes[i].value > sizes[i].most) {
            return fail("%s %lld: at most %lld", sizes[i].name, (long long)sizes[i].value,
                        (long long)sizes[i].most);
        }
    }
    const long long count = (long long)batches_of_step(o, o->batch);
    return count <= 1 << 20
               ? 0
               : fail("--tokens %lld: %lld batches of %lld tokens, and a step has at most %d",
                      (long long)o->tokens, count, (long long)(o->batch * o->sequence), 1 << 20);
}

static int check_shape(const settings *o, const shape *s) {
    if (s->layers == 0 || s->channels == 0 || s->heads == 0) {
        return fail("--family %s: give --layers, --channels and --heads", family_names[s->kind]);
    }
    if (check_sizes(o, s) != 0) {
        return 1;
    }
    if (s->channels % s->heads != 0) {
        return fail("--heads %lld: the %lld channels are not a multiple", (long long)s->heads,
                    (long long)s->channels);
    }
    if (s->heads % s->kv_heads != 0) {
        return fail("--kv-heads %lld: the %lld heads are not a multiple", (long long)s->kv_heads,
                    (long long)s->heads);
    }
    if (s->kind == FAMILY_LLAMA && s->channels / s->heads % 2 != 0) {
        return fail(
            "--heads %lld: a head of %lld channels has no pairs for rotary positions to turn",
            (long long)s->heads, (long long)(s->channels / s->heads));
    }
    if (s->positions && o->sequence > s->positions) {
        return fail("--sequence %lld: the position table of %s has %lld rows; --positions sets "
                    "another number",
                    (long long)o->sequence, s->name, (long long)s->positions);
    }
    return 0;
}

static int choose_shape(settings *o, shape *s) {
    if (start_shape(o, s) != 0) {
        return 1;
    }
    const bool is_llama = s->kind == FAMILY_LLAMA;
    if (!is_llama && (o->kv_heads || o->feed_forward)) {
        return fail(
            "--kv-heads and --feed-forward are for llama: gpt2 and bert of nn.h have as many "
            "heads of keys as of queries, and 4 times the channels");
    }
    if (is_llama && o->positions) {
        return fail("--positions is for gpt2 and bert: llama has no table of positions");
    }
    const int64_t named_channels = s->channels;
    const bool shares_keys = s->kv_heads != s->heads;
    bool differs = take_size(o->layers, &s->layers);
    differs |= take_size(o->channels, &s->channels);
    differs |= take_size(o->heads, &s->heads);
    differs |= take_size(o->vocabulary, &s->vocabulary);
    differs |= take_size(o->positions, &s->positions);
    s->kv_heads = shares_keys ? s->kv_heads : s->heads;
    if (s->channels != named_channels) {
        s->feed_forward = is_llama ? (8 * s->channels / 3 + 255) / 256 * 256 : 4 * s->channels;
    }
    differs |= take_size(o->kv_heads, &s->kv_heads);
    differs |= take_size(o->feed_forward, &s->feed_forward);
    if (differs && !(o->family && o->files.count == 0)) {
        const shape named = *s;
        snprintf(s->name, sizeof s->name, "like %.58s", named.name);
    }
    o->batch = o->batch ? o->batch : 4;
    if (o->sequence == 0) {
        o->sequence = s->positions && s->positions < 512 ? s->positions : 512;
    }
    return check_shape(o, s);
}

#endif // MEMSCALE_ESTIMATE_MODEL_H
