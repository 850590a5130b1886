/*  test_offload.c - what a plan moves to the host and back: the order of copies and of what is
    computed, of random graphs with random moves. MEMSCALE_TEST_DAGS sets how many graphs there are,
    MEMSCALE_TEST_SEED which is the first. */
#include "private.h"
#include "toy_layers.h"
#include "random_dag.h"
#include "virtual.h"
#include "late_dag.h"
#include "orders.h"
#include "slices.h"

/* The emulated device is some ten times slower. */
#ifdef T_CUDA
enum { QUICK_GRAPHS = 40, GRAPHS = 400, QUICK_ORDERED = 30, ORDERED = 30 };
#else
enum { QUICK_GRAPHS = 120, GRAPHS = 4500, QUICK_ORDERED = 180, ORDERED = 10000 };
#endif

static uint64_t first_seed(void) {
    return t_environment("MEMSCALE_TEST_SEED", 1);
}

static uint64_t end_seed(uint64_t quick, uint64_t full) {
    return first_seed() + t_environment("MEMSCALE_TEST_DAGS", t_sweep(quick, full));
}

// ------------------------------------------------------------------------------------------------
// the order of a program, without running it

/* Whether a graph has values in 16 bits. */
static bool is_mixed(const rd_graph *g) {
    return g->seed % 2 == 1;
}

/* A random graph of which random things are moved, planned. */
static rd_net *moved_net(rd_graph *g, char *failure, bool mixed) {
    t_rng rng = t_seed(g->seed ^ 0x0ff1);
    const ms_config config = t_config();
    if (mixed) {
        rd_random_dtypes(g, g->seed + 99);
    }
    rd_net *n = rd_net_create(g, &config, "moved", failure, false);
    rd_force_moves(n, &rng);
    if (mixed) {
        rd_force_half(n, g->seed);
    }
    t_ok(n->model, ms_wrap(n->model));
    return n;
}

static void what_conflicts_is_ordered(void **state) {
    (void)state;
    const uint64_t end = end_seed(QUICK_ORDERED, ORDERED);
    for (uint64_t seed = first_seed(); seed < end; ++seed) {
        char failure[RD_TEXT] = "";
        rd_graph *g = rd_generate(seed);
        rd_net *n = moved_net(g, failure, is_mixed(g));
        char where[32];
        snprintf(where, sizeof where, "graph %llu", (unsigned long long)seed);
        o_expect_ordered(n->model, where);
        rd_net_destroy(n);
        free(g);
    }
}

/* Keeps most of the state of layers on the host; false if there is none. */
static bool keep_state_on_host(rd_graph *g, t_rng *rng) {
    bool any = false;
    for (uint32_t i = 0; i < g->value_count; ++i) {
        rd_value *v = &g->value[i];
        v->on_host |= v->is_state && t_chance(rng, 0.7);
        any |= v->is_state && v->on_host;
    }
    return any;
}

/* Forces recomputation on some activations, most of which have a layer that allows it. */
static void force_recomputations(rd_net *n, t_rng *rng) {
    for (uint32_t i = 0; i < n->run.graph->value_count; ++i) {
        const rd_value *v = &n->run.graph->value[i];
        const bool stays = v->kept || v->kept_in_eval || v->stopped || i == n->run.graph->loss;
        if (v->role == RD_ACTIVATION && !stays && t_chance(rng, 0.4)) {
            ms_set_tensor_technique(n->model, n->handle[i], MS_TECHNIQUE_OFFLOADING,
                                    MS_SWITCH_DEFAULT);
            ms_set_tensor_technique(n->model, n->handle[i], MS_TECHNIQUE_CHECKPOINTING,
                                    MS_SWITCH_ON);
        }
    }
}

/* Recomputations put state back, on the host where callbacks use it there, between copies that the
   device alone waits for. */
static void state_on_the_host_is_awaited_there(void **state) {
    (void)state;
    const uint64_t end = end_seed(QUICK_ORDERED, ORDERED);
    uint32_t restored = 0;
    for (uint64_t seed = first_seed(); seed < end; ++seed) {
        char failure[RD_TEXT] = "", where[32];
        t_rng rng = t_seed(seed ^ 0x0ff1);
        const ms_config config = t_config();
        rd_graph *g = rd_generate(seed);
        if (keep_state_on_host(g, &rng)) {
            rd_net *n = rd_net_create(g, &config, "shown", failure, false);
            rd_force_moves(n, &rng);
            force_recomputations(n, &rng);
            if (ms_wrap(n->model) == MS_RESULT_OK) {
                snprintf(where, sizeof where, "graph %llu", (unsigned long long)seed);
                o_expect_ordered(n->model, where);
                const msi_program *p = &n->model->run.plan->train;
                for (uint32_t k = 0; k < p->code.instructions.count; ++k) {
                    const msi_instruction *i = &p->code.instructions.items[k];
                    restored += i->restores && i->op == MSI_OP_COPY_OUT;
                }
            }
            rd_net_destroy(n);
        }
        free(g);
    }
    assert_true(restored >= 10 || end - first_seed() < QUICK_ORDERED);
}

static void every_wait_matters(void **state) {
    (void)state;
    const uint64_t end = end_seed(QUICK_ORDERED, ORDERED);
    o_tally t = {{0}, {0}};
    for (uint64_t seed = first_seed(); seed < end; ++seed) {
        char failure[RD_TEXT] = "";
        rd_graph *g = rd_generate(seed);
        rd_net *n = moved_net(g, failure, false);
        o_leave_out_each(n->model, &t);
        rd_net_destroy(n);
        free(g);
    }
    o_expect_needed(&t);
}

// ------------------------------------------------------------------------------------------------
// what copies keep to

/* Whether an instruction uses, or awaits, what a copy brings. */
static bool uses_target(const msi_program *p, const msi_instruction *i,
                        const msi_instruction *copy) {
    for (uint32_t k = 0; k < i->operand_count; ++k) {
        for (uint32_t pair = 0; pair < copy->operand_count; pair += 2) {
            if (p->code.operands.items[i->operand_first + k].range ==
                p->code.operands.items[copy->operand_first + pair].range) {
                return true;
            }
        }
    }
    return false;
}

