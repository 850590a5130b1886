/*  test_solver.c - plans against references that know nothing of the library: chains against the
    persistent schedules of rotor, computed exactly, and against greedy; small graphs against every
    plan there is; budget sweeps over published models. Give it CSV files of chains (those of
    bench/chain) to hold their plans to the same. MEMSCALE_TEST_SEED makes other chains and graphs,
    MEMSCALE_TEST_DAGS more of the latter. */
#include "../bench/bench.h"
#include "private.h"
#include "toy_layers.h"
#include "../examples/nn.h"
#include "../bench/models.h"
#include "../bench/chains.h"
#include "../bench/nets.h"

/* Sanitizers are some ten times slower. */
#if defined(__SANITIZE_ADDRESS__)
enum { SANITIZED = 1 };
#else
enum { SANITIZED = 0 };
#endif

/* Times are limited here so far that only another order of growth exceeds them, on any machine;
   bench/chain measures. */
static const double SLACK = SANITIZED ? 100.0 : 10.0;

/* What is published rounds times to four digits. */
static const double TIME_TOLERANCE = 1e-4;

static uint64_t most(uint64_t a, uint64_t b) {
    return a > b ? a : b;
}

/* The time of what does not fit: no infinity, which -Ofast may take for a number that never occurs. */
#define NEVER 1e300

// ------------------------------------------------------------------------------------------------
// chains of all shapes

typedef enum chain_kind {
    CHAIN_UNIFORM, // sizes and times of any stage between one and four times the smallest
    CHAIN_SKEWED,  // a few stages hold most of the bytes
    CHAIN_RISING,
    CHAIN_FALLING,
    CHAIN_U_SHAPED,
    CHAIN_EXPENSIVE_ENDS, // in time
    CHAIN_EQUAL,
    CHAIN_HUNGRY, // workspaces as large as what is saved
    CHAIN_KINDS
} chain_kind;

static const char *const chain_kinds[CHAIN_KINDS] = {
    "uniform", "skewed", "rising", "falling", "U-shaped", "expensive ends", "equal", "hungry"};

/* Size of something at `place`, 0 to 1 along the chain. */
static uint64_t chain_size(t_rng *rng, chain_kind kind, double place) {
    const double side = 2.0 * place - 1.0, spread = 0.9 + 0.2 * t_unit(rng);
    switch (kind) {
    case CHAIN_SKEWED:
        return (uint64_t)(100e3 * pow(100.0, pow(t_unit(rng), 3.0)));
    case CHAIN_RISING:
        return (uint64_t)(100e3 * spread * (1.0 + 20.0 * place));
    case CHAIN_FALLING:
        return (uint64_t)(100e3 * spread * (21.0 - 20.0 * place));
    case CHAIN_U_SHAPED:
        return (uint64_t)(100e3 * spread * (1.0 + 15.0 * side * side));
    case CHAIN_EQUAL:
        return 1000000;
    default:
        return (uint64_t)(1e6 * (1.0 + 3.0 * t_unit(rng)));
    }
}

static chain make_chain(chain_kind kind, uint32_t count, uint64_t seed) {
    t_rng rng = t_seed(seed * 1000 + (uint64_t)kind);
    chain c;
    memset(&c, 0, sizeof c);
    uint64_t x = chain_size(&rng, kind, 0.0);
    for (uint32_t i = 0; i < count; ++i) {
        const double place = (double)i / (double)count, side = fabs(2.0 * place - 1.0);
        chain_stage s;
        s.ain = x;
        s.aout = x = chain_size(&rng, kind, place);
        s.abar = s.aout + (t_chance(&rng, 0.1) && kind != CHAIN_EQUAL
                               ? 0
                               : (1 + t_below(&rng, 4)) * chain_size(&rng, kind, place));
        s.abar = kind == CHAIN_EQUAL ? 6000000 : s.abar;
        s.tf = kind == CHAIN_EQUAL ? 1.0 : 0.2 + t_unit(&rng);
        s.tf *= kind == CHAIN_EXPENSIVE_ENDS && side > 0.7 ? 25.0 : 1.0;
        s.tb = s.tf * (kind == CHAIN_EQUAL ? 2.0 : 1.5 + t_unit(&rng));
        s.tmpf = t_chance(&rng, 0.3) && kind != CHAIN_EQUAL ? s.aout / 3 : 0;
        s.tmpb = t_chance(&rng, 0.5) && kind != CHAIN_EQUAL ? s.aout / 2 : 0;
        if (kind == CHAIN_HUNGRY) {
            s.tmpf = t_below(&rng, (uint32_t)s.abar);
            s.tmpb = t_below(&rng, (uint32_t)s.abar);
        }
        assert_null(chain_add(&c, &s));
    }
    return c;
}

/* The chain of 13 stages for which the reference values are published: twelve equal blocks of
   GPT-2 and its head, times in seconds. */
static chain gpt2_chain(void) {
    chain c;
    const chain_stage block = {12582912, 12582912, 226492416, 0, 50331648, 0.141734, 0.283468};
    const chain_stage head = {12582912, 32768, 102959104, 0, 0, 0.632379, 1.264759};
    memset(&c, 0, sizeof c);
    for (int i = 0; i < 12; ++i) {
        assert_null(chain_add(&c, &block));
    }
    assert_null(chain_add(&c, &head));
    return c;
}

static uint64_t size_of_x(const chain *c, uint32_t i) {
    return i == 0 ? c->stages[0].ain : c->stages[i - 1].aout;
}

// ------------------------------------------------------------------------------------------------
// a machine that runs a schedule, counting bytes and time

enum { STAGES = 128 };

typedef struct machine {
    const chain *c;
    bool x[STAGES + 1], saved[STAGES];
    uint32_t left; // stages whose backward has not run
    bool lost;     // the loss has: the gradient of x[left] is there
    uint64_t live, peak;
    double time;
} machine;

static machine machine_start(const chain *c) {
    machine m;
    memset(&m, 0, sizeof m);
    assert_true(c->count <= STAGES);
    m.c = c;
    m.x[0] = true;
    m.left = c->count;
    m.live = m.peak = size_of_x(c, 0);
    return m;
}

static void machine_forward(machine *m, uint32_t i, bool keep) {
    const chain_stage *s = &m->c->stages[i];
    assert_true(m->x[i] && i < m->left);
    m->live += m->x[i + 1] ? 0 : s->aout;
    m->live += keep && !m->saved[i] ? s->abar - s->aout : 0;
    m->x[i + 1] = true;
    m->saved[i] |= keep;
    m->peak = most(m->peak, m->live + s->tmpf);
    m->time += s->tf;
}

static void machine_forget(machine *m, uint32_t x) {
    m->live -= m->x[x] ? size_of_x(m->c, x) : 0;
    m->x[x] = false;
}

static void machine_backward(machine *m) {
    const uint32_t i = m->left - 1;
    const chain_stage *s = &m->c->stages[i];
    if (!m->lost) {
        assert_true(m->x[m->c->count]);
        m->live += size_of_x(m->c, m->c->count);
        m->lost = true;
    }
    assert_true(m->x[i] && m->x[i + 1] && m->saved[i]);
    m->live += s->ain; // its gradient
    m->peak = most(m->peak, m->live + s->tmpb);
    m->time += s->tb;
    m->live -= s->abar + s->aout;
    m->x[i + 1] = m->saved[i] = false;
    m->left = i;
}

// ------------------------------------------------------------------------------------------------
// reference: rotor
//
// The dynamic program over persistent schedules of Beaumont, Eyraud-Dubois, Herrmann, Joly and
// Shilova, "Optimal checkpointing for heterogeneous chains: how to train deep neural networks with
// limited memory", 2019 (section 4), without its slots of memory: for each part of the chain, all
// pairs of bytes and time that are worth having. Bytes count from when x[first] is there, beside
// it, and the gradient of x[last + 1] with them, but for the end of the chain, where the loss makes
// it. For long chains bytes are rounded up, to fine slots after all.

enum { EXACT_STAGES = 60, SLOTS = 2000 };

typedef struct point {
    uint64_t bytes;
    double time;
} point;

typedef struct front {
    point *points; // more bytes, less time
    uint32_t count;
} front;

typedef struct rotor {
    const chain *c;
    front *fronts; // of stages [first, last]: at first * count + last
    uint64_t limit, slot;
    point *found; // for the front in the making
    uint32_t found_count, found_capacity;
} rotor;

static front *rotor_front(const rotor *r, uint32_t first, uint32_t last) {
    return &r->fronts[first * r->c->count + last];
}

static void rotor_find(rotor *r, uint64_t bytes, double time) {
    bytes = (bytes + r->slot - 1) / r->slot * r->slot;
    if (bytes > r->limit) {
        return;
    }
    if (r->found_count == r->found_capacity) {
        r->found_capacity = r->found_capacity ? 2 * r->found_capacity : 1024;
        void *grown = realloc(r->found, r->found_capacity * sizeof *r->found);
        assert_non_null(grown);
        r->found = (point *)grown;
    }
    r->found[r->found_count].bytes = bytes;
    r->found[r->found_count++].time = time;
}

static int compare_points(const void *a, const void *b) {
    const point *p = (const point *)a, *q = (const point *)b;
    if (p->bytes != q->bytes) {
        return p->bytes < q->bytes ? -1 : 1;
    }
    return p->time < q->time ? -1 : p->time > q->time;
}

static void rotor_keep_best(rotor *r, front *f) {
    uint32_t count = 0;
    if (r->found_count > 0) {
        qsort(r->found, r->found_count, sizeof *r->found, compare_points);
    }
    for (uint32_t i = 0; i < r->found_count; ++i) {
        if (count == 0 || r->found[i].time < r->found[count - 1].time * (1.0 - 1e-13)) {
            r->found[count++] = r->found[i];
        }
    }
    f->count = count;
    f->points = (point *)malloc((count + 1) * sizeof(point));
    assert_non_null(f->points);
    if (count > 0) {
        memcpy(f->points, r->found, count * sizeof(point));
    }
    r->found_count = 0;
}

