/*  test_layout.c - where the blocks of a program lie in the arena: none that live at the same time
    overlap, the arena is close to its lower bound, and a large graph takes near-linear time.
    MEMSCALE_TEST_TRACES names a folder with published traces. */
#include "private.h"
#include "toy_layers.h"

enum { LAYOUT_BLOCKS = 120, LAYOUT_TIME = 60, LAYOUT_EFFORT = 2000000 };

static ms_allocator plain_allocator(t_heap *heap) {
    memset(heap, 0, sizeof *heap);
    return t_heap_allocator(heap);
}

static uint32_t random_blocks(t_rng *rng, msi_block *blocks) {
    uint32_t count = t_below(rng, LAYOUT_BLOCKS) + 1;
    memset(blocks, 0, LAYOUT_BLOCKS * sizeof *blocks);
    for (uint32_t i = 0; i < count; ++i) {
        uint32_t longest = t_chance(rng, 0.2) ? LAYOUT_TIME : 8;
        blocks[i].bytes = 64u * t_below(rng, t_chance(rng, 0.2) ? 200 : 20);
        blocks[i].first = t_below(rng, LAYOUT_TIME);
        blocks[i].last = blocks[i].first + t_below(rng, longest);
        blocks[i].offset = UINT64_MAX;
        blocks[i].from_top = t_chance(rng, 0.3);
    }
    return count;
}

static uint64_t load_bound(const msi_block *blocks, uint32_t count) {
    uint64_t bound = 0;
    for (uint32_t now = 0; now < 2 * LAYOUT_TIME; ++now) {
        uint64_t sum = 0;
        for (uint32_t i = 0; i < count; ++i) {
            sum += blocks[i].first <= now && now <= blocks[i].last ? blocks[i].bytes : 0;
        }
        bound = sum > bound ? sum : bound;
    }
    return bound;
}

static void check_layout(const msi_block *blocks, uint32_t count, uint64_t height) {
    for (uint32_t i = 0; i < count; ++i) {
        const msi_block *a = &blocks[i];
        assert_true(a->bytes == 0 || (a->offset % 64 == 0 && a->offset + a->bytes <= height));
        for (uint32_t k = 0; k < i; ++k) {
            const msi_block *b = &blocks[k];
            bool in_time = a->first <= b->last && b->first <= a->last;
            bool in_space = a->offset < b->offset + b->bytes && b->offset < a->offset + a->bytes;
            assert_false(in_time && in_space);
        }
    }
}

static bool is_valid(const msi_block *blocks, uint32_t count, uint64_t *bound) {
    const ms_allocator none = {NULL, NULL, NULL, NULL};
    bool valid = false;
    assert_int_equal(msi_layout_check(&none, blocks, count, &valid, bound), MS_RESULT_OK);
    return valid;
}

static void random_layouts(void **state) {
    (void)state;
    t_heap heap;
    ms_allocator allocator = plain_allocator(&heap);
    msi_block blocks[LAYOUT_BLOCKS], twins[LAYOUT_BLOCKS];
    double ratios = 0.0;
    for (uint64_t seed = 0; seed < 200; ++seed) {
        t_rng rng = t_seed(seed);
        uint32_t count = random_blocks(&rng, blocks);
        uint64_t height = 0, again = 0, bound = 0;
        memcpy(twins, blocks, sizeof blocks);
        assert_int_equal(msi_layout(&allocator, blocks, count, LAYOUT_EFFORT, 0, &height), 0);
        assert_int_equal(msi_layout(&allocator, twins, count, LAYOUT_EFFORT, 0, &again), 0);
        assert_true(height == again);
        assert_memory_equal(blocks, twins, count * sizeof *blocks);
        check_layout(blocks, count, height);
        assert_true(is_valid(blocks, count, &bound));
        assert_true(bound == load_bound(blocks, count) && height >= bound);
        ratios += bound == 0 ? 1.0 : (double)height / (double)bound;
    }
    assert_true(ratios / 200.0 < 1.02);
    assert_true(heap.live_count == 0 && heap.wrong_releases == 0);
}