/* Where each copy in must have come: where it is awaited, or what it brings is used first if other
   copies are awaited in its place; or where a later copy must have come. */
static void find_needed(const msi_program *p, uint32_t *needed) {
    uint32_t next = p->code.instructions.count;
    for (uint32_t now = p->code.instructions.count; now-- > 0;) {
        const msi_instruction *copy = &p->code.instructions.items[now];
        needed[now] = 0;
        if (copy->op == MSI_OP_COPY_IN) {
            uint32_t use = now + 1;
            for (; use < next; ++use) {
                const msi_instruction *i = &p->code.instructions.items[use];
                const bool other =
                    msi_is_issued((msi_op)i->op) ||
                    (i->op == MSI_OP_WAIT && msi_awaited_engine(p, i) == MSI_ENGINE_TO_HOST);
                if (!other && uses_target(p, i, copy)) {
                    break;
                }
            }
            needed[now] = next = use;
        }
    }
}

/* Counts, before each instruction that computes, the copies in whose values are needed later; with
   async_offload OFF none of either direction is under way. Nor is any at the end, or at that of
   backward if micro-batches follow. Returns how often there were as many copies in as there may be. */
static uint32_t check_under_way(const ms_model *m, const msi_program *p) {
    const uint32_t depth = m->config.prefetch_depth;
    const bool waits = m->config.async_offload == MS_SWITCH_OFF;
    uint32_t *needed = (uint32_t *)calloc(p->code.instructions.count + 1u, sizeof *needed);
    uint32_t issued[MSI_ENGINE_COUNT] = {0}, awaited[MSI_ENGINE_COUNT] = {0};
    uint32_t *of_event =
        (uint32_t *)calloc(MSI_ISSUED_COUNT * (size_t)p->code.event_count, sizeof *of_event);
    uint32_t at_most = 0;
    assert_true(needed != NULL && of_event != NULL);
    find_needed(p, needed);
    for (uint32_t now = 0; now <= p->code.instructions.count; ++now) {
        const bool ends = now == p->code.instructions.count;
        const msi_instruction *i = ends ? NULL : &p->code.instructions.items[now];
        if (ends || (now == p->code.backward_end && m->run.store->micro_count > 1)) {
            assert_memory_equal(issued, awaited, sizeof issued);
        }
        if (i != NULL && msi_is_issued((msi_op)i->op)) {
            const msi_engine engine = msi_ops[i->op].engine;
            issued[engine] += 1;
            if (i->event != MSI_NO_EVENT) {
                of_event[i->event] = issued[engine];
            }
        } else if (i != NULL && i->op == MSI_OP_WAIT) {
            awaited[msi_awaited_engine(p, i)] = of_event[i->event];
        } else if (i != NULL && i->op != MSI_OP_NOTHING) {
            uint32_t ahead = 0;
            for (uint32_t k = 0; k < now; ++k) {
                ahead += needed[k] > now;
            }
            assert_true(depth == 0 || ahead <= depth);
            assert_true(!waits || memcmp(issued, awaited, sizeof issued) == 0);
            at_most += ahead == depth;
        }
    }
    free(needed);
    free(of_event);
    return at_most;
}

static void copies_keep_to_their_limits(void **state) {
    (void)state;
    const uint64_t at_the_end = 196; // a wait at the end of backward orders nothing before the next
    const uint64_t end = end_seed(QUICK_ORDERED / 3, ORDERED);
    uint32_t at_most = 0, later = 0;
    for (uint64_t k = first_seed(); k <= end; ++k) {
        const uint64_t seed = k < end ? k : at_the_end;
        char failure[RD_TEXT] = "";
        t_rng rng = t_seed(seed ^ 0x0ff1);
        ms_config config = t_config();
        rd_graph *g = rd_generate(seed);
        config.prefetch_depth = (uint32_t)(seed % 3);
        config.async_offload = seed % 3 == 0 ? MS_SWITCH_OFF : MS_SWITCH_DEFAULT;
        rd_net *n = rd_net_create(g, &config, "moved", failure, false);
        rd_force_moves(n, &rng);
        t_ok(n->model, ms_wrap(n->model));
        at_most += check_under_way(n->model, &n->model->run.plan->train) * (seed % 3 > 0);
        (void)check_under_way(n->model, &n->model->run.plan->eval);
        later += g->accumulation > 1;
        rd_net_destroy(n);
        free(g);
    }
    assert_true(at_most > 0 && later > 0);
}

/* Copies in begin so that each has come when it or one behind it in the stream is needed: at most
   as late as the last moment that lets all of them run one after another. */
static void copies_begin_in_time_for_those_behind(void **state) {
    (void)state;
    enum { SLOTS = 6, COPIES = 5 };
    t_rng rng = t_seed(3);
    for (int round = 0; round < 200; ++round) {
        msi_transfer copies[COPIES];
        double begin_us[SLOTS + 1] = {0.0};
        msi_costs costs;
        msi_scheduling s;
        memset(&s, 0, sizeof s);
        memset(copies, 0, sizeof copies);
        memset(&costs, 0, sizeof costs);
        s.costs = &costs;
        s.transfers = copies;
        s.transfer_count = COPIES;
        s.begin_us = begin_us;
        for (int k = 0; k < SLOTS; ++k) {
            begin_us[k + 1] = begin_us[k] + 1.0 + t_below(&rng, 9);
        }
        for (uint32_t k = 0, needed = 0; k < COPIES; ++k) {
            needed += t_below(&rng, 2);
            copies[k].needed = needed;
            copies[k].us = 1.0 + t_below(&rng, 5);
            copies[k].engine = t_chance(&rng, 0.8) ? MSI_ENGINE_TO_DEVICE : MSI_ENGINE_TO_HOST;
            copies[k].is_left_out = t_chance(&rng, 0.2);
            copies[k].start_us = NAN;
        }
        msi_find_starts(&s);
        for (uint32_t k = 0; k < COPIES; ++k) {
            double latest = 1e300, us = 0.0; // over all that are behind: when it is needed, less
            for (uint32_t behind = k; behind < COPIES; ++behind) { // what runs until then
                const msi_transfer *t = &copies[behind];
                if (msi_is_in(t) && !t->is_left_out) {
                    us += t->us;
                    latest = begin_us[t->needed] - us < latest ? begin_us[t->needed] - us : latest;
                }
            }
            assert_true(!msi_is_in(&copies[k]) || copies[k].is_left_out ||
                        copies[k].start_us == latest);
        }
    }
}

