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
        const size_t some = left < PIECE ? (size_t)left : PIECE;
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
        bench_stop("no such preset");
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

static void print_row(const settings *s, const char *what, double *bare, double *ours,
                      double *ratio, uint64_t bytes, uint64_t more) {
    const int n = (int)s->rounds;
    printf(s->tsv ? "%s\t%.1f\t%.3f\t%.3f\t%.3f\t%.2f\n"
                  : "%-6s %8.1f %10.3f %10.3f %8.3f %10.2f\n",
           what, (double)bytes / 1e6, bench_median(bare, n), bench_median(ours, n),
           bench_median(ratio, n), (double)more / 1048576.0);
}

int main(int argc, char **argv) {
    settings s = {"gpt2-124M", "build/save.bin", 5, false, false};
    double bare[2][ROUNDS_MAX], ours[2][ROUNDS_MAX], ratio[2][ROUNDS_MAX];
    uint64_t more[2] = {0, 0};
    char other[512];
    const bench_option options[] = {
        {"--preset", "gpt2-124M, gpt2-tiny or another of nn.h", NULL, NULL, &s.preset},
        {"--file", "where to write", NULL, NULL, &s.path},
        {"--rounds", "32 at most", NULL, &s.rounds, NULL},
        {"--warm", "read what the system has in memory", &s.warm, NULL, NULL},
        {"--tsv", "tab-separated output", &s.tsv, NULL, NULL},
    };
    bench_options(argc, argv, "Saving and loading a run, over writing and reading as many bytes.",
                  options, (int)(sizeof options / sizeof options[0]));
    if (s.rounds < 1 || s.rounds > ROUNDS_MAX) {
        bench_stop("--rounds is 1 to 32");
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
    for (int k = 0; k < (int)s.rounds; k++) {
        if (k % 2 == 0) { // one after the other has to wait for the disk: they take turns
            bare[0][k] = write_bytes(other, piece, bytes);
        }
        forget_file(&s, other);
        const uint64_t before = held.most = held.now;
        double begin = bench_seconds();
        bench_check(from.model, ms_save_file(from.model, s.path));
        ours[0][k] = bench_seconds() - begin;
        if (k % 2 == 1) {
            forget_file(&s, s.path);
            bare[0][k] = write_bytes(other, piece, bytes);
            forget_file(&s, other);
        }
        more[0] = held.most - before > more[0] ? held.most - before : more[0];
        bench_model to = make_model(&s, false);
        forget_file(&s, s.path);
        if (k % 2 == 0) {
            bare[1][k] = read_bytes(s.path, piece);
            forget_file(&s, s.path);
        }
        const uint64_t with_model = held.most = held.now;
        begin = bench_seconds();
        bench_check(to.model, ms_load_file(to.model, s.path, NULL));
        ours[1][k] = bench_seconds() - begin;
        if (k % 2 == 1) {
            forget_file(&s, s.path);
            bare[1][k] = read_bytes(s.path, piece);
        }
        more[1] = held.most - with_model > more[1] ? held.most - with_model : more[1];
        bench_model_destroy(&to);
        for (int i = 0; i < 2; i++) {
            ratio[i][k] = ours[i][k] / bare[i][k];
        }
    }
    for (int k = 0; !s.tsv && k < (int)s.rounds; k++) {
        printf("round %d: write %.3f, save %.3f, read %.3f, load %.3f s\n", k + 1, bare[0][k],
               ours[0][k], bare[1][k], ours[1][k]);
    }
    puts(s.tsv ? "what\tMB\tbare s\tours s\tratio\tMiB of the host"
               : "what         MB     bare s     ours s    ratio   MiB host");
    for (int i = 0; i < 2; i++) {
        print_row(&s, i ? "load" : "save", bare[i], ours[i], ratio[i], bytes, more[i]);
    }
    remove(s.path);
    remove(other);
    bench_model_destroy(&from);
    free(piece);
    return 0;
}