/* Least time within so many bytes. */
static double front_time(const front *f, uint64_t bytes) {
    uint32_t low = 0, high = f->count;
    while (low < high) {
        const uint32_t middle = (low + high) / 2;
        if (f->points[middle].bytes <= bytes) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low > 0 ? f->points[low - 1].time : NEVER;
}

/* Bytes while stage `first` of [first, last] runs forward and is kept, or runs backward. */
static uint64_t rotor_keep_bytes(const chain *c, uint32_t first, uint32_t last) {
    const chain_stage *s = &c->stages[first];
    const uint64_t gradient = last + 1 < c->count ? size_of_x(c, last + 1) : 0;
    return s->abar + most(s->tmpf + gradient, s->aout + s->ain + s->tmpb);
}

/* Bytes while stage i of [first, last] runs forward and is not kept. */
static uint64_t rotor_pass_bytes(const chain *c, uint32_t first, uint32_t last, uint32_t i) {
    const chain_stage *s = &c->stages[i];
    const uint64_t gradient = last + 1 < c->count ? size_of_x(c, last + 1) : 0;
    return (i > first ? s->ain : 0) + s->aout + s->tmpf + gradient;
}

/* [first, last] with x[k] as a checkpoint: the points of [k, last] above x[k], then those of
   [first, k - 1] in the same memory. */
static void rotor_join(rotor *r, uint32_t first, uint32_t k, uint32_t last, uint64_t pass_bytes,
                       double pass_time) {
    const front *upper = rotor_front(r, k, last), *lower = rotor_front(r, first, k - 1);
    const uint64_t held = size_of_x(r->c, k);
    for (uint32_t i = 0, j = 0; i < upper->count && j < lower->count;) {
        const uint64_t bytes = most(upper->points[i].bytes + held, lower->points[j].bytes);
        rotor_find(r, most(bytes, pass_bytes),
                   pass_time + upper->points[i].time + lower->points[j].time);
        const uint64_t next_upper =
            i + 1 < upper->count ? upper->points[i + 1].bytes + held : UINT64_MAX;
        const uint64_t next_lower = j + 1 < lower->count ? lower->points[j + 1].bytes : UINT64_MAX;
        i += next_upper <= next_lower;
        j += next_lower <= next_upper;
    }
}

static void rotor_solve_part(rotor *r, uint32_t first, uint32_t last) {
    const chain *c = r->c;
    const chain_stage *s = &c->stages[first];
    const uint64_t keep = rotor_keep_bytes(c, first, last);
    uint64_t pass_bytes = 0;
    double pass_time = 0.0;
    if (first == last) {
        rotor_find(r, keep, s->tf + s->tb);
    }
    for (uint32_t k = first + 1; k <= last; ++k) {
        pass_bytes = most(pass_bytes, rotor_pass_bytes(c, first, last, k - 1));
        pass_time += c->stages[k - 1].tf;
        rotor_join(r, first, k, last, pass_bytes, pass_time);
    }
    const front *rest = first < last ? rotor_front(r, first + 1, last) : NULL;
    for (uint32_t i = 0; rest != NULL && i < rest->count; ++i) {
        rotor_find(r, most(keep, s->abar + rest->points[i].bytes),
                   s->tf + s->tb + rest->points[i].time);
    }
    rotor_keep_best(r, rotor_front(r, first, last));
}

static rotor rotor_solve(const chain *c) {
    rotor r;
    memset(&r, 0, sizeof r);
    r.c = c;
    r.limit = chain_peak(c) - size_of_x(c, 0);
    r.slot = c->count > EXACT_STAGES ? r.limit / SLOTS : 1;
    r.fronts = (front *)calloc((size_t)c->count * c->count, sizeof(front));
    assert_non_null(r.fronts);
    for (uint32_t length = 0; length < c->count; ++length) {
        for (uint32_t first = 0; first + length < c->count; ++first) {
            rotor_solve_part(&r, first, first + length);
        }
    }
    return r;
}

static void rotor_free(rotor *r) {
    for (uint32_t i = 0; i < r->c->count * r->c->count; ++i) {
        free(r->fronts[i].points);
    }
    free(r->fronts);
    free(r->found);
}

/* Time of a step within a budget. */
static double rotor_time(const rotor *r, uint64_t budget) {
    const uint64_t x = size_of_x(r->c, 0);
    return budget < x ? NEVER : front_time(rotor_front(r, 0, r->c->count - 1), budget - x);
}

/* The same by the recursion as it is written down; exponential. */
static double rotor_plainly(const chain *c, uint32_t first, uint32_t last, uint64_t bytes) {
    const chain_stage *s = &c->stages[first];
    double best = NEVER, passed = 0.0;
    if (rotor_keep_bytes(c, first, last) <= bytes) {
        best = s->tf + s->tb +
               (first < last ? rotor_plainly(c, first + 1, last, bytes - s->abar) : 0.0);
    }
    for (uint32_t k = first + 1; k <= last; ++k) {
        passed += c->stages[k - 1].tf;
        if (rotor_pass_bytes(c, first, last, k - 1) > bytes) {
            break;
        }
        if (size_of_x(c, k) <= bytes) {
            const double time = passed + rotor_plainly(c, k, last, bytes - size_of_x(c, k)) +
                                rotor_plainly(c, first, k - 1, bytes);
            best = time < best ? time : best;
        }
    }
    return best;
}

static bool same_time(double a, double b) {
    return a >= NEVER || b >= NEVER ? a >= NEVER && b >= NEVER
                                    : fabs(a - b) <= 1e-9 * (1.0 + fabs(a));
}

/* Runs the schedule that the fronts stand for. */
static void rotor_run(const rotor *r, machine *m, uint32_t first, uint32_t last, uint64_t bytes) {
    const chain *c = r->c;
    const chain_stage *s = &c->stages[first];
    const double time = front_time(rotor_front(r, first, last), bytes);
    double passed = 0.0;
    const bool room = rotor_keep_bytes(c, first, last) <= bytes;
    const double rest = first == last ? 0.0
                        : room        ? front_time(rotor_front(r, first + 1, last), bytes - s->abar)
                                      : NEVER;
    if (room && same_time(time, s->tf + s->tb + rest)) {
        machine_forward(m, first, true);
        if (first < last) {
            rotor_run(r, m, first + 1, last, bytes - s->abar);
        }
        machine_backward(m);
        return;
    }
    for (uint32_t k = first + 1; k <= last; ++k) {
        const uint64_t x = size_of_x(c, k);
        passed += c->stages[k - 1].tf;
        machine_forward(m, k - 1, false);
        if (k - 1 > first) {
            machine_forget(m, k - 1);
        }
        if (x <= bytes && same_time(time, passed + front_time(rotor_front(r, k, last), bytes - x) +
                                              front_time(rotor_front(r, first, k - 1), bytes))) {
            rotor_run(r, m, k, last, bytes - x);
            machine_forget(m, k);
            rotor_run(r, m, first, k - 1, bytes);
            return;
        }
    }
    fail();
}

// ------------------------------------------------------------------------------------------------
// reference: greedy over whole stages

/* Time of the step that drops what some stages save, and what they put out too if `whole`; each is
   brought back once, from the last that is kept. */
static double greedy_run(const chain *c, const bool *drops, bool whole, uint64_t *peak) {
    machine m = machine_start(c);
    for (uint32_t i = 0; i < c->count; ++i) {
        machine_forward(&m, i, !drops[i]);
        if (i > 0 && whole && drops[i - 1]) {
            machine_forget(&m, i);
        }
    }
    for (uint32_t i = c->count; i-- > 0;) {
        uint32_t from = i;
        while (!m.x[from]) {
            --from;
        }
        for (; from <= i; ++from) {
            if (!m.x[from + 1] || !m.saved[from]) {
                machine_forward(&m, from, true);
            }
        }
        machine_backward(&m);
    }
    *peak = m.peak;
    return m.time;
}

/* Drops the stages in the order of bytes per time until the rest fits. */
static double greedy_time(const chain *c, uint64_t budget, bool whole) {
    bool drops[STAGES] = {false};
    for (uint32_t round = 0; round <= c->count; ++round) {
        uint64_t peak;
        const double time = greedy_run(c, drops, whole, &peak);
        if (peak <= budget) {
            return time;
        }
        uint32_t best = c->count;
        double most_bytes = -1.0;
        for (uint32_t i = 0; i < c->count; ++i) {
            const chain_stage *s = &c->stages[i];
            const double bytes = (double)(s->abar - (whole ? 0 : s->aout)) / s->tf;
            if (!drops[i] && bytes > most_bytes) {
                best = i;
                most_bytes = bytes;
            }
        }
        if (best < c->count) {
            drops[best] = true;
        }
    }
    return NEVER;
}

// ------------------------------------------------------------------------------------------------
// reference: every schedule there is, for a few stages

enum { FEW = 4 };

/* What is in memory: x[0] to x[count], then saved[0] to saved[count - 1], a bit each; and how many
   backwards are left, with count + 1 before the loss. */
typedef struct search {
    const chain *c;
    uint64_t budget;
    double time[FEW + 2][1 << (2 * FEW + 1)]; // least, to get there
    bool changed;
} search;

static uint64_t search_bytes(const search *s, uint32_t memory, uint32_t left) {
    const uint32_t count = s->c->count;
    uint64_t bytes = left <= count ? size_of_x(s->c, left) : 0; // the gradient
    for (uint32_t i = 0; i <= count; ++i) {
        bytes += memory >> i & 1 ? size_of_x(s->c, i) : 0;
    }
    for (uint32_t i = 0; i < count; ++i) {
        const chain_stage *stage = &s->c->stages[i];
        bytes += memory >> (count + 1 + i) & 1 ? stage->abar - stage->aout : 0;
    }
    return bytes;
}

static void search_reach(search *s, uint32_t memory, uint32_t left, uint64_t bytes, double time) {
    if (bytes <= s->budget && time < s->time[left][memory]) {
        s->time[left][memory] = time;
        s->changed = true;
    }
}

/* Every step that may follow. */
static void search_from(search *s, uint32_t memory, uint32_t left) {
    const uint32_t count = s->c->count, saved = count + 1;
    const double time = s->time[left][memory];
    for (uint32_t bit = 0; bit < 2 * count + 1; ++bit) {
        search_reach(s, memory & ~(1u << bit), left, 0, time);
    }
    for (uint32_t i = 0; i < count && i < left; ++i) {
        const chain_stage *stage = &s->c->stages[i];
        for (uint32_t keep = 0; keep < 2 && (memory >> i & 1) != 0; ++keep) {
            const uint32_t next = memory | 2u << i | keep << (saved + i);
            search_reach(s, next, left, search_bytes(s, next, left) + stage->tmpf,
                         time + stage->tf);
        }
    }
    if (left > count && (memory >> count & 1) != 0) {
        search_reach(s, memory, count, search_bytes(s, memory, count), time);
    } else if (left > 0 && left <= count) {
        const uint32_t i = left - 1, reads = 3u << i | 1u << (saved + i);
        const uint64_t bytes = search_bytes(s, memory, left) + s->c->stages[i].ain;
        if ((memory & reads) == reads) {
            search_reach(s, memory & ~(2u << i | 1u << (saved + i)), i,
                         bytes + s->c->stages[i].tmpb, time + s->c->stages[i].tb);
        }
    }
}

static double search_time(const chain *c, uint64_t budget) {
    static search s;
    const uint32_t states = 1u << (2 * c->count + 1);
    double best = NEVER;
    assert_true(c->count <= FEW);
    s.c = c;
    s.budget = budget;
    for (uint32_t left = 0; left < c->count + 2; ++left) {
        for (uint32_t memory = 0; memory < states; ++memory) {
            s.time[left][memory] = NEVER;
        }
    }
    search_reach(&s, 1, c->count + 1, size_of_x(c, 0), 0.0);
    for (uint32_t left = c->count + 2; left-- > 0;) {
        do {
            s.changed = false;
            for (uint32_t memory = 0; memory < states; ++memory) {
                if (s.time[left][memory] < NEVER) {
                    search_from(&s, memory, left);
                }
            }
        } while (s.changed);
    }
    for (uint32_t memory = 0; memory < states; ++memory) {
        best = s.time[0][memory] < best ? s.time[0][memory] : best;
    }
    return best;
}

// ------------------------------------------------------------------------------------------------
// the references hold

static void rotor_gives_the_published_times(void **state) {
    (void)state;
    static const struct {
        double share, time;
    } published[] = {{1.0, 1.0},    {0.8, 1.0607},  {0.65, 1.1012}, {0.5, 1.1417}, {0.4, 1.1620},
                     {0.3, 1.1822}, {0.25, 1.2025}, {0.2, 1.2227},  {0.15, 1.3037}};
    chain c = gpt2_chain();
    rotor r = rotor_solve(&c);
    assert_true(chain_peak(&c) == 2846066688);
    for (size_t i = 0; i < sizeof published / sizeof published[0]; ++i) {
        const uint64_t budget = (uint64_t)(published[i].share * (double)chain_peak(&c));
        const double time = rotor_time(&r, budget) / chain_time(&c);
        assert_true(fabs(time - published[i].time) < 0.51e-4);
    }
    rotor_free(&r);
    chain_free(&c);
}

/* What the fronts promise is what their schedules need, on a machine that counts by itself. */
static void rotor_schedules_run_as_promised(void **state) {
    (void)state;
    uint32_t runs = 0;
    for (int kind = 0; kind < CHAIN_KINDS; ++kind) {
        chain c = make_chain((chain_kind)kind, 20, 7);
        rotor r = rotor_solve(&c);
        const uint64_t x = size_of_x(&c, 0);
        for (uint64_t percent = 100; percent >= 5; percent -= 5) {
            const uint64_t budget = chain_peak(&c) * percent / 100;
            const double time = rotor_time(&r, budget);
            if (time < NEVER) {
                machine m = machine_start(&c);
                rotor_run(&r, &m, 0, c.count - 1, budget - x);
                assert_true(m.left == 0 && m.peak <= budget && same_time(m.time, time));
                runs += 1;
            }
        }
        rotor_free(&r);
        chain_free(&c);
    }
    assert_true(runs > 80);
}

/* No part of the bookkeeping of fronts loses anything, and nothing is below what is possible. */
static void rotor_is_its_recursion_and_no_better_than_the_best(void **state) {
    (void)state;
    uint32_t above = 0;
    for (uint64_t seed = 1; seed <= 5; ++seed) {
        for (int kind = 0; kind < CHAIN_KINDS; ++kind) {
            chain small = make_chain((chain_kind)kind, 8, seed);
            chain tiny = make_chain((chain_kind)kind, FEW, seed);
            rotor r = rotor_solve(&small), few = rotor_solve(&tiny);
            for (uint64_t percent = 100; percent >= 10; percent -= 6) {
                const uint64_t budget = chain_peak(&small) * percent / 100;
                const uint64_t tiny_budget = chain_peak(&tiny) * percent / 100;
                const double best = search_time(&tiny, tiny_budget);
                const double time = rotor_time(&few, tiny_budget);
                const uint64_t x = size_of_x(&small, 0);
                assert_true(budget < x ||
                            same_time(rotor_plainly(&small, 0, small.count - 1, budget - x),
                                      rotor_time(&r, budget)));
                assert_true(time >= NEVER || best <= time * (1.0 + 1e-12));
                above += !same_time(best, time);
            }
            rotor_free(&r);
            rotor_free(&few);
            chain_free(&small);
            chain_free(&tiny);
        }
    }
    print_message("rotor is above the best of all schedules in %u of 600 cases\n", above);
    assert_true(above > 0 && above < 300);
}

// ------------------------------------------------------------------------------------------------
// what a plan needs, counted from its events

typedef struct block {
    uint64_t offset, bytes;
    uint32_t tensor;
    bool fixed;
} block;

enum { BLOCKS = 20000 };

/* Blocks that are live, over the events of a program. */
typedef struct walk {
    block *blocks;
    uint32_t count;
    uint64_t live, peak, end;
    uint32_t overlaps, unknown, wrong; // sums that are not those of the events
} walk;

static uint64_t rounded(uint64_t bytes) {
    return (bytes + 63) / 64 * 64;
}

static uint32_t walk_find(const walk *w, const ms_event_operand *o) {
    uint32_t i = 0;
    while (i < w->count &&
           (w->blocks[i].offset != o->offset || w->blocks[i].tensor != o->tensor.id)) {
        ++i;
    }
    return i;
}

static void walk_remove(walk *w, uint32_t i) {
    w->live -= rounded(w->blocks[i].bytes);
    w->blocks[i] = w->blocks[--w->count];
}

static bool walk_is_operand(const ms_event *event, const block *b) {
    for (uint32_t k = 0; k < event->operand_count; ++k) {
        if (event->operands[k].tensor.id == b->tensor && event->operands[k].offset == b->offset) {
            return true;
        }
    }
    return false;
}

/* Memory that another operand of the same event ends in goes over; any other overlap is wrong. */
static void walk_add(walk *w, const ms_event *event, const ms_event_operand *o, bool fixed) {
    const uint64_t end = o->offset + rounded(o->bytes);
    for (uint32_t i = w->count; i-- > 0;) {
        const block *b = &w->blocks[i];
        if (o->bytes == 0 || b->bytes == 0 || b->offset >= end ||
            o->offset >= b->offset + rounded(b->bytes)) {
            continue;
        }
        if (b->offset == o->offset && rounded(b->bytes) == rounded(o->bytes) && !b->fixed &&
            event != NULL && walk_is_operand(event, b)) {
            walk_remove(w, i);
        } else {
            w->overlaps += 1;
        }
    }
    assert_true(w->count < BLOCKS);
    block *b = &w->blocks[w->count++];
    b->offset = o->offset;
    b->bytes = o->bytes;
    b->tensor = o->tensor.id;
    b->fixed = fixed;
    w->live += rounded(o->bytes);
    w->end = most(w->end, end);
}

/* Values that live between steps: never new. */
static void walk_fixed(const ms_event *event, void *user) {
    walk *w = (walk *)user;
    for (uint32_t k = 0; k < event->operand_count && event->kind != MS_EVENT_DROP; ++k) {
        const ms_event_operand *o = &event->operands[k];
        const uint32_t i = walk_find(w, o);
        if (o->is_new && i == w->count) { // passes: leave a mark, so that later uses are no find
            block *b = &w->blocks[w->count++];
            b->offset = o->offset;
            b->tensor = o->tensor.id;
            b->bytes = 0;
            b->fixed = false;
        } else if (!o->is_new && !o->is_outside && i == w->count) {
            walk_add(w, NULL, o, true);
        }
        assert_true(w->count < BLOCKS);
    }
}

static void walk_event(const ms_event *event, void *user) {
    walk *w = (walk *)user;
    for (uint32_t k = 0; k < event->operand_count; ++k) {
        const ms_event_operand *o = &event->operands[k];
        const uint32_t i = walk_find(w, o);
        if (event->kind == MS_EVENT_DROP) {
            w->unknown += i == w->count;
            if (i < w->count) {
                walk_remove(w, i);
            }
        } else if (i == w->count) {
            w->unknown += !o->is_new && !o->is_outside;
            if (!o->is_outside) {
                walk_add(w, event, o, false);
            }
        }
    }
    if (event->kind != MS_EVENT_DROP) {
        w->wrong += w->live != event->live_bytes;
        w->peak = most(w->peak, w->live);
    }
}

/* The arena of the present plan is what its events need, by a count that is not the library's. */
static void check_events(ms_model *m) {
    walk w;
    ms_memory_report report;
    memset(&w, 0, sizeof w);
    w.blocks = (block *)malloc(BLOCKS * sizeof(block));
    assert_non_null(w.blocks);
    t_report(m, &report);
    t_ok(m, ms_visit_events(m, MS_PROGRAM_TRAIN, walk_fixed, &w));
    for (uint32_t i = w.count; i-- > 0;) {
        if (!w.blocks[i].fixed) {
            walk_remove(&w, i);
        }
    }
    t_ok(m, ms_visit_events(m, MS_PROGRAM_TRAIN, walk_event, &w));
    assert_true(w.overlaps == 0 && w.unknown == 0 && w.wrong == 0);
    assert_true(w.peak == report.lower_bound_bytes && w.end <= report.arena_bytes);
    free(w.blocks);
}

// ------------------------------------------------------------------------------------------------
// the library's plans of chains

/* Host memory of a model, and most of it at once. */
typedef struct meter {
    uint64_t live, peak;
    uint64_t large_bytes; // an allocation of so many is a large one; 0: none is
    uint32_t large_count;
} meter;

static void *meter_alloc(uint64_t bytes, void *user) {
    meter *heap = (meter *)user;
    heap->live += bytes;
    heap->peak = most(heap->peak, heap->live);
    heap->large_count += heap->large_bytes && bytes >= heap->large_bytes;
    return malloc((size_t)bytes);
}

static void meter_release(void *memory, uint64_t bytes, void *user) {
    meter *heap = (meter *)user;
    heap->live -= bytes;
    free(memory);
}

typedef struct outcome {
    bool fits;
    uint64_t peak_bytes, hash;
    double time, plan_ms; // time of a step over that of keeping everything
    uint64_t heap_bytes;  // host memory for planning
} outcome;

static ms_config solver_config(meter *heap) {
    ms_config config;
    memset(&config, 0, sizeof config);
    memset(heap, 0, sizeof *heap);
    config.allocator.alloc = meter_alloc;
    config.allocator.release = meter_release;
    config.allocator.user = heap;
    config.mode = MS_MODE_CONSERVATIVE;
    config.early_update = MS_SWITCH_OFF;
    config.dry_run = true;
    return config;
}

/* Wraps for a budget of the model; peak_bytes are those of the arena. */
static outcome wrap_for(ms_model *m, meter *heap, uint64_t budget) {
    outcome o;
    ms_memory_report report;
    memset(&o, 0, sizeof o);
    const uint64_t before = heap->live;
    heap->peak = before;
    ms_set_budget(m, budget);
    const clock_t start = clock();
    const ms_result result = ms_wrap(m);
    o.plan_ms = 1e3 * (double)(clock() - start) / CLOCKS_PER_SEC;
    o.heap_bytes = heap->peak - before;
    o.fits = result == MS_RESULT_OK;
    if (o.fits) {
        t_report(m, &report);
        assert_true(report.arena_bytes <= budget);
        o.peak_bytes = report.arena_bytes;
        o.time = 1.0 + report.recompute_share;
        o.hash = report.plan_hash;
        check_events(m);
    } else {
        t_error(m, result, MS_RESULT_BUDGET);
    }
    return o;
}

static outcome plan_chain(const chain *c, uint64_t budget) {
    meter heap;
    ms_model *m;
    const ms_config config = solver_config(&heap);
    assert_int_equal(ms_create(&config, &m), MS_RESULT_OK);
    chain_register(m, c, false);
    outcome o = wrap_for(m, &heap, chain_budget(budget));
    o.peak_bytes = o.fits ? chain_bytes(o.peak_bytes) : 0;
    ms_destroy(m);
    assert_true(heap.live == 0);
    return o;
}

/* What a sweep finds wrong, and how far the plans are from the references. */
typedef struct verdict {
    uint32_t plans, faults, referred; // to a reference that fits
    uint32_t missed;                  // of the faults: slower than the reference, or nothing fits
    uint32_t one_in;                  // of so many plans one may be missed; 0: none
    /* References count bytes, not addresses. Plans that the layout holds up: slower than the
       reference, but no slower than that with 1 % less memory. */
    uint32_t squeezed;
    double worst, sum; // of time over it
    double most_ms;
    uint64_t most_heap_bytes;
    bool prints; // a line for each budget
} verdict;

static void blame(verdict *v, const char *name, uint64_t percent, const char *what, double is,
                  double should) {
    print_error("%s at %llu %%: %s, %.6f against %.6f\n", name, (unsigned long long)percent, what,
                is, should);
    v->faults += 1;
}

/* One budget: no slower than the reference, and not worse than the budget before. `squeezed` is the
   reference with less memory. */
static void judge(verdict *v, const char *name, uint64_t percent, const outcome *o,
                  const outcome *last, double reference, double squeezed) {
    v->plans += 1;
    v->most_ms = o->plan_ms > v->most_ms ? o->plan_ms : v->most_ms;
    v->most_heap_bytes = most(v->most_heap_bytes, o->heap_bytes);
    if (!o->fits) {
        if (reference < NEVER) {
            blame(v, name, percent, "nothing fits", NEVER, reference);
            v->missed += 1;
        }
        return;
    }
    if (reference < NEVER) {
        v->referred += 1;
        v->worst = o->time / reference > v->worst ? o->time / reference : v->worst;
        v->sum += o->time / reference;
    }
    if (o->time > squeezed + TIME_TOLERANCE) {
        blame(v, name, percent, "time", o->time, reference);
        v->missed += 1;
    } else if (o->time > reference + TIME_TOLERANCE) {
        v->squeezed += 1;
    }
    if (!last->fits || o->peak_bytes > last->peak_bytes) {
        blame(v, name, percent, "the peak rises", (double)o->peak_bytes, (double)last->peak_bytes);
    }
    if (o->time < last->time - 1e-12) {
        blame(v, name, percent, "the time falls", o->time, last->time);
    }
}

/* The better of the references, or one of them alone. */
static double reference_time(const chain *c, const rotor *r, uint64_t budget, bool greedy,
                             bool dynamic) {
    double best = dynamic ? rotor_time(r, budget) : NEVER;
    for (int whole = 0; whole < 2 && greedy; ++whole) {
        const double time = greedy_time(c, budget, whole == 1);
        best = time < best ? time : best;
    }
    return best < NEVER ? best / chain_time(c) : NEVER;
}

/* Strict: the layout has to find room for what the references do. */
static void sweep_chain(const chain *c, const char *name, bool strict, verdict *v) {
    rotor r = rotor_solve(c);
    outcome last;
    memset(&last, 0, sizeof last);
    for (uint64_t percent = 100; percent >= 15; percent -= t_size(15, 5)) {
        const uint64_t budget = (uint64_t)((double)chain_peak(c) * (double)percent / 100.0);
        const uint64_t less = strict || percent == 100 ? budget : budget - budget / 100;
        const outcome o = plan_chain(c, budget);
        if (percent == 100) {
            last = o;
            if (!o.fits || o.peak_bytes != chain_peak(c) || o.time > 1.0) {
                blame(v, name, percent, "not all is kept", o.time, 1.0);
            }
        }
        if (v->prints) {
            print_message("%3u %%: %.4f, rotor %.4f, greedy %.4f\n", (unsigned)percent,
                          o.fits ? o.time : NEVER, reference_time(c, &r, budget, false, true),
                          reference_time(c, &r, budget, true, false));
        }
        judge(v, name, percent, &o, &last, reference_time(c, &r, budget, true, true),
              reference_time(c, &r, less, true, true));
        last = o;
    }
    rotor_free(&r);
}

/* Planning takes up to so many milliseconds of a processor that nobody else slows down, and so much
   host memory. */
static bool sum_up(const verdict *v, const char *what, double limit_ms, uint64_t limit_mib) {
    print_message("%s: %u plans, %u faults, %.1f ms and %.1f MB at most", what, v->plans, v->faults,
                  v->most_ms, 1e-6 * (double)v->most_heap_bytes);
    if (v->referred > 0) {
        print_message("; time over the reference %.4f on average, %.4f at most; %u squeezed",
                      v->sum / v->referred, v->worst, v->squeezed);
    }
    print_message("\n");
    const uint32_t may_miss = v->one_in > 0 ? v->plans / v->one_in : 0;
    return v->plans > 0 && v->faults == v->missed && v->missed <= may_miss &&
           100 * v->squeezed <= v->plans && v->most_heap_bytes <= limit_mib << 20 &&
           v->most_ms <= SLACK * limit_ms;
}

static void plans_of_chains_are_as_fast_as_the_references(void **state) {
    (void)state;
    static const uint32_t counts[] = {5, 8, 13, 20, 40};
    const uint64_t seed = t_environment("MEMSCALE_TEST_SEED", 1);
    verdict v;
    memset(&v, 0, sizeof v);
    for (int kind = 0; kind < CHAIN_KINDS; ++kind) {
        for (uint32_t i = 0; i < 5; i += i == 0 ? 1 : (uint32_t)t_stride(2)) {
            char name[64];
            snprintf(name, sizeof name, "%s, %u stages", chain_kinds[kind], (unsigned)counts[i]);
            chain c = make_chain((chain_kind)kind, counts[i], seed);
            sweep_chain(&c, name, false, &v);
            chain_free(&c);
        }
    }
    chain c = gpt2_chain();
    sweep_chain(&c, "GPT-2", true, &v);
    chain_free(&c);
    assert_true(sum_up(&v, "chains", 20.0, 16));
}

static void plans_of_a_long_chain_are_as_fast_as_the_references(void **state) {
    (void)state;
    verdict v;
    memset(&v, 0, sizeof v);
    chain c = make_chain(CHAIN_UNIFORM, (uint32_t)t_sweep(40, 100),
                         t_environment("MEMSCALE_TEST_SEED", 1));
    sweep_chain(&c, "a long chain", false, &v);
    chain_free(&c);
    assert_true(sum_up(&v, "a long chain", 300.0, 16));
}

/* Of files that are named on the command line. */
static void plans_of_files_are_as_fast_as_the_references(void **state) {
    const char *const usual[] = {"tests/chain.csv", NULL};
    const char *const *given = (const char *const *)*state;
    const char *const *paths = given[0] != NULL ? given : usual;
    verdict v;
    memset(&v, 0, sizeof v);
    v.prints = given[0] != NULL;
    for (int i = 0; paths[i] != NULL; ++i) {
        chain c;
        uint64_t line;
        const char *wrong = chain_read(&c, paths[i], &line);
        if (wrong != NULL || c.count > STAGES) {
            print_error("%s:%llu: %s\n", paths[i], (unsigned long long)line,
                        wrong != NULL ? wrong : "too many stages");
            fail();
        }
        sweep_chain(&c, paths[i], true, &v);
        chain_free(&c);
    }
    assert_true(sum_up(&v, "files", 300.0, 16));
}

/* No plan claims what no schedule can do. */
static void plans_of_short_chains_are_possible(void **state) {
    (void)state;
    uint32_t plans = 0, best_plans = 0;
    for (uint64_t seed = 1; seed <= 6; ++seed) {
        for (int kind = 0; kind < CHAIN_KINDS; ++kind) {
            chain c = make_chain((chain_kind)kind, 2 + (uint32_t)(seed % (FEW - 1)), seed);
            for (uint64_t percent = 100; percent >= 20; percent -= 8) {
                const uint64_t budget = chain_peak(&c) * percent / 100;
                const double best = search_time(&c, budget) / chain_time(&c);
                const outcome o = plan_chain(&c, budget);
                assert_true(!o.fits || o.time >= best - 1e-9);
                plans += o.fits;
                best_plans += o.fits && o.time <= best + 1e-9;
            }
            chain_free(&c);
        }
    }
    print_message("%u of %u plans of short chains are as fast as any schedule\n", best_plans,
                  plans);
    assert_true(plans > 100 && best_plans * 100 >= plans * 95);
}

// ------------------------------------------------------------------------------------------------
// small graphs against every plan

enum { GRAPH_LAYERS = 9, GRAPH_TENSORS = 80, DROPPABLE = 18 };

typedef struct graph {
    t_rng rng;
    ms_model *model;
    bool has_params;                // of layers, with the state of Adam
    ms_tensor value[GRAPH_TENSORS]; // outputs of layers
    uint32_t value_count, readers[GRAPH_TENSORS];
} graph;

static ms_shape graph_shape(graph *g) {
    static const int64_t rows[] = {1, 2, 2, 3, 5, 8, 13, 40};
    return ms_shape2(rows[t_below(&g->rng, 8)], 16);
}

static ms_tensor graph_value(graph *g, ms_shape shape) {
    const ms_tensor t = ms_activation(g->model, "value", MS_DTYPE_F32, shape);
    assert_true(g->value_count < GRAPH_TENSORS);
    g->readers[g->value_count] = 0;
    g->value[g->value_count++] = t;
    return t;
}

/* One of the values, more often a late one. */
static ms_tensor graph_pick(graph *g) {
    const uint32_t recent = g->value_count > 2 && t_chance(&g->rng, 0.6) ? 2 : g->value_count;
    const uint32_t i = g->value_count - 1 - t_below(&g->rng, recent);
    g->readers[i] += 1;
    return g->value[i];
}

static void graph_register(graph *g, ms_layer_desc *d) {
    ms_layer_time time;
    d->forward = d->backward = t_nothing;
    time.forward_us = pow(100.0, t_unit(&g->rng));
    time.backward_us = time.forward_us * (1.0 + 2.0 * t_unit(&g->rng));
    time.recompute_us = time.forward_us;
    if (!d->no_recompute && t_chance(&g->rng, 0.15)) {
        d->recompute = t_nothing;
        time.recompute_us *= t_unit(&g->rng);
    }
    ms_set_layer_time(g->model, ms_register_layer(g->model, d), &time);
}

static void graph_add(graph *g) {
    ms_layer_desc d;
    memset(&d, 0, sizeof d);
    const uint32_t in = 1 + t_below(&g->rng, 3), out = 1 + t_below(&g->rng, 5) / 4;
    for (uint32_t k = 0; k < in; ++k) {
        d.in[k] = graph_pick(g);
    }
    for (uint32_t k = 0; k < out; ++k) {
        const bool like = t_chance(&g->rng, 0.3);
        d.out[k] = graph_value(g, like ? ms_tensor_shape(g->model, d.in[0]) : graph_shape(g));
        d.in_place[0] = like && k == 0 && t_chance(&g->rng, 0.4);
    }
    for (uint32_t k = 0; k < 2 && t_chance(&g->rng, 0.4); ++k) {
        d.saved[k] = ms_saved(g->model, "saved", MS_DTYPE_F32, graph_shape(g));
        d.optional_saved |= t_below(&g->rng, 2) << k;
    }
    if (t_chance(&g->rng, 0.6)) {
        d.backward_reads.in = t_below(&g->rng, 1u << in);
        d.backward_reads.out = t_below(&g->rng, 1u << out);
        d.backward_reads.saved = MS_ALL_SLOTS;
    }
    if (g->has_params && t_chance(&g->rng, 0.6)) {
        d.param[0] = ms_param(g->model, "param", MS_DTYPE_F32, graph_shape(g));
    }
    d.no_recompute = t_chance(&g->rng, 0.1);
    d.forward_workspace.bytes = t_chance(&g->rng, 0.2) ? 64 * t_below(&g->rng, 20) : 0;
    d.backward_workspace.bytes = t_chance(&g->rng, 0.3) ? 64 * t_below(&g->rng, 20) : 0;
    graph_register(g, &d);
}

/* A source with a param, more layers, and a loss that reads what nobody else does. With `layers` 0
   they are up to seven. */
static void graph_fill(graph *g, uint64_t seed, uint32_t layers, const ms_config *config) {
    ms_layer_desc d;
    const ms_optimizer_desc optimizer =
        t_optimizer(g->has_params ? MS_OPTIMIZER_ADAMW : MS_OPTIMIZER_SGD, 0.0f);
    memset(&d, 0, sizeof d);
    g->rng = t_seed(seed);
    assert_int_equal(ms_create(config, &g->model), MS_RESULT_OK);
    ms_set_optimizer(g->model, &optimizer);
    d.in[0] = ms_input(g->model, "input", MS_DTYPE_F32, ms_shape1(16));
    d.param[0] = ms_param(g->model, "param", MS_DTYPE_F32, ms_shape1(16));
    d.out[0] = graph_value(g, graph_shape(g));
    graph_register(g, &d);
    const uint32_t more = layers > 0 ? layers - 2 : 3 + t_below(&g->rng, GRAPH_LAYERS - 4);
    for (uint32_t i = 0; i < more; ++i) {
        graph_add(g);
    }
    memset(&d, 0, sizeof d);
    for (uint32_t i = 0, k = 0; i < g->value_count && k < MS_LIMIT_IN; ++i) {
        if (g->readers[i] == 0) {
            d.in[k++] = g->value[i];
        }
    }
    d.out[0] = ms_activation(g->model, "loss", MS_DTYPE_F32, ms_shape1(16));
    d.no_recompute = true;
    graph_register(g, &d);
    ms_set_loss(g->model, d.out[0]);
}

static void graph_create(graph *g, uint64_t seed, uint32_t layers, const ms_config *config) {
    memset(g, 0, sizeof *g);
    graph_fill(g, seed, layers, config);
}

/* All plans of a graph: each value that may be dropped is, or is not. */
typedef struct census {
    msi_store *store;
    msi_plan *plan;
    msi_lowering lowering;
    msi_shortage shortage;
    msi_scorer scorer;
    msi_score score;                   // of the last choice
    uint32_t tensor[DROPPABLE], count; // that may be dropped
    uint64_t peak_bytes[1 << DROPPABLE];
    double time[1 << DROPPABLE];
    uint32_t order[1 << DROPPABLE]; // by time
    double plain_us;
    msi_chain *chain; // with its subchains, for a search of their points alone
} census;

static void census_choose(census *c, uint32_t mask) {
    for (uint32_t k = 0; k < c->count; ++k) {
        c->plan->decisions[c->tensor[k]].pass = mask >> k & 1;
    }
    c->score = msi_estimate(&c->scorer, c->plan->decisions);
    assert_false(msi_is_short(&c->scorer));
}

static const census *census_of_sort;

static int compare_times(const void *a, const void *b) {
    const uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    const double p = census_of_sort->time[x], q = census_of_sort->time[y];
    return p != q ? (p > q) - (p < q) : (x > y) - (x < y);
}

/* Of a model that has been analyzed: what scores its plans. */
static void census_open(census *c, ms_model *m) {
    memset(&c->score, 0, sizeof c->score);
    t_ok(m, msi_make_plans(m, MSI_GOAL_PLAIN, &c->store, &c->plan));
    assert_true(msi_scorer_init(&c->scorer, m, c->store, c->plan, &c->lowering, &c->shortage));
}

/* A search that has found nothing yet, and keeps its best decisions in the plan. */
static msi_search census_search(census *c, uint64_t budget) {
    msi_search s;
    memset(&s, 0, sizeof s);
    s.scorer = &c->scorer;
    s.budget = budget;
    s.techniques = MSI_CHECKPOINTING;
    s.host_budget = UINT64_MAX;
    s.best = c->plan->decisions;
    return s;
}

/* False: too many values for a census. */
static bool census_take(census *c, ms_model *m, uint32_t limit) {
    const msi_graph *g = &m->graph;
    c->store = NULL;
    c->count = 0;
    for (uint32_t t = 0; t < g->tensors.count; ++t) {
        if (g->tensors.items[t].last_reader != MSI_NONE && msi_is_droppable(g, t)) {
            if (c->count == limit) {
                return false;
            }
            c->tensor[c->count++] = t;
        }
    }
    census_open(c, m);
    c->plain_us = c->plan->plain_step_us;
    for (uint32_t mask = 0; mask >> c->count == 0; ++mask) {
        census_choose(c, mask);
        c->peak_bytes[mask] = c->store->resident_bytes + c->plan->train.layout.peak_bytes;
        c->time[mask] = 1.0 + c->plan->train.predicted.last.recompute_us / c->plain_us;
        c->order[mask] = mask;
    }
    census_of_sort = c;
    qsort(c->order, (size_t)1 << c->count, sizeof c->order[0], compare_times);
    return true;
}

static void census_free(census *c, ms_model *m) {
    if (c->store != NULL) {
        msi_lowering_free(&c->lowering);
        msi_plans_free(m, c->plan);
        msi_store_free(m, c->store);
    }
}

/* The least arena of a plan that needs no more than this much. */
static uint64_t census_arena(census *c, uint32_t mask, uint64_t budget) {
    if (c->peak_bytes[mask] > budget) {
        return UINT64_MAX;
    }
    census_choose(c, mask);
    const bool fits = msi_fits(&c->scorer, &c->score, budget, 0);
    assert_false(msi_is_short(&c->scorer));
    return fits ? c->score.bytes : UINT64_MAX;
}

static uint64_t census_smallest(census *c) {
    uint64_t least = UINT64_MAX;
    for (uint32_t mask = 0; mask >> c->count == 0; ++mask) {
        const uint64_t arena = census_arena(c, mask, least);
        least = arena < least ? arena : least;
    }
    return least;
}

/* Time of the fastest plan that fits, laid out. */
static double census_time(census *c, uint64_t budget) {
    for (uint32_t i = 0; i >> c->count == 0; ++i) {
        if (census_arena(c, c->order[i], budget) <= budget) {
            return c->time[c->order[i]];
        }
    }
    return NEVER;
}

/* Of fewer values than DROPPABLE_ALL the smallest arena must be met exactly, of more nearly. */
enum { GRAPH_BUDGETS = 8, GRAPH_PER_CENT = 2, DROPPABLE_ALL = 13 };

/* Holds the plans of a model that is wrapped to the census of its plans, at budgets from that of
   the plain plan to the smallest. False: too many values for that. */
static bool check_census(ms_model *m, meter *heap, const char *name, uint32_t limit, verdict *v) {
    static census c;
    outcome last;
    const bool taken = census_take(&c, m, limit);
    if (taken) {
        const uint64_t plain = census_arena(&c, 0, UINT64_MAX), smallest = census_smallest(&c);
        const uint64_t near = smallest + smallest / 100 * GRAPH_PER_CENT;
        const uint64_t least = limit < DROPPABLE_ALL ? smallest : near < plain ? near : plain;
        for (uint64_t i = 0; i <= GRAPH_BUDGETS; ++i) {
            const uint64_t budget = plain - (plain - least) * i / GRAPH_BUDGETS;
            const double best = census_time(&c, budget);
            const outcome o = wrap_for(m, heap, budget);
            last = i == 0 ? o : last;
            const double bound = best * (1.0 + 0.01 * GRAPH_PER_CENT);
            judge(v, name, 100 * budget / plain, &o, &last, bound, bound);
            last = o;
        }
    }
    census_free(&c, m);
    return taken;
}

static void check_graph(uint64_t seed, verdict *v) {
    meter heap;
    graph g;
    char name[32];
    ms_config config = solver_config(&heap);
    graph_create(&g, seed, 0, &config);
    snprintf(name, sizeof name, "graph %llu", (unsigned long long)seed);
    t_ok(g.model, ms_wrap(g.model)); // analyses the graph
    (void)check_census(g.model, &heap, name, DROPPABLE_ALL - 1, v);
    ms_destroy(g.model);
    assert_true(heap.live == 0);
}

/* All plans of a graph that keep, drop or move each of its values, with room for copies and without. */
enum { MOVABLE = 7, MOVE_PLANS = 2 * 2187, MOVE_BUDGETS = 6 }; // 3^7, twice

typedef struct move_plan {
    uint64_t bytes;
    double us;
} move_plan;

static uint32_t take_move_plans(census *c, ms_model *m, move_plan *plans) {
    const msi_graph *g = &m->graph;
    uint32_t tensor[MOVABLE], values = 0, count = 1;
    msi_search base = MSI_ZERO_INIT;
    base.scorer = &c->scorer;
    for (uint32_t t = 0; t < g->tensors.count; ++t) {
        if (g->tensors.items[t].last_reader != MSI_NONE &&
            (msi_is_droppable(g, t) ||
             (msi_movable(g, t) != 0 && !msi_is_resident(&g->tensors.items[t])))) {
            if (values == MOVABLE) {
                return 0;
            }
            tensor[values++] = t;
            count *= 3;
        }
    }
    for (uint32_t number = 0; number < 2 * count; ++number) {
        msi_decide_base(&base, c->plan->decisions);
        c->plan->decisions[g->tensors.count].room = number >= count;
        bool sound = true;
        uint32_t digits = number % count;
        for (uint32_t k = 0; k < values; ++k, digits /= 3) {
            const uint32_t t = tensor[k];
            sound &= digits % 3 != 1 || msi_is_droppable(g, t);
            sound &= digits % 3 != 2 || msi_movable(g, t) != 0;
            c->plan->decisions[t].pass = digits % 3 == 1;
            c->plan->decisions[t].moves = digits % 3 == 2 ? MSI_MOVES_VALUE : 0;
        }
        const msi_score score = msi_score_of(&c->scorer, c->plan->decisions);
        plans[number].bytes = sound ? score.bytes : UINT64_MAX;
        plans[number].us = score.us;
    }
    return 2 * count;
}

static ms_hardware linked_device(t_rng *rng) {
    ms_hardware h;
    memset(&h, 0, sizeof h);
    snprintf(h.name, sizeof h.name, "linked");
    h.kind = MS_DEVICE_DISCRETE;
    h.total_bytes = h.free_bytes = (uint64_t)1 << 34;
    h.memory_gb_per_s = 100.0;
    h.f32_tflops = 1.0;
    h.launch_us = 1e-6;
    h.to_device_gb_per_s = h.to_host_gb_per_s = 2.0 + 30.0 * t_unit(rng);
    return h;
}

/* The time over that of a plain step, for a share of the bytes of keeping everything, where the link
   copies what all stages keep in 1 / link of their forward; and how many groups of one stage keep
   or move what they could drop. */
static double linked_time(const chain *c, double share, double link, bool tiles, uint32_t *alone) {
    meter heap;
    ms_model *m;
    ms_memory_report report;
    t_rng rng = t_seed(1);
    double bytes = 0.0, seconds = 0.0;
    ms_config config = solver_config(&heap);
    ms_hardware device = linked_device(&rng);
    for (uint32_t i = 0; i < c->count; ++i) {
        bytes += (double)c->stages[i].abar;
        seconds += c->stages[i].tf;
    }
    device.total_bytes = device.free_bytes = (uint64_t)1 << 60;
    device.memory_gb_per_s = 1e9;
    device.to_device_gb_per_s = device.to_host_gb_per_s =
        1e-9 * link * (double)CHAIN_SCALE * bytes / seconds;
    config.offloading = MS_SWITCH_ON;
    config.tiling = tiles ? MS_SWITCH_ON : MS_SWITCH_OFF;
    config.max_host_bytes = UINT64_MAX;
    config.memory_budget_bytes = chain_budget((uint64_t)(share * (double)chain_peak(c)));
    assert_int_equal(ms_create(&config, &m), MS_RESULT_OK);
    chain_register(m, c, true);
    ms_set_hardware(m, &device);
    t_ok(m, ms_wrap(m));
    t_report(m, &report);
    assert_true(report.arena_bytes <= config.memory_budget_bytes);
    const msi_tensor_decision *d = m->run.plan->decisions;
    for (uint32_t i = 0; i < m->graph.layers.count; ++i) {
        *alone += msi_tiles_of(&m->graph, d, i) > 1 && msi_group_at(&m->graph, d, i).end == i + 1 &&
                  msi_keeps_inner(&m->graph, d, i);
    }
    ms_destroy(m);
    assert_true(heap.live == 0);
    return report.step_us / report.plain_step_us;
}

/* Twelve blocks that each keep half of the budget: as a whole, what one keeps does not land while
   another is in use, and to recompute is faster. Nowhere are plans slower for their tiles. */
static void what_lands_in_parts_has_room(void **state) {
    (void)state;
    static const double links[] = {1.0, 0.5, 0.25}, shares[] = {0.15, 0.5, 0.2, 0.3, 0.7};
    chain c = gpt2_chain();
    for (int k = 0; k < (int)t_sweep(2, 3); ++k) {
        for (int i = 0; i < (int)t_sweep(2, 5); ++i) {
            uint32_t parts = 0, whole = 0;
            const double in_parts = linked_time(&c, shares[i], links[k], true, &parts);
            const double as_wholes = linked_time(&c, shares[i], links[k], false, &whole);
            print_message("link %.2f, %.2f of plain: %.4f, in parts %.4f\n", links[k], shares[i],
                          as_wholes, in_parts);
            assert_true(whole == 0 && in_parts <= as_wholes + 1e-9);
            assert_true(i + k > 0 || (in_parts <= 0.95 * as_wholes && parts > 0));
        }
    }
    chain_free(&c);
}

/* Within 2 % of the fastest of all plans that keep, drop or move, feasible wherever one is. */
static void plans_that_move_are_close_to_the_best(void **state) {
    (void)state;
    static census c;
    static move_plan plans[MOVE_PLANS];
    uint32_t checked = 0, moved = 0, missed = 0;
    for (uint64_t seed = 1; seed <= t_sweep(50, 4000); ++seed) {
        meter heap;
        graph g;
        t_rng rng = t_seed(seed + 77);
        const ms_hardware device = linked_device(&rng);
        ms_config config = solver_config(&heap);
        config.offloading = MS_SWITCH_ON;
        config.max_host_bytes = (uint64_t)1 << 40;
        config.early_update = MS_SWITCH_OFF;
        graph_create(&g, seed, 0, &config);
        ms_set_hardware(g.model, &device);
        for (uint32_t t = 0; t < g.model->graph.tensors.count; ++t) {
            if (g.model->graph.tensors.items[t].kind == MSI_KIND_PARAM) {
                g.model->graph.tensors.items[t].forbidden_moves = MSI_MOVES_ALL;
            }
        }
        t_ok(g.model, ms_wrap(g.model));
        census_open(&c, g.model);
        const uint32_t count = take_move_plans(&c, g.model, plans);
        uint64_t smallest = UINT64_MAX;
        for (uint32_t k = 0; k < count; ++k) {
            smallest = plans[k].bytes < smallest ? plans[k].bytes : smallest;
        }
        const uint64_t plain = count > 0 ? plans[0].bytes : 0;
        for (uint64_t i = 0; i <= MOVE_BUDGETS && count > 0; ++i) {
            const uint64_t budget = plain - (plain - smallest) * i / MOVE_BUDGETS;
            double best = NEVER;
            for (uint32_t k = 0; k < count; ++k) {
                best = plans[k].bytes <= budget && plans[k].us < best ? plans[k].us : best;
            }
            ms_memory_report report;
            ms_set_budget(g.model, budget);
            const ms_result result = ms_wrap(g.model);
            if (result != MS_RESULT_OK) {
                print_error("seed %llu, budget %llu: %s\n", (unsigned long long)seed,
                            (unsigned long long)budget, ms_last_error(g.model));
            }
            assert_int_equal(result, MS_RESULT_OK);
            t_report(g.model, &report);
            best =
                best > report.plain_step_us ? best : report.plain_step_us; // none counts as faster
            ++checked;
            moved += report.to_host_bytes > 0;
            missed += report.step_us > 1.02 * best;
        }
        census_free(&c, g.model);
        ms_destroy(g.model);
        assert_true(heap.live == 0);
    }
    print_message("%u plans, %u of them move something, %u slower by 2 %%\n", (unsigned)checked,
                  (unsigned)moved, (unsigned)missed);
    assert_true(moved > checked / 20);
    assert_int_equal(missed, 0);
}

/* Within 2 % of the fastest, feasible wherever one is. Of larger graphs, which are not enumerated,
   one plan in 500 may miss that. */
static void plans_of_small_graphs_are_close_to_the_best(void **state) {
    (void)state;
    verdict v;
    memset(&v, 0, sizeof v);
    const uint64_t first = t_environment("MEMSCALE_TEST_SEED", 1);
    const uint64_t count = t_environment("MEMSCALE_TEST_DAGS", t_sweep(30, 600));
    for (uint64_t seed = first; seed < first + count; ++seed) {
        check_graph(seed, &v);
    }
    check_graph(243, &v); // a chain of few layers with more choices than are enumerated
    check_graph(552, &v); // layers with several values that the greedy list drops
    assert_true(count < 50 || v.plans > 5 * count);
    assert_true(sum_up(&v, "small graphs", 20.0, 16));
}

/* Graphs of 10 to 18 layers, of two generators. */
static bool check_larger_graph(uint64_t seed, verdict *v) {
    meter heap;
    graph g;
    char name[64];
    t_rng rng = t_seed(seed);
    const uint32_t values = (uint32_t)t_sweep(14, DROPPABLE), layers = 10 + t_below(&rng, 9);
    ms_config config = solver_config(&heap);
    memset(&g, 0, sizeof g);
    if (seed % 2) {
        graph_create(&g, seed, layers, &config);
    } else {
        assert_int_equal(ms_create(&config, &g.model), MS_RESULT_OK);
        net_register(g.model, NET_RANDOM, layers - 1, seed);
    }
    snprintf(name, sizeof name, "graph %llu of %u layers", (unsigned long long)seed, layers);
    t_ok(g.model, ms_wrap(g.model)); // analyses the graph
    const bool taken = check_census(g.model, &heap, name, values, v);
    ms_destroy(g.model);
    assert_true(heap.live == 0);
    return taken;
}

static void plans_of_larger_graphs_are_close_to_the_best(void **state) {
    (void)state;
    verdict v;
    memset(&v, 0, sizeof v);
    v.one_in = 500;
    uint64_t wanted = t_environment("MEMSCALE_TEST_DAGS", t_sweep(8, 200));
    for (uint64_t seed = t_environment("MEMSCALE_TEST_SEED", 1); wanted > 0; ++seed) {
        wanted -= check_larger_graph(seed, &v);
    }
    assert_true(sum_up(&v, "larger graphs", 100.0, 4));
}

// ------------------------------------------------------------------------------------------------
// budgets of all kinds of graphs: a larger one never makes a step slower, a smaller one never makes
// the arena larger, and the smallest is the smallest

static void net_for_budgets(uint64_t seed, const ms_config *config, ms_model **m) {
    t_rng rng = t_seed(seed);
    const bool random = t_chance(&rng, 0.8);
    const net_kind kind =
        random ? (t_chance(&rng, 0.5) ? NET_RANDOM : NET_CHAIN) : (net_kind)t_below(&rng, 4);
    const uint32_t layers = 5 + t_below(&rng, 56);
    assert_int_equal(ms_create(config, m), MS_RESULT_OK);
    net_register(*m, kind, layers, seed);
    for (uint32_t t = 0; t < (*m)->graph.tensors.count; t++) { // some are forced, some forbidden
        const bool made = (*m)->graph.tensors.items[t].kind == MSI_KIND_ACTIVATION;
        if (made && t + 1 < (*m)->graph.tensors.count && seed % 4 == 0 && t_chance(&rng, 0.1)) {
            ms_set_tensor_technique(*m, msi_handle(&(*m)->graph, t, MSI_ROLE_VALUE),
                                    MS_TECHNIQUE_CHECKPOINTING,
                                    t_chance(&rng, 0.5) ? MS_SWITCH_ON : MS_SWITCH_OFF);
        }
    }
}

typedef struct planned {
    uint64_t bytes;
    double us;
} planned;

/* Whether a plan drops all that the user wants to be dropped. */
static bool drops_what_is_forced(const ms_model *m) {
    bool all = true;
    for (uint32_t t = 0; t < m->graph.tensors.count; ++t) {
        all &= m->run.plan->decisions[t].pass > 0 || !msi_is_drop_forced(&m->graph, t);
    }
    return all;
}

static bool take_plan(ms_model *m, uint64_t budget, planned *p) {
    ms_memory_report report;
    ms_set_budget(m, budget);
    const ms_result result = ms_wrap(m);
    if (result != MS_RESULT_OK) {
        t_error(m, result, MS_RESULT_BUDGET);
        return false;
    }
    t_report(m, &report);
    assert_true(report.arena_bytes <= budget && drops_what_is_forced(m));
    p->bytes = report.arena_bytes;
    p->us = m->run.plan->train.predicted.last.us;
    return true;
}

/* Returns the number of violations. */
static uint32_t check_budgets(uint64_t seed) {
    enum { BUDGETS = 25 };
    meter heap;
    ms_model *m;
    planned plain, last, now;
    uint64_t least = 0;
    uint32_t wrong = 0;
    ms_config config = solver_config(&heap);
    config.early_update = seed % 3 ? MS_SWITCH_DEFAULT : MS_SWITCH_OFF;
    config.offloading = seed % 5 == 2 ? MS_SWITCH_ON : MS_SWITCH_OFF;
    net_for_budgets(seed, &config, &m);
    assert_true(take_plan(m, UINT64_MAX, &plain));
    t_ok(m, ms_smallest_budget(m, &least));
    /* Searches with moves try plans in an order of their own, which depends on the budget: of plans
       as fast, a budget may have a smaller one, and two in a hundred may slip. */
    const bool moves = config.offloading == MS_SWITCH_ON;
    const double slack = moves ? 0.98 : 1.0;
    assert_true(take_plan(m, plain.bytes, &now)); // it fits to the byte
    assert_true(moves || now.bytes == plain.bytes);
    assert_true(now.bytes <= plain.bytes && !(now.us < plain.us) && !(now.us > plain.us));
    last = plain;
    for (uint64_t i = 1; i <= BUDGETS; ++i) {
        const uint64_t even = plain.bytes - (plain.bytes - least) * i / BUDGETS;
        const uint64_t budget = i % 4 == 0 && last.bytes > least ? last.bytes - 1 : even;
        const bool fits = take_plan(m, budget, &now);
        const bool good = fits && now.bytes <= last.bytes && now.us >= slack * last.us;
        if (!good && budget <= last.bytes) {
            print_message("net %llu, budget %llu: %llu bytes, %.17g us after %llu, %.17g\n",
                          (unsigned long long)seed, (unsigned long long)budget,
                          (unsigned long long)(fits ? now.bytes : 0), fits ? now.us : 0.0,
                          (unsigned long long)last.bytes, last.us);
            wrong++;
        }
        last = fits && budget <= last.bytes ? now : last;
    }
    if (!take_plan(m, least, &now) || take_plan(m, least - 1, &now)) {
        print_message("net %llu: %llu is not the smallest budget\n", (unsigned long long)seed,
                      (unsigned long long)least);
        wrong++;
    }
    ms_destroy(m);
    assert_true(heap.live == 0);
    return wrong;
}

static void budgets_are_monotone_and_the_smallest_is_exact(void **state) {
    (void)state;
    const uint64_t first = t_environment("MEMSCALE_TEST_SEED", 1);
    const uint64_t count = t_environment("MEMSCALE_TEST_NETS", t_sweep(3, 1000));
    uint32_t wrong = 0;
    for (uint64_t seed = first; seed < first + count; ++seed) {
        wrong += check_budgets(seed);
    }
    assert_int_equal(wrong, 0);
}

/* A net, a share of the way from the smallest budget to the plain arena, and a link in GB/s or 0. */
typedef struct changed_net {
    net_kind kind;
    uint32_t layers;
    double share, link;
} changed_net;

/* Keeps, drops, or moves up to three values, and moves what belongs to params. */
static void change_plan(const ms_model *m, t_rng *rng, bool moves, msi_tensor_decision *d) {
    const msi_graph *g = &m->graph;
    for (uint32_t left = 1 + t_below(rng, 3); left > 0;) {
        const uint32_t t = t_below(rng, g->tensors.count), way = t_below(rng, 3);
        const uint8_t may = moves ? msi_may_choose(g, t) : 0;
        const uint8_t one = (uint8_t)(MSI_MOVES_VALUE << way);
        if (g->tensors.items[t].kind == MSI_KIND_PARAM && (may & one)) {
            d[t].moves = (uint8_t)((d[t].moves ^ one) & ~MSI_IN_PLACE);
        } else if (g->tensors.items[t].kind == MSI_KIND_PARAM || way == 2 ? may == 0
                                                                          : !msi_is_choice(g, t)) {
            continue;
        } else if (g->tensors.items[t].kind != MSI_KIND_PARAM) {
            d[t].pass = way == 1 ? 1 + t_below(rng, 2) : 0;
            d[t].moves = way == 2 ? MSI_MOVES_VALUE : 0;
        }
        --left;
    }
}

/* A net on a device of its own, wrapped without a limit. */
static ms_model *changed_open(const changed_net *net, meter *heap) {
    ms_model *m;
    ms_config config = solver_config(heap);
    ms_hardware h = *ms_hardware_find("RTX 3090");
    config.early_update = MS_SWITCH_DEFAULT;
    config.offloading = net->link > 0.0 ? MS_SWITCH_ON : MS_SWITCH_OFF;
    config.max_host_bytes = (uint64_t)1 << 40;
    assert_int_equal(ms_create(&config, &m), MS_RESULT_OK);
    net_register(m, net->kind, net->layers, 1);
    h.total_bytes = h.free_bytes = (uint64_t)1 << 40;
    h.launch_us = 1.0;
    if (net->link > 0.0) {
        h.to_device_gb_per_s = h.to_host_gb_per_s = net->link;
    }
    ms_set_hardware(m, &h);
    ms_set_budget(m, UINT64_MAX);
    t_ok(m, ms_wrap(m));
    return m;
}

/* How many times as long as the fastest of so many plans that differ from it a little a plan takes. */
static double over_changes(const changed_net *net, uint32_t tries) {
    static census with;
    meter heap;
    ms_model *m = changed_open(net, &heap);
    uint64_t least = 0;
    t_rng rng = t_seed(net->layers);
    census_open(&with, m);
    t_ok(m, ms_smallest_budget(m, &least));
    const uint64_t budget =
        least + (uint64_t)(net->share * (double)(with.plan->plain_bytes - least));
    ms_set_budget(m, budget);
    t_ok(m, ms_wrap(m));
    const size_t bytes = (size_t)msi_decisions_bytes(&m->graph);
    const double us = m->run.plan->train.predicted.step.us;
    double best = us;
    for (uint32_t k = 0; k < tries; ++k) {
        memcpy(with.plan->decisions, m->run.plan->decisions, bytes);
        change_plan(m, &rng, net->link > 0.0, with.plan->decisions);
        msi_score score = msi_estimate(&with.scorer, with.plan->decisions);
        score.us = fmax(score.us, with.plan->plain_step_us);
        if (score.us < best && msi_fits(&with.scorer, &score, budget, 0)) {
            best = score.us;
        }
    }
    census_free(&with, m);
    ms_destroy(m);
    assert_true(heap.live == 0);
    return us / best;
}

/* Nets with branches, with a link and without, some of which need nested recomputation: none of many
   random changes to their plans makes them faster by a five-hundredth. */
static void random_changes_make_no_plan_faster(void **state) {
    (void)state;
    static const changed_net nets[] = {
        {NET_UNET, 41, 0.2, 0.0},      {NET_UNET, 41, 0.5, 0.0},      {NET_DENSENET, 55, 0.8, 0.0},
        {NET_INCEPTION, 55, 0.2, 0.0}, {NET_RESNET, 20, 0.2, 0.0},    {NET_RANDOM, 40, 0.16, 0.0},
        {NET_INCEPTION, 20, 0.3, 0.5}, {NET_INCEPTION, 55, 0.2, 0.5}, {NET_RESNET, 40, 0.2, 0.0}};
    uint32_t wrong = 0;
    for (size_t k = 0; k < sizeof nets / sizeof nets[0]; ++k) {
        const double over = over_changes(&nets[k], (uint32_t)t_sweep(500, 4000));
        if (over > 1.002) {
            print_message("%s of %u layers, %.2f, link %.2f: %.4f\n", net_names[nets[k].kind],
                          (unsigned)nets[k].layers, nets[k].share, nets[k].link, over);
            wrong++;
        }
    }
    assert_int_equal(wrong, 0);
}

static uint64_t smallest_with(net_kind kind, uint32_t layers, uint64_t host_bytes) {
    meter heap;
    ms_model *m;
    ms_config config = solver_config(&heap);
    uint64_t least = 0;
    config.offloading = host_bytes > 0 ? MS_SWITCH_ON : MS_SWITCH_OFF;
    config.max_host_bytes = host_bytes;
    assert_int_equal(ms_create(&config, &m), MS_RESULT_OK);
    net_register(m, kind, layers, 1);
    ms_set_hardware(m, ms_hardware_find("RTX 3090"));
    ms_set_budget(m, UINT64_MAX);
    t_ok(m, ms_smallest_budget(m, &least));
    ms_destroy(m);
    return least;
}

/* What may be moved, but finds no room on the host, makes no plan larger. */
static void a_host_without_room_does_no_harm(void **state) {
    (void)state;
    static const net_kind kinds[] = {NET_UNET, NET_DENSENET, NET_INCEPTION, NET_RESNET, NET_RANDOM};
    for (size_t k = 0; k < sizeof kinds / sizeof kinds[0]; ++k) {
        for (uint32_t layers = 12; layers <= (uint32_t)t_sweep(32, 62); layers += 10) {
            const uint64_t alone = smallest_with(kinds[k], layers, 0);
            assert_true(smallest_with(kinds[k], layers, 1) <= alone);
            assert_true(smallest_with(kinds[k], layers, alone / 4) <= alone);
        }
    }
}

/* A chain with the plans of all of its subchains. */
static msi_chain *fill_chain(census *with, msi_search *s) {
    msi_chain *c = (msi_chain *)msi_scratch(&with->scorer, sizeof *c);
    assert_true(c != NULL && msi_chain_init(c, s) && msi_is_chain(c));
    msi_find_options(c);
    msi_fill_subchains(c);
    return c;
}

/* A chain with stages that need much, whose graph was analysed, and what scores its plans. */
typedef struct hungry {
    meter heap;
    ms_model *model;
    chain stages;
} hungry;

static void hungry_open(hungry *h, census *with, uint64_t seed) {
    const ms_config config = solver_config(&h->heap);
    h->stages = make_chain(CHAIN_HUNGRY, 12, seed);
    assert_int_equal(ms_create(&config, &h->model), MS_RESULT_OK);
    chain_register(h->model, &h->stages, false);
    t_ok(h->model, ms_wrap(h->model));
    census_open(with, h->model);
}

static void hungry_close(hungry *h, census *with) {
    census_free(with, h->model);
    ms_destroy(h->model);
    chain_free(&h->stages);
    assert_true(h->heap.live == 0);
}

/* What the search of chains expects a plan to need is mostly exact, and never too much: no plan
   that fits is passed over. */
static void a_chain_needs_what_its_search_expects(void **state) {
    (void)state;
    static census with;
    uint32_t points = 0, exact = 0;
    for (uint64_t seed = 1; seed <= t_sweep(4, 40); ++seed) {
        hungry h;
        hungry_open(&h, &with, seed);
        msi_search of_chain = census_search(&with, UINT64_MAX);
        msi_chain *c = fill_chain(&with, &of_chain);
        for (uint32_t i = 0; i < msi_whole_chain(c)->count; ++i) {
            const msi_score score = msi_estimate_point(c, i);
            const uint64_t expected = msi_whole_chain(c)->points[i].bytes;
            assert_true(score.live_bytes >= expected);
            exact += score.live_bytes - expected == MSI_ALIGNMENT; // the loss
            points += 1;
        }
        msi_score first = msi_estimate_point(c, 0);
        assert_true(msi_try_point(c, 0, &first, 0));
        assert_true(msi_try_point(c, 0, &first, first.bytes)); // no smaller than a slower one
        assert_false(msi_try_point(c, 0, &first, first.bytes + 1));
        msi_chain_free(c);
        hungry_close(&h, &with);
    }
    assert_true(points > 50 && 10 * exact > 9 * points);
}

/* Opens the choices of a net without a link, which are searched as in a plan. */
static void choices_open(census *with, msi_exhaustive *all, msi_search *s) {
    memset(all, 0, sizeof *all);
    assert_true(msi_exhaustive_init(all, s));
    msi_list_groups(all, false, 0, MSI_NONE);
    assert_true(all->group_count > 0 && all->wanted == all->group_count);
    s->how.by = MSI_FINDER_LOCAL;
    assert_false(msi_is_short(&with->scorer));
}

/* Opens a net on a device with a link of so many GB/s; 0: on the host. */
static ms_model *net_open(census *c, meter *heap, net_kind kind, uint32_t layers, double gb_per_s) {
    ms_model *m;
    t_rng rng = t_seed(layers);
    ms_hardware device = linked_device(&rng);
    const ms_config config = solver_config(heap);
    assert_int_equal(ms_create(&config, &m), MS_RESULT_OK);
    net_register(m, kind, layers, 1);
    if (gb_per_s > 0.0) {
        device.to_device_gb_per_s = device.to_host_gb_per_s = gb_per_s;
        ms_set_hardware(m, &device);
    }
    t_ok(m, ms_wrap(m)); // analyses the graph
    census_open(c, m);
    return m;
}

/* Climbs leave the fronts from which they begin as they were: where a climb begins does not depend on
   those before it, nor what is found on the budget. */
static void climbs_begin_at_what_was_found_before(void **state) {
    (void)state;
    static census with;
    static const net_kind kinds[] = {NET_UNET, NET_RANDOM, NET_RESNET};
    uint32_t tried = 0;
    for (size_t k = 0; k < sizeof kinds / sizeof kinds[0]; ++k) {
        meter heap;
        msi_exhaustive all;
        ms_model *m = net_open(&with, &heap, kinds[k], 20, 0.0);
        msi_search s = census_search(&with, with.plan->plain_bytes * 8 / 10);
        choices_open(&with, &all, &s);
        msi_search_locally(&all);
        const uint32_t count = all.count, points[2] = {all.by_bytes.count, all.by_crowd.count};
        msi_front_point *before = (msi_front_point *)calloc(points[0] + points[1], sizeof *before);
        assert_non_null(before);
        memcpy(before, all.by_bytes.points, points[0] * sizeof *before);
        memcpy(before + points[0], all.by_crowd.points, points[1] * sizeof *before);
        msi_climb_rungs(&all);
        tried += all.count - count;
        assert_true(all.by_bytes.count == points[0] && all.by_crowd.count == points[1]);
        assert_memory_equal(before, all.by_bytes.points, points[0] * sizeof *before);
        assert_memory_equal(before + points[0], all.by_crowd.points, points[1] * sizeof *before);
        free(before);
        msi_release(with.scorer.allocator, all.tried, msi_exhaustive_bytes(&all));
        census_free(&with, m);
        ms_destroy(m);
        assert_true(heap.live == 0);
    }
    assert_true(tried > 100);
}

/* The choice that begins a climb at a point of the chain is the plan of that point, in whatever order
   points are taken. */
static void climbs_begin_at_points_of_the_chain(void **state) {
    (void)state;
    static census with;
    static msi_score expected[MSI_ALL_GROUPS];
    for (uint64_t seed = 1; seed <= t_sweep(3, 40); ++seed) {
        hungry h;
        msi_exhaustive all;
        hungry_open(&h, &with, seed);
        msi_search s = census_search(&with, UINT64_MAX);
        s.chain = fill_chain(&with, &s);
        const uint32_t count = msi_whole_chain(s.chain)->count;
        assert_true(count > 20 && count <= MSI_ALL_GROUPS);
        for (uint32_t i = 0; i < count; ++i) {
            expected[i] = msi_estimate_point(s.chain, i);
        }
        choices_open(&with, &all, &s);
        for (uint32_t i = 0; i < 2 * count; ++i) {
            const uint32_t number = i < count ? i : 2 * count - 1 - i;
            const msi_groups groups = msi_groups_of_point(&all, number);
            const msi_score score = msi_estimate_groups(&all, &groups);
            assert_true(score.live_bytes == expected[number].live_bytes);
            assert_true(!(score.us < expected[number].us) && !(score.us > expected[number].us));
        }
        msi_release(with.scorer.allocator, all.tried, msi_exhaustive_bytes(&all));
        msi_chain_free(s.chain);
        hungry_close(&h, &with);
    }
}

/* Climbs make plans of nets with branches faster, and need memory for what they try, at the budget
   first: without it the step of the first net is 0.2 % slower, in another order that of the second 3 %. */
static void climbs_have_room_for_what_they_try(void **state) {
    (void)state;
    static const changed_net nets[] = {{NET_UNET, 20, 0.8, 0.0}, {NET_INCEPTION, 60, 0.25, 0.5}};
    static const double known[] = {1.0467, 1.0748};
    for (size_t k = 0; k < sizeof nets / sizeof nets[0]; ++k) {
        meter heap;
        ms_memory_report r;
        ms_model *m = changed_open(&nets[k], &heap);
        t_report(m, &r);
        ms_set_budget(m, (uint64_t)(nets[k].share * (double)r.plain_bytes));
        t_ok(m, ms_wrap(m));
        t_report(m, &r);
        print_message("%s of %u layers: %.4f\n", net_names[nets[k].kind], (unsigned)nets[k].layers,
                      r.step_us / r.plain_step_us);
        assert_true(r.step_us <= (known[k] + 1e-4) * r.plain_step_us);
        ms_destroy(m);
        assert_true(heap.live == 0);
    }
}

/* What climbs find does not depend on those before them, which depend on the budget. Each budget is
   asked of a new model, at which plans of other budgets are unknown. */
static void climbs_keep_larger_budgets_faster(void **state) {
    (void)state;
    double fastest = 1e300;
    uint64_t bytes = 0;
    for (int k = 0; k < 16; ++k) {
        meter heap;
        ms_memory_report r;
        ms_model *m;
        ms_config config = solver_config(&heap);
        uint64_t least = 0;
        config.offloading = MS_SWITCH_OFF;
        assert_int_equal(ms_create(&config, &m), MS_RESULT_OK);
        net_register(m, NET_RANDOM, 63, 13);
        ms_set_hardware(m, ms_hardware_find("RTX 3090"));
        ms_set_budget(m, UINT64_MAX);
        t_ok(m, ms_smallest_budget(m, &least));
        t_ok(m, ms_wrap(m));
        t_report(m, &r);
        ms_set_budget(m, least + (r.plain_bytes - least) * (uint64_t)k / 128);
        t_ok(m, ms_wrap(m));
        t_report(m, &r);
        assert_true(r.step_us <= fastest && r.arena_bytes >= bytes);
        fastest = r.step_us;
        bytes = r.arena_bytes;
        ms_destroy(m);
        assert_true(heap.live == 0);
    }
}

/* Of all pairs that should gain something and fit, each is taken once, those that gain more first. */
static void pairs_are_tried_in_the_order_of_gain(void **state) {
    (void)state;
    enum { PAIRED = 7 };
    static msi_exhaustive all;
    uint32_t ties = 0;
    for (uint64_t seed = 1; seed <= 50; ++seed) {
        t_rng rng = t_seed(seed);
        const double room = t_below(&rng, 4);
        bool taken[PAIRED * PAIRED] = {false};
        uint32_t left = 0, pair = 0;
        double us = -1e300;
        all.group_count = PAIRED;
        for (uint32_t k = 0; k < PAIRED; ++k) {
            all.singles[k].us = (double)t_below(&rng, 5) - 3.0;
            all.singles[k].bytes = (double)t_below(&rng, 9) - 4.0;
        }
        for (uint32_t k = 0; k < PAIRED * PAIRED; ++k) {
            const msi_single *a = &all.singles[k / PAIRED], *b = &all.singles[k % PAIRED];
            left += a != b && a->us < 0.0 && a->us + b->us < 0.0 && a->bytes + b->bytes <= room;
        }
        for (; (pair = msi_next_pair(&all, room, pair, us)) != MSI_NONE; --left) {
            const msi_single *a = &all.singles[pair / PAIRED], *b = &all.singles[pair % PAIRED];
            assert_true(!taken[pair] && a->us + b->us >= us && a->bytes + b->bytes <= room);
            ties += !(a->us + b->us > us);
            us = a->us + b->us;
            taken[pair] = true;
        }
        assert_int_equal(left, 0);
    }
    assert_true(ties > 50);
}

/* A small graph, and the greedy search of its list. */
typedef struct listed {
    meter heap;
    graph g;
    msi_search search;
    msi_greedy greedy;
} listed;

static msi_greedy *list_open(listed *l, census *with, uint64_t seed) {
    const ms_config config = solver_config(&l->heap);
    graph_create(&l->g, seed, 0, &config);
    t_ok(l->g.model, ms_wrap(l->g.model)); // analyses the graph
    census_open(with, l->g.model);
    l->search = census_search(with, 0);
    assert_true(msi_greedy_init(&l->greedy, &l->search));
    msi_decide_base(&l->search, l->greedy.decisions);
    l->greedy.score = msi_search_estimate(&l->search, l->greedy.decisions);
    return &l->greedy;
}

static void list_close(listed *l, census *with) {
    msi_greedy_free(&l->greedy);
    census_free(with, l->g.model);
    ms_destroy(l->g.model);
    assert_true(l->heap.live == 0);
}

/* Each plan of the greedy list of a small graph drops the values of one more layer: a drop that does
   not help is taken back before the next one is tried. */
static void a_plan_of_the_list_is_one_move_further(void **state) {
    (void)state;
    static census with;
    uint32_t plans = 0;
    for (uint64_t seed = 1; seed <= t_sweep(20, 200); ++seed) {
        listed list;
        msi_greedy *w = list_open(&list, &with, seed);
        const msi_tensor *tensors = w->graph->tensors.items;
        for (uint32_t before = 0; msi_next_plan(w); before = w->drops.count) {
            for (uint32_t i = before; i < w->drops.count; ++i) {
                assert_true(tensors[w->drops.items[i]].producer ==
                            tensors[w->drops.items[before]].producer);
            }
            plans += 1;
        }
        list_close(&list, &with);
    }
    assert_true(plans > 50);
}

typedef enum search_kind {
    OF_LIST,
    OF_CHAIN,
    OF_SEGMENTS,
    OF_CHOICES,
    SEARCH_KINDS,
    OF_POINTS // of a chain that is there
} search_kind;

/* What one search alone finds for a budget. False: nothing that fits. */
static bool search_alone(census *with, search_kind kind, uint64_t budget, planned *p) {
    msi_search s = census_search(with, budget);
    s.least_us = with->plain_us;
    if (kind == OF_LIST) {
        msi_greedy w;
        assert_true(msi_greedy_init(&w, &s));
        msi_decide_base(&s, w.decisions);
        w.score = msi_search_estimate(&s, w.decisions);
        if (msi_add_prefix(&w) && msi_fits(&with->scorer, &w.score, budget, 0)) {
            msi_propose(&s, w.decisions, &w.score);
        } else {
            msi_search_greedy(&w, true);
        }
        msi_greedy_free(&w);
    } else if (kind == OF_CHAIN) {
        msi_search_chain(&s);
    } else if (kind == OF_POINTS) {
        with->chain->search = &s;
        with->chain->unfit_count = 0;
        msi_search_points(with->chain);
    } else if (kind == OF_SEGMENTS) {
        msi_search_segments(&s);
    } else {
        msi_search_exhaustive(&s, false);
    }
    assert_false(msi_is_short(&with->scorer));
    p->bytes = s.best_score.bytes;
    p->us = s.best_score.us;
    return s.found && s.fits;
}

/* Returns the number of violations of what each search promises: a larger budget gets no slower
   plan, and a plan that fits a smaller budget as well is the plan for that one, too. */
static uint32_t check_search(census *with, search_kind kind, uint64_t seed, uint64_t plain) {
    enum { BUDGETS = 25 };
    planned last = {plain, 0.0}, now;
    uint32_t wrong = 0;
    uint64_t budget = plain;
    for (int i = 0; i < BUDGETS && search_alone(with, kind, budget, &now); ++i) {
        const bool same = i > 0 && last.bytes <= budget;
        const bool good = now.bytes <= budget && now.bytes <= last.bytes && now.us >= last.us &&
                          (!same || (now.us <= last.us && now.bytes == last.bytes));
        if (!good) {
            print_message(
                "net %llu, search %d, budget %llu: %llu bytes, %.17g us after %llu, %.17g\n",
                (unsigned long long)seed, (int)kind, (unsigned long long)budget,
                (unsigned long long)now.bytes, now.us, (unsigned long long)last.bytes, last.us);
            wrong++;
        }
        last = now;
        budget = i % 3 == 0 ? budget - budget / 50 : now.bytes - 1;
    }
    return wrong;
}

static void each_search_is_monotone(void **state) {
    (void)state;
    static census with;
    const uint64_t first = t_environment("MEMSCALE_TEST_SEED", 1);
    const uint64_t count = t_environment("MEMSCALE_TEST_NETS", t_sweep(4, 500));
    uint32_t wrong = 0;
    for (uint64_t seed = first; seed < first + count; ++seed) {
        meter heap;
        ms_model *m;
        const ms_config config = solver_config(&heap);
        net_for_budgets(seed, &config, &m);
        t_ok(m, ms_wrap(m)); // analyses the graph
        census_open(&with, m);
        with.plain_us = with.plan->plain_step_us;
        const uint64_t plain = with.plan->plain_bytes;
        for (int kind = 0; kind < SEARCH_KINDS; ++kind) {
            wrong += check_search(&with, (search_kind)kind, seed, plain);
        }
        census_free(&with, m);
        ms_destroy(m);
        assert_true(heap.live == 0);
    }
    assert_int_equal(wrong, 0);
}

/* Points whose times are not those that the search of chains expects, and so are in no order. */
static void points_out_of_order_are_passed_over(void **state) {
    (void)state;
    static census with;
    uint32_t wrong = 0;
    for (uint64_t seed = 1; seed <= t_sweep(4, 40); ++seed) {
        meter heap;
        ms_model *m;
        t_rng rng = t_seed(seed);
        const ms_config config = solver_config(&heap);
        chain stages = make_chain(CHAIN_UNIFORM, 12, seed);
        assert_int_equal(ms_create(&config, &m), MS_RESULT_OK);
        chain_register(m, &stages, false);
        t_ok(m, ms_wrap(m)); // analyses the graph
        census_open(&with, m);
        with.plain_us = 0.0;
        msi_search of_chain = census_search(&with, 0);
        with.chain = fill_chain(&with, &of_chain);
        for (uint32_t i = 0; i < m->graph.layers.count; ++i) {
            m->graph.layers.items[i].time[MSI_FORMAT_F32].forward_us *= 3.0 * t_unit(&rng);
            m->graph.layers.items[i].time[MSI_FORMAT_F32].recompute_us *= 3.0 * t_unit(&rng);
        }
        wrong += check_search(&with, OF_POINTS, seed, with.plan->plain_bytes);
        msi_chain_free(with.chain);
        census_free(&with, m);
        ms_destroy(m);
        chain_free(&stages);
        assert_true(heap.live == 0);
    }
    assert_int_equal(wrong, 0);
}

/* Goes through the whole list, and lays out its last plan. */
static void list_all(msi_greedy *w) {
    (void)msi_add_prefix(w);
    while (msi_next_plan(w)) {
        (void)msi_add_prefix(w);
    }
    msi_return_to(w, &w->prefixes.items[w->prefixes.count - 1], 0);
}

/* Of plans of one size the first, which is the fastest; and none that is larger than what is found. */
static void check_smallest(msi_greedy *w) {
    uint32_t first = 0;
    uint64_t least = UINT64_MAX;
    for (uint32_t k = 0; k < w->prefixes.count; ++k) {
        if (w->prefixes.items[k].counts) {
            msi_return_to(w, &w->prefixes.items[k], 0);
            first = w->score.bytes < least ? k : first;
            least = w->score.bytes < least ? w->score.bytes : least;
        }
    }
    for (int found = 0; found < 3; ++found) { // nothing; what is as large; what is smaller
        w->search->found = found > 0;
        w->search->best_score.bytes = found == 1 ? least : least - 1;
        assert_true(msi_take_smallest(w) == (found < 2));
        assert_true(found == 2 || (w->score.bytes == least &&
                                   w->drops.count == w->prefixes.items[first].drop_count));
    }
    w->search->found = false;
}

/* Some of the drops of the last plan may be enough, but none of these plans is smaller than it.
   Returns whether one was found. */
static bool check_trim(msi_greedy *w) {
    const msi_prefix *before = &w->prefixes.items[0], *end = before + w->prefixes.count - 1;
    msi_search *s = w->search;
    msi_return_to(w, end, 0);
    msi_score last = w->score;
    s->budget = UINT64_MAX;
    msi_trim_last(w, before, &last);
    const bool found = s->found;
    assert_true(!found || (s->best_score.bytes >= last.bytes &&
                           s->best_score.us >= before->score.us && s->best_score.us < last.us));
    msi_set_drops(w, end->drop_count);
    last.bytes = UINT64_MAX; // larger than any
    s->found = false;
    msi_trim_last(w, before, &last);
    assert_false(s->found);
    return found;
}

static void the_list_ends_with_what_is_smallest(void **state) {
    (void)state;
    static census with;
    uint32_t trimmed = 0;
    for (uint64_t seed = 1; seed <= t_sweep(10, 100); ++seed) {
        listed list;
        msi_greedy *w = list_open(&list, &with, seed);
        list_all(w);
        check_smallest(w);
        trimmed += check_trim(w);
        list_close(&list, &with);
    }
    assert_true(trimmed > 0);
}

/* Choices of a plan that updates params inside backward are of such plans, too. */
static void choices_keep_early_updates(void **state) {
    (void)state;
    static census with;
    meter heap;
    graph g;
    const ms_config config = solver_config(&heap);
    graph_create(&g, 1, 0, &config);
    t_ok(g.model, ms_wrap(g.model)); // analyses the graph
    census_open(&with, g.model);
    for (int early = 0; early < 2; ++early) {
        uint32_t updates = 0;
        msi_search s = census_search(&with, UINT64_MAX);
        s.how.early = early == 1;
        msi_search_exhaustive(&s, false);
        assert_true(s.found && s.best_how.early == s.how.early);
        for (uint32_t t = 0; t < g.model->graph.tensors.count; ++t) {
            updates += s.best[t].update_after != MSI_NONE;
        }
        assert_int_equal(updates, early);
    }
    census_free(&with, g.model);
    ms_destroy(g.model);
    assert_true(heap.live == 0);
}

// ------------------------------------------------------------------------------------------------
// what each search keeps to, and the estimates it relies on

/* A graph with params on a device with a link, for which nothing has been searched yet. */
typedef struct moving {
    meter heap;
    graph g;
    msi_search search;
} moving;

static void moving_open(moving *of, census *c, uint64_t seed, uint32_t micro_count) {
    ms_config config = solver_config(&of->heap);
    t_rng rng = t_seed(seed + 77);
    const ms_hardware device = linked_device(&rng);
    config.offloading = MS_SWITCH_ON;
    config.max_host_bytes = (uint64_t)1 << 40;
    config.accumulation_steps = micro_count;
    memset(&of->g, 0, sizeof of->g);
    of->g.has_params = true;
    graph_fill(&of->g, seed, 0, &config);
    ms_set_hardware(of->g.model, &device);
    t_ok(of->g.model, ms_wrap(of->g.model)); // analyses the graph
    census_open(c, of->g.model);
    of->search = census_search(c, 0);
    of->search.may_move = true;
}

static void moving_close(moving *of, census *c) {
    census_free(c, of->g.model);
    ms_destroy(of->g.model);
    assert_true(of->heap.live == 0);
}

/* Forces some of the techniques of some tensors, and forbids others. */
static void set_techniques(ms_model *m, t_rng *rng) {
    for (uint32_t t = 0; t < m->graph.tensors.count; ++t) {
        msi_tensor *tensor = &m->graph.tensors.items[t];
        const uint32_t moves = t_below(rng, MSI_MOVES_ALL + 1);
        tensor->forced_moves = (uint8_t)(t_chance(rng, 0.2) ? moves : 0);
        tensor->forbidden_moves =
            (uint8_t)(t_chance(rng, 0.3) ? MSI_MOVES_ALL & ~tensor->forced_moves : 0);
        if (t_chance(rng, 0.3) && msi_is_choice(&m->graph, t)) {
            const ms_switch force = t_chance(rng, 0.7) ? MS_SWITCH_OFF : MS_SWITCH_ON;
            tensor->technique[MS_TECHNIQUE_CHECKPOINTING] = (uint8_t)force;
        }
    }
}

typedef void search_function(msi_search *s);

static void search_list(msi_search *s) {
    msi_greedy w;
    assert_true(msi_greedy_init(&w, s));
    msi_decide_base(s, w.decisions);
    w.score = msi_search_estimate(s, w.decisions);
    msi_search_greedy(&w, true);
    msi_greedy_free(&w);
}

static void search_chain(msi_search *s) {
    (void)msi_search_chain(s);
}

static void search_choices(msi_search *s) {
    msi_search_exhaustive(s, false);
}

typedef struct search_case {
    search_function *search;
    bool drops, moves;      // may do so
    msi_finder found_by[2]; // what it may say that found its plans
} search_case;

static const search_case searches[] = {
    {search_list, true, false, {MSI_FINDER_GREEDY}},
    {search_chain, true, false, {MSI_FINDER_CHAIN}},
    {msi_search_segments, true, false, {MSI_FINDER_SEGMENTS}},
    {search_choices, true, true, {MSI_FINDER_EXHAUSTIVE, MSI_FINDER_LOCAL}},
    {msi_search_offloading, true, true, {MSI_FINDER_LISTS, MSI_FINDER_GIVEN_BACK}},
    {search_choices, false, true, {MSI_FINDER_EXHAUSTIVE, MSI_FINDER_LOCAL}},
    {msi_search_offloading, false, true, {MSI_FINDER_LISTS, MSI_FINDER_GIVEN_BACK}}};

enum { SEARCHES = sizeof searches / sizeof searches[0] };

/* What a search has found does all that is forced, and nothing else that may not be done. Returns
   how many tensors it drops or moves by choice. */
static uint32_t check_allowed(const msi_search *s, const msi_tensor_decision *base) {
    const msi_graph *g = s->scorer->graph;
    uint32_t chosen = 0;
    assert_true(s->best_score.host_bytes <= s->host_budget);
    for (uint32_t t = 0; t < g->tensors.count; ++t) {
        const msi_tensor_decision *d = &s->best[t];
        const uint32_t more = d->moves & MSI_MOVES_ALL & ~base[t].moves;
        const bool may_drop = (s->techniques & MSI_CHECKPOINTING) && msi_is_droppable(g, t);
        assert_true(d->pass == 0 || base[t].pass > 0 || may_drop);
        assert_true(d->pass > 0 || base[t].pass == 0);
        assert_true((more & ~(s->may_move ? msi_may_choose(g, t) : 0u)) == 0);
        assert_true((base[t].moves & ~d->moves) == 0);
        assert_true(!(d->moves & MSI_IN_PLACE) ||
                    (s->scorer->costs->maps_host && (d->moves & MSI_MOVES_STATE)));
        chosen += more != 0 || (d->pass > 0 && base[t].pass == 0);
    }
    return chosen;
}

/* Each value that may be dropped is in a group of its own, or in that of its layer; each move that
   may be chosen is one too. What is forced is in none. */
static void a_small_graph_has_groups_for_all_that_may_be_chosen(void **state) {
    (void)state;
    static census c;
    uint32_t drops = 0, joined = 0, moved[MSI_MOVES_ALL + 1] = {0};
    for (uint64_t seed = 1; seed <= 20; ++seed) {
        for (int by_layer = 0; by_layer < 2; ++by_layer) {
            moving of;
            t_rng rng = t_seed(seed);
            moving_open(&of, &c, seed, 1);
            set_techniques(of.g.model, &rng);
            const msi_graph *g = &of.g.model->graph;
            msi_exhaustive all = MSI_ZERO_INIT;
            of.search.techniques = MSI_CHECKPOINTING;
            assert_true(msi_exhaustive_init(&all, &of.search));
            msi_list_groups(&all, by_layer == 1, 0, MSI_NONE);
            if (all.wanted <= MSI_MOST_GROUPS) {
                uint32_t seen[GRAPH_TENSORS * 3][2 * MSI_IN_PLACE] = {{0}};
                assert_true(g->tensors.count < GRAPH_TENSORS * 3);
                for (uint32_t k = 0; k < all.group_count && k < all.room_group; ++k) {
                    const uint32_t first = all.first[k], end = all.first[k + 1];
                    const msi_tensor *of_first =
                        &g->tensors.items[all.members[first] & ((1u << MSI_ACTION_SHIFT) - 1)];
                    assert_true(end == first + 1 || (by_layer && k < all.drop_count));
                    joined += end > first + 1;
                    for (uint32_t i = first; i < end; ++i) {
                        const uint32_t t = msi_action_tensor(all.members[i]);
                        const uint32_t move = all.members[i] >> MSI_ACTION_SHIFT;
                        assert_int_equal(move != 0, k >= all.drop_count);
                        assert_true(move || g->tensors.items[t].producer == of_first->producer);
                        seen[t][move] += 1;
                    }
                }
                for (uint32_t t = 0; t < g->tensors.count; ++t) {
                    const msi_tensor_decision *d = &all.base[t];
                    const bool drops_it =
                        d->pass == 0 && !(d->moves & MSI_MOVES_VALUE) && msi_is_choice(g, t);
                    assert_int_equal(seen[t][0], drops_it);
                    drops += drops_it;
                    for (uint32_t move = 1; move < MSI_MOVES_ALL; move *= 2) {
                        const bool may =
                            d->pass == 0 && (msi_may_choose(g, t) & ~(uint32_t)d->moves & move);
                        assert_int_equal(seen[t][move], may);
                        moved[move] += may;
                    }
                    assert_int_equal(seen[t][MSI_MOVES_STATE | MSI_IN_PLACE],
                                     seen[t][MSI_MOVES_STATE] && c.scorer.costs->maps_host);
                }
            }
            msi_release(c.scorer.allocator, all.tried, msi_exhaustive_bytes(&all));
            moving_close(&of, &c);
        }
    }
    assert_true(drops > 0 && joined > 0 && moved[MSI_MOVES_VALUE] > 0);
}

/* Of a graph with too many groups those with the most bytes are chosen, and as many as there is room for. */
static void a_large_graph_has_groups_for_the_most_bytes(void **state) {
    (void)state;
    static census c;
    static const net_kind kinds[] = {NET_RANDOM, NET_UNET, NET_EQUAL};
    uint32_t left_out = 0;
    for (size_t kind = 0; kind < sizeof kinds / sizeof kinds[0]; ++kind) {
        meter heap;
        msi_exhaustive all = MSI_ZERO_INIT;
        ms_model *m = net_open(&c, &heap, kinds[kind], 400, 0.1);
        msi_search s = census_search(&c, 1);
        s.may_move = true;
        assert_true(msi_exhaustive_init(&all, &s));
        msi_choose_groups(&all);
        const msi_graph *g = &m->graph;
        bool(*seen)[MSI_MOVES_ALL] = (bool(*)[MSI_MOVES_ALL])calloc(g->tensors.count, sizeof *seen);
        uint64_t least = UINT64_MAX, of_layer[512] = {0};
        assert_true(seen != NULL && g->layers.count <= 512 && all.wanted == MSI_MOST_GROUPS);
        for (uint32_t k = 0; k < MSI_MOST_GROUPS; ++k) {
            uint64_t bytes = 0;
            for (uint32_t i = all.first[k]; i < all.first[k + 1]; ++i) {
                bytes += msi_member_bytes(&all, all.members[i]);
                seen[msi_action_tensor(all.members[i])][all.members[i] >> MSI_ACTION_SHIFT] = true;
            }
            least = bytes < least ? bytes : least;
        }
        for (uint32_t t = 0; t < g->tensors.count; ++t) {
            const uint32_t layer = g->tensors.items[t].producer;
            of_layer[layer == MSI_NONE ? 511 : layer] +=
                msi_joins_group(&all, t) ? msi_member_bytes(&all, t) : 0;
        }
        for (uint32_t t = 0; t < g->tensors.count; ++t) {
            for (uint32_t move = 1; move < MSI_MOVES_ALL; move *= 2) {
                if ((msi_may_choose(g, t) & move) && !seen[t][move]) {
                    assert_true(msi_member_bytes(&all, t | move << MSI_ACTION_SHIFT) <= least);
                    left_out += 1;
                }
            }
            if (msi_joins_group(&all, t) && !seen[t][0]) {
                assert_true(of_layer[g->tensors.items[t].producer] <= least);
                left_out += 1;
            }
        }
        free(seen);
        msi_release(c.scorer.allocator, all.tried, msi_exhaustive_bytes(&all));
        census_free(&c, m);
        ms_destroy(m);
        assert_true(heap.live == 0);
    }
    assert_true(left_out > 100);
}

/* Plans of a list that splits: no value is both dropped and moved, each plan comes back as it was, and
   what is recomputed together shrinks below what drops and moves alone reach. */
static void splits_are_made_and_taken_back(void **state) {
    (void)state;
    static census c;
    enum { PLANS = 400 };
    static const net_kind kinds[] = {NET_RESNET, NET_UNET};
    for (size_t kind = 0; kind < sizeof kinds / sizeof kinds[0]; ++kind) {
        meter heap;
        msi_greedy w;
        ms_model *m = net_open(&c, &heap, kinds[kind], 60, 0.1);
        msi_search s = census_search(&c, 1);
        uint32_t list = 0, splits = 0, count = 0;
        uint64_t begun = 0, before = UINT64_MAX;
        msi_score scores[PLANS];
        uint32_t drops[PLANS];
        s.may_move = true;
        while (!(msi_move_lists[list].needs & MSI_NEEDS_SPLITS)) {
            list++;
        }
        s.techniques |= MSI_OFFLOADING;
        s.moves = msi_move_lists[list].moves;
        assert_true(msi_greedy_init(&w, &s));
        msi_begin_moves(&w, &msi_move_lists[list]);
        msi_move_begun(&w, &msi_move_lists[list]);
        begun = w.score.live_bytes;
        do {
            assert_true(count < PLANS);
            scores[count] = w.score;
            drops[count++] = w.drops.count;
            for (uint32_t t = 0; t < m->graph.tensors.count; ++t) {
                assert_false(w.decisions[t].pass > 0 && (w.decisions[t].moves & MSI_MOVES_VALUE));
            }
        } while (msi_next_plan(&w));
        for (uint32_t i = 0; i < w.drops.count; ++i) {
            const bool is_split = w.drops.items[i] >> MSI_ACTION_SHIFT == MSI_SPLIT;
            assert_true(msi_is_done(w.decisions, w.drops.items[i]) || !is_split);
            splits += is_split;
        }
        assert_true(splits > 1 && (w.met & MSI_NEEDS_SPLITS));
        for (uint32_t k = count; k-- > 0;) {
            msi_set_drops(&w, drops[k]);
            const msi_score score = msi_search_estimate(&s, w.decisions);
            assert_true(score.live_bytes == scores[k].live_bytes && !(score.us < scores[k].us) &&
                        !(score.us > scores[k].us));
            before = drops[k] > 0 && w.drops.items[drops[k] - 1] >> MSI_ACTION_SHIFT == MSI_SPLIT
                         ? scores[k].live_bytes
                         : before;
        }
        assert_true(3 * scores[count - 1].live_bytes < begun &&
                    scores[count - 1].live_bytes < before);
        msi_greedy_free(&w);
        census_free(&c, m);
        ms_destroy(m);
        assert_true(heap.live == 0);
    }
}

/* Whatever is forced or forbidden, with accumulation or not, and whatever the host has room for. */
static void searches_do_what_is_allowed(void **state) {
    (void)state;
    enum { FEW_TENSORS = 13 };
    static census c;
    uint32_t chosen[SEARCHES] = {0}, in_place = 0, found_by[MSI_FINDER_COUNT] = {0};
    for (uint64_t seed = 1; seed <= t_sweep(16, 400); ++seed) {
        moving of;
        t_rng rng = t_seed(seed);
        moving_open(&of, &c, seed, seed % 3 == 0 ? 4 : 1);
        const uint32_t tensors = of.g.model->graph.tensors.count;
        msi_tensor_decision base[GRAPH_TENSORS * 3];
        assert_true(tensors < sizeof base / sizeof base[0]);
        set_techniques(of.g.model, &rng);
        of.g.model->costs.maps_host = seed % 2 == 0;
        msi_decide_base(&of.search, base);
        const uint64_t forced = msi_score_of(&c.scorer, base).host_bytes;
        const uint64_t plain = c.plan->plain_bytes;
        for (uint32_t k = 0; k < SEARCHES; ++k) {
            msi_search s = of.search;
            if (searches[k].search == search_choices && tensors > FEW_TENSORS) {
                continue; // takes longer than all others
            }
            s.budget = plain * t_below(&rng, 120) / 100;
            s.techniques = searches[k].drops ? MSI_CHECKPOINTING : 0;
            s.may_move = searches[k].moves;
            s.host_budget = t_chance(&rng, 0.5) ? UINT64_MAX : plain * t_below(&rng, 60) / 100;
            s.host_budget = most(s.host_budget, forced);
            searches[k].search(&s);
            assert_false(msi_is_short(&c.scorer));
            chosen[k] += s.found ? check_allowed(&s, base) : 0;
            assert_true(!s.found || s.best_how.by == searches[k].found_by[0] ||
                        s.best_how.by == searches[k].found_by[1]);
            found_by[s.best_how.by] += s.found;
            for (uint32_t t = 0; s.found && t < tensors; ++t) {
                in_place += (s.best[t].moves & MSI_IN_PLACE) != 0;
            }
        }
        moving_close(&of, &c);
    }
    for (uint32_t k = 0; k < SEARCHES; ++k) {
        assert_true(chosen[k] > 0 && found_by[searches[k].found_by[0]] > 0);
    }
    assert_true(in_place > 0 && found_by[MSI_FINDER_LOCAL] > 0);
}

/* Plans say which search found them: one that drops nothing by choice is the first of its list. */
static void plans_say_what_found_them(void **state) {
    (void)state;
    uint32_t found_by[MSI_FINDER_COUNT] = {0};
    for (uint64_t seed = 1; seed <= t_sweep(6, 60); ++seed) {
        meter heap;
        ms_model *m;
        ms_memory_report report;
        const ms_config config = solver_config(&heap);
        net_for_budgets(seed, &config, &m);
        t_ok(m, ms_wrap(m));
        t_report(m, &report);
        const uint64_t plain = report.plain_bytes;
        uint64_t least;
        t_ok(m, ms_smallest_budget(m, &least));
        for (uint64_t i = 0; i <= 8; ++i) {
            ms_set_budget(m, least + (plain - least) * i / 8);
            t_ok(m, ms_wrap(m));
            t_report(m, &report);
            const msi_finder finder = m->run.plan->found.by;
            assert_string_equal(report.found_by, msi_finder_names[finder]);
            uint32_t dropped = 0;
            for (uint32_t t = 0; t < m->graph.tensors.count; ++t) {
                dropped += msi_is_choice(&m->graph, t) && m->run.plan->decisions[t].pass > 0;
            }
            assert_true(finder != MSI_FINDER_BASE || dropped == 0);
            assert_true(finder == MSI_FINDER_BASE || finder == MSI_FINDER_SQUEEZED || dropped > 0);
            found_by[finder] += 1;
        }
        ms_destroy(m);
        assert_true(heap.live == 0);
    }
    assert_true(found_by[MSI_FINDER_BASE] > 0 && found_by[MSI_FINDER_CHAIN] > 0 &&
                found_by[MSI_FINDER_GREEDY] > 0);
}

/* Whatever a plan for other sizes rounds by itself, the homes of params are those of the plan whose
   store it uses. */
static void homes_are_taken_as_they_are(void **state) {
    (void)state;
    static census c;
    for (uint64_t seed = 1; seed <= 10; ++seed) {
        moving of;
        t_rng rng = t_seed(seed);
        msi_tensor_decision homes[GRAPH_TENSORS * 3], now[GRAPH_TENSORS * 3];
        moving_open(&of, &c, seed, 1);
        const msi_graph *g = &of.g.model->graph;
        set_techniques(of.g.model, &rng);
        msi_decide_base(&of.search, homes);
        for (uint32_t t = 0; t < g->tensors.count; ++t) {
            if (g->tensors.items[t].kind == MSI_KIND_PARAM) {
                homes[t].moves = (uint8_t)t_below(&rng, MSI_MOVES_ALL + 1);
                homes[t].state_8bit = t_chance(&rng, 0.5);
                homes[t].format = t_chance(&rng, 0.5) ? MSI_FORMAT_BF16 : MSI_FORMAT_F32;
            }
        }
        c.scorer.homes = homes;
        c.scorer.has_state_formats = true;
        for (uint32_t rounding = 0; rounding < MSI_ROUNDINGS; ++rounding) {
            of.search.how.rounding = rounding;
            msi_decide_base(&of.search, now);
            for (uint32_t t = 0; t < g->tensors.count; ++t) {
                assert_true(now[t].format == homes[t].format);
                assert_true(
                    g->tensors.items[t].kind != MSI_KIND_PARAM ||
                    (now[t].moves == homes[t].moves && now[t].state_8bit == homes[t].state_8bit));
            }
        }
        moving_close(&of, &c);
    }
}

/* A list ends where recomputation or the copies of one direction, which overlap with those of the
   other, take longer than the fastest plan that fits. */
static void a_list_ends_where_it_cannot_win(void **state) {
    (void)state;
    static const struct {
        double to_device_us, to_host_us, recompute_us;
        double best_us, fastest_us; // of other lists, 0: none, and of this one
        bool ends;
    } cases[] = {{90.0, 90.0, 0.0, 100.0, 1e300, false}, {90.0, 90.0, 0.0, 0.0, 91.0, false},
                 {101.0, 0.0, 0.0, 100.0, 1e300, true},  {0.0, 101.0, 0.0, 100.0, 1e300, true},
                 {0.0, 0.0, 45.0, 100.0, 1e300, false},  {0.0, 0.0, 55.0, 100.0, 1e300, true},
                 {80.0, 80.0, 45.0, 100.0, 95.0, false}, {99.0, 0.0, 0.0, 0.0, 91.0, false},
                 {0.0, 99.0, 0.0, 0.0, 89.0, true},      {1e9, 1e9, 1e9, 0.0, 1e300, false}};
    msi_program program = MSI_ZERO_INIT;
    msi_scorer scorer = MSI_ZERO_INIT;
    msi_search of = MSI_ZERO_INIT;
    msi_greedy w = MSI_ZERO_INIT;
    scorer.program = &program;
    of.scorer = w.scorer = &scorer;
    of.least_us = 50.0;
    w.search = &of;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; ++i) {
        program.predicted.step.link_us[MS_STREAM_TO_DEVICE] = cases[i].to_device_us;
        program.predicted.step.link_us[MS_STREAM_TO_HOST] = cases[i].to_host_us;
        program.predicted.step.recompute_us = cases[i].recompute_us;
        of.fits = cases[i].best_us > 0.0;
        of.best_score.us = cases[i].best_us;
        assert_true(msi_cannot_win(&w, cases[i].fastest_us) == cases[i].ends);
    }
}