/* What is kept from slot to slot is held in all of them or in none, and nowhere beyond the peak. */
static void what_is_kept_fits_everywhere(void **state) {
    (void)state;
    enum { SLOTS = 300, MOST = 1000, GROUPS = SLOTS / MSI_SLOT_GROUP + 1 };
    t_rng rng = t_seed(4);
    uint32_t held = 0, refused = 0;
    for (int round = 0; round < 200; ++round) {
        uint64_t own[SLOTS], more[GROUPS] = {0}, fullest[GROUPS] = {0}, live[SLOTS];
        const uint32_t slots = 1 + t_below(&rng, SLOTS);
        msi_scheduling s;
        memset(&s, 0, sizeof s);
        s.live_bytes = own;
        s.more_bytes = more;
        s.group_bytes = fullest;
        s.most_bytes = MOST;
        for (uint32_t k = 0; k < slots; ++k) {
            live[k] = own[k] = t_below(&rng, MOST / 2);
            fullest[k / MSI_SLOT_GROUP] = msi_larger(fullest[k / MSI_SLOT_GROUP], own[k]);
        }
        for (int time = 0; time < 40; ++time) {
            const uint32_t first = t_below(&rng, slots), bytes = 1 + t_below(&rng, MOST / 4);
            const uint32_t end = first + t_below(&rng, slots - first + 1);
            uint32_t last = MSI_NONE;
            for (uint32_t k = first; k < end; ++k) {
                last = live[k] + bytes > MOST ? k : last;
            }
            const bool fits = last == MSI_NONE;
            assert_int_equal(msi_hold(&s, first, end, bytes), last);
            for (uint32_t k = 0; k < slots; ++k) {
                live[k] += fits && first <= k && k < end ? bytes : 0;
                assert_int_equal(msi_live_at(&s, k), live[k]);
            }
            held += fits && end > first;
            refused += !fits;
        }
    }
    assert_true(held > 1000 && refused > 1000);
}

/* At smaller sizes the plan may have to follow that for the largest, also in when copies begin and
   end: these two graphs, scheduled anew, have copies that overlap other values. */
static void smaller_sizes_keep_the_schedule(void **state) {
    (void)state;
    static const uint64_t seeds[] = {5678, 6742};
    for (int k = 0; k < 2; ++k) {
        char failure[RD_TEXT] = "";
        rd_graph *g = rd_generate(seeds[k]);
        rd_net *n = moved_net(g, failure, false);
        const msi_program *p = &n->model->run.plan->train;
        bool valid = false;
        uint64_t bound;
        assert_true(g->axis_count > 0);
        assert_int_equal(msi_layout_check(&n->model->config.allocator, p->layout.blocks.items,
                                          p->layout.blocks.count, &valid, &bound),
                         MS_RESULT_OK);
        assert_true(valid);
        rd_net_destroy(n);
        free(g);
    }
}

/* Copies between host and device, by what moves in them. */
typedef struct copy_tally {
    uint32_t several; // several tensors or roles
    uint32_t values;  // the values of several params
    uint32_t whole;   // a param with its state
    uint32_t at_once; // of those with several: the backend makes one copy of all
} copy_tally;

/* How many copies the backend makes of one. The prediction never counts fewer. */
static uint32_t count_calls(const ms_model *m, const msi_program *p, const msi_instruction *i) {
    uint32_t calls = 0, predicted = 1;
    for (uint32_t k = 0; k < msi_pair_count(i); ++calls) {
        msi_pair pair;
        k += msi_take_pairs(m, p, i, k, &pair);
    }
    for (uint32_t k = 1; k < msi_pair_count(i); ++k) {
        predicted += !msi_continues(p, i, k);
    }
    assert_true(calls <= predicted);
    return calls;
}

static void count_copies(const ms_model *m, const msi_program *p, copy_tally *tally) {
    for (uint32_t now = 0; now < p->code.instructions.count; ++now) {
        const msi_instruction *i = &p->code.instructions.items[now];
        const msi_operand *ends = p->code.operands.items + i->operand_first;
        const uint32_t pairs = i->operand_count / 2u;
        uint32_t values = 0, states = 0;
        if (i->op != MSI_OP_COPY_IN && i->op != MSI_OP_COPY_OUT) {
            continue;
        }
        assert_int_equal(i->operand_count % 2, 0);
        for (uint32_t k = 0; k < pairs; ++k) {
            const msi_range *target = &p->code.ranges.items[ends[2 * k].range];
            const msi_range *source = &p->code.ranges.items[ends[2 * k + 1].range];
            assert_true(target->on_host == (i->op == MSI_OP_COPY_OUT));
            assert_true(source->on_host == (i->op == MSI_OP_COPY_IN));
            assert_true(pairs == 1 ||
                        (target->tensor == source->tensor && target->role == source->role));
            values += target->role == MSI_ROLE_VALUE;
            states += target->role >= MSI_ROLE_STATE0 && target->role < MSI_ROLE_RESIDENT_COUNT;
        }
        assert_true(pairs == 1 || values + states == pairs);
        tally->several += pairs > 1;
        tally->values += values > 1;
        tally->whole += values > 0 && states > 0;
        tally->at_once += count_calls(m, p, i) == 1 && pairs > 1;
    }
}