enum { PASS_LAYERS = 60, PASS_BLOCKS = 8 * PASS_LAYERS };

static void add_block(msi_block *blocks, uint32_t *count, uint64_t bytes, uint32_t first,
                      uint32_t last) {
    msi_block *b = &blocks[(*count)++];
    memset(b, 0, sizeof *b);
    b->bytes = bytes;
    b->first = first;
    b->last = last;
    b->offset = UINT64_MAX;
}

/* A step of a chain that keeps every `every`-th activation, and makes the others again, segment by
   segment, in backward; with gradients that follow, and scratch memory. Sizes differ by up to
   2^8. */
static uint32_t chain_blocks(t_rng *rng, uint32_t every, msi_block *blocks) {
    uint64_t bytes[PASS_LAYERS];
    uint32_t count = 0, now = PASS_LAYERS;
    for (uint32_t i = 0; i < PASS_LAYERS; ++i) {
        bytes[i] = 64 * (uint64_t)exp2(4.0 + 8.0 * t_unit(rng));
        if (i % every != 0) { // dropped
            add_block(blocks, &count, bytes[i], i, i + 1);
        }
        if (t_chance(rng, 0.3)) {
            add_block(blocks, &count, 64 * (uint64_t)exp2(4.0 + 8.0 * t_unit(rng)), i, i);
        }
    }
    for (uint32_t end = PASS_LAYERS; end > 0;) { // layers [begin, end) come back
        const uint32_t begin = (end - 1) / every * every, made = now, length = end - begin;
        for (uint32_t i = begin + 1; i < end; ++i) {
            add_block(blocks, &count, bytes[i], made + i - begin - 1, made + length + end - 1 - i);
        }
        now += length - 1;
        for (uint32_t i = end; i-- > begin; ++now) {
            add_block(blocks, &count, bytes[i], now, now + 1); // its gradient
        }
        add_block(blocks, &count, bytes[begin], begin, now);
        end = begin;
    }
    return count;
}

/* Where checkpoints die and come back in the midst of others, little is lost. */
static void layouts_of_recomputation(void **state) {
    (void)state;
    static msi_block blocks[PASS_BLOCKS];
    t_heap heap;
    ms_allocator allocator = plain_allocator(&heap);
    double worst = 1.0, sum = 0.0;
    for (uint64_t seed = 0; seed < 60; ++seed) {
        t_rng rng = t_seed(seed);
        uint64_t height = 0, bound = 0;
        uint32_t count = chain_blocks(&rng, 1 + (uint32_t)(seed % 12), blocks);
        assert_true(count <= PASS_BLOCKS);
        assert_int_equal(msi_layout(&allocator, blocks, count, 10 * LAYOUT_EFFORT, 0, &height), 0);
        check_layout(blocks, count, height);
        assert_true(is_valid(blocks, count, &bound));
        const double ratio = (double)height / (double)bound;
        worst = ratio > worst ? ratio : worst;
        sum += ratio;
    }
    print_message("arena over lower bound: %.5f, at most %.5f\n", sum / 60.0, worst);
    assert_true(sum / 60.0 < 1.0005 && worst < 1.005);
}

enum { LARGE_BLOCKS = 20000 };

/* A plain step of a chain: activations that live until their backward, gradients, and gradients of
   params that live until the updates at the end. `spread`: of sizes, in powers of two. */
static uint32_t large_chain(t_rng *rng, double spread, msi_block *blocks) {
    const uint32_t layers = LARGE_BLOCKS / 4;
    uint32_t count = 0;
    for (uint32_t i = 0; i < layers; ++i) {
        const uint32_t back = 2 * layers - 1 - i;
        const uint64_t bytes = 64 * (uint64_t)exp2(8.0 + spread * t_unit(rng));
        add_block(blocks, &count, bytes, i, back);
        add_block(blocks, &count, bytes, back - (i + 1 < layers), back);
        add_block(blocks, &count, 64 * (1 + t_below(rng, 8)), back, 3 * layers - 1 - i);
        if (spread > 0.0) {
            add_block(blocks, &count, 64 * (uint64_t)exp2(6.0 + spread * t_unit(rng)), i, i);
        }
    }
    return count;
}

