// How well the layout packs blocks with known live ranges: arena over lower bound, and the time
// that it takes, for CSV files with the columns id,lower,upper,size and half-open ranges
// [lower, upper), or for generated traces like those of training.
#include "bench.h"

#include <errno.h>

#include "private.h"

static const char HEADER[] = "id,lower,upper,size";
static const ms_allocator MALLOC = {NULL, NULL, NULL, NULL}; // malloc and free

typedef struct buffers {
    msi_block *blocks;
    uint32_t count, capacity;
    uint64_t total_bytes;
} buffers;

static void fail_at(const char *path, uint64_t line, const char *text) {
    if (line) {
        fprintf(stderr, "%s:%llu: %s\n", path, (unsigned long long)line, text);
    } else {
        fprintf(stderr, "%s: %s\n", path, text);
    }
    exit(1);
}

/* The number after the next comma; false if there is none. */
static bool take_number(const char **text, uint64_t *number) {
    const char *digits = strchr(*text, ',');
    if (!digits || digits[1] < '0' || digits[1] > '9') {
        return false;
    }
    char *end;
    errno = 0;
    *number = strtoull(digits + 1, &end, 10);
    *text = end;
    return errno == 0 && (*end == ',' || *end == '\0');
}

/* Adds the buffer of one line; returns what is wrong with it, or NULL. */
static const char *add_buffer(buffers *b, const char *line) {
    uint64_t lower, upper, bytes;
    if (!take_number(&line, &lower) || !take_number(&line, &upper) || !take_number(&line, &bytes) ||
        *line) {
        return "not of the form id,lower,upper,size, with whole numbers from 0 on";
    }
    if (lower >= upper) {
        return "lower must be below upper: the live range is [lower, upper)";
    }
    if (upper > UINT32_MAX) {
        return "upper is beyond 4294967295";
    }
    if (bytes > UINT64_MAX - b->total_bytes) {
        return "the sum of all sizes is beyond 64 bits";
    }
    if (b->count == b->capacity) {
        b->capacity = b->capacity ? 2 * b->capacity : 1024;
        void *grown = realloc(b->blocks, b->capacity * sizeof *b->blocks);
        if (!grown) {
            return "out of memory";
        }
        b->blocks = (msi_block *)grown;
    }
    msi_block *block = &b->blocks[b->count++];
    memset(block, 0, sizeof *block);
    block->bytes = bytes;
    block->first = (uint32_t)lower;
    block->last = (uint32_t)upper - 1;
    b->total_bytes += bytes;
    return NULL;
}

static buffers read_buffers(const char *path) {
    buffers b = {NULL, 0, 0, 0};
    char line[512];
    uint64_t number = 0;
    FILE *file = fopen(path, "r");
    if (!file) {
        fail_at(path, 0, strerror(errno));
    }
    while (fgets(line, sizeof line, file)) {
        ++number;
        const size_t length = strcspn(line, "\r\n");
        if (length + 1 == sizeof line) {
            fail_at(path, number, "the line is too long");
        }
        line[length] = '\0';
        if (number == 1 && strcmp(line, HEADER) != 0) {
            fail_at(path, number, "the first line must be id,lower,upper,size");
        }
        const char *wrong = number > 1 && length ? add_buffer(&b, line) : NULL;
        if (wrong) {
            fail_at(path, number, wrong);
        }
    }
    if (ferror(file)) {
        fail_at(path, 0, strerror(errno));
    }
    fclose(file);
    if (b.count == 0) {
        fail_at(path, 0, "no buffers in this file");
    }
    return b;
}

// ---- traces --------------------------------------------------------------------------------------