/* So many params move in one copy, at most one of which is not small. */
static void what_moves_in_one_copy_is_small_except_for_one(void **state) {
    (void)state;
    uint32_t counts[MSI_MOST_TOGETHER + 1] = {0};
    t_rng rng = t_seed(1);
    msi_batch b = {0, 0};
    for (uint32_t k = 0, count = 0, large = 0; k < 2000; ++k) {
        const bool is_large = t_chance(&rng, 0.3);
        const bool fits = count > 0 && count < MSI_MOST_TOGETHER && large + is_large <= 1;
        assert_int_equal(msi_goes_along(&b, MSI_SMALL_BYTES + (is_large ? 4 : 0)), fits);
        counts[fits ? 0 : count] += 1;
        count = fits ? count + 1 : 1;
        large = (fits ? large : 0) + is_large;
        assert_int_equal(b.count, count);
    }
    assert_true(counts[1] > 0 && counts[2] > 0 && counts[MSI_MOST_TOGETHER] > 0);
}

static void random_copies_have_what_moves_together(void **state) {
    (void)state;
    const uint64_t end = end_seed(QUICK_ORDERED, ORDERED);
    copy_tally tally = {0, 0, 0, 0};
    for (uint64_t seed = first_seed(); seed < end; ++seed) {
        char failure[RD_TEXT] = "";
        rd_graph *g = rd_generate(seed);
        rd_net *n = moved_net(g, failure, false);
        count_copies(n->model, &n->model->run.plan->train, &tally);
        count_copies(n->model, &n->model->run.plan->eval, &tally);
        rd_net_destroy(n);
        free(g);
    }
    print_message("%u copies of several, %u of them made at once; %u with the values of several "
                  "params, %u with a param and its state\n",
                  (unsigned)tally.several, (unsigned)tally.at_once, (unsigned)tally.values,
                  (unsigned)tally.whole);
    assert_true(tally.values > 0 && tally.whole > 0);
    assert_true(tally.at_once > 0 && tally.at_once < tally.several);
}

// ------------------------------------------------------------------------------------------------
// what there is on the host

static uint64_t host_bytes; // that the backend has given

static int count_host_alloc(void *user, const ms_allocator *host, uint64_t bytes, void **memory) {
    (void)user;
    *memory = host->alloc(bytes, host->user);
    host_bytes += *memory != NULL ? bytes : 0;
    return *memory == NULL;
}

static void count_host_release(void *user, const ms_allocator *host, void *memory, uint64_t bytes) {
    (void)user;
    host_bytes -= bytes;
    host->release(memory, bytes, host->user);
}

/* Whether a program copies to this place on the host. */
static bool is_copied_to(const msi_program *p, uint32_t range) {
    bool found = false;
    for (uint32_t now = 0; now < p->code.instructions.count; ++now) {
        const msi_instruction *i = &p->code.instructions.items[now];
        for (uint32_t k = 0; k < i->operand_count && i->op == MSI_OP_COPY_OUT; k += 2) {
            found |= p->code.operands.items[i->operand_first + k].range == range;
        }
    }
    return found;
}

/* Returns how many bytes lie on the host for a while, and checks that copies bring them there. */
static uint64_t expect_copied(const msi_program *p, uint32_t residents, const char *where) {
    uint64_t sent = 0, all = 0, most = 0;
    for (uint32_t k = residents; k < p->code.ranges.count; ++k) {
        const msi_range *range = &p->code.ranges.items[k];
        if (range->on_host && range->bytes > 0) {
            if (!is_copied_to(p, k)) {
                fail_msg("%s: range %u is on the host, and nothing is copied there", where,
                         (unsigned)k);
            }
            sent += range->role != MSI_ROLE_SNAPSHOT ? msi_align(range->bytes) : 0;
            all += msi_align(range->bytes);
        }
    }
    for (uint32_t now = 0; now < p->code.instructions.count; ++now) {
        uint64_t live = 0;
        for (uint32_t k = residents; k < p->code.ranges.count; ++k) {
            const msi_range *range = &p->code.ranges.items[k];
            live += range->on_host && range->first <= now && now <= range->last
                        ? msi_align(range->bytes)
                        : 0;
        }
        most = live > most ? live : most;
    }
    assert_true(p->layout.host_height >= most && p->layout.host_height <= all);
    return sent;
}

/* Homes, what a program keeps on the host, and staging lie apart, inside of what is allocated. */
static void expect_apart(const ms_model *m) {
    const msi_store *store = m->run.store;
    const msi_plan *plan = m->run.plan;
    const uint8_t *staging = msi_staging_of(store), *end = staging + store->staging_bytes;
    const uint8_t *homes_end = store->host + store->host_bytes;
    assert_true(end <= store->host + host_bytes);
    for (int which = 0; which < 2; ++which) {
        const msi_program *p = which ? &plan->eval : &plan->train;
        for (uint32_t k = 0; k < p->code.ranges.count; ++k) {
            const msi_range *range = &p->code.ranges.items[k];
            const uint8_t *at = (const uint8_t *)msi_address(m, p, k);
            if (k >= store->residents.count && range->on_host) {
                assert_true(at >= homes_end && at + range->bytes <= staging);
            } else if (at >= store->host && at < end) {
                assert_true(at + range->bytes <= homes_end);
            }
        }
    }
}

/* A plan has no place on the host for what it does not copy there, and searches, which stay within
   max_host_bytes, count none; what is allocated is what the report says. */
static void the_host_holds_what_is_copied_there(void **state) {
    (void)state;
    const uint64_t end = end_seed(QUICK_ORDERED, ORDERED);
    uint64_t moving = 0;
    for (uint64_t seed = first_seed(); seed < end; ++seed) {
        char failure[RD_TEXT] = "", where[32];
        t_rng rng = t_seed(seed ^ 0x0ff1);
        t_heap heap;
        ms_memory_report report;
        ms_config config = t_config();
        rd_graph *g = rd_generate(seed);
        memset(&heap, 0, sizeof heap);
        config.allocator = t_heap_allocator(&heap);
        config.backend = ms_backend_cpu();
        config.backend.host_alloc = count_host_alloc;
        config.backend.host_release = count_host_release;
        config.force_optimize = seed % 3 == 0;
        rd_net *n = rd_net_create(g, &config, "counted", failure, false);
        rd_force_moves(n, &rng);
        t_ok(n->model, ms_wrap(n->model));
        snprintf(where, sizeof where, "graph %llu", (unsigned long long)seed);
        const msi_store *store = n->model->run.store;
        const msi_plan *plan = n->model->run.plan;
        const uint64_t sent = expect_copied(&plan->train, store->residents.count, where);
        assert_int_equal(plan->train.layout.sent_bytes, sent);
        assert_int_equal(expect_copied(&plan->eval, store->residents.count, where), 0);
        expect_apart(n->model);
        t_report(n->model, &report);
        assert_true(g->axis_count > 0 || report.host_bytes == plan->train.layout.home_bytes +
                                                                  plan->train.layout.host_height);
        assert_int_equal(host_bytes, report.host_bytes + report.staging_bytes);
        moving += sent > 0;
        rd_net_destroy(n);
        assert_true(host_bytes == 0 && heap.live_count == 0 && heap.wrong_releases == 0);
        free(g);
    }
    assert_true(moving > 0);
}