/* A net of so many blocks with skips to anywhere later, saved tensors, and activations that backward
   does not read. */
static uint32_t large_net(t_rng *rng, uint32_t blocks_wanted, msi_block *blocks) {
    const uint32_t layers = blocks_wanted / 5;
    uint32_t count = 0;
    for (uint32_t i = 0; i < layers; ++i) {
        const uint32_t back = 2 * layers - 1 - i, left = layers - i;
        const uint32_t skip = t_chance(rng, 0.1) ? t_below(rng, left) : t_below(rng, 3);
        const uint64_t bytes = 64 * (uint64_t)exp2(10.0 * t_unit(rng));
        add_block(blocks, &count, bytes, i, t_chance(rng, 0.7) ? back : i + skip);
        add_block(blocks, &count, 64 * (1 + t_below(rng, 20)), i, back);
        add_block(blocks, &count, bytes, skip < left ? back - skip : back, back + 1);
        add_block(blocks, &count, 64 * (1 + t_below(rng, 900)), back, back);
        add_block(blocks, &count, 64 * (1 + t_below(rng, 90)), back,
                  t_chance(rng, 0.3) ? 2 * layers : back + t_below(rng, 12));
    }
    return count;
}

enum { PEAK_BLOCKS = 400, PEAK_TIME = 500 };

/* Half of the blocks are nested around the middle; some live to the end. */
static uint32_t nested_blocks(t_rng *rng, msi_block *blocks) {
    const uint32_t wanted = 1 + t_below(rng, PEAK_BLOCKS - 1), time = 4 + t_below(rng, PEAK_TIME);
    uint32_t count = 0;
    while (count < wanted) {
        uint32_t first = t_below(rng, time);
        uint32_t last = first + t_below(rng, t_chance(rng, 0.3) ? time : 12);
        if (t_chance(rng, 0.5)) {
            first /= 2;
            last = time - first + t_below(rng, 5);
        } else if (t_chance(rng, 0.2)) {
            last = time + t_below(rng, 9);
        }
        add_block(blocks, &count, 64 * t_below(rng, t_chance(rng, 0.2) ? 300 : 30), first, last);
    }
    return count;
}

/* What first-fit in the order of w gives after the first `begin` blocks, found by trial of all. */
static void check_first_fit(const msi_layout_work *w, uint32_t begin) {
    for (uint32_t i = begin; i < w->used; ++i) {
        const uint32_t block = w->order[i];
        const uint64_t bytes = w->blocks[block].bytes;
        uint64_t low = 0;
        for (uint32_t k = 0; k < i; ++k) {
            const uint32_t other = w->order[k];
            const uint64_t high = w->best[other] + w->blocks[other].bytes;
            if (w->first[other] <= w->last[block] && w->first[block] <= w->last[other] &&
                w->best[other] < low + bytes && high > low) {
                low = high;
                k = UINT32_MAX; // again, from the first
            }
        }
        assert_true(low == w->best[block]);
    }
}

/* Layouts from the peak are layouts, and where nothing hangs, they are what first-fit gives. */
static void layouts_from_the_peak(void **state) {
    (void)state;
    static const msi_stacking ways[] = {{0, true, MSI_ORDER_BYTES},   {64, false, MSI_ORDER_BYTES},
                                        {0, false, MSI_ORDER_BYTES},  {0, true, MSI_ORDER_LOAD},
                                        {0, false, MSI_ORDER_LOAD},   {8, true, MSI_ORDER_BYTES},
                                        {100, true, MSI_ORDER_BYTES}, {1, false, MSI_ORDER_SPAN}};
    const ms_allocator none = {NULL, NULL, NULL, NULL};
    static msi_block blocks[PEAK_BLOCKS];
    for (uint64_t seed = 0; seed < 400; ++seed) {
        t_rng rng = t_seed(seed);
        const uint32_t count = nested_blocks(&rng, blocks);
        const msi_stacking *how = &ways[seed % (sizeof ways / sizeof ways[0])];
        msi_layout_work w;
        uint64_t *memory, height = 0, bound;
        assert_int_equal(msi_layout_begin(&w, &none, blocks, count, &memory), MS_RESULT_OK);
        if (w.used > 0) {
            assert_true(msi_layout_from_peak(&w, how, UINT64_MAX) > 0);
            assert_true(w.height < UINT64_MAX);
        }
        for (uint32_t i = 0; i < count; ++i) {
            blocks[i].offset = blocks[i].bytes ? w.best[i] : 0;
            height = msi_larger(height, blocks[i].offset + blocks[i].bytes);
        }
        assert_true(is_valid(blocks, count, &bound) && (w.used == 0 || height == w.height));
        if (w.used > 0 && !how->hang) {
            check_first_fit(&w, w.stacks.count);
        }
        msi_release(&none, memory, msi_layout_bind(&w, NULL));
    }
}

