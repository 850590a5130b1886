/*  test_elastic.c - budgets that change between steps, and models that are suspended and resumed: no
    bit changes, there are never two arenas, budgets that were seen before take no memory of the
    host unless their plans have some, which is given back, and a failed allocation leaves what there
    was. MEMSCALE_TEST_DAGS sets how many random graphs there are, MEMSCALE_TEST_SEED which is the
    first. */
#define T_OFFLOADS
#include "private.h"
#include "toy_layers.h"
#include "random_dag.h"
#include "virtual.h"
#include "late_dag.h"
#include "slices.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

enum { QUICK_GRAPHS = 24, GRAPHS = 1000, BUDGETS = 12 };

static uint64_t first_seed(void) {
    return t_environment("MEMSCALE_TEST_SEED", 1);
}

static uint64_t end_seed(void) {
    return first_seed() + t_environment("MEMSCALE_TEST_DAGS", t_sweep(QUICK_GRAPHS, GRAPHS));
}

// ------------------------------------------------------------------------------------------------
// budgets of a chain, from the smallest to that of the plain plan

enum { DEPTH = 12 };

static void chain_budgets(t_chain *chain, uint64_t *budgets) {
    ms_memory_report report;
    uint64_t smallest;
    t_report(chain->model, &report);
    t_ok(chain->model, ms_smallest_budget(chain->model, &smallest));
    for (int i = 0; i < BUDGETS; ++i) {
        budgets[i] = smallest + (report.arena_bytes - smallest) * (uint64_t)i / (BUDGETS - 1);
    }
}

// ------------------------------------------------------------------------------------------------
// random graphs under budgets that change

typedef struct elastic {
    rd_graph *graph;
    rd_net *fixed, *net;
    char failure[RD_TEXT];
    uint64_t budget[BUDGETS];
    uint32_t budget_count;
    uint64_t round;
    t_rng rng;
} elastic;

static void stop(const elastic *e, const char *what) {
    fail_msg("MEMSCALE_TEST_SEED=%llu: %s: %s: %s", (unsigned long long)e->graph->seed, what,
             e->failure, ms_last_error(e->net->model));
}