/* The smallest plan is searched in the lists that begin with all moved, from the last one on, and in the
   others only where these have not found it; and what does not fit a budget is not laid out for that. */
static void the_smallest_is_searched_from_the_other_end(void **state) {
    (void)state;
    static census c;
    uint32_t moot = 0, others = 0;
    for (uint64_t seed = 1; seed <= t_sweep(40, 400); ++seed) {
        moving of;
        moving_open(&of, &c, seed, 1);
        const uint64_t *lowered = &c.scorer.lowering->lowered;
        msi_search s = of.search, few = of.search;
        uint32_t met = 0;
        s.techniques = few.techniques = MSI_CHECKPOINTING;
        const uint64_t before = *lowered;
        msi_search_offloading(&s);
        const uint64_t middle = *lowered;
        for (int k = MSI_MOVE_LISTS - 1; k >= MSI_FIRST_BEGUN; --k) {
            met = msi_is_list_of_use(&few, k, met) ? msi_search_list_of_moves(&few, k) : met;
        }
        const bool has =
            few.found && few.best_how.by == MSI_FINDER_LISTS && !msi_is_small(&of.g.model->graph);
        assert_true(has ? middle - before == *lowered - middle
                        : middle - before > *lowered - middle);
        assert_true(s.best_score.bytes <= few.best_score.bytes || !few.found);
        moot += has;
        others += !has;
        few = of.search;
        few.budget = 1;
        msi_search_offloading(&few);
        assert_false(few.found);
        moving_close(&of, &c);
    }
    print_message("%u without the others, %u with them\n", (unsigned)moot, (unsigned)others);
    assert_true(moot > 0 && others > 0);
}

