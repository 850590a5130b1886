// Saving and loading a run, compared with writing and reading as many bytes in pieces of 8 MiB: GPT-2
// with its optimizer state, on the CPU. Writing ends with fsync; reading is from the disk, with --warm from
// the memory of the system. The two take turns; the table has medians, and medians of the ratios of a round.
#include "bench.h"

#define MEMSCALE_IMPLEMENTATION
#include "memscale.h"
#include "nn.h"
#include "models.h"

#include <fcntl.h>
#include <unistd.h>

enum { PIECE = 1 << 23, ROUNDS_MAX = 32 };

typedef struct settings {
    const char *preset, *path;
    int64_t rounds;
    bool tsv, warm;
} settings;

/* Seconds by round, and what was held beyond a model. */
typedef struct measured {
    double bare[ROUNDS_MAX], ours[ROUNDS_MAX];
    uint64_t more;
} measured;

/* What a model holds of the host's memory, at most, beyond what it held when the count began. */
static struct { uint64_t now, most; } held;

static void *count_alloc(uint64_t bytes, void *user) {
    (void)user;
    held.now += bytes;
    held.most = held.now > held.most ? held.now : held.most;
    return malloc((size_t)bytes);
}

static void count_release(void *memory, uint64_t bytes, void *user) {
    (void)user;
    held.now -= memory ? bytes : 0;
    free(memory);
}

static uint64_t size_of(const char *path) {
    FILE *file = fopen(path, "rb");
    uint64_t bytes = 0;
    if (file && fseek(file, 0, SEEK_END) == 0) {
        bytes = (uint64_t)ftell(file);
        fclose(file);
    }
    return bytes;
}

static double write_bytes(const char *path, uint8_t *piece, uint64_t bytes) {
    const double begin = bench_seconds();
    FILE *file = fopen(path, "wb");
    for (uint64_t left = bytes; file && left > 0;) {
        const size_t some = (size_t)(left < PIECE ? left : (uint64_t)PIECE);
        if (fwrite(piece, 1, some, file) != some) {
            bench_stop("the disk is full");
        }
        left -= some;
    }
    if (!file || fflush(file) != 0 || fsync(fileno(file)) != 0 || fclose(file) != 0) {
        bench_stop("the file cannot be written");
    }
    return bench_seconds() - begin;
}

/* The next reading is from the disk, and what follows need not wait for memory. */
static void forget_file(const settings *s, const char *path) {
    const int file = s->warm ? -1 : open(path, O_RDONLY);
    if (file >= 0) {
        (void)posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED);
        (void)close(file);
    }
}

static double read_bytes(const char *path, uint8_t *piece) {
    const double begin = bench_seconds();
    FILE *file = fopen(path, "rb");
    while (file && fread(piece, 1, PIECE, file) == PIECE) {
    }
    if (!file || fclose(file) != 0) {
        bench_stop("the file cannot be read");
    }
    return bench_seconds() - begin;
}

static bench_model make_model(const settings *s, bool has_values) {
    ms_config config;
    nn_transformer_config shape;
    memset(&config, 0, sizeof config);
    config.memory_budget_bytes = (uint64_t)1 << 36;
    config.allocator.alloc = count_alloc;
    config.allocator.release = count_release;
    if (!bench_shape(s->preset, &shape)) {
        fail("--preset %s: there is no such preset; --help lists some", s->preset);
        exit(2);
    }
    shape.batch = 1;
    shape.sequence = 16;
    bench_model m = bench_model_create(&config, nn_cpu(), s->preset, &shape);
    bench_check(m.model, ms_wrap(m.model));
    if (has_values) {
        bench_check(m.model, nn_init(m.net, 1));
    }
    return m;
}