// ------------------------------------------------------------------------------------------------
// random graphs: the bits of the plain plan on the CPU

enum { STEPS = 3 };

typedef struct pair_of_nets {
    rd_graph *graph;
    rd_net *plain, *moved;
    char failure[RD_TEXT];
    uint64_t round;
    bool omits; // one of the waits of the moved net's program
    bool codes; // the state of some params is in 8 bits, of others in BF16
    uint64_t omitted;
} pair_of_nets;

static bool works(const rd_net *n, ms_result result, const char *call) {
    return result == MS_RESULT_OK ||
           rd_fail(&n->run, "%s: %s: %s", call, ms_result_name(result), ms_last_error(n->model));
}

#define TRY(n, call) works((n), (call), #call)

/* One tensor of both nets. A gradient that is gone by an early update, or was never made, cannot be
   read. */
static bool same_tensor(pair_of_nets *t, const char *what, uint32_t value, ms_tensor plain,
                        ms_tensor moved) {
    uint64_t a[RD_ELEMENTS] = {0}, b[RD_ELEMENTS] = {0};
    const uint64_t bytes = rd_bytes(&t->graph->value[value], t->plain->run.size);
    const ms_result of_plain = ms_read(t->plain->model, plain, a);
    const ms_result of_moved = ms_read(t->moved->model, moved, b);
    const bool is_gone = of_moved == MS_RESULT_ORDER && strcmp(what, "gradient") == 0;
    if (of_plain != of_moved && !is_gone) {
        return rd_fail(&t->moved->run, "reading %s %u: %s, plain %s", what, (unsigned)value,
                       ms_result_name(of_moved), ms_result_name(of_plain));
    }
    return of_plain != MS_RESULT_OK || is_gone || memcmp(a, b, (size_t)bytes) == 0 ||
           rd_fail(&t->moved->run, "%s %u differs from the plain plan's", what, (unsigned)value);
}

static bool same_gradients(pair_of_nets *t) {
    const rd_graph *g = t->graph;
    bool fine = true;
    for (uint32_t i = 0; i < g->value_count && fine; ++i) {
        if (g->value[i].role == RD_PARAM && !g->value[i].frozen) {
            fine = same_tensor(t, "gradient", i, ms_gradient(t->plain->model, t->plain->handle[i]),
                               ms_gradient(t->moved->model, t->moved->handle[i]));
        }
    }
    return fine;
}

static bool same_values(pair_of_nets *t) {
    const rd_graph *g = t->graph;
    ms_model *const a = t->plain->model, *const b = t->moved->model;
    bool fine = true;
    for (uint32_t i = 0; i < g->value_count && fine; ++i) {
        const rd_value *v = &g->value[i];
        const ms_tensor plain = t->plain->handle[i], moved = t->moved->handle[i];
        const bool trained = v->role == RD_PARAM && !v->frozen;
        if (v->role < RD_ACTIVATION || v->kept || i == g->loss) {
            fine = same_tensor(t, "value", i, plain, moved);
        }
        for (uint32_t k = 0; k < rd_state_count(g, i) && trained && fine; ++k) {
            fine = same_tensor(t, "state", i, ms_optimizer_state(a, plain, (int)k),
                               ms_optimizer_state(b, moved, (int)k));
        }
    }
    return fine;
}

/* Layers that run late look at what the test changes from pass to pass. */
static bool settle(rd_net *n) {
    return TRY(n, ms_synchronize(n->model));
}

static bool one_micro(rd_net *n, uint64_t round, bool at_once, double *loss) {
    for (uint32_t i = 0; i < n->run.graph->layer_count; ++i) {
        n->run.op[i].forwards = n->run.op[i].backwards = n->run.op[i].recomputes = 0;
    }
    return rd_net_write(n, round, false) &&
           (at_once ? TRY(n, s_step(n->model, loss))
                    : TRY(n, ms_forward(n->model, loss)) && TRY(n, ms_backward(n->model))) &&
           settle(n);
}

/* Steps at once leave gradients without an optimizer; those in three parts show them in any case. */
static bool step_both(pair_of_nets *t, bool at_once) {
    rd_net *const nets[] = {t->plain, t->moved};
    const bool keeps = t->graph->optimizer.kind == MS_OPTIMIZER_NONE;
    double loss[2] = {0.0, 0.0};
    for (uint32_t micro = 0; micro < t->graph->accumulation; ++micro, ++t->round) {
        for (int k = 0; k < 2; ++k) {
            nets[k]->run.micro = micro;
            if (!one_micro(nets[k], t->round, at_once, &loss[k])) {
                return false;
            }
        }
        if (memcmp(&loss[0], &loss[1], sizeof loss[0]) != 0) {
            return rd_fail(&t->moved->run, "a loss of %.17g, plain %.17g", loss[1], loss[0]);
        }
    }
    if (!at_once && (!same_gradients(t) || !TRY(t->plain, ms_update(t->plain->model)) ||
                     !TRY(t->moved, ms_update(t->moved->model)) || !settle(t->moved))) {
        return false;
    }
    t->plain->run.step += 1;
    t->moved->run.step += 1;
    return same_values(t) && (!keeps || same_gradients(t));
}