/* Numbers from 0 to below `below`, the same in every run (splitmix64). */
static uint64_t draw(uint64_t *state, uint64_t below) {
    uint64_t x = *state += UINT64_C(0x9e3779b97f4a7c15);
    x = (x ^ (x >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94d049bb133111eb);
    return (x ^ (x >> 31)) % below;
}

/* 64 bytes to 64 KiB, small ones as often as large ones. */
static uint64_t draw_bytes(uint64_t *state) {
    const uint64_t least = (uint64_t)64 << draw(state, 10);
    return least + 64 * draw(state, least / 64);
}

static void add_range(buffers *b, uint64_t bytes, uint64_t first, uint64_t last) {
    msi_block *block = &b->blocks[b->count++];
    memset(block, 0, sizeof *block);
    block->bytes = bytes;
    block->first = (uint32_t)first;
    block->last = (uint32_t)last;
    b->total_bytes += bytes;
}

/* A plain step of a net in which layer i makes an activation at i and goes backward at 2n - 1 - i.
   Seven activations in ten are read in backward, the others by one of the next layers; one in ten
   is also read by a layer much later, which makes its gradient long-lived. Saved tensors,
   scratch memory of backward, and gradients of params, three in ten of which live to the end. */
static buffers make_trace(uint32_t count) {
    const uint32_t layers = count / 5;
    uint64_t state = count;
    buffers b = {(msi_block *)calloc(count, sizeof(msi_block)), 0, count, 0};
    if (!b.blocks) {
        fail_at("trace", 0, "out of memory");
    }
    for (uint32_t i = 0; i < layers; i++) {
        const uint32_t back = 2 * layers - 1 - i, left = layers - i;
        const uint64_t bytes = draw_bytes(&state);
        uint64_t skip = draw(&state, 10) == 0 ? draw(&state, left) : draw(&state, 3);
        skip = skip < left ? skip : left - 1;
        add_range(&b, bytes, i, draw(&state, 10) < 7 ? back : i + skip);
        add_range(&b, 64 * (1 + draw(&state, 20)), i, back);
        add_range(&b, bytes, back - skip, back + 1);
        add_range(&b, 64 * (1 + draw(&state, 900)), back, back);
        add_range(&b, 64 * (1 + draw(&state, 90)), back,
                  draw(&state, 10) < 3 ? 2 * layers : back + draw(&state, 12));
    }
    return b;
}

/* A trace of so many ranges if `name` is "trace:20000"; else the file of that name. */
static buffers take_buffers(const char *name) {
    char *end;
    if (strncmp(name, "trace:", 6) != 0) {
        return read_buffers(name);
    }
    const unsigned long count = strtoul(name + 6, &end, 10);
    if (*end || count < 5 || count > 10000000) {
        fail("%s: a trace has 5 to 10000000 ranges", name);
        exit(2);
    }
    return make_trace((uint32_t)count);
}

// ---- measurements --------------------------------------------------------------------------------

/* The usual method: first-fit by decreasing size. */
static uint64_t greedy_height(const char *path, const buffers *b) {
    msi_layout_work work;
    uint64_t *memory;
    if (msi_layout_begin(&work, &MALLOC, b->blocks, b->count, &memory) != MS_RESULT_OK) {
        fail_at(path, 0, "out of memory");
    }
    work.effort = UINT64_MAX;
    msi_layout_sort(&work, MSI_ORDER_BYTES, 1);
    msi_layout_list_living(&work);
    (void)msi_layout_first_fit(&work, false);
    const uint64_t height = work.used ? work.height : 0;
    msi_release(&MALLOC, memory, msi_layout_bind(&work, NULL));
    return height;
}

static double ratio_of(uint64_t height, uint64_t bound) {
    return bound ? (double)height / (double)bound : 1.0;
}

/* Prints the row of one file or trace; returns its ratio. */
static double measure(const char *path, uint64_t effort, bool greedy, bench_table *table) {
    buffers b = take_buffers(path);
    uint64_t bound, height;
    const clock_t start = clock(); // processor time, which other programs do not add to
    const ms_result result = msi_layout(&MALLOC, b.blocks, b.count, effort, 0, &height);
    const double ms = 1e3 * (double)(clock() - start) / CLOCKS_PER_SEC;
    if (result != MS_RESULT_OK) {
        fail_at(path, 0, ms_result_text(result));
    }
    bool valid = false;
    if (msi_layout_check(&MALLOC, b.blocks, b.count, &valid, &bound) != MS_RESULT_OK || !valid) {
        fail_at(path, 0, "the layout is wrong: two buffers overlap");
    }
    const char *slash = strrchr(path, '/');
    bench_cell(table, slash && !table->tsv ? slash + 1 : path);
    bench_count(table, b.count);
    bench_count(table, bound);
    bench_count(table, height);
    bench_value(table, ratio_of(height, bound), 4);
    bench_value(table, ms, 3);
    if (greedy) {
        const uint64_t usual = greedy_height(path, &b);
        bench_count(table, usual);
        bench_value(table, ratio_of(usual, bound), 4);
    }
    free(b.blocks);
    return ratio_of(height, bound);
}

int main(int argc, char **argv) {
    bool tsv = false, greedy = false;
    int64_t effort = 100000000;
    const option_spec options[] = {
        {"--tsv", NULL, OPTION_FLAG, &tsv, "tab-separated output"},
        {"--greedy", NULL, OPTION_FLAG, &greedy,
         "also the usual method: first-fit by decreasing size"},
        {"--effort", "N", OPTION_COUNT, &effort,
         "limit of operations for each file, of about a nanosecond each"},
    };
    const char *const usage = "[options] FILE ...\n"
                              "Lays out buffers: of a CSV with the columns id,lower,upper,size, "
                              "live in [lower, upper); or of\n"
                              "trace:N, a generated step of training with about N buffers.";
    option_words files = {{NULL}, 0};
    if (take_options(usage, options, OPTIONS_IN(options), argc, argv, &files) != 0) {
        return 2;
    }
    if (files.count == 0) {
        fail("no FILE given; --help tells more");
        return 2;
    }

    bench_table table = bench_table_begin(
        tsv, greedy ? "file buffers lower_bound arena ratio ms greedy_arena greedy_ratio"
                    : "file buffers lower_bound arena ratio ms");
    double sum = 0.0;
    for (int i = 0; i < files.count; ++i) {
        sum += measure(files.items[i], (uint64_t)effort, greedy, &table);
    }
    if (!tsv) {
        printf("mean ratio %.4f\n", sum / files.count);
    }
    return 0;
}