/* A plan for other sizes fits if neither the device nor the host has too little memory. */
static void a_plan_has_room_on_both_sides(void **state) {
    (void)state;
    msi_request request = MSI_ZERO_INIT;
    msi_solver s = MSI_ZERO_INIT;
    s.request = &request;
    request.room = request.host_room = 100;
    for (uint64_t bytes = 99; bytes <= 101; ++bytes) {
        for (uint64_t host_bytes = 99; host_bytes <= 101; ++host_bytes) {
            s.score.bytes = bytes;
            s.score.host_bytes = host_bytes;
            assert_true(msi_has_room(&s) == (bytes <= 100 && host_bytes <= 100));
        }
    }
}

/* Lists of moves that found plans of the same score are named once to what a fold guides, each other
   search for itself, the best first. What the local search finds is found again by greedy. */
static void a_guide_names_equal_lists_once(void **state) {
    (void)state;
    static const struct {
        msi_finder by;
        int list;
        uint32_t rounding;
        double us;
        uint32_t at, count; // where it is ranked then, of how many
    } found[] = {{MSI_FINDER_LISTS, 1, 0, 4.0, 0, 1},  {MSI_FINDER_LISTS, 2, 0, 4.0, 1, 1},
                 {MSI_FINDER_GREEDY, 0, 0, 4.0, 1, 2}, {MSI_FINDER_LISTS, 4, 0, 3.0, 0, 3},
                 {MSI_FINDER_LISTS, 5, 0, 3.0, 3, 3},  {MSI_FINDER_LISTS, 4, 1, 3.0, 1, 3},
                 {MSI_FINDER_LOCAL, 7, 0, 2.0, 0, 3}};
    msi_search s = MSI_ZERO_INIT;
    s.budget = 100;
    for (size_t i = 0; i < sizeof found / sizeof found[0]; ++i) {
        msi_score score = {100, 100, found[i].us, 0, 0.0};
        uint32_t at = 0;
        s.how.by = found[i].by;
        s.how.list = found[i].list;
        s.how.rounding = found[i].rounding;
        msi_rank(&s, &score);
        const msi_found by = msi_search_of(s.how);
        while (at < s.rank_count && !msi_is_same_search(&s.ranks[at], &by, true)) {
            ++at;
        }
        assert_int_equal(s.rank_count, found[i].count);
        assert_int_equal(at, found[i].at);
    }
}