/* One round of each kind: who begins has to wait for the disk, so the two take turns. */
static void compare_writing(const settings *s, ms_model *model, const char *other, uint8_t *piece,
                            measured *w) {
    const uint64_t bytes = size_of(s->path);
    for (int k = 0; k < (int)s->rounds; k++) {
        for (int turn = 0; turn < 2; turn++) {
            const uint64_t before = held.most = held.now;
            if (turn == k % 2) {
                w->bare[k] = write_bytes(other, piece, bytes);
            } else {
                const double begin = bench_seconds();
                bench_check(model, ms_save_file(model, s->path));
                w->ours[k] = bench_seconds() - begin;
            }
            w->more = held.most - before > w->more ? held.most - before : w->more;
            forget_file(s, turn == k % 2 ? other : s->path);
        }
    }
}

static void compare_reading(const settings *s, uint8_t *piece, measured *r) {
    for (int k = 0; k < (int)s->rounds; k++) {
        bench_model to = make_model(s, false);
        for (int turn = 0; turn < 2; turn++) {
            const uint64_t before = held.most = held.now;
            forget_file(s, s->path);
            if (turn == k % 2) {
                r->bare[k] = read_bytes(s->path, piece);
            } else {
                const double begin = bench_seconds();
                bench_check(to.model, ms_load_file(to.model, s->path, NULL));
                r->ours[k] = bench_seconds() - begin;
            }
            r->more = held.most - before > r->more ? held.most - before : r->more;
        }
        bench_model_destroy(&to);
    }
}

static void print_row(const settings *s, const char *what, measured *x, uint64_t bytes) {
    double ratio[ROUNDS_MAX];
    const int n = (int)s->rounds;
    for (int k = 0; k < n; k++) {
        ratio[k] = x->ours[k] / x->bare[k];
    }
    printf(s->tsv ? "%s\t%.1f\t%.3f\t%.3f\t%.3f\t%.2f\n"
                  : "%-6s %8.1f %10.3f %10.3f %8.3f %10.2f\n",
           what, (double)bytes / 1e6, bench_median(x->bare, n), bench_median(x->ours, n),
           bench_median(ratio, n), (double)x->more / 1048576.0);
}

int main(int argc, char **argv) {
    settings s = {"gpt2-124M", "build/save.bin", 5, false, false};
    static measured writing, reading;
    char other[512];
    const option_spec options[] = {
        {"--preset", "NAME", OPTION_TEXT, &s.preset, "gpt2-124M, gpt2-tiny or another of nn.h"},
        {"--file", "FILE", OPTION_TEXT, &s.path, "where to write"},
        {"--rounds", "N", OPTION_COUNT, &s.rounds, "of each, 32 at most"},
        {"--warm", NULL, OPTION_FLAG, &s.warm, "read what the system has in memory"},
        {"--tsv", NULL, OPTION_FLAG, &s.tsv, "tab-separated output"},
    };
    if (take_options("[options]\nSaving and loading a run, over writing and reading as many bytes.",
                     options, OPTIONS_IN(options), argc, argv, NULL) != 0 ||
        check_most("--rounds", s.rounds, ROUNDS_MAX) != 0) {
        return 2;
    }
    snprintf(other, sizeof other, "%s.bare", s.path);
    uint8_t *piece = (uint8_t *)malloc(PIECE);
    if (!piece) {
        bench_stop("no memory");
    }
    memset(piece, 1, PIECE);
    bench_model from = make_model(&s, true);
    bench_check(from.model, ms_save_file(from.model, s.path));
    const uint64_t bytes = size_of(s.path);
    compare_writing(&s, from.model, other, piece, &writing);
    compare_reading(&s, piece, &reading);
    for (int k = 0; !s.tsv && k < (int)s.rounds; k++) {
        printf("round %d: write %.3f, save %.3f, read %.3f, load %.3f s\n", k + 1, writing.bare[k],
               writing.ours[k], reading.bare[k], reading.ours[k]);
    }
    puts(s.tsv ? "what\tMB\tbare s\tours s\tratio\tMiB of the host"
               : "what         MB     bare s     ours s    ratio   MiB host");
    print_row(&s, "save", &writing, bytes);
    print_row(&s, "load", &reading, bytes);
    remove(s.path);
    remove(other);
    bench_model_destroy(&from);
    free(piece);
    return 0;
}