static bool eval_both(pair_of_nets *t) {
    rd_net *const nets[] = {t->plain, t->moved};
    double loss[2] = {0.0, 0.0};
    for (int k = 0; k < 2; ++k) {
        nets[k]->run.micro = 0;
        if (!rd_net_write(nets[k], t->round, false) ||
            !TRY(nets[k], ms_eval(nets[k]->model, &loss[k]))) {
            return false;
        }
    }
    t->round += 1;
    return memcmp(&loss[0], &loss[1], sizeof loss[0]) == 0 && same_values(t);
}

/* Leaves out the wait with this number, modulo how many there are. */
static void omit(pair_of_nets *t) {
    const o_omission first = {&t->moved->model->run.plan->train, 0, O_WAIT};
    uint64_t count = 0, number = 0;
    o_omission at;
    for (at = first; o_find(&at); o_next(&at)) {
        ++count;
    }
    for (at = first; o_find(&at); o_next(&at), ++number) {
        if (number == t->omitted % count) {
            o_omit(&at);
        }
    }
    t->omits = count > 0;
}

static bool run_both(pair_of_nets *t, t_rng *rng) {
    bool fine = t->failure[0] == 0 && TRY(t->plain, ms_wrap(t->plain->model)) &&
                rd_net_write(t->plain, 0, false) && TRY(t->moved, ms_wrap(t->moved->model)) &&
                rd_net_write(t->moved, 0, false);
    if (fine && t->codes) {
        rd_force_codes(t->plain, t->graph->seed);
        rd_force_codes(t->moved, t->graph->seed);
        fine = TRY(t->plain, ms_wrap(t->plain->model)) && TRY(t->moved, ms_wrap(t->moved->model));
    }
    if (fine && t->omits) {
        omit(t);
    }
    for (int step = 0; step < STEPS && fine; ++step) {
        fine = step_both(t, t_chance(rng, 0.5)) && (t_chance(rng, 0.7) || eval_both(t));
    }
    return fine && t->failure[0] == 0;
}

/* Runs a graph by the plain plan on the CPU, and with random moves by this config. */
static bool gives_same_bits(pair_of_nets *t, const ms_config *config) {
    rd_graph *const g = t->graph;
    t_rng rng = t_seed(g->seed ^ 0x0ff10ad);
    ms_config plain = t_config(), moved = *config;
    t_heap heap;
    memset(&heap, 0, sizeof heap);
    plain.checkpointing = plain.early_update = MS_SWITCH_OFF;
    moved.allocator = t_heap_allocator(&heap);
    moved.force_optimize = t_chance(&rng, 0.2);
    if (t_chance(&rng, 0.5)) {
        s_slice(&moved, g->seed);
    }
    t->codes = t_chance(&rng, 0.5);
    if (t->codes) {
        rd_random_formats(g, &rng);
    }
    t->round = 1;
    const bool scales = g->seed % 3 == 0 && t_is_built_in((int)g->optimizer.kind);
    const ms_dtype half = scales ? MS_DTYPE_F16 : MS_DTYPE_BF16;
    if (is_mixed(g)) {
        rd_random_dtypes(g, g->seed + 99);
        plain.master_weights = moved.master_weights =
            g->seed % 4 == 1 ? MS_SWITCH_OFF : MS_SWITCH_DEFAULT;
        plain.mixed_dtype = moved.mixed_dtype = half;
        plain.loss_scaling.initial = moved.loss_scaling.initial = 16.0f;
    }
    t->moved = rd_net_create(g, &moved, "moved", t->failure, false);
    g->move = NULL;
    t->plain = rd_net_create(g, &plain, "plain", t->failure, false);
    rd_force_moves(t->moved, &rng);
    if (is_mixed(g)) {
        rd_force_half(t->moved, g->seed);
        rd_force_half(t->plain, g->seed);
    }
    const bool fine = run_both(t, &rng);
    rd_net_destroy(t->moved);
    rd_net_destroy(t->plain);
    if (heap.live_count != 0 || heap.wrong_releases != 0) {
        fail_msg("MEMSCALE_TEST_SEED=%llu: %s; %llu allocations are left",
                 (unsigned long long)g->seed, t->failure, (unsigned long long)heap.live_count);
    }
    return fine;
}

static void expect_same_bits(rd_graph *g, const ms_config *config) {
    static pair_of_nets t;
    memset(&t, 0, sizeof t);
    t.graph = g;
    if (!gives_same_bits(&t, config)) {
        fail_msg("MEMSCALE_TEST_SEED=%llu: %s", (unsigned long long)g->seed, t.failure);
    }
    free(g);
}

static void moves_change_no_bit(void **state) {
    (void)state;
    const uint64_t end = end_seed(QUICK_GRAPHS, GRAPHS);
    for (uint64_t seed = first_seed(); seed < end; ++seed) {
        const ms_config config = t_config();
        expect_same_bits(rd_generate(seed), &config);
    }
}

/* On streams that run in an adversarial order. */
static void moves_wait_for_all_they_need(void **state) {
    (void)state;
    static v_layer layers[RD_LAYERS];
    const uint64_t end = end_seed(QUICK_GRAPHS, GRAPHS);
    for (uint64_t seed = first_seed(); seed < end; ++seed) {
        v_device device;
        ms_config config = t_config();
        v_open(&device, seed);
        config.backend = v_backend(&device);
        config.prefetch_depth = (uint32_t)(seed % 4);
        config.async_offload = seed % 8 == 7 ? MS_SWITCH_OFF : MS_SWITCH_DEFAULT;
        expect_same_bits(ld_make_late(rd_generate(seed), layers), &config);
        assert_int_equal(device.engine.pending, 0);
        assert_int_equal(device.callback_error, 0);
        assert_int_equal(device.overtaken, 0);
        v_close(&device);
    }
}

/* Whether streams that run in this order show wrong bits, or errors, without one of the waits; false
   too if the plan has none. */