/* Updates inside backward are not delayed where the plan would have more on the host. */
static void delayed_updates_need_no_more_of_the_host(void **state) {
    (void)state;
    static census with;
    uint32_t delayed = 0;
    for (uint64_t seed = 1; seed <= 40; ++seed) {
        moving of;
        moving_open(&of, &with, seed, 1);
        msi_request request = MSI_ZERO_INIT;
        msi_solver s = MSI_ZERO_INIT;
        const ms_model *m = of.g.model;
        msi_tensor_decision *d = with.plan->decisions, *before;
        const size_t bytes = (size_t)msi_decisions_bytes(&m->graph);
        msi_decide_plain(&m->graph, d);
        for (uint32_t t = 0; t < m->graph.tensors.count; ++t) {
            const bool value = m->graph.tensors.items[t].kind != MSI_KIND_PARAM;
            d[t].moves = (uint8_t)(value ? msi_may_choose(&m->graph, t) & MSI_MOVES_VALUE : 0);
        }
        msi_place_updates(&m->graph, d, true, false, 0);
        before = (msi_tensor_decision *)malloc(bytes);
        assert_non_null(before);
        memcpy(before, d, bytes);
        s.scorer = &with.scorer;
        s.plan = with.plan;
        s.request = &request;
        request.budget = UINT64_MAX;
        for (int room = 1; room >= 0; --room) { // for all that it has there, or for one byte less
            memcpy(d, before, bytes);
            s.score = msi_score_of(s.scorer, d);
            const uint64_t arena_bytes = s.score.bytes, host_bytes = s.score.host_bytes;
            s.score.host_bytes -= !room;
            msi_relax_updates(&s);
            const bool same = memcmp(d, before, bytes) == 0;
            assert_true(s.score.bytes == arena_bytes && s.score.host_bytes <= host_bytes);
            assert_true(room || same || s.score.host_bytes < host_bytes);
            delayed += room && !same;
        }
        free(before);
        moving_close(&of, &with);
    }
    assert_true(delayed > 5);
}