/* Layouts in the order of time are layouts, in which each block stands on the ground or on another. */
static void layouts_in_the_order_of_time(void **state) {
    (void)state;
    const ms_allocator none = {NULL, NULL, NULL, NULL};
    static msi_block blocks[PEAK_BLOCKS];
    double sum = 0.0;
    for (uint64_t seed = 0; seed < 400; ++seed) {
        t_rng rng = t_seed(seed);
        const uint32_t count = nested_blocks(&rng, blocks);
        memset(blocks + count, 0, (PEAK_BLOCKS - count) * sizeof *blocks); // it is for many
        msi_layout_work w;
        uint64_t *memory, height = 0, bound;
        assert_int_equal(msi_layout_begin(&w, &none, blocks, PEAK_BLOCKS, &memory), MS_RESULT_OK);
        msi_layout_allocate(&w);
        for (uint32_t i = 0; i < count; ++i) {
            bool stands = blocks[i].bytes == 0 || w.best[i] == 0;
            for (uint32_t k = 0; k < count && !stands; ++k) {
                stands = blocks[k].bytes > 0 && w.first[k] <= w.first[i] &&
                         w.first[i] <= w.last[k] && w.best[k] + blocks[k].bytes == w.best[i];
            }
            assert_true(stands);
            blocks[i].offset = blocks[i].bytes ? w.best[i] : 0;
            height = msi_larger(height, blocks[i].offset + blocks[i].bytes);
        }
        assert_true(is_valid(blocks, PEAK_BLOCKS, &bound) && (w.used == 0 || height == w.height));
        sum += w.used > 0 ? (double)height / (double)bound : 1.0;
        msi_release(&none, memory, msi_layout_bind(&w, NULL));
    }
    print_message("arena over lower bound: %.4f\n", sum / 400.0);
    assert_true(sum / 400.0 < 1.15);
}

/* What a block that meets those before it in the order of w can have as highest offset below the
   bound, found by trial of all; UINT64_MAX: there is none. */
static uint64_t highest_offset(const msi_layout_work *w, uint32_t i) {
    const uint32_t block = w->order[i];
    const uint64_t bytes = w->blocks[block].bytes;
    uint64_t high = w->bound;
    for (uint32_t k = 0; k < i && high >= bytes; ++k) {
        const uint32_t other = w->order[k];
        if (w->first[other] <= w->last[block] && w->first[block] <= w->last[other] &&
            w->best[other] < high && w->best[other] + w->blocks[other].bytes > high - bytes) {
            high = w->best[other];
            k = UINT32_MAX; // again, from the first
        }
    }
    return high >= bytes ? high - bytes : UINT64_MAX;
}