static bool shows_omission(uint64_t graph, uint64_t omitted, uint64_t order, bool *omits) {
    static v_layer layers[RD_LAYERS];
    static pair_of_nets t;
    v_device device;
    ms_config config = t_config();
    memset(&t, 0, sizeof t);
    v_open(&device, order);
    config.backend = v_backend(&device);
    t.graph = ld_make_late(rd_generate(graph), layers);
    t.omits = true;
    t.omitted = omitted;
    const bool fine = gives_same_bits(&t, &config);
    *omits = t.omits;
    v_close(&device);
    free(t.graph);
    return !fine;
}

/* What every_wait_matters finds by reasoning shows in bits: most waits that are left out do in some
   of a few orders. (Others are for what comes between programs, where this test waits for all, or
   for memory that holds the same bytes already, as of a frozen param.) */
static void left_out_waits_show(void **state) {
    (void)state;
    enum { ORDERS = 6 };
    const uint64_t end = end_seed(QUICK_GRAPHS, GRAPHS / 4);
    uint32_t omissions = 0, shown = 0;
    for (uint64_t seed = first_seed(); seed < end; ++seed) {
        bool omits = true, shows = false;
        for (uint64_t order = 0; order < ORDERS && omits && !shows; ++order) {
            shows = shows_omission(seed, seed * 7919, order, &omits);
        }
        omissions += omits;
        shown += shows;
    }
    print_message("%u of %u waits that were left out gave wrong bits\n", (unsigned)shown,
                  (unsigned)omissions);
    assert_true(shown * 10 >= omissions * 6);
}

// ------------------------------------------------------------------------------------------------
// steps that are given up

static uint64_t calls_left; // of layers until one fails where it is called; 0: none does

static int fail_or_forward(const ms_call *call) {
    return calls_left > 0 && --calls_left == 0 ? RD_CALLBACK_ERROR : v_forward(call);
}

static int fail_or_backward(const ms_call *call) {
    return calls_left > 0 && --calls_left == 0 ? RD_CALLBACK_ERROR : v_backward(call);
}

static ms_layer_desc move_failing(void *layers, uint32_t layer, const ms_layer_desc *desc) {
    ms_layer_desc d = v_wrap(desc, (v_layer *)layers + layer);
    d.forward = fail_or_forward;
    d.backward = d.backward != NULL ? fail_or_backward : NULL;
    return d;
}

/* Begins a step that does not come to its end. Its layers are not told of other numbers, since what
   a forward has left is not waited for. */
static bool give_up(pair_of_nets *t, v_device *device, t_rng *rng) {
    ms_model *m = t->moved->model;
    ms_result result = MS_RESULT_OK;
    const uint32_t way = t_chance(rng, 0.6) ? 0 : t_below(rng, 4);
    calls_left = way == 1 ? 1 + t_below(rng, 2 * t->graph->layer_count) : 0;
    if (way == 0) { // dropped by the next one; the plain model goes the same way for its buffers
        return TRY(t->moved, ms_forward(m, NULL)) &&
               TRY(t->plain, ms_forward(t->plain->model, NULL));
    }
    if (way == 1) {
        result = ms_forward(m, NULL);
        result = result == MS_RESULT_OK ? ms_backward(m) : result;
    } else if (way == 2) {
        result = ms_step_slice(m, t_below(rng, 100), NULL);
        if (result == MS_RESULT_MORE && m->run.updates_done == 0) {
            ms_cancel(m);
            result = ms_step_slice(m, 1, NULL);
            return result == MS_RESULT_CANCELLED || TRY(t->moved, result);
        }
        result = result == MS_RESULT_MORE ? ms_step_slice(m, UINT64_MAX, NULL) : result;
        const bool fine = TRY(t->moved, result) && TRY(t->plain, ms_step(t->plain->model, NULL)) &&
                          settle(t->moved); // it was done
        t->plain->run.step += 1;
        t->moved->run.step += 1;
        return fine;
    } else {
        device->engine.fail_at = device->engine.calls + 1 + t_below(rng, 60);
        result = ms_forward(m, NULL);
        result = result == MS_RESULT_OK ? ms_backward(m) : result;
        device->engine.fail_at = 0;
    }
    calls_left = 0;
    assert_true(result == MS_RESULT_OK || device->engine.pending == 0);
    return true;
}

/* Gives the moved net the buffers of the plain one, and both what a step needs. */
static bool same_start(pair_of_nets *t) {
    const rd_graph *g = t->graph;
    uint64_t data[RD_ELEMENTS];
    bool fine = true;
    for (uint32_t i = 0; i < g->value_count && fine; ++i) {
        fine = g->value[i].role != RD_BUFFER ||
               (TRY(t->plain, ms_read(t->plain->model, t->plain->handle[i], data)) &&
                TRY(t->moved, ms_write(t->moved->model, t->moved->handle[i], data)));
    }
    return fine;
}

static bool run_given_up(pair_of_nets *t, v_device *device, t_rng *rng) {
    rd_net *const nets[] = {t->plain, t->moved};
    bool fine = TRY(t->plain, ms_wrap(t->plain->model)) &&
                TRY(t->moved, ms_wrap(t->moved->model)) && rd_net_write(t->plain, 0, false) &&
                rd_net_write(t->moved, 0, false);
    for (int step = 0; step < 4 * STEPS && fine; ++step) {
        double loss[2] = {0.0, 0.0};
        fine = same_start(t) && settle(t->moved) && give_up(t, device, rng);
        fine = fine && (t->moved->model->run.progress == MSI_PROGRESS_FORWARD || same_start(t));
        for (int k = 0; k < 2 && fine; ++k) {
            fine = TRY(nets[k], ms_step(nets[k]->model, &loss[k])) && settle(nets[k]);
        }
        if (fine && memcmp(&loss[0], &loss[1], sizeof loss[0]) != 0) {
            fine = rd_fail(&t->moved->run, "a loss of %.17g, plain %.17g", loss[1], loss[0]);
        }
        t->plain->run.step += 1;
        t->moved->run.step += 1;
        fine = fine && same_values(t);
    }
    return fine && t->failure[0] == 0;
}