/* What a list is skipped for: no plan of it has fewer bytes resident, and where all that it may move
   is moved, there are no more; and a plan with so little resident copies as long as is said. */
static void bounds_of_lists_hold(void **state) {
    (void)state;
    static census c;
    const int lists = sizeof msi_move_lists / sizeof msi_move_lists[0];
    for (uint64_t seed = 1; seed <= t_sweep(10, 100); ++seed) {
        moving of;
        const uint32_t micro_count = seed % 2 ? 1 : 3;
        moving_open(&of, &c, seed, micro_count);
        for (int k = 0; k < lists; ++k) {
            msi_greedy w;
            of.search.moves = msi_move_lists[k].moves;
            assert_true(msi_greedy_init(&w, &of.search));
            msi_decide_base(&of.search, w.decisions);
            w.score = msi_search_estimate(&of.search, w.decisions);
            const uint64_t plain = c.plan->train.layout.resident_bytes;
            const uint64_t least = msi_least_resident_bytes(&w);
            msi_find_host_left(&w);
            msi_move_params(&w, of.search.moves & MSI_MOVES_ALL, 0);
            w.score = msi_search_estimate(&of.search, w.decisions);
            const uint64_t resident = c.plan->train.layout.resident_bytes;
            assert_true(least <= resident && (resident < plain) == (of.search.moves != 0));
            assert_true(least == resident || micro_count == 1); // without sums of gradients
            of.search.budget = resident;
            msi_decide_base(&of.search, w.decisions);
            (void)msi_search_estimate(&of.search, w.decisions);
            const double us =
                (double)(plain - resident) / (1e3 * c.scorer.costs->hardware.to_device_gb_per_s);
            assert_true(fabs(msi_bound_us(&of.search, 0.0) - us) <= 1e-9 * us);
            assert_true(msi_bound_us(&of.search, 1e9) >= 1e9);
            msi_greedy_free(&w);
        }
        moving_close(&of, &c);
    }
}