/* First-fit looks at few blocks and finds what trial of all finds, in any order, and from both ends. */
static void first_fit_finds_the_first_gap(void **state) {
    (void)state;
    const ms_allocator none = {NULL, NULL, NULL, NULL};
    static msi_block blocks[PEAK_BLOCKS];
    uint32_t hanging = 0, strides = 0;
    for (uint64_t seed = 0; seed < t_sweep(300, 3000); ++seed) {
        t_rng rng = t_seed(seed);
        const uint32_t count = nested_blocks(&rng, blocks);
        const bool both = t_chance(&rng, 0.5);
        msi_layout_work w;
        uint64_t *memory, bound;
        assert_int_equal(msi_layout_begin(&w, &none, blocks, count, &memory), MS_RESULT_OK);
        if (w.used > 0) {
            w.effort = UINT64_MAX;
            msi_layout_list_living(&w);
            strides += w.stride > 1;
            msi_layout_sort(&w, (msi_layout_order)t_below(&rng, MSI_ORDER_SPAN_CLASS + 1), 4);
            assert_true(msi_layout_first_fit(&w, both));
        }
        for (uint32_t i = 0; i < count; ++i) {
            blocks[i].offset = blocks[i].bytes ? w.best[i] : 0;
        }
        assert_true(is_valid(blocks, count, &bound));
        for (uint32_t i = 0; i < w.used && both; ++i) {
            const uint32_t block = w.order[i];
            const uint64_t high = highest_offset(&w, i);
            if (w.last[block] - w.first[block] < 3 && high < UINT64_MAX) {
                assert_true(w.best[block] == high);
                hanging++;
            }
        }
        if (!both) {
            check_first_fit(&w, 0);
        }
        msi_release(&none, memory, msi_layout_bind(&w, NULL));
    }
    assert_true(hanging > 1000 && strides > 100);
}

/* With tens of thousands of blocks the layout still comes close to the bound. */
/* A skyline is as high over a range as what was put anywhere on it. */
static void a_skyline_is_as_high_as_its_blocks(void **state) {
    (void)state;
    enum { MOST_LEAVES = 32 };
    for (uint64_t seed = 0; seed < 200; ++seed) {
        t_rng rng = t_seed(seed);
        uint64_t highest[2 * MOST_LEAVES], applied[2 * MOST_LEAVES], height[MOST_LEAVES] = {0};
        const msi_skyline s = {highest, applied, 1u << t_below(&rng, 6)};
        msi_skyline_clear(&s);
        for (uint64_t k = 0; k < 40; ++k) {
            const uint32_t first = t_below(&rng, s.leaves);
            const uint32_t last = first + t_below(&rng, s.leaves - first);
            const uint64_t raised = t_below(&rng, 1000);
            uint64_t most = 0;
            for (uint32_t t = first; t <= last; ++t) {
                most = height[t] > most ? height[t] : most;
            }
            assert_int_equal(msi_skyline_max(&s, first, last), most);
            for (uint32_t t = first; t <= last && k % 2 == 0; ++t) {
                height[t] = raised > height[t] ? raised : height[t];
            }
            if (k % 2 == 0) {
                msi_skyline_raise(&s, first, last, raised);
            }
        }
    }
}

static void layouts_of_large_graphs(void **state) {
    (void)state;
    t_heap heap;
    ms_allocator allocator = plain_allocator(&heap);
    msi_block *blocks = (msi_block *)malloc(LARGE_BLOCKS * sizeof *blocks);
    assert_non_null(blocks);
    for (uint64_t seed = 0; seed < 6; ++seed) {
        t_rng rng = t_seed(seed);
        uint64_t height = 0, bound = 0;
        const uint32_t count = seed < 3 ? large_chain(&rng, 3.0 * (double)seed, blocks)
                                        : large_net(&rng, LARGE_BLOCKS, blocks);
        assert_true(count <= LARGE_BLOCKS);
        assert_int_equal(msi_layout(&allocator, blocks, count, LAYOUT_EFFORT, 0, &height), 0);
        assert_true(is_valid(blocks, count, &bound));
        const double ratio = (double)height / (double)bound;
        print_message("%u blocks: arena over lower bound %.5f\n", count, ratio);
        assert_true(ratio <= 1.005);
    }
    free(blocks);
}