/* Graphs with gradients that go on adding up, whatever becomes of a step, are left out. */
static bool can_be_given_up(const rd_graph *g) {
    bool can = g->accumulation == 1 && g->optimizer.kind != MS_OPTIMIZER_NONE;
    for (uint32_t i = 0; i < g->value_count; ++i) {
        can &= !g->value[i].borrowed_gradient;
    }
    return can;
}

static void give_up_steps(rd_graph *g, v_device *device, uint64_t order) {
    static pair_of_nets t;
    t_rng rng = t_seed(g->seed ^ 0x91fe);
    ms_config plain = t_config(), moved = t_config();
    t_heap heap;
    memset(&t, 0, sizeof t);
    memset(&heap, 0, sizeof heap);
    t.graph = g;
    g->move = move_failing;
    plain.checkpointing = plain.early_update = moved.early_update = MS_SWITCH_OFF;
    moved.allocator = t_heap_allocator(&heap);
    moved.backend = v_backend(device);
    s_slice(&moved, order);
    t.moved = rd_net_create(g, &moved, "given up", t.failure, false);
    g->move = NULL;
    t.plain = rd_net_create(g, &plain, "plain", t.failure, false);
    t.plain->run.debug = t.moved->run.debug = true; // forward may run twice
    rd_force_moves(t.moved, &rng);
    if (!run_given_up(&t, device, &rng)) {
        fail_msg("MEMSCALE_TEST_SEED=%llu: %s: %s", (unsigned long long)g->seed, t.failure,
                 ms_last_error(t.moved->model));
    }
    rd_net_destroy(t.moved);
    rd_net_destroy(t.plain);
    assert_true(device->engine.pending == 0 && heap.live_count == 0);
}

/* A step that is given up leaves no copy that comes late into the next one: whether the next one
   takes its place, or it fails where a layer or the device is called, or it is cancelled. */
static void what_is_given_up_leaves_no_copies(void **state) {
    (void)state;
    enum { ORDERS = 2 };
    static v_layer layers[RD_LAYERS];
    const uint64_t end = end_seed(2 * QUICK_GRAPHS, GRAPHS);
    for (uint64_t seed = first_seed(); seed < end; ++seed) {
        rd_graph *g = ld_make_late(rd_generate(seed), layers);
        for (uint64_t order = 0; order < ORDERS && can_be_given_up(g); ++order) {
            v_device device;
            v_open(&device, seed * ORDERS + order);
            give_up_steps(g, &device, order);
            v_close(&device);
        }
        free(g);
    }
}

static uint32_t joined; // mask of streams: what is computed waits for all that they were given

static int note_record(void *state, ms_stream_kind stream, uint32_t event) {
    joined |= event == MSI_EVENT_COPY ? 1u << (16 + (int)stream) : 0u;
    return v_record(state, stream, event);
}

static int note_wait(void *state, ms_stream_kind stream, uint32_t event) {
    joined |= event == MSI_EVENT_COPY && stream == MS_STREAM_COMPUTE ? joined >> 16 : 0u;
    return v_wait(state, stream, event);
}

/* Whatever comes next waits for the copies of both directions: a recording, too, which copies on
   streams of its own. */
static void what_is_given_up_is_joined(void **state) {
    (void)state;
    static v_layer layers[RD_LAYERS];
    const uint32_t both = 1u << MS_STREAM_TO_DEVICE | 1u << MS_STREAM_TO_HOST;
    uint32_t found = 0;
    for (uint64_t seed = first_seed(); seed < first_seed() + 20; ++seed) {
        v_device device;
        char failure[RD_TEXT] = "";
        t_rng rng = t_seed(seed ^ 0x91fe);
        ms_config config = t_config();
        t_heap heap;
        rd_graph *g = ld_make_late(rd_generate(seed), layers);
        v_open(&device, seed);
        memset(&heap, 0, sizeof heap);
        config.allocator = t_heap_allocator(&heap);
        config.early_update = MS_SWITCH_OFF;
        config.backend = v_backend(&device);
        config.backend.record = note_record;
        config.backend.wait = note_wait;
        rd_net *n = rd_net_create(g, &config, "given up", failure, false);
        n->run.debug = true; // forward may run twice
        rd_force_moves(n, &rng);
        t_ok(n->model, ms_wrap(n->model));
        assert_true(rd_net_write(n, 0, false));
        const msi_program *p = &n->model->run.plan->train;
        uint32_t copies = 0;
        for (uint32_t k = 0; k < p->code.forward_end; ++k) {
            copies += p->code.instructions.items[k].op == MSI_OP_COPY_OUT;
        }
        for (int backward = 0; backward < 2 && copies > 0 && can_be_given_up(g); ++backward) {
            t_ok(n->model, ms_forward(n->model, NULL));
            if (backward) {
                t_ok(n->model, ms_backward(n->model));
            }
            joined = 0;
            t_ok(n->model, ms_forward(n->model, NULL));
            assert_int_equal(joined & both, both);
            t_ok(n->model, ms_synchronize(n->model));
            found++;
        }
        rd_net_destroy(n);
        assert_true(device.engine.pending == 0 && heap.live_count == 0);
        v_close(&device);
        free(g);
    }
    assert_true(found > 0);
}

int main(void) {
    t_hook.part_bytes = 128; // so that state comes in parts
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_conflicts_is_ordered),
        cmocka_unit_test(state_on_the_host_is_awaited_there),
        cmocka_unit_test(every_wait_matters),
        cmocka_unit_test(copies_keep_to_their_limits),
        cmocka_unit_test(copies_begin_in_time_for_those_behind),
        cmocka_unit_test(what_is_kept_fits_everywhere),
        cmocka_unit_test(smaller_sizes_keep_the_schedule),
        cmocka_unit_test(random_copies_have_what_moves_together),
        cmocka_unit_test(what_moves_in_one_copy_is_small_except_for_one),
        cmocka_unit_test(the_host_holds_what_is_copied_there),
        cmocka_unit_test(moves_change_no_bit),
        cmocka_unit_test(moves_wait_for_all_they_need),
        cmocka_unit_test(left_out_waits_show),
        cmocka_unit_test(what_is_given_up_leaves_no_copies),
        cmocka_unit_test(what_is_given_up_is_joined),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