/* A layer of four inputs, some of which are dropped: to recompute it costs those of them, too, that
   its recompute callback reads, or all without one. Those that come back anyway cost nothing. */
static void a_drop_costs_what_its_recomputation_reads(void **state) {
    (void)state;
    enum { INPUTS = 4, SUBSETS = 1 << INPUTS };
    static census c;
    for (uint32_t reads = 0; reads <= SUBSETS; ++reads) { // the last: no callback
        meter heap;
        ms_model *m;
        msi_pricing pricing;
        ms_layer_desc d;
        ms_tensor in[INPUTS], value = {0};
        const ms_config config = solver_config(&heap);
        const ms_shape shape = ms_shape1(64);
        assert_int_equal(ms_create(&config, &m), MS_RESULT_OK);
        const ms_tensor x = ms_input(m, "x", MS_DTYPE_F32, shape);
        for (uint32_t k = 0; k < INPUTS + 2u; ++k) { // then that of their values, and the loss
            const ms_layer_time time = {1.0, 1.0, (double)(1u << k)};
            memset(&d, 0, sizeof d);
            d.forward = d.backward = t_nothing;
            d.in[0] = k > INPUTS ? value : x;
            d.param[0] = ms_param(m, "w", MS_DTYPE_F32, shape);
            d.out[0] = ms_activation(m, "value", MS_DTYPE_F32, shape);
            if (k == INPUTS) {
                memcpy(d.in, in, sizeof in);
                d.recompute = reads < SUBSETS ? t_nothing : NULL;
                d.recompute_reads.in = reads % SUBSETS;
                d.recompute_reads.nothing = reads == 0;
                value = d.out[0];
            } else if (k < INPUTS) {
                in[k] = d.out[0];
            }
            ms_set_layer_time(m, ms_register_layer(m, &d), &time);
        }
        ms_set_loss(m, d.out[0]);
        t_ok(m, ms_wrap(m)); // analyses the graph
        census_open(&c, m);
        assert_true(msi_pricing_init(&pricing, &c.scorer));
        for (uint32_t choice = 0; choice < SUBSETS * SUBSETS; ++choice) {
            const uint32_t dropped = choice % SUBSETS, again = choice / SUBSETS;
            const uint32_t paid = dropped & (reads < SUBSETS ? reads : SUBSETS - 1u) & ~again;
            memset(pricing.recomputed, 0, m->graph.layers.count);
            for (uint32_t t = 0; t < m->graph.tensors.count; ++t) {
                const uint32_t layer = m->graph.tensors.items[t].producer;
                if (layer < INPUTS) {
                    c.plan->decisions[t].pass = dropped >> layer & 1;
                    pricing.recomputed[layer] = again >> layer & 1;
                }
            }
            const double us =
                msi_price_us(&pricing, c.plan->decisions, msi_index(&m->graph, value));
            assert_true(fabs(us - (double)(SUBSETS + paid)) < 1e-9);
        }
        msi_pricing_free(&pricing);
        census_free(&c, m);
        ms_destroy(m);
        assert_true(heap.live == 0);
    }
}