static double ratio_of_layout(msi_block *blocks, uint32_t count, uint64_t effort) {
    t_heap heap;
    ms_allocator allocator = plain_allocator(&heap);
    uint64_t height = 0, bound = 0;
    const clock_t start = clock();
    assert_int_equal(msi_layout(&allocator, blocks, count, effort, 0, &height), 0);
    const double s = (double)(clock() - start) / CLOCKS_PER_SEC;
    assert_true(is_valid(blocks, count, &bound));
    print_message("%u blocks: arena over lower bound %.5f, %.0f ms\n", count,
                  (double)height / (double)bound, 1e3 * s);
    return (double)height / (double)bound;
}

/* Where the first way from the peak is not close, there is time for the others. */
static void layouts_of_larger_nets(void **state) {
    (void)state;
    enum { LARGER = 3 * LARGE_BLOCKS };
    msi_block *blocks = (msi_block *)malloc(LARGER * sizeof *blocks);
    assert_non_null(blocks);
    for (uint64_t seed = 0; seed < 4; ++seed) {
        t_rng rng = t_seed(seed);
        const uint32_t count = large_net(&rng, LARGER, blocks);
        assert_true(ratio_of_layout(blocks, count, LAYOUT_EFFORT) <= 1.005);
    }
    free(blocks);
}

/* The blocks of a trace; 0: there is no such file. One line is id,lower,upper,size. */
static uint32_t read_trace(const char *folder, const char *name, msi_block *blocks, uint32_t most) {
    char path[512], line[256];
    uint32_t count = 0;
    snprintf(path, sizeof path, "%s/%s.csv", folder, name);
    FILE *file = fopen(path, "r");
    while (file != NULL && count < most && fgets(line, sizeof line, file) != NULL) {
        unsigned long long lower, upper, bytes;
        if (sscanf(line, "%*u,%llu,%llu,%llu", &lower, &upper, &bytes) == 3) {
            add_block(blocks, &count, bytes, (uint32_t)lower, (uint32_t)upper - 1);
        }
    }
    if (file != NULL) {
        fclose(file);
    }
    return count;
}

/* Published traces of other programs, in the folder MEMSCALE_TEST_TRACES: those of the contest
   IOPDDL as idealloc has them. */
static void layouts_of_published_traces(void **state) {
    (void)state;
    static const char *const names[] = {"G_1", "S_1", "Y_1"};
    enum { MOST = 100000 };
    const char *folder = getenv("MEMSCALE_TEST_TRACES");
    uint32_t found = 0;
    msi_block *blocks = (msi_block *)malloc(MOST * sizeof *blocks);
    assert_non_null(blocks);
    for (uint32_t i = 0; folder != NULL && i < sizeof names / sizeof names[0]; ++i) {
        const uint32_t count = read_trace(folder, names[i], blocks, MOST);
        assert_true(count == 0 || ratio_of_layout(blocks, count, 100000000) <= 1.001);
        found += count > 0;
    }
    free(blocks);
    if (found == 0) {
        print_message(
            "skipped: MEMSCALE_TEST_TRACES names no folder with G_1.csv, S_1.csv, Y_1.csv\n");
        skip();
    }
}

/* A step of a chain of equal layers that makes its activations again in segments. */
static uint32_t segmented_chain(uint32_t layers, uint32_t width, msi_block *blocks) {
    uint32_t count = 0, now = layers;
    for (uint32_t end = layers; end > 0; end -= width) { // layers [end - width, end) come back
        const uint32_t made = now;
        add_block(blocks, &count, 256, end - width, made + 2 * width);
        for (uint32_t k = 1; k < width; ++k) {
            const uint64_t bytes = 64 + 64 * (uint64_t)((end + k * k) % 97);
            add_block(blocks, &count, 64, end - width + k, end - width + k + 1);
            add_block(blocks, &count, bytes, made + k, made + 2 * width - k);
        }
        now += 2 * width;
    }
    return count;
}

/* What recomputation brings back lives longer, the larger the graph; its layout takes about as many
   operations for each block all the same. */