#define CHECK(e, call)                                                                             \
    do {                                                                                           \
        if (!(call)) {                                                                             \
            stop(e, #call);                                                                        \
        }                                                                                          \
    } while (0)

static bool is_ok(const rd_net *n, ms_result result) {
    return result == MS_RESULT_OK ||
           rd_fail(&n->run, "%s: %s", ms_result_name(result), ms_last_error(n->model));
}

static void same_tensor(const elastic *e, const char *what, uint32_t value, ms_tensor a,
                        ms_tensor b) {
    uint64_t of_fixed[RD_ELEMENTS], of_net[RD_ELEMENTS];
    const ms_result from_fixed = ms_read(e->fixed->model, a, of_fixed);
    const ms_result from_net = ms_read(e->net->model, b, of_net);
    const uint64_t bytes = ms_tensor_bytes(e->fixed->model, a);
    if (from_fixed != from_net ||
        (from_net == MS_RESULT_OK && memcmp(of_fixed, of_net, (size_t)bytes) != 0)) {
        fail_msg("MEMSCALE_TEST_SEED=%llu: %s of value %u differs (%s, %s)",
                 (unsigned long long)e->graph->seed, what, (unsigned)value,
                 ms_result_name(from_fixed), ms_last_error(e->net->model));
    }
}

static void same_lasting(const elastic *e) {
    const rd_graph *g = e->graph;
    for (uint32_t i = 0; i < g->value_count; ++i) {
        const rd_value *v = &g->value[i];
        const ms_tensor a = e->fixed->handle[i], b = e->net->handle[i];
        const int states = v->role == RD_PARAM && !v->frozen ? (int)rd_state_count(g, i) : 0;
        if (v->role < RD_ACTIVATION) {
            same_tensor(e, "the value", i, a, b);
        }
        for (int k = 0; k < states; ++k) {
            same_tensor(e, "the state", i, ms_optimizer_state(e->fixed->model, a, k),
                        ms_optimizer_state(e->net->model, b, k));
        }
    }
}

static void begin_micro(elastic *e, rd_net *n, uint32_t micro) {
    n->run.micro = micro;
    for (uint32_t i = 0; i < n->run.graph->layer_count; ++i) {
        n->run.op[i].forwards = n->run.op[i].backwards = n->run.op[i].recomputes = 0;
    }
    CHECK(e, rd_net_write(n, e->round, false));
}

static void one_micro(elastic *e, rd_net *n, uint32_t micro, double *loss) {
    begin_micro(e, n, micro);
    CHECK(e, is_ok(n, s_step(n->model, loss)) && is_ok(n, ms_synchronize(n->model)));
}

/* Wraps for one of the budgets; twice in ten to the plain plan and back. */
static void change_budget(elastic *e) {
    ms_model *m = e->net->model;
    const uint32_t which = t_below(&e->rng, e->budget_count);
    if (t_chance(&e->rng, 0.1)) {
        CHECK(e, is_ok(e->net, ms_detach(m)));
    }
    ms_set_budget(m, e->budget[which]);
    CHECK(e, is_ok(e->net, ms_wrap(m)));
    ms_memory_report report;
    t_report(m, &report);
    CHECK(e, report.arena_bytes <= e->budget[which]);
}

/* What the image of a model takes now. */
static uint64_t bounded_image(const elastic *e) {
    ms_memory_report report;
    t_report(e->net->model, &report);
    const uint64_t bytes = ms_suspended_bytes(e->net->model);
    CHECK(e, bytes <= report.arena_bytes + 64);
    return bytes;
}

static void suspend_for_a_while(elastic *e) {
    ms_model *m = e->net->model;
    const bool lends = t_chance(&e->rng, 0.5);
    const uint64_t bytes = bounded_image(e);
    void *memory = lends ? malloc((size_t)bytes + 1) : NULL;
    CHECK(e, is_ok(e->net, ms_suspend(m, memory)));
    CHECK(e, is_ok(e->net, ms_resume(m)));
    free(memory);
}

/* One step of both; the budget of one of them may change between micro-batches. */
static void step_both(elastic *e) {
    double loss[2];
    for (uint32_t micro = 0; micro < e->graph->accumulation; ++micro) {
        one_micro(e, e->fixed, micro, &loss[0]);
        if (t_chance(&e->rng, 0.5)) {
            change_budget(e);
        }
        if (t_chance(&e->rng, 0.2)) {
            suspend_for_a_while(e);
        }
        one_micro(e, e->net, micro, &loss[1]);
        if (memcmp(&loss[0], &loss[1], sizeof loss[0]) != 0) {
            fail_msg("MEMSCALE_TEST_SEED=%llu: the loss differs",
                     (unsigned long long)e->graph->seed);
        }
        e->round += 1;
    }
    e->fixed->run.step += 1;
    e->net->run.step += 1;
    same_lasting(e);
}

/* What is planned by other budgets must not be a technique that rounds. */
static void elastic_start(elastic *e, rd_graph *g, const ms_config *config) {
    ms_config plain = t_config(), elastic_config = *config;
    uint64_t smallest;
    ms_memory_report report;
    e->graph = g;
    e->failure[0] = 0;
    e->rng = t_seed(g->seed ^ 0xe1a5);
    e->round = 1;
    plain.checkpointing = plain.early_update = MS_SWITCH_OFF;
    elastic_config.offloading = MS_SWITCH_ON;
    e->net = rd_net_create(g, &elastic_config, "elastic", e->failure, false);
    g->move = NULL;
    e->fixed = rd_net_create(g, &plain, "fixed", e->failure, false);
    CHECK(e, is_ok(e->fixed, ms_wrap(e->fixed->model)) && rd_net_write(e->fixed, 0, false));
    CHECK(e, rd_net_write(e->net, 0, false));
    CHECK(e, is_ok(e->net, ms_smallest_budget(e->net->model, &smallest)));
    CHECK(e, is_ok(e->net, ms_wrap(e->net->model)));
    t_report(e->net->model, &report);
    const uint64_t most = report.arena_bytes > smallest ? report.arena_bytes : smallest;
    e->budget_count = (uint32_t)t_size(5, BUDGETS);
    for (uint32_t i = 0; i < e->budget_count; ++i) {
        e->budget[i] = smallest + (most - smallest) * i / (e->budget_count - 1);
    }
}

static void elastic_end(elastic *e) {
    rd_net_destroy(e->net);
    rd_net_destroy(e->fixed);
    CHECK(e, e->failure[0] == 0);
    free(e->graph);
}

static void run_elastic(rd_graph *g, const ms_config *config, int steps) {
    static elastic e;
    elastic_start(&e, g, config);
    for (int step = 0; step < steps; ++step) {
        step_both(&e);
    }
    elastic_end(&e);
}

/* Gradients that the trainer lends are not the library's to keep. */
static bool is_suitable(const rd_graph *g) {
    bool lent = g->optimizer.kind == MS_OPTIMIZER_NONE;
    for (uint32_t i = 0; i < g->value_count; ++i) {
        lent |= g->value[i].borrowed_gradient;
    }
    return !lent;
}

/* Runs a test, which frees its graph, on random graphs; `heap` counts what it takes, if it uses it. */
static void with_each_graph(void (*test)(rd_graph *g, t_heap *heap)) {
    for (uint64_t seed = first_seed(); seed < end_seed(); ++seed) {
        rd_graph *g = rd_generate(seed);
        t_heap heap;
        memset(&heap, 0, sizeof heap);
        if (is_suitable(g)) {
            test(g, &heap);
        } else {
            free(g);
        }
        assert_true(heap.live_count == 0 && heap.wrong_releases == 0);
    }
}

static void change_budgets(rd_graph *g, t_heap *heap) {
    ms_config config = t_config();
    config.debug = g->seed % 8 == 1;
    if (g->seed % 2) { // without resize
        config.allocator = t_heap_allocator(heap);
    }
    if (g->seed % 3 == 0) {
        s_slice(&config, g->seed);
    }
    run_elastic(g, &config, (int)t_size(8, 20));
}

static void budgets_change_no_bit(void **state) {
    (void)state;
    with_each_graph(change_budgets);
}

static void budgets_change_a_thousand_times(void **state) {
    (void)state;
    const ms_config config = t_config();
    uint64_t seed = 3;
    rd_graph *g = rd_generate(seed);
    while (!is_suitable(g) || g->axis_count > 0) {
        free(g);
        g = rd_generate(++seed);
    }
    run_elastic(g, &config, 1000);
}

#ifndef T_CUDA
// ------------------------------------------------------------------------------------------------
// device memory that is counted: what of it there is at once, and how often it is asked for

typedef struct counted {
    ms_backend cpu;
    uint64_t bytes, most_bytes;
    uint64_t host_bytes; // of memory for copies
    uint64_t calls;      // of alloc and of resize to another size
    uint64_t fail_at;    // the call that fails, from 1; 0: none
    bool fails_on;       // as do all after it
    bool resizes;
} counted;

static bool call_fails(counted *c) {
    c->calls += 1;
    return c->calls == c->fail_at || (c->fails_on && c->calls > c->fail_at);
}

static void note_bytes(counted *c, uint64_t more, uint64_t less) {
    c->bytes += more;
    c->bytes -= less;
    c->most_bytes = c->bytes > c->most_bytes ? c->bytes : c->most_bytes;
}

static int counted_alloc(void *user, const ms_allocator *host, uint64_t bytes, void **device) {
    counted *c = (counted *)user;
    if (call_fails(c) || c->cpu.memory_alloc(NULL, host, bytes, device) != 0) {
        return 1;
    }
    note_bytes(c, bytes, 0);
    memset(*device, 0x7f, (size_t)bytes);
    return 0;
}

static void counted_release(void *user, const ms_allocator *host, void *device, uint64_t bytes) {
    counted *c = (counted *)user;
    note_bytes(c, 0, bytes);
    memset(device, 0x7f, (size_t)bytes);
    c->cpu.memory_release(NULL, host, device, bytes);
}

/* To other memory each time, so that a stale address shows. */
static int counted_resize(void *user, const ms_allocator *host, void **device, uint64_t old_bytes,
                          uint64_t bytes) {
    counted *c = (counted *)user;
    void *moved;
    if (!c->resizes || bytes == old_bytes) {
        return c->resizes ? 0 : MS_BACKEND_UNSUPPORTED;
    }
    if (call_fails(c) || c->cpu.memory_alloc(NULL, host, bytes, &moved) != 0) {
        return 1;
    }
    memset(moved, 0x7f, (size_t)bytes);
    memcpy(moved, *device, (size_t)(bytes < old_bytes ? bytes : old_bytes));
    memset(*device, 0x7f, (size_t)old_bytes);
    c->cpu.memory_release(NULL, host, *device, old_bytes);
    note_bytes(c, bytes > old_bytes ? bytes - old_bytes : 0,
               bytes < old_bytes ? old_bytes - bytes : 0);
    *device = moved;
    return 0;
}

static int counted_host_alloc(void *user, const ms_allocator *host, uint64_t bytes, void **memory) {
    counted *c = (counted *)user;
    const int error = c->cpu.memory_alloc(NULL, host, bytes, memory);
    c->host_bytes += error ? 0 : bytes;
    return error;
}

static void counted_host_release(void *user, const ms_allocator *host, void *memory,
                                 uint64_t bytes) {
    counted *c = (counted *)user;
    c->host_bytes -= bytes;
    memset(memory, 0x7f, (size_t)bytes);
    c->cpu.memory_release(NULL, host, memory, bytes);
}

static ms_backend counted_backend(counted *c, bool resizes) {
    ms_backend b = t_backend_without_state();
    memset(c, 0, sizeof *c);
    c->cpu = ms_backend_cpu();
    c->resizes = resizes;
    b.user = c;
    b.memory_alloc = counted_alloc;
    b.memory_release = counted_release;
    b.memory_resize = counted_resize;
    b.host_alloc = counted_host_alloc;
    b.host_release = counted_host_release;
    return b;
}

// ------------------------------------------------------------------------------------------------
// budgets that change in other memory

/* Pages of which the first and the last cannot be touched. */
typedef struct guarded {
    uint8_t *pages;
    size_t page, room; // bytes of each of these two, and between them
} guarded;

static guarded take_guarded(size_t least) {
    guarded g;
    g.page = (size_t)sysconf(_SC_PAGESIZE);
    g.room = (least + g.page - 1) / g.page * g.page;
    const int zeros = open("/dev/zero", O_RDWR);
    assert_true(zeros >= 0);
    g.pages = (uint8_t *)mmap(NULL, g.room + 2 * g.page, PROT_NONE, MAP_PRIVATE, zeros, 0);
    close(zeros);
    assert_true(g.pages != MAP_FAILED);
    assert_int_equal(mprotect(g.pages + g.page, g.room, PROT_READ | PROT_WRITE), 0);
    return g;
}

static void give_guarded(const guarded *g) {
    assert_int_equal(munmap(g->pages, g->room + 2 * g->page), 0);
}

/* In a block that the trainer lends: it ends where a page does that cannot be touched, and begins
   where one ended, or at an address that is not aligned. */
static void change_budgets_in_lent_memory(rd_graph *g, t_heap *heap) {
    (void)heap;
    const guarded block = take_guarded(1 << 20);
    const size_t skipped = g->seed % 2 ? (size_t)(g->seed % 64) : 0;
    ms_config config = t_config();
    counted c;
    memset(block.pages + block.page, 0x5a, block.room);
    config.backend = counted_backend(&c, false);
    config.memory = block.pages + block.page + skipped;
    config.memory_bytes = block.room - skipped;
    if (g->seed % 3 == 0) {
        s_slice(&config, g->seed);
    }
    run_elastic(g, &config, (int)t_size(5, 10));
    assert_int_equal(c.calls, 0);
    for (size_t i = 0; i < skipped; ++i) {
        assert_int_equal(block.pages[block.page + i], 0x5a);
    }
    give_guarded(&block);
}

static void budgets_change_in_lent_memory(void **state) {
    (void)state;
    with_each_graph(change_budgets_in_lent_memory);
}

static void a_lent_block_that_is_too_small(void **state) {
    (void)state;
    t_chain chain;
    uint64_t block[16];
    ms_config config = t_config();
    config.memory = block;
    assert_int_equal(t_chain_create(&chain, &config, 2, T_CHAIN_ROWS, T_CHAIN_COLS),
                     MS_RESULT_INVALID);
    t_text_has(ms_last_error(chain.model), "memory_bytes is 0");
    ms_destroy(chain.model);
    config.memory_bytes = 1;
    assert_int_equal(t_chain_create(&chain, &config, 2, T_CHAIN_ROWS, T_CHAIN_COLS), MS_RESULT_OK);
    t_error(chain.model, ms_wrap(chain.model), MS_RESULT_BUDGET);
    t_text_has(ms_last_error(chain.model), "ms_config.memory has ");
    ms_destroy(chain.model);
}

/* What lies before the first aligned address of a lent block is no room: a block with one byte less
   than the model needs from there on is refused, and the last one that suffices is used to its end,
   but not beyond it. */
static void what_is_skipped_of_a_lent_block_is_no_room(void **state) {
    (void)state;
    static uint8_t block[1 << 20];
    for (int i = 0; i < 2 * 24; ++i) {
        const size_t unit = i % 2 ? 256 : MSI_ALIGNMENT;
        uint8_t *const aligned =
            block + unit - (size_t)((uintptr_t)block % unit) + unit; // the block begins before it
        const size_t skipped = i < 4 ? (size_t)(i / 2) : (size_t)i * 37 % unit;
        ms_config config = t_config();
        ms_memory_report report;
        t_chain chain;
        uint64_t bytes;
        config.backend = ms_backend_cpu();
        config.backend.workspace_bytes = i % 2 ? 256 : 0;
        assert_int_equal(t_chain_create(&chain, &config, 2, T_CHAIN_ROWS, T_CHAIN_COLS),
                         MS_RESULT_OK);
        t_ok(chain.model, ms_smallest_budget(chain.model, &bytes));
        ms_destroy(chain.model);
        for (int less = 0; less < 2; ++less) {
            memset(block, 0x5a, sizeof block);
            config.memory = aligned - skipped;
            config.memory_bytes = bytes + skipped - (uint64_t)less;
            assert_int_equal(t_chain_create(&chain, &config, 2, T_CHAIN_ROWS, T_CHAIN_COLS),
                             MS_RESULT_OK);
            if (less) {
                t_error(chain.model, ms_wrap(chain.model), MS_RESULT_BUDGET);
            } else {
                t_ok(chain.model, ms_wrap(chain.model));
                t_ok(chain.model, t_chain_write(&chain, 1));
                t_ok(chain.model, ms_step(chain.model, NULL));
                t_report(chain.model, &report);
                assert_true(report.arena_bytes == bytes);
            }
            for (const uint8_t *c = block; c < block + sizeof block; ++c) {
                if ((c < aligned || c >= aligned + bytes) && *c != 0x5a) {
                    fail_msg("byte %d of %d is written", (int)(c - aligned), (int)bytes);
                }
            }
            ms_destroy(chain.model);
        }
    }
}

/* On a device that works later, by way of the host. */
static void change_budgets_on_a_device(rd_graph *g, t_heap *heap) {
    static v_layer layers[RD_LAYERS];
    v_device device;
    ms_config config = t_config();
    v_open(&device, g->seed);
    config.backend = v_backend(&device);
    config.allocator = t_heap_allocator(heap);
    uint8_t *block = NULL;
    if (g->seed % 2) { // or inside lent memory, where values slide
        block = (uint8_t *)malloc(1 << 20);
        config.memory = block;
        config.memory_bytes = 1 << 20;
    }
    if (g->seed % 3 == 0) {
        s_slice(&config, g->seed);
    }
    run_elastic(ld_make_late(g, layers), &config, (int)t_size(4, 8));
    assert_int_equal(device.engine.pending, 0);
    assert_int_equal(device.callback_error, 0);
    v_close(&device);
    free(block);
}

static void budgets_change_on_a_device(void **state) {
    (void)state;
    with_each_graph(change_budgets_on_a_device);
}

// ------------------------------------------------------------------------------------------------
// values that move inside memory that two stores share

enum { MOVED_PARAMS = 6, MOVED_ROLES = 4, MOVED = MOVED_PARAMS * MOVED_ROLES };
enum { MOVED_BYTES = 1 << 17, MOVED_ELEMENTS = 1024 };

static const msi_role moved_roles[MOVED_ROLES] = {
    MSI_ROLE_VALUE, MSI_ROLE_STATE0, (msi_role)((int)MSI_ROLE_STATE0 + 1), MSI_ROLE_MASTER};

/* The second moment of AdamW has no sign. */
static bool is_second_moment(const msi_resident *r) {
    return r->role == moved_roles[2];
}

/* A store as a plan could have it: values in their order, with gaps between them. */
typedef struct moved_store {
    msi_store store;
    msi_resident residents[MOVED];
    uint32_t order[MOVED], first[MOVED_PARAMS];
} moved_store;

static void place_moved(moved_store *s, const ms_model *m, t_rng *rng) {
    static const msi_format formats[] = {MSI_FORMAT_F32, MSI_FORMAT_BF16, MSI_FORMAT_8BIT};
    const double on_host = 0.5 * t_unit(rng) + 0.25, tight = t_unit(rng);
    memset(s, 0, sizeof *s);
    for (uint32_t p = 0; p < MOVED_PARAMS; ++p) {
        const uint64_t bytes = m->graph.tensors.items[p].largest_bytes;
        const bool half = t_chance(rng, 0.5);
        s->first[p] = p * MOVED_ROLES;
        for (uint32_t k = 0; k < MOVED_ROLES; ++k) {
            msi_resident *r = &s->residents[p * MOVED_ROLES + k];
            r->tensor = p;
            r->role = moved_roles[k];
            r->format = k == 1 || k == 2 ? formats[t_below(rng, 3)]
                        : k == 0 && half ? MSI_FORMAT_BF16
                                         : MSI_FORMAT_F32;
            r->bytes = k == 3 && !half ? 0 : msi_format_bytes(r->format, bytes / sizeof(float));
            r->on_host = t_chance(rng, on_host);
        }
    }
    uint64_t end[2] = {0, 0};
    for (uint32_t i = 0; i < MOVED; ++i) {
        const uint32_t number[2] = {i, MOVED - 1 - i}; // on the device, and on the host
        s->order[i] = number[1];
        for (int host = 0; host < 2; ++host) {
            msi_resident *r = &s->residents[number[host]];
            if (r->bytes > 0 && r->on_host == (host == 1)) {
                r->offset = end[host] + (t_chance(rng, tight) ? 0 : 64 * t_below(rng, 20));
                end[host] = r->offset + msi_align(r->bytes);
                assert_true(end[host] <= MOVED_BYTES);
            }
        }
    }
    s->store.residents.items = s->residents;
    s->store.residents.count = MOVED;
    s->store.resident_of = s->first;
    s->store.home_order = s->order;
}

static void lend_moved(moved_store *s, void *memory, uint8_t *host) {
    s->store.memory = memory;
    s->store.host = host;
    for (uint32_t i = 0; i < MOVED; ++i) {
        msi_resident *r = &s->residents[i];
        r->address = (r->on_host ? host : (uint8_t *)memory) + r->offset;
    }
}

/* What `to` is made of: the master is the value of a param that has one. */
static const msi_resident *moved_from(const moved_store *old, const moved_store *now, uint32_t i) {
    const uint32_t value = i / MOVED_ROLES * MOVED_ROLES, master = value + 3;
    const bool had = old->residents[master].bytes > 0, has = now->residents[master].bytes > 0;
    const bool is_state = i != value && i != master;
    return &old->residents[is_state || (had && has) ? i : had ? master : value];
}

/* Between any two stores, on a device that sees host memory or not, in the same host memory or in
   another one: each value has afterwards, in its format, what it had. */
static void values_are_moved_whole(void **state) {
    (void)state;
    for (uint64_t seed = 0; seed < 200; ++seed) {
        static uint8_t held[MOVED][MOVED_ELEMENTS * 4], host[2][MOVED_BYTES];
        static uint8_t wanted[MOVED_ELEMENTS * 4], got[MOVED_ELEMENTS * 4];
        static float values[2][MOVED_ELEMENTS];
        const ms_optimizer_desc adamw = t_optimizer(MS_OPTIMIZER_ADAMW, 0.01f);
        const bool other_host = seed / 2 % 2 == 1;
        t_rng rng = t_seed(seed);
        t_device device;
        moved_store old, now;
        ms_config config = t_config();
        ms_model *m;
        void *memory;
        config.backend = t_device_backend(&device);
        assert_int_equal(ms_create(&config, &m), MS_RESULT_OK);
        m->config.backend.device_is_host = seed % 2 == 0;
        ms_set_optimizer(m, &adamw);
        for (int p = 0; p < MOVED_PARAMS; ++p) {
            ms_param(m, "p", MS_DTYPE_F32, ms_shape1(1 + (int64_t)t_below(&rng, MOVED_ELEMENTS)));
        }
        t_ok(m, msi_device_alloc(m, MOVED_BYTES, &memory));
        place_moved(&old, m, &rng);
        place_moved(&now, m, &rng);
        lend_moved(&old, memory, host[0]);
        lend_moved(&now, memory, host[other_host]);
        for (uint32_t i = 0; i < MOVED; ++i) {
            const msi_resident *r = &old.residents[i];
            const uint64_t count = m->graph.tensors.items[r->tensor].largest_bytes / sizeof(float);
            t_fill(&rng, values[0], count, 1.0f);
            for (uint64_t k = 0; k < count && is_second_moment(r); ++k) {
                values[0][k] = fabsf(values[0][k]);
            }
            msi_convert_on_host(held[i], r->format, values[0], MSI_FORMAT_F32, !is_second_moment(r),
                                count);
            t_ok(m, msi_copy(m, r->address, r->on_host, held[i], true, r->bytes));
        }
        msi_relocation r = {m, &old.store, &now.store, false, false, NULL, 0, MS_RESULT_OK};
        r.carry = (uint8_t *)malloc((size_t)msi_choose_routes(&r, other_host) + 1);
        msi_relocate_all(&r);
        t_ok(m, r.result);
        for (uint32_t i = 0; i < MOVED; ++i) {
            const msi_resident *to = &now.residents[i], *from = moved_from(&old, &now, i);
            const uint64_t elements =
                m->graph.tensors.items[to->tensor].largest_bytes / sizeof(float);
            const uint64_t count = to->bytes > 0 ? elements : 0;
            const void *source = held[from - old.residents];
            if (to->format != from->format) {
                msi_convert_on_host(wanted, to->format, source, from->format, !is_second_moment(to),
                                    count);
                source = wanted;
            }
            t_ok(m, msi_copy(m, got, true, to->address, to->on_host, to->bytes));
            msi_convert_on_host(values[0], MSI_FORMAT_F32, source, to->format,
                                !is_second_moment(to), count);
            msi_convert_on_host(values[1], MSI_FORMAT_F32, got, to->format, !is_second_moment(to),
                                count);
            if (memcmp(values[0], values[1], (size_t)count * sizeof(float)) != 0) {
                fail_msg("seed %u: role %d of param %u", (unsigned)seed, (int)to->role,
                         (unsigned)to->tensor);
            }
        }
        free(r.carry);
        m->config.backend.memory_release(m->config.backend.user, &m->config.allocator, memory,
                                         MOVED_BYTES);
        ms_destroy(m);
    }
}

// ------------------------------------------------------------------------------------------------
// memory

/* A chain on counted memory, and one on the CPU under a budget that does not change. */
typedef struct twins {
    counted c;
    t_heap heap;
    t_chain chain, twin;
    uint64_t budgets[BUDGETS];
} twins;

static void twins_open(twins *t, uint32_t depth, bool resizes, bool debug) {
    const ms_config plain = t_config();
    ms_config config = plain;
    memset(t, 0, sizeof *t);
    config.backend = counted_backend(&t->c, resizes);
    config.allocator = t_heap_allocator(&t->heap);
    config.offloading = MS_SWITCH_ON;
    config.debug = debug;
    t_chain_start(&t->chain, &config, depth);
    t_chain_start(&t->twin, &plain, depth);
}

static void twins_start(twins *t, uint32_t depth, bool resizes, bool debug) {
    twins_open(t, depth, resizes, debug);
    chain_budgets(&t->chain, t->budgets);
}

static void twins_step(twins *t) {
    t_ok(t->chain.model, ms_step(t->chain.model, NULL));
    t_ok(t->twin.model, ms_step(t->twin.model, NULL));
}

static void twins_end(twins *t) {
    t_chain_same(&t->chain, &t->twin);
    ms_destroy(t->chain.model);
    ms_destroy(t->twin.model);
    assert_true(t->c.bytes == 0 && t->c.host_bytes == 0 && t->heap.live_count == 0);
}

/* A model holds no memory for copies that its report does not tell. */
static void expect_reported_host(const twins *t) {
    ms_memory_report report;
    t_report(t->chain.model, &report);
    assert_true(t->c.host_bytes == report.host_bytes + report.staging_bytes);
}

/* Device memory is never more than the larger of two arenas, with one allocation at most. */
static void there_are_never_two_arenas(void **state) {
    (void)state;
    uint32_t unmoved = 0;
    for (int resizes = 0; resizes < 2; ++resizes) {
        twins t;
        t_rng rng = t_seed(5);
        ms_memory_report before, after;
        twins_start(&t, (uint32_t)t_size(5, DEPTH), resizes != 0, false);
        ms_model *m = t.chain.model;
        for (int i = 0; i < 200; ++i) {
            const uint64_t to = t.budgets[t_below(&rng, BUDGETS)];
            const bool seen = i >= 100;
            t_report(m, &before);
            t.c.most_bytes = t.c.bytes;
            const uint64_t calls = t.c.calls, allocated = t.heap.calls;
            ms_set_budget(m, to);
            t_ok(m, ms_wrap(m));
            t_report(m, &after);
            const uint64_t larger =
                before.arena_bytes > after.arena_bytes ? before.arena_bytes : after.arena_bytes;
            assert_true(t.c.bytes == after.arena_bytes && t.c.most_bytes <= larger);
            assert_true(t.c.calls <= calls + 1);
            expect_reported_host(&t);
            const bool alone = before.host_bytes == 0 && after.host_bytes == 0;
            assert_true(!seen || !resizes || !alone ||
                        t.heap.calls == allocated + t.c.calls - calls);
            unmoved += seen && alone && resizes;
            twins_step(&t);
        }
        twins_end(&t);
    }
    assert_true(unmoved > 0);
}

/* Wraps for a budget, goes back to the plain plan, or is suspended for a while; one time in four
   with an allocation that fails. */
static void change_host(twins *t, t_rng *rng) {
    ms_model *m = t->chain.model;
    const uint64_t to = t->budgets[t_below(rng, BUDGETS)];
    ms_memory_report before;
    t_report(m, &before);
    t->heap.fail_at = t_chance(rng, 0.25) ? t->heap.calls + 1 + t_below(rng, 8) : 0;
    if (t_chance(rng, 0.2)) {
        const ms_result result = ms_suspend(m, NULL);
        t->heap.fail_at = 0;
        assert_true(result == MS_RESULT_OK || result == MS_RESULT_OUT_OF_MEMORY);
        if (result == MS_RESULT_OK && t_chance(rng, 0.5)) {
            t_ok(m, ms_resume(m));
        }
    }
    ms_set_budget(m, to);
    const bool plain = t_chance(rng, 0.3);
    const ms_result result = plain ? ms_detach(m) : ms_wrap(m);
    t->heap.fail_at = 0;
    assert_true(result == MS_RESULT_OK || result == MS_RESULT_OUT_OF_MEMORY);
    if (result != MS_RESULT_OK && t->c.bytes == 0) {
        t_ok(m, ms_resume(m));
    }
}

/* Whatever takes effect, is refused or comes back: host memory that is no longer needed is given
   back, or reported; and there is none after the plain plan. */
static void host_memory_goes_with_its_plan(void **state) {
    (void)state;
    for (int resizes = 0; resizes < 2; ++resizes) {
        twins t;
        t_rng rng = t_seed(7);
        uint64_t most = 0;
        twins_start(&t, (uint32_t)t_size(5, DEPTH), resizes != 0, false);
        for (int i = 0; i < 100; ++i) {
            ms_memory_report report;
            change_host(&t, &rng);
            expect_reported_host(&t);
            t_report(t.chain.model, &report);
            most = report.host_bytes > most ? report.host_bytes : most;
            if (i % 4 == 3) {
                t_ok(t.chain.model, ms_detach(t.chain.model));
                t_report(t.chain.model, &report);
                assert_true(report.host_bytes == 0 && t.c.host_bytes == report.staging_bytes);
            }
            twins_step(&t);
        }
        assert_true(most > 0);
        twins_end(&t);
    }
}

/* The same where all memory is the allocator's, by its count: from an offloading plan to the plain
   one, live bytes change by the bytes of the arena and of what was on the host. */
static void the_allocator_gets_host_memory_back(void **state) {
    (void)state;
    for (int resizes = 0; resizes < 2; ++resizes) {
        t_heap heap;
        t_chain chain;
        ms_memory_report plain, small;
        uint64_t least;
        ms_config config = t_config();
        memset(&heap, 0, sizeof heap);
        config.allocator = t_heap_allocator(&heap);
        config.allocator.resize = resizes ? t_heap_resize : NULL;
        config.offloading = MS_SWITCH_ON;
        t_chain_start(&chain, &config, 6);
        ms_model *m = chain.model;
        t_ok(m, ms_smallest_budget(m, &least));
        t_ok(m, ms_detach(m));
        t_report(m, &plain);
        for (int i = 0; i < 3; ++i) {
            ms_set_budget(m, least);
            t_ok(m, ms_wrap(m));
            t_ok(m, ms_step(m, NULL));
            t_report(m, &small);
            const uint64_t live =
                heap.live_bytes - small.arena_bytes - small.host_bytes - small.staging_bytes;
            t_ok(m, ms_detach(m));
            const uint64_t now = heap.live_bytes - plain.arena_bytes - plain.staging_bytes;
            assert_true(plain.host_bytes == 0 && small.host_bytes > 0);
            assert_true(i == 0 || now == live);
        }
        ms_destroy(m);
        assert_true(heap.live_count == 0 && heap.wrong_releases == 0);
    }
}

/* An allocation of a change fails, on the device or on the host: the old plan stays, with all its
   values. Returns how many there are. */
static uint64_t change_fails_cleanly(const uint64_t *budgets, bool resizes, bool grows,
                                     bool of_heap) {
    twins t;
    const uint32_t errors = 1u << MS_RESULT_OUT_OF_MEMORY;
    memset(&t, 0, sizeof t);
    t_failing f =
        of_heap ? t_failing_heap(&t.heap) : t_failing_of(&t.c.calls, &t.c.fail_at, errors);
    const bool keeps = resizes && !grows && !of_heap; // what cannot be given back
    /* Memory of the host that cannot be had for less of it stays as it is. */
    const bool may_keep = resizes && of_heap;
    f.errors = keeps ? 1u << MS_RESULT_OK : errors | (may_keep ? 1u << MS_RESULT_OK : 0u);
    while (t_next_failure(&f, of_heap ? 1 + f.at / t_size(5, 20) : 1)) {
        ms_memory_report before, after;
        twins_open(&t, 3, resizes, false);
        ms_model *m = t.chain.model;
        ms_set_budget(m, budgets[grows ? 0 : BUDGETS - 1]);
        t_ok(m, ms_wrap(m));
        twins_step(&t);
        t_report(m, &before);
        ms_set_budget(m, budgets[grows ? BUDGETS - 1 : 0]);
        t_arm(&f);
        const ms_result result = ms_wrap(m);
        const bool failed = t_failed(&f, m, result);
        t_report(m, &after);
        if (failed && (keeps || result != MS_RESULT_OK)) {
            assert_true(t.c.bytes == before.arena_bytes);
            assert_true(keeps ? after.arena_bytes < before.arena_bytes
                              : after.arena_bytes == before.arena_bytes &&
                                    after.plan_hash == before.plan_hash);
        }
        twins_step(&t);
        twins_end(&t);
    }
    return f.at - 1;
}

static void a_refused_arena_leaves_the_old_one(void **state) {
    (void)state;
    twins all;
    twins_start(&all, 3, false, false); // the smallest budget takes most of the time of a change
    twins_end(&all);
    for (int how = 0; how < 8; ++how) {
        const uint64_t count =
            change_fails_cleanly(all.budgets, (how & 1) != 0, (how & 2) != 0, (how & 4) != 0);
        assert_true(count > 0 || (how & 3) == 1); // an arena that shrinks where it is needs nothing
    }
}

static void what_is_lost_for_good_is_suspended(void **state) {
    (void)state;
    twins t;
    twins_start(&t, 3, false, false);
    ms_model *m = t.chain.model;
    twins_step(&t);
    ms_set_budget(m, t.budgets[0]);
    t.c.fail_at = t.c.calls + 1;
    t.c.fails_on = true; // the old arena is refused as well
    t_error(m, ms_wrap(m), MS_RESULT_OUT_OF_MEMORY);
    t_error(m, ms_step(m, NULL), MS_RESULT_ORDER);
    t_error(m, ms_resume(m), MS_RESULT_OUT_OF_MEMORY);
    t.c.fail_at = 0;
    t.c.fails_on = false;
    t_ok(m, ms_wrap(m));
    twins_step(&t);
    twins_end(&t);
}
#endif

// ------------------------------------------------------------------------------------------------
// suspend and resume

/* Suspends at every slice of one step. */
static void a_step_is_suspended_anywhere(void **state) {
    (void)state;
    t_chain chain, twin;
    double loss[2];
    const ms_config plain = t_config();
    ms_config config = t_config();
    s_slice(&config, 3);
    config.offloading = MS_SWITCH_ON;
    config.force_optimize = true;
    t_chain_start(&chain, &config, DEPTH);
    t_chain_start(&twin, &plain, DEPTH);
    for (int step = 0; step < 6; ++step) {
        ms_result result = MS_RESULT_MORE;
        while (result == MS_RESULT_MORE) {
            result = ms_step_slice(chain.model, 1 + (uint64_t)step, &loss[0]);
            t_ok(chain.model, ms_suspend(chain.model, NULL));
            assert_int_equal(ms_step_slice(chain.model, 1, &loss[0]), MS_RESULT_ORDER);
            t_text_has(ms_last_error(chain.model), "ms_resume");
            t_ok(chain.model, ms_resume(chain.model));
        }
        t_ok(chain.model, result);
        t_ok(twin.model, ms_step(twin.model, &loss[1]));
        assert_memory_equal(&loss[0], &loss[1], sizeof loss[0]);
    }
    t_chain_same(&chain, &twin);
    ms_destroy(chain.model);
    ms_destroy(twin.model);
}

#ifndef T_CUDA
/* The loss and the outputs of what ran last, one after the other, as far as they can be read. */
static size_t read_outputs(const elastic *e, uint8_t *data) {
    const rd_graph *g = e->graph;
    size_t used = 0;
    for (uint32_t i = 0; i < g->value_count; ++i) {
        const rd_value *v = &g->value[i];
        if ((v->kept || v->kept_in_eval || i == g->loss) &&
            ms_read(e->net->model, e->net->handle[i], data + used) == MS_RESULT_OK) {
            used += (size_t)ms_tensor_bytes(e->net->model, e->net->handle[i]);
        }
    }
    return used;
}

static void outputs_are_resumed(const elastic *e) {
    static uint8_t before[RD_VALUES * RD_ELEMENTS * 8], after[sizeof before];
    ms_model *m = e->net->model;
    const size_t used = read_outputs(e, before);
    assert_true(used >= sizeof(float));
    CHECK(e, is_ok(e->net, ms_suspend(m, NULL)) && is_ok(e->net, ms_resume(m)));
    if (read_outputs(e, after) != used || memcmp(before, after, used) != 0) {
        fail_msg("MEMSCALE_TEST_SEED=%llu: a loss or an output is lost by suspending",
                 (unsigned long long)e->graph->seed);
    }
}

static void suspend_after_steps(rd_graph *g, t_heap *heap) {
    static elastic e;
    counted c; // other memory is full of garbage
    double loss;
    ms_config config = t_config();
    config.backend = counted_backend(&c, false);
    config.allocator = t_heap_allocator(heap);
    config.force_optimize = g->seed % 2 == 0;
    elastic_start(&e, g, &config);
    for (uint32_t micro = 0; micro < g->accumulation; ++micro, ++e.round) {
        one_micro(&e, e.net, micro, &loss);
        outputs_are_resumed(&e);
    }
    e.net->run.step += 1;
    begin_micro(&e, e.net, 0);
    CHECK(&e, is_ok(e.net, ms_eval(e.net->model, &loss)));
    outputs_are_resumed(&e);
    begin_micro(&e, e.net, 0);
    CHECK(&e, is_ok(e.net, ms_forward(e.net->model, &loss)));
    outputs_are_resumed(&e);
    elastic_end(&e);
}

static void losses_and_outputs_are_resumed(void **state) {
    (void)state;
    with_each_graph(suspend_after_steps);
}

/* After a step and after an evaluation, whose outputs and losses stay until the next one. */
static void outputs_outlive_a_suspension(void **state) {
    (void)state;
    for (int smallest = 0; smallest < 2; ++smallest) {
        t_chain chain;
        float before[3][T_CHAIN_INPUT], after[3][T_CHAIN_INPUT];
        t_heap heap; // what it gives is full of garbage
        ms_config config = t_config();
        memset(&heap, 0, sizeof heap);
        config.allocator = t_heap_allocator(&heap);
        config.force_optimize = smallest != 0;
        assert_int_equal(t_chain_create(&chain, &config, 4, T_CHAIN_ROWS, T_CHAIN_COLS),
                         MS_RESULT_OK);
        ms_model *m = chain.model;
        ms_add_output(m, chain.hidden[0]);
        ms_add_output(m, chain.hidden[2]);
        t_ok(m, ms_wrap(m));
        t_ok(m, t_chain_write(&chain, 1));
        const ms_tensor all[3] = {chain.hidden[0], chain.hidden[2], chain.loss};
        for (int turn = 0; turn < 4; ++turn) {
            t_ok(m, turn % 2 == 0 ? ms_step(m, NULL) : ms_eval(m, NULL));
            memset(before, 0, sizeof before);
            memset(after, 0, sizeof after);
            for (int k = 0; k < 3; ++k) {
                t_ok(m, ms_read(m, all[k], before[k]));
            }
            t_ok(m, ms_suspend(m, NULL));
            t_ok(m, ms_resume(m));
            for (int k = 0; k < 3; ++k) {
                t_ok(m, ms_read(m, all[k], after[k]));
            }
            assert_memory_equal(before, after, sizeof before);
        }
        ms_destroy(m);
    }
}

/* Calls again what failed for want of memory. */
static void call_again(elastic *e, t_heap *heap, ms_result result, ms_result (*call)(ms_model *)) {
    if (result != MS_RESULT_OK) {
        CHECK(e, heap->has_failed && result == MS_RESULT_OUT_OF_MEMORY);
        result = call(e->net->model);
    }
    CHECK(e, is_ok(e->net, result));
}

static ms_result suspend_to_own(ms_model *m) {
    return ms_suspend(m, NULL);
}

/* Suspends and resumes, while one of the first allocations fails, or none. */
static void suspend_short_of_memory(elastic *e, t_heap *heap) {
    const uint64_t nth = t_below(&e->rng, 4);
    heap->fail_at = nth ? heap->calls + nth : 0;
    heap->has_failed = false;
    (void)bounded_image(e);
    call_again(e, heap, suspend_to_own(e->net->model), suspend_to_own);
    CHECK(e, ms_step_slice(e->net->model, 1, NULL) == MS_RESULT_ORDER);
    call_again(e, heap, ms_resume(e->net->model), ms_resume);
    heap->fail_at = 0;
}

/* After each instruction. */
static void suspend_anywhere(rd_graph *g, t_heap *heap) {
    static elastic e;
    ms_config config = t_config();
    config.allocator = t_heap_allocator(heap);
    s_slice(&config, g->seed); // for its clock: two instructions seldom fit
    elastic_start(&e, g, &config);
    for (int step = 0; step < 3; ++step) {
        for (uint32_t micro = 0; micro < g->accumulation; ++micro, ++e.round) {
            double loss[2];
            ms_result result = MS_RESULT_MORE;
            one_micro(&e, e.fixed, micro, &loss[0]);
            for (begin_micro(&e, e.net, micro); result == MS_RESULT_MORE;) {
                result = ms_step_slice(e.net->model, 1, &loss[1]);
                suspend_short_of_memory(&e, heap);
            }
            CHECK(&e, is_ok(e.net, result));
            assert_memory_equal(&loss[0], &loss[1], sizeof loss[0]);
        }
        e.fixed->run.step += 1;
        e.net->run.step += 1;
        same_lasting(&e);
    }
    elastic_end(&e);
}

static void random_steps_are_suspended_anywhere(void **state) {
    (void)state;
    with_each_graph(suspend_anywhere);
}
#endif

/* In the middle of a step, where the arena cannot be had again: the step is cancelled, and a smaller
   one will do. */
static void a_suspended_step_can_be_cancelled(void **state) {
    (void)state;
    const ms_config plain = t_config();
    uint32_t cancelled = 0;
    for (uint32_t slices = 1, more = 1; more; ++slices) {
        t_chain chain, twin;
        double loss;
        uint64_t budgets[BUDGETS];
        float data[T_CHAIN_COLS * T_CHAIN_COLS];
        ms_config config = t_config();
        s_slice(&config, slices);
        config.early_update = MS_SWITCH_OFF;
        t_chain_start(&chain, &config, 3);
        t_chain_start(&twin, &plain, 3);
        ms_model *m = chain.model;
        chain_budgets(&chain, budgets);
        ms_result result = MS_RESULT_MORE;
        for (uint32_t i = 0; i < slices && result == MS_RESULT_MORE; ++i) {
            result = ms_step_slice(m, 1, &loss);
        }
        more = result == MS_RESULT_MORE;
        const bool updates = m->run.updates_done > 0;
        t_ok(m, ms_suspend(m, NULL));
        ms_set_budget(m, budgets[0]);
        if (more) {
            t_error(m, ms_wrap(m), MS_RESULT_ORDER);
            t_error(m, ms_step_slice(m, 1, &loss), MS_RESULT_ORDER);
            ms_cancel(m);
            result = ms_step_slice(m, 1, &loss);
            t_error(m, result, updates ? MS_RESULT_ORDER : MS_RESULT_CANCELLED);
        }
        if (updates && more) {
            t_ok(m, ms_resume(m));
            t_ok(m, ms_step_slice(m, UINT64_MAX, &loss));
            t_error(m, ms_step(m, &loss), MS_RESULT_CANCELLED);
        } else if (slices % 2) {
            t_ok(m, ms_resume(m));
        }
        cancelled += more && !updates;
        t_ok(m, ms_wrap(m));
        t_ok(m, ms_read(m, chain.weight[0], data));
        t_ok(twin.model, ms_step(twin.model, &loss));
        if (more && !updates) {
            t_ok(m, ms_step(m, &loss));
        }
        t_chain_same(&chain, &twin);
        ms_destroy(m);
        ms_destroy(twin.model);
    }
    assert_true(cancelled > 3);
}

static void calls_of_a_suspended_model(void **state) {
    (void)state;
    t_chain chain, twin;
    double loss;
    uint64_t budgets[BUDGETS];
    float data[T_CHAIN_COLS * T_CHAIN_COLS];
    ms_memory_report report;
    ms_verify_report verified;
    const ms_config config = t_config();
    t_chain_start(&twin, &config, 3);
    assert_int_equal(t_chain_create(&chain, &config, 3, T_CHAIN_ROWS, T_CHAIN_COLS), MS_RESULT_OK);
    t_error(chain.model, ms_suspend(chain.model, NULL), MS_RESULT_ORDER);
    t_error(chain.model, ms_resume(chain.model), MS_RESULT_ORDER);
    assert_int_equal(ms_suspended_bytes(chain.model), 0);
    assert_int_equal(ms_suspended_bytes(NULL), 0);
    assert_int_equal(ms_suspend(NULL, NULL), MS_RESULT_INVALID);
    assert_int_equal(ms_resume(NULL), MS_RESULT_INVALID);
    t_ok(chain.model, ms_wrap(chain.model));
    t_ok(chain.model, t_chain_write(&chain, 1));
    t_error(chain.model, ms_resume(chain.model), MS_RESULT_ORDER);
    chain_budgets(&chain, budgets);
    t_ok(chain.model, ms_step(chain.model, &loss));
    assert_true(ms_suspended_bytes(chain.model) > 3 * sizeof data);
    t_ok(chain.model, ms_suspend(chain.model, NULL));
    t_error(chain.model, ms_suspend(chain.model, NULL), MS_RESULT_ORDER);
    t_error(chain.model, ms_step(chain.model, &loss), MS_RESULT_ORDER);
    t_error(chain.model, ms_eval(chain.model, &loss), MS_RESULT_ORDER);
    t_error(chain.model, ms_update(chain.model), MS_RESULT_ORDER);
    t_error(chain.model, ms_read(chain.model, chain.weight[0], data), MS_RESULT_ORDER);
    t_error(chain.model, ms_write(chain.model, chain.weight[0], data), MS_RESULT_ORDER);
    t_error(chain.model, ms_verify(chain.model, NULL, NULL, &verified), MS_RESULT_ORDER);
    assert_null(ms_data(chain.model, chain.weight[0]));
    t_ok(chain.model, ms_report(chain.model, &report));
    t_ok(chain.model, ms_synchronize(chain.model));
    assert_int_equal(ms_suspended_bytes(chain.model), 0);
    ms_set_budget(chain.model, budgets[BUDGETS / 2]); // resumed by another plan
    t_ok(chain.model, ms_wrap(chain.model));
    t_ok(chain.model, ms_step(chain.model, &loss));
    t_ok(chain.model, ms_suspend(chain.model, NULL));
    t_ok(chain.model, ms_wrap(chain.model)); // and by the same one
    t_ok(chain.model, ms_step(chain.model, &loss));
    for (int i = 0; i < 3; ++i) {
        t_ok(twin.model, ms_step(twin.model, &loss));
    }
    t_chain_same(&chain, &twin);
    t_ok(chain.model, ms_suspend(chain.model, NULL));
    ms_destroy(chain.model); // as it is
    ms_destroy(twin.model);
}

#ifndef T_CUDA
/* Without memory a model stays as it was, suspended or not. */
static void suspend_with_failures(bool debug) {
    twins t;
    t_failing f = t_failing_heap(&t.heap);
    while (t_next_failure(&f, 1)) {
        twins_start(&t, 3, false, debug);
        ms_model *m = t.chain.model;
        twins_step(&t);
        t_arm(&f);
        ms_result result = ms_suspend(m, NULL);
        const bool suspended = result == MS_RESULT_OK;
        assert_true(!suspended || t.c.bytes == 0);
        result = suspended ? ms_resume(m) : result;
        t_failed(&f, m, result);
        if (suspended && result != MS_RESULT_OK) {
            t_error(m, ms_step(m, NULL), MS_RESULT_ORDER);
            t_ok(m, ms_resume(m));
        }
        twins_step(&t);
        twins_end(&t);
    }
    assert_true(f.error_count > 0 && f.at < 50);
}

/* What its trainer suspended stays so when another plan lacks memory, on the device or on the host. */
static void a_failing_wrap_leaves_a_model_suspended(void **state) {
    (void)state;
    for (int of_heap = 0; of_heap < 2; ++of_heap) {
        twins t;
        memset(&t, 0, sizeof t);
        t_failing f = of_heap
                          ? t_failing_heap(&t.heap)
                          : t_failing_of(&t.c.calls, &t.c.fail_at, 1u << MS_RESULT_OUT_OF_MEMORY);
        while (t_next_failure(&f, 1)) {
            ms_memory_report report;
            twins_open(&t, 3, false, false);
            ms_model *m = t.chain.model;
            twins_step(&t);
            t_report(m, &report);
            t_ok(m, ms_suspend(m, NULL));
            ms_set_budget(m, report.arena_bytes + 4096);
            t_arm(&f);
            if (t_failed(&f, m, ms_wrap(m))) {
                assert_true(t.c.bytes == 0);
                t_error(m, ms_step(m, NULL), MS_RESULT_ORDER);
                t_ok(m, ms_resume(m));
            }
            twins_step(&t);
            twins_end(&t);
        }
        assert_true(f.error_count > 0);
    }
}

static void suspending_fails_cleanly(void **state) {
    (void)state;
    suspend_with_failures(false);
    suspend_with_failures(true);
}
#endif

int main(void) {
    t_hook.part_bytes = 128; // so that state comes in parts
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(budgets_change_no_bit),
        cmocka_unit_test(budgets_change_a_thousand_times),
#ifndef T_CUDA
        cmocka_unit_test(budgets_change_in_lent_memory),
        cmocka_unit_test(a_lent_block_that_is_too_small),
        cmocka_unit_test(what_is_skipped_of_a_lent_block_is_no_room),
        cmocka_unit_test(budgets_change_on_a_device),
        cmocka_unit_test(values_are_moved_whole),
        cmocka_unit_test(there_are_never_two_arenas),
        cmocka_unit_test(host_memory_goes_with_its_plan),
        cmocka_unit_test(the_allocator_gets_host_memory_back),
        cmocka_unit_test(a_refused_arena_leaves_the_old_one),
        cmocka_unit_test(what_is_lost_for_good_is_suspended),
        cmocka_unit_test(suspending_fails_cleanly),
        cmocka_unit_test(a_failing_wrap_leaves_a_model_suspended),
        cmocka_unit_test(random_steps_are_suspended_anywhere),
        cmocka_unit_test(losses_and_outputs_are_resumed),
        cmocka_unit_test(outputs_outlive_a_suspension),
#endif
        cmocka_unit_test(a_step_is_suspended_anywhere),
        cmocka_unit_test(a_suspended_step_can_be_cancelled),
        cmocka_unit_test(calls_of_a_suspended_model),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