/* A chain of layers whose activations have random sizes. */
static void long_chain(const ms_config *config, uint32_t layers, ms_model **m) {
    t_rng rng = t_seed(7);
    assert_int_equal(ms_create(config, m), MS_RESULT_OK);
    ms_tensor x = ms_input(*m, "x", MS_DTYPE_F32, ms_shape1(4096));
    for (uint32_t i = 0; i < layers; ++i) {
        ms_layer_desc d;
        memset(&d, 0, sizeof d);
        d.name = "layer";
        d.in[0] = x;
        d.param[0] = ms_param(*m, "w", MS_DTYPE_F32, ms_shape1(64));
        d.out[0] = x =
            ms_activation(*m, "a", MS_DTYPE_F32, ms_shape1(64 + 64 * t_below(&rng, 256)));
        d.backward_reads.in = d.backward_reads.param = 1;
        ms_register_layer(*m, &d);
    }
    ms_set_loss(*m, x);
}

/* Layouts are most of the work of planning a large graph. What cannot win is not laid out, and what
   is refused is not laid out again. */
static void few_plans_of_large_graphs_are_laid_out(void **state) {
    (void)state;
    meter heap;
    ms_model *m;
    planned plain, half;
    ms_config config = solver_config(&heap);
    config.early_update = MS_SWITCH_DEFAULT;
    const uint32_t layers = 3000;
    long_chain(&config, layers, &m);
    assert_true(take_plan(m, UINT64_MAX, &plain));
    heap.large_bytes = 500 * (uint64_t)layers; // the working memory of a layout, and of the search
    heap.large_count = 0;
    assert_true(take_plan(m, plain.bytes / 2, &half));
    const uint32_t planned_count = heap.large_count;
    heap.large_count = 0;
    assert_false(take_plan(m, plain.bytes / 1000, &half));
    print_message("large allocations: %u for a plan, %u for a refusal\n", planned_count,
                  heap.large_count);
    assert_true(planned_count <= 16 && heap.large_count <= 48); // the error names what modes need
    ms_destroy(m);
    assert_true(heap.live == 0);
}

// ------------------------------------------------------------------------------------------------
// published models

static bench_model workload_create(int number, const ms_config *config) {
    const bench_workload *w = &bench_workloads[number];
    nn_transformer_config shape;
    assert_true(bench_shape(w->preset, &shape));
    shape.batch = w->batch;
    shape.sequence = w->sequence;
    return bench_model_create(config, nn_cpu(), w->preset, &shape);
}

/* Steps of 5 %, or of 20 % by default, from the plain plan down to the smallest, operator by operator. */
static void sweep_workload(int number, verdict *v) {
    const char *name = bench_workloads[number].name;
    meter heap;
    uint64_t smallest = 0;
    ms_config config = solver_config(&heap);
    config.early_update = MS_SWITCH_DEFAULT;
    bench_model m = workload_create(number, &config);
    const outcome plain = wrap_for(m.model, &heap, UINT64_MAX);
    outcome last = plain;
    t_ok(m.model, ms_smallest_budget(m.model, &smallest));
    for (uint64_t percent = 100; plain.peak_bytes * percent / 100 >= smallest;
         percent -= t_size(20, 5)) {
        const outcome o = wrap_for(m.model, &heap, plain.peak_bytes * percent / 100);
        judge(v, name, percent, &o, &last, NEVER, NEVER);
        if (!o.fits) {
            blame(v, name, percent, "nothing fits", (double)smallest, (double)plain.peak_bytes);
        }
        last = o;
    }
    const outcome o = wrap_for(m.model, &heap, smallest);
    judge(v, name, 0, &o, &last, NEVER, NEVER);
    assert_true(o.fits && o.peak_bytes == smallest);
    assert_false(wrap_for(m.model, &heap, smallest - 1).fits);
    bench_model_destroy(&m);
    assert_true(heap.live == 0);
}

static void sweeps_of_published_models_are_monotone(void **state) {
    (void)state;
    bool good = true;
    for (int i = 0; i < BENCH_WORKLOADS; i += (int)t_size(8, t_stride(4))) {
        verdict v;
        memset(&v, 0, sizeof v);
        sweep_workload(i, &v);
        good &= sum_up(&v, bench_workloads[i].name, 1000.0, 64);
    }
    assert_true(good);
}

// ------------------------------------------------------------------------------------------------
// the same input gives the same plan

static void the_same_chain_gives_the_same_plan(void **state) {
    (void)state;
    uint64_t last = 0;
    uint32_t changes = 0;
    for (uint64_t percent = 100; percent >= 20; percent -= 10) {
        chain c = make_chain(CHAIN_UNIFORM, 20, 3);
        const outcome a = plan_chain(&c, chain_peak(&c) * percent / 100);
        const outcome b = plan_chain(&c, chain_peak(&c) * percent / 100);
        assert_true(a.fits == b.fits && a.hash == b.hash);
        changes += a.hash != last;
        last = a.hash;
        chain_free(&c);
    }
    assert_true(changes > 4); // the hash tells plans apart
}

/* Whatever was planned before. */
static void the_same_model_gives_the_same_plan(void **state) {
    (void)state;
    uint64_t smallest = 0, hashes[2];
    for (int i = 0; i < 2; ++i) {
        meter heap;
        ms_config config = solver_config(&heap);
        bench_model m = workload_create(0, &config);
        const outcome plain = wrap_for(m.model, &heap, UINT64_MAX);
        t_ok(m.model, ms_smallest_budget(m.model, &smallest));
        for (int detour = 0; detour < i; ++detour) {
            wrap_for(m.model, &heap, smallest);
        }
        hashes[i] = wrap_for(m.model, &heap, (smallest + plain.peak_bytes) / 2).hash;
        bench_model_destroy(&m);
    }
    assert_true(hashes[0] == hashes[1]);
}

// ------------------------------------------------------------------------------------------------
// what is forced

/* x -> a -> b -> c, where nothing but forward reads a, and the user forces b to be dropped. The plain
   plan drops a as well, so that b comes back by both layers. With any budget that has room for a, it
   is kept, and b comes back by its own layer alone. */
static void what_a_forced_drop_reads_is_kept(void **state) {
    (void)state;
    static const char *const names[] = {"a", "b", "c"};
    const ms_shape shape = ms_shape2(64, 64);
    meter heap;
    ms_model *m;
    ms_memory_report report;
    ms_tensor value[3];
    const ms_config config = solver_config(&heap);
    assert_int_equal(ms_create(&config, &m), MS_RESULT_OK);
    ms_tensor last = ms_input(m, "x", MS_DTYPE_F32, shape);
    for (int i = 0; i < 3; ++i) {
        const ms_layer_time time = {100.0, 200.0, 100.0};
        ms_layer_desc d;
        memset(&d, 0, sizeof d);
        d.forward = d.backward = t_nothing;
        d.in[0] = last;
        d.param[0] = ms_param(m, "w", MS_DTYPE_F32, ms_shape1(16));
        d.out[0] = last = value[i] = ms_activation(m, names[i], MS_DTYPE_F32, shape);
        d.backward_reads.in = i == 2;
        d.backward_reads.param = 1;
        ms_set_layer_time(m, ms_register_layer(m, &d), &time);
    }
    ms_set_loss(m, last);
    ms_set_tensor_technique(m, value[1], MS_TECHNIQUE_CHECKPOINTING, MS_SWITCH_ON);
    t_ok(m, ms_wrap(m));
    t_report(m, &report);
    assert_true(drops_what_is_forced(m));
    assert_int_equal(report.recompute_count, 1);
    ms_destroy(m);
    assert_true(heap.live == 0);
}

// ------------------------------------------------------------------------------------------------
// two ways back: by the recompute callback, from what it reads, or by forward

typedef enum way_back { BY_FORWARD, BY_EITHER, BY_CALLBACK } way_back;

/* A chain of convolutions with batch normalization: x_norm can be made again from the kept x at
   almost no cost, and both by the convolution. */
static ms_model *norms_create(way_back way) {
    const ms_shape shape = ms_shape2(64, 1024);
    ms_config config = t_config();
    ms_model *m;
    config.dry_run = true;
    config.early_update = MS_SWITCH_OFF;
    t_ok(NULL, ms_create(&config, &m));
    ms_tensor last = ms_input(m, "in", MS_DTYPE_F32, shape);
    for (int i = 0; i < 12; ++i) {
        const ms_layer_time time = {100.0, 200.0, way == BY_FORWARD ? 100.0 : 2.0};
        ms_layer_desc d;
        memset(&d, 0, sizeof d);
        d.forward = d.backward = t_nothing;
        d.in[0] = last;
        d.param[0] = ms_param(m, "w", MS_DTYPE_F32, ms_shape1(16));
        d.out[0] = last = ms_activation(m, "out", MS_DTYPE_F32, shape);
        d.saved[0] = ms_saved(m, "x", MS_DTYPE_F32, shape);
        d.saved[1] = ms_saved(m, "x_norm", MS_DTYPE_F32, shape);
        d.backward_reads.in = 1;
        d.backward_reads.saved = 3;
        if (way != BY_FORWARD) {
            d.recompute = t_nothing;
            d.recompute_reads.saved = 1;
            d.no_recompute = way == BY_CALLBACK;
        }
        ms_set_layer_time(m, ms_register_layer(m, &d), &time);
    }
    ms_set_loss(m, last);
    return m;
}

typedef struct ways_met {
    uint32_t by_callback, by_forward;
} ways_met;

static void meet_ways(const ms_event *event, void *user) {
    ways_met *met = (ways_met *)user;
    if (event->kind == MS_EVENT_RECOMPUTE) {
        met->by_forward += event->by_forward;
        met->by_callback += !event->by_forward;
    }
}

/* The predicted time of a step within a budget. */
static double norms_us(ms_model *m, uint64_t budget, ways_met *met) {
    ms_memory_report report;
    ms_set_budget(m, budget);
    t_ok(m, ms_wrap(m));
    t_report(m, &report);
    memset(met, 0, sizeof *met);
    t_ok(m, ms_visit_events(m, MS_PROGRAM_TRAIN, meet_ways, met));
    return report.step_us;
}

/* The smallest budget is that without the callback; above it steps are as fast as the faster way
   allows, and in between some values come back in one way and some in the other. */
static void a_plan_chooses_the_way_back(void **state) {
    (void)state;
    ms_model *m[3];
    uint64_t smallest[3];
    bool mixed = false, saves = false;
    for (int k = 0; k < 3; ++k) {
        m[k] = norms_create((way_back)k);
        t_ok(m[k], ms_smallest_budget(m[k], &smallest[k]));
    }
    assert_true(smallest[BY_EITHER] <= smallest[BY_FORWARD]);
    assert_true(smallest[BY_CALLBACK] > smallest[BY_FORWARD]);
    for (uint64_t budget = smallest[BY_FORWARD]; budget < 10u << 20; budget += 1u << 17) {
        ways_met met[3];
        const double by_forward = norms_us(m[BY_FORWARD], budget, &met[BY_FORWARD]);
        const double by_either = norms_us(m[BY_EITHER], budget, &met[BY_EITHER]);
        assert_true(by_either <= by_forward);
        assert_int_equal(met[BY_FORWARD].by_forward, 0);
        mixed = mixed || (met[BY_EITHER].by_forward > 0 && met[BY_EITHER].by_callback > 0);
        saves = saves || by_either < 0.9 * by_forward;
        if (budget >= smallest[BY_CALLBACK]) {
            const double by_callback = norms_us(m[BY_CALLBACK], budget, &met[BY_CALLBACK]);
            assert_true(by_either <= 1.001 * by_callback);
            assert_int_equal(met[BY_CALLBACK].by_forward, 0);
        }
    }
    assert_true(mixed && saves);
    for (int k = 0; k < 3; ++k) {
        ms_destroy(m[k]);
    }
}

/* From none to all, by one where there are options for that, and never fewer than before. */
static void the_last_option_of_a_stage_drops_all(void **state) {
    (void)state;
    for (uint32_t options = 2; options <= 20; ++options) {
        for (uint32_t drops = 0; drops <= 100; ++drops) {
            assert_int_equal(msi_drops_of_option(drops, 0, options), 0);
            assert_int_equal(msi_drops_of_option(drops, options - 1, options), drops);
            for (uint32_t k = 1; k < options; ++k) {
                const uint32_t more = msi_drops_of_option(drops, k, options) -
                                      msi_drops_of_option(drops, k - 1, options);
                assert_in_range(more, 0, drops / (options - 1) + 1);
            }
        }
    }
}

int main(int argc, char **argv) {
    (void)argc;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rotor_gives_the_published_times),
        cmocka_unit_test(rotor_schedules_run_as_promised),
        cmocka_unit_test(rotor_is_its_recursion_and_no_better_than_the_best),
        cmocka_unit_test(plans_of_short_chains_are_possible),
        cmocka_unit_test(plans_of_chains_are_as_fast_as_the_references),
        cmocka_unit_test(plans_of_a_long_chain_are_as_fast_as_the_references),
        cmocka_unit_test_prestate(plans_of_files_are_as_fast_as_the_references, argv + 1),
        cmocka_unit_test(plans_of_small_graphs_are_close_to_the_best),
        cmocka_unit_test(what_lands_in_parts_has_room),
        cmocka_unit_test(plans_that_move_are_close_to_the_best),
        cmocka_unit_test(plans_of_larger_graphs_are_close_to_the_best),
        cmocka_unit_test(budgets_are_monotone_and_the_smallest_is_exact),
        cmocka_unit_test(each_search_is_monotone),
        cmocka_unit_test(random_changes_make_no_plan_faster),
        cmocka_unit_test(a_host_without_room_does_no_harm),
        cmocka_unit_test(points_out_of_order_are_passed_over),
        cmocka_unit_test(the_list_ends_with_what_is_smallest),
        cmocka_unit_test(choices_keep_early_updates),
        cmocka_unit_test(searches_do_what_is_allowed),
        cmocka_unit_test(plans_say_what_found_them),
        cmocka_unit_test(a_small_graph_has_groups_for_all_that_may_be_chosen),
        cmocka_unit_test(a_large_graph_has_groups_for_the_most_bytes),
        cmocka_unit_test(splits_are_made_and_taken_back),
        cmocka_unit_test(homes_are_taken_as_they_are),
        cmocka_unit_test(a_list_ends_where_it_cannot_win),
        cmocka_unit_test(the_smallest_is_searched_from_the_other_end),
        cmocka_unit_test(a_plan_has_room_on_both_sides),
        cmocka_unit_test(a_guide_names_equal_lists_once),
        cmocka_unit_test(delayed_updates_need_no_more_of_the_host),
        cmocka_unit_test(bounds_of_lists_hold),
        cmocka_unit_test(a_drop_costs_what_its_recomputation_reads),
        cmocka_unit_test(climbs_begin_at_what_was_found_before),
        cmocka_unit_test(climbs_begin_at_points_of_the_chain),
        cmocka_unit_test(climbs_have_room_for_what_they_try),
        cmocka_unit_test(climbs_keep_larger_budgets_faster),
        cmocka_unit_test(pairs_are_tried_in_the_order_of_gain),
        cmocka_unit_test(a_chain_needs_what_its_search_expects),
        cmocka_unit_test(a_plan_of_the_list_is_one_move_further),
        cmocka_unit_test(few_plans_of_large_graphs_are_laid_out),
        cmocka_unit_test(sweeps_of_published_models_are_monotone),
        cmocka_unit_test(the_same_chain_gives_the_same_plan),
        cmocka_unit_test(the_same_model_gives_the_same_plan),
        cmocka_unit_test(what_a_forced_drop_reads_is_kept),
        cmocka_unit_test(a_plan_chooses_the_way_back),
        cmocka_unit_test(the_last_option_of_a_stage_drops_all),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