static void layouts_of_recomputation_take_near_linear_time(void **state) {
    (void)state;
    static const msi_stacking way = {0, true, MSI_ORDER_BYTES};
    static const uint32_t layers[][2] = {{2500, 40000}, {3000, 48000}};
    static const uint32_t widths[][2] = {{50, 200}, {1000, 16000}};
    const ms_allocator none = {NULL, NULL, NULL, NULL};
    double each[2];
    for (int i = 0; i < 4; ++i) {
        const uint32_t most = layers[i / 2][i % 2];
        msi_block *blocks = (msi_block *)malloc(2 * (size_t)most * sizeof *blocks);
        assert_non_null(blocks);
        const uint32_t count = segmented_chain(most, widths[i / 2][i % 2], blocks);
        msi_layout_work w;
        uint64_t *memory;
        assert_int_equal(msi_layout_begin(&w, &none, blocks, count, &memory), MS_RESULT_OK);
        const uint64_t left = msi_layout_from_peak(&w, &way, UINT64_MAX);
        each[i % 2] = (double)(UINT64_MAX - left) / (double)count;
        print_message("%u blocks: %.0f operations each, arena over lower bound %.5f\n", count,
                      each[i % 2], (double)w.height / (double)w.bound);
        msi_release(&none, memory, msi_layout_bind(&w, NULL));
        free(blocks);
        assert_true(i % 2 == 0 || each[1] < 6.0 * each[0]);
    }
}

/* Many values live long, as those do that are copied to the host and back: first-fit from the peak takes
   seconds and leaves a fifth of the arena empty, the order of time does not. */
static void layouts_of_what_lives_long(void **state) {
    (void)state;
    static const uint32_t counts[] = {10000, 100000};
    static const double most[] = {1.02, 1.008};
    for (int i = 0; i < 2; ++i) {
        msi_block *blocks = (msi_block *)calloc(counts[i], sizeof *blocks);
        uint32_t count = 0;
        t_heap heap;
        t_rng rng = t_seed(7);
        const ms_allocator allocator = plain_allocator(&heap);
        uint64_t height = 0, bound = 0;
        assert_non_null(blocks);
        while (count < counts[i]) {
            const uint32_t longest = t_chance(&rng, 0.5) ? 3 : counts[i] / 3;
            const uint32_t now = count, end = now + 1 + t_below(&rng, longest);
            add_block(blocks, &count, (uint64_t)4096 << t_below(&rng, 3), now, end);
        }
        const clock_t begin = clock();
        assert_int_equal(msi_layout(&allocator, blocks, count, LAYOUT_EFFORT, 0, &height), 0);
        const double seconds = (double)(clock() - begin) / CLOCKS_PER_SEC;
        assert_true(is_valid(blocks, count, &bound));
        print_message("%u blocks: arena over lower bound %.5f, in %.3f s\n", count,
                      (double)height / (double)bound, seconds);
        assert_true((double)height <= most[i] * (double)bound && seconds < 2.0);
        free(blocks);
    }
}

/* Two blocks that overlap are no layout, whatever else stands there. */
static void an_invalid_layout_is_told(void **state) {
    (void)state;
    msi_block blocks[3];
    uint64_t bound;
    memset(blocks, 0, sizeof blocks);
    for (uint32_t i = 0; i < 3; ++i) {
        blocks[i].bytes = 128;
        blocks[i].offset = 128 * (uint64_t)i;
        blocks[i].first = i;
        blocks[i].last = i + 1;
    }
    assert_true(is_valid(blocks, 3, &bound));
    blocks[2].offset = 0; // over block 0, which is dead by then
    assert_true(is_valid(blocks, 3, &bound));
    blocks[2].offset = 192;
    assert_false(is_valid(blocks, 3, &bound));
    blocks[2].first = blocks[2].last = 1;
    blocks[2].offset = 64;
    assert_false(is_valid(blocks, 3, &bound));
}

/* Gradients are hinted to lie at the top, where they pile up while activations end below. The layout
   is as good with all hints turned round, so its height does not show them. */
static void gradients_come_from_the_top(void **state) {
    (void)state;
    t_chain chain;
    ms_config config = t_config();
    uint32_t count[2] = {0, 0};
    t_chain_start(&chain, &config, 6);
    const msi_program *p = &chain.model->run.plan->train;
    for (uint32_t i = chain.model->run.store->residents.count; i < p->code.ranges.count; ++i) {
        const msi_range *range = &p->code.ranges.items[i];
        const bool gradient = range->category == MS_CATEGORY_GRADIENT;
        if (range->alias_of == MSI_NONE) {
            assert_true(p->layout.blocks.items[range->block].from_top == (uint8_t)gradient);
            count[gradient] += 1;
        }
    }
    assert_true(count[0] > 0 && count[1] > 0);
    ms_destroy(chain.model);
}

static void layouts_of_nothing_and_of_little(void **state) {
    (void)state;
    t_heap heap;
    ms_allocator allocator = plain_allocator(&heap);
    msi_block blocks[3];
    uint64_t height = 99;
    assert_int_equal(msi_layout(&allocator, NULL, 0, LAYOUT_EFFORT, 0, &height), MS_RESULT_OK);
    assert_true(height == 0);
    memset(blocks, 0, sizeof blocks);
    blocks[0].bytes = 192;
    blocks[0].first = blocks[0].last = 4;
    assert_int_equal(msi_layout(&allocator, blocks, 1, LAYOUT_EFFORT, 0, &height), MS_RESULT_OK);
    assert_true(height == 192 && blocks[0].offset == 0);
    blocks[1] = blocks[2] = blocks[0];
    blocks[1].bytes = 0;
    assert_int_equal(msi_layout(&allocator, blocks, 3, LAYOUT_EFFORT, 0, &height), MS_RESULT_OK);
    assert_true(height == 384);
    check_layout(blocks, 3, height);
    for (int i = 0; i < 3; ++i) {
        blocks[i].bytes = 0;
    }
    assert_int_equal(msi_layout(&allocator, blocks, 3, LAYOUT_EFFORT, 0, &height), MS_RESULT_OK);
    assert_true(height == 0);
    assert_true(heap.live_count == 0);
}

/* With no effort to spend there is still a layout. */
static void a_layout_without_effort(void **state) {
    (void)state;
    t_heap heap;
    ms_allocator allocator = plain_allocator(&heap);
    msi_block blocks[LAYOUT_BLOCKS];
    for (uint64_t seed = 0; seed < 50; ++seed) {
        t_rng rng = t_seed(seed);
        uint32_t count = random_blocks(&rng, blocks);
        uint64_t height = 0;
        assert_int_equal(msi_layout(&allocator, blocks, count, 0, 0, &height), MS_RESULT_OK);
        check_layout(blocks, count, height);
    }
}

static void a_layout_without_memory(void **state) {
    (void)state;
    t_heap heap;
    const ms_allocator allocator = plain_allocator(&heap);
    msi_block blocks[LAYOUT_BLOCKS];
    t_rng rng = t_seed(3);
    uint64_t height = 0;
    const uint32_t count = random_blocks(&rng, blocks);
    t_failing f = t_failing_heap(&heap);
    while (t_next_failure(&f, 1)) {
        t_arm(&f);
        t_failed(&f, NULL, msi_layout(&allocator, blocks, count, LAYOUT_EFFORT, 0, &height));
    }
    assert_true(f.error_count > 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(random_layouts),
        cmocka_unit_test(layouts_of_recomputation),
        cmocka_unit_test(layouts_from_the_peak),
        cmocka_unit_test(layouts_in_the_order_of_time),
        cmocka_unit_test(first_fit_finds_the_first_gap),
        cmocka_unit_test(a_skyline_is_as_high_as_its_blocks),
        cmocka_unit_test(layouts_of_large_graphs),
        cmocka_unit_test(layouts_of_larger_nets),
        cmocka_unit_test(layouts_of_published_traces),
        cmocka_unit_test(layouts_of_recomputation_take_near_linear_time),
        cmocka_unit_test(layouts_of_what_lives_long),
        cmocka_unit_test(an_invalid_layout_is_told),
        cmocka_unit_test(gradients_come_from_the_top),
        cmocka_unit_test(layouts_of_nothing_and_of_little),
        cmocka_unit_test(a_layout_without_effort),
        cmocka_unit_test(a_layout_without_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
