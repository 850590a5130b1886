/*  test_contract.c - a plan changes no bit, whatever the layers declare. Random graphs that mix the
    whole contract are run by the plain plan, by plans for random budgets, and by a reference that
    has no plan; all that can be seen is compared bit for bit. MEMSCALE_TEST_DAGS sets how many
    graphs are run, MEMSCALE_TEST_SEED which is the first. */
#include "private.h"
#include "toy_layers.h"
#include "random_dag.h"
#include "slices.h"
#include "files.h"

/* The emulated device is some ten times slower. */
#ifdef T_CUDA
enum { QUICK_GRAPHS = 50, GRAPHS = 500, QUICK_FAULTY_GRAPHS = 12, FAULTY_GRAPHS = 60 };
#else
enum { QUICK_GRAPHS = 60, GRAPHS = 10000, QUICK_FAULTY_GRAPHS = 8, FAULTY_GRAPHS = 150 };
#endif

static uint32_t faulty_graphs(void) {
    return (uint32_t)t_sweep(QUICK_FAULTY_GRAPHS, FAULTY_GRAPHS);
}

// ------------------------------------------------------------------------------------------------
// what can be seen of a model, as bytes

enum { VIEW_BYTES = 1 << 20, VIEW_ITEMS = 4096 };

typedef struct item {
    const char *what;
    uint32_t value, index;
    uint32_t first, bytes; // in view.data
    ms_dtype dtype;
    bool is_tensor;
} item;

typedef struct view {
    uint32_t used, count;
    item items[VIEW_ITEMS];
    unsigned char data[VIEW_BYTES];
} view;

static void *view_room(view *to, const char *what, uint32_t value, uint32_t index, ms_dtype dtype,
                       uint64_t bytes) {
    assert_true(to->count < VIEW_ITEMS && to->used + bytes + 16 <= VIEW_BYTES);
    item *it = &to->items[to->count++];
    it->what = what;
    it->value = value;
    it->index = index;
    it->first = (to->used + 15u) & ~15u;
    it->bytes = (uint32_t)bytes;
    it->dtype = dtype;
    it->is_tensor = false;
    to->used = it->first + it->bytes;
    return to->data + it->first;
}

static bool has_nan(const float *values, uint64_t count) {
    bool nan = false;
    for (uint64_t i = 0; i < count; ++i) {
        nan |= t_is_nan(values[i]);
    }
    return nan;
}

/* Adds a tensor, or the error that ms_read gives, which must be the same for all. */
static bool view_tensor(view *to, rd_net *n, const char *what, uint32_t value, uint32_t index,
                        ms_tensor tensor) {
    const rd_value *v = &n->run.graph->value[value];
    uint64_t bytes = rd_bytes(v, n->run.size);
    void *data = view_room(to, what, value, index, v->dtype, bytes);
    memset(data, 0, (size_t)bytes);
    ms_result result = ms_read(n->model, tensor, data);
    if (result != MS_RESULT_OK && result != MS_RESULT_ORDER) {
        return rd_fail(&n->run, "reading %s %u: %s", what, (unsigned)value,
                       ms_last_error(n->model));
    }
    if (result == MS_RESULT_OK && v->dtype == MS_DTYPE_F32 &&
        has_nan((const float *)data, bytes / sizeof(float))) {
        return rd_fail(&n->run, "%s %u holds a NaN", what, (unsigned)value);
    }
    to->items[to->count - 1].is_tensor = true;
    int32_t code = (int32_t)result;
    memcpy(view_room(to, "result of reading", value, index, MS_DTYPE_I32, sizeof code), &code,
           sizeof code);
    return true;
}

static bool view_lasting(view *to, rd_net *n) {
    const rd_graph *g = n->run.graph;
    bool fine = true;
    for (uint32_t i = 0; i < g->value_count && fine; ++i) {
        const rd_value *v = &g->value[i];
        if (v->role < RD_ACTIVATION) {
            fine = view_tensor(to, n, "value", i, 0, n->handle[i]);
        }
        bool trained = v->role == RD_PARAM && !v->frozen;
        for (uint32_t k = 0; k < rd_state_count(g, i) && trained && fine; ++k) {
            fine = view_tensor(to, n, "state", i, k,
                               ms_optimizer_state(n->model, n->handle[i], (int)k));
        }
    }
    return fine;
}

static bool view_outputs(view *to, rd_net *n, bool eval) {
    const rd_graph *g = n->run.graph;
    bool fine = g->has_no_loss || view_tensor(to, n, "loss", g->loss, 0, n->handle[g->loss]);
    for (uint32_t i = 0; i < g->value_count && fine; ++i) {
        if (g->value[i].kept || (eval && g->value[i].kept_in_eval)) {
            fine = view_tensor(to, n, "output", i, 0, n->handle[i]);
        }
    }
    return fine;
}

/* Gradients that a step leaves: without an optimizer, in the trainer's own memory, and wanted. */
static bool view_gradients(view *to, rd_net *n) {
    const rd_graph *g = n->run.graph;
    bool all = g->optimizer.kind == MS_OPTIMIZER_NONE;
    bool fine = true;
    for (uint32_t i = 0; i < g->value_count && fine; ++i) {
        const rd_value *v = &g->value[i];
        if (v->wanted || (v->role == RD_PARAM && !v->frozen && (all || v->borrowed_gradient))) {
            fine = view_tensor(to, n, "gradient", i, 0, ms_gradient(n->model, n->handle[i]));
        }
    }
    return fine;
}

static void view_number(view *to, const char *what, double number) {
    memcpy(view_room(to, what, 0, 0, MS_DTYPE_F64, sizeof number), &number, sizeof number);
}

static bool view_norm(view *to, rd_net *n) {
    double norm = 0.0;
    if (!rd_clips(n->run.graph)) {
        return true;
    }
    if (ms_gradient_norm(n->model, &norm) != MS_RESULT_OK) {
        return rd_fail(&n->run, "ms_gradient_norm: %s", ms_last_error(n->model));
    }
    view_number(to, "norm", norm);
    return true;
}

static bool views_agree(const rd_run *run, const view *plain, const view *other) {
    assert_true(plain->count == other->count);
    for (uint32_t i = 0; i < plain->count; ++i) {
        const item *a = &plain->items[i], *b = &other->items[i];
        if (a->bytes != b->bytes ||
            memcmp(plain->data + a->first, other->data + b->first, a->bytes) != 0) {
            return rd_fail(run, "%s %u [%u] differs from the plain plan's", a->what,
                           (unsigned)a->value, (unsigned)a->index);
        }
    }
    return true;
}

// ------------------------------------------------------------------------------------------------
// one graph: the plain plan, others, and the reference

enum { NETS = 3, STEPS = 4 };

typedef struct trial {
    rd_graph *graph;
    t_rng rng;
    rd_net *net[NETS]; // the first one has the plain plan
    uint32_t net_count;
    bool is_off[NETS][RD_LAYERS]; // layers that must not be recomputed
    bool is_plain[NETS];
    rd_graph *neighbour_graph; // another model in the same arena
    rd_net *neighbour;
    bool force[NETS];
    bool mixed; // values are in 16 bits, the same ones in every net
    ms_arena *arena;
    rd_reference *reference;
    t_heap heap;
    uint64_t round;
    float loss_factor, learning_rate; // as the models were told
    uint32_t micros;                  // of this step, which may be fewer than the graph's
    uint32_t replay;                  // the net whose events are carried out; 0: none
    char failure[RD_TEXT];
} trial;

static view seen_by[NETS];

static bool works(const rd_net *n, ms_result result, const char *call) {
    return result == MS_RESULT_OK ||
           rd_fail(&n->run, "%s: %s: %s", call, ms_result_name(result), ms_last_error(n->model));
}

#define TRY(n, call) works((n), (call), #call)

static void force_techniques(trial *t, uint32_t k) {
    rd_net *n = t->net[k];
    rd_graph *g = t->graph;
    for (uint32_t i = 0; i < g->value_count; ++i) {
        const rd_value *v = &g->value[i];
        if (v->role >= RD_ACTIVATION && t_chance(&t->rng, 0.05)) {
            ms_set_tensor_technique(n->model, n->handle[i], MS_TECHNIQUE_CHECKPOINTING,
                                    MS_SWITCH_ON);
        }
        if (v->role == RD_PARAM && t_chance(&t->rng, 0.1)) {
            ms_switch force = t_chance(&t->rng, 0.5) ? MS_SWITCH_ON : MS_SWITCH_OFF;
            ms_set_tensor_technique(n->model, n->handle[i], MS_TECHNIQUE_EARLY_UPDATE, force);
        }
    }
    for (uint32_t i = 0; i < g->layer_count; ++i) { // the last word on a tensor counts
        if (t_chance(&t->rng, 0.15)) {
            t->is_off[k][i] = true;
            ms_set_layer_technique(n->model, n->layer[i], MS_TECHNIQUE_CHECKPOINTING,
                                   MS_SWITCH_OFF);
            g->seen[RD_FORCED_OFF] = 1;
        } else if (t_chance(&t->rng, 0.05)) {
            ms_set_layer_technique(n->model, n->layer[i], MS_TECHNIQUE_CHECKPOINTING, MS_SWITCH_ON);
        }
    }
}

/* What could not be forced is left to the plan. */
static void force_nothing(trial *t, uint32_t k) {
    rd_net *n = t->net[k];
    for (uint32_t i = 0; i < t->graph->layer_count; ++i) {
        ms_switch force = t->is_off[k][i] ? MS_SWITCH_OFF : MS_SWITCH_DEFAULT;
        ms_set_layer_technique(n->model, n->layer[i], MS_TECHNIQUE_CHECKPOINTING, force);
    }
    for (uint32_t i = 0; i < t->graph->value_count; ++i) {
        if (t->graph->value[i].role == RD_PARAM) {
            ms_set_tensor_technique(n->model, n->handle[i], MS_TECHNIQUE_EARLY_UPDATE,
                                    MS_SWITCH_DEFAULT);
        }
    }
}

/* A budget between the smallest and the plain arena, and a plan for it. */
static bool wrap_within(trial *t, uint32_t k) {
    rd_net *n = t->net[k];
    ms_memory_report report;
    uint64_t smallest = 0;
    if (!TRY(n, ms_smallest_budget(n->model, &smallest))) {
        return false;
    }
    ms_set_budget(n->model, (uint64_t)1 << 40);
    if (!TRY(n, ms_wrap(n->model)) || !TRY(n, ms_report(n->model, &report))) {
        return false;
    }
    if (smallest > report.arena_bytes) {
        return rd_fail(&n->run, "smallest budget %llu, plan of %llu", (unsigned long long)smallest,
                       (unsigned long long)report.arena_bytes);
    }
    uint64_t span = report.arena_bytes - smallest + 1;
    uint64_t budget = t_chance(&t->rng, 0.4) ? smallest : smallest + t_next(&t->rng) % span;
    ms_set_budget(n->model, budget);
    if (!TRY(n, ms_wrap(n->model)) || !TRY(n, ms_report(n->model, &report))) {
        return false;
    }
    if (report.arena_bytes > budget) {
        return rd_fail(&n->run, "arena of %llu, budget %llu",
                       (unsigned long long)report.arena_bytes, (unsigned long long)budget);
    }
    t->graph->seen[RD_DID_UPDATE_EARLY] |= report.early_update;
    t->is_plain[k] = false;
    return true;
}

static bool wrap_net(trial *t, uint32_t k) {
    rd_net *n = t->net[k];
    if (k == 0) {
        t->is_plain[k] = true;
        return TRY(n, ms_wrap(n->model));
    }
    if (t->force[k]) {
        force_techniques(t, k);
        ms_result result = ms_wrap(n->model);
        t->graph->seen[RD_FORCED_ON] |= result == MS_RESULT_OK;
        if (result == MS_RESULT_INVALID) {
            force_nothing(t, k);
        }
        t->force[k] = false;
    }
    return wrap_within(t, k);
}

static ms_config random_config(trial *t, uint32_t k) {
    ms_config config = t_config();
    const rd_graph *g = t->graph;
    bool can_be_early =
        g->accumulation == 1 && !rd_clips(g) && g->optimizer.kind != MS_OPTIMIZER_NONE;
    if (k == 0) {
        config.checkpointing = MS_SWITCH_OFF;
        config.early_update = MS_SWITCH_OFF;
        return config;
    }
    config.early_update = (ms_switch)t_below(&t->rng, 3);
    if (config.early_update == MS_SWITCH_ON && !can_be_early) {
        config.early_update = MS_SWITCH_DEFAULT;
    }
    config.force_optimize = t_chance(&t->rng, 0.2);
    config.debug = t_chance(&t->rng, 0.1);
    config.arena = t->arena;
    if (t_chance(&t->rng, 0.2)) {
        config.allocator = t_heap_allocator(&t->heap);
    }
    if (g->seed % 3 == 1) {
        config.empirical_profiling = MS_SWITCH_ON;
        config.warmup_steps = 1;
        t->graph->seen[RD_PROFILED] = 1;
    } else if (g->seed % 5 < 3) {
        s_slice(&config, g->seed);
    }
    t->graph->seen[RD_DEBUG_MODE] |= config.debug;
    if (g->seed % 64 == 2) { // moves by choice too, which takes long to plan
        config.offloading = MS_SWITCH_ON;
    }
#ifndef T_CUDA
    if (g->seed % 128 == 2 && !t->arena) { // a shared arena has the backend as it comes
        config.backend = ms_backend_cpu();
        config.backend.maps_host = true;
    }
#endif
    return config;
}

/* A model of another graph that takes turns in the shared arena. */
static bool settle_neighbour(trial *t, uint64_t seed) {
    ms_config config = t_config();
    ms_memory_report report;
    config.arena = t->arena;
    config.force_optimize = t_chance(&t->rng, 0.5);
    t->neighbour_graph = rd_generate(seed + 1000000);
    t->neighbour = rd_net_create(t->neighbour_graph, &config, "neighbour", t->failure, false);
    return TRY(t->neighbour, ms_wrap(t->neighbour->model)) &&
           rd_net_write(t->neighbour, 0, false) &&
           TRY(t->neighbour, ms_report(t->neighbour->model, &report)) &&
           (ms_arena_bytes(t->arena) > 0 || rd_fail(&t->neighbour->run, "the arena is empty"));
}

/* Whether the values of a graph that has some in 16 bits are in F16. */
static bool is_f16(const rd_graph *g) {
    return t_is_built_in((int)g->optimizer.kind) && (g->seed % 8 == 3 || g->seed % 8 == 4);
}

/* The graphs of the next trials have no loss: they are evaluated. */
static bool drops_loss;

static void drop_loss(rd_graph *g) {
    g->has_no_loss = g->value[g->loss].kept_in_eval = true;
    for (uint32_t i = 0; i < g->value_count; ++i) {
        g->value[i].wanted = false;
    }
}

static bool trial_begin(trial *t, uint64_t seed, rd_fault fault, bool debug, bool mixed) {
    static const char *const names[] = {"plain", "planned", "planned too"};
    memset(t, 0, sizeof *t);
    t->graph = rd_generate(seed);
    t->mixed = mixed;
    if (drops_loss) {
        drop_loss(t->graph);
    }
    if (mixed) {
        rd_random_dtypes(t->graph, seed + 99);
    }
    t->rng = t_seed(seed ^ 0xc0ffee);
    t->learning_rate = t->graph->optimizer.learning_rate;
    t->net_count = t_chance(&t->rng, 0.3) ? 3 : 2;
    if (t->net_count == 3 && t_chance(&t->rng, 0.5)) {
        assert_int_equal(ms_arena_create(NULL, NULL, &t->arena), MS_RESULT_OK);
        t->graph->seen[RD_SHARED_ARENA] = 1;
    }
    for (uint32_t k = 0; k < t->net_count; ++k) {
        ms_config config = random_config(t, k);
        config.debug |= debug && k > 0;
        config.master_weights = mixed && seed % 3 == 0 ? MS_SWITCH_OFF : MS_SWITCH_DEFAULT;
        if (mixed && is_f16(t->graph)) {
            config.mixed_dtype = MS_DTYPE_F16;
            config.early_update = MS_SWITCH_OFF;
            config.loss_scaling.initial = 4096.0f; // so that some steps overflow
        }
        t->net[k] = rd_net_create(t->graph, &config, names[k], t->failure, false);
        t->net[k]->run.fault = k == 0 ? RD_FAULT_NONE : fault;
        t->force[k] = t_chance(&t->rng, 0.3);
        if (mixed) {
            rd_force_half(t->net[k], seed);
        }
        if (k > 0 && t_chance(&t->rng, 0.5)) {
            rd_force_moves(t->net[k], &t->rng);
        }
    }
    for (uint32_t k = 0; k < t->net_count; ++k) {
        bool early = t_chance(&t->rng, 0.5);
        if ((early && !rd_net_write(t->net[k], 0, false)) || !wrap_net(t, k) ||
            (!early && !rd_net_write(t->net[k], 0, false))) {
            return false;
        }
    }
    if (t_chance(&t->rng, 0.8) && !mixed) {
        t->reference = rd_reference_create(t->graph, t->failure);
        t->graph->seen[RD_REFERENCE] = 1;
    }
    return t->failure[0] == 0 && (t->arena == NULL || settle_neighbour(t, seed));
}

// ------------------------------------------------------------------------------------------------
// the plain plan against the reference: equal as numbers, since a sum that starts from a zero may
// turn a negative zero into a positive one

static bool same_numbers(const rd_net *n, const char *what, uint32_t value, const void *of_model,
                         const void *of_reference) {
    const rd_value *v = &n->run.graph->value[value];
    uint32_t count = rd_count(v, n->run.size);
    bool same = true;
    if (v->dtype == MS_DTYPE_F32) {
        for (uint32_t i = 0; i < count; ++i) {
            same &= ((const float *)of_model)[i] == ((const float *)of_reference)[i];
        }
    } else {
        same = memcmp(of_model, of_reference, (size_t)rd_bytes(v, n->run.size)) == 0;
    }
    return same || rd_fail(&n->run, "%s %u differs from the reference's", what, (unsigned)value);
}

/* Goes through what was seen of the plain plan. */
static bool reference_agrees(trial *t, const view *plain) {
    rd_reference *r = t->reference;
    const rd_net *n = t->net[0];
    for (uint32_t i = 0; i < plain->count; i += 1) {
        const item *it = &plain->items[i];
        const void *expected = NULL;
        if (strcmp(it->what, "norm") == 0) {
            double norm;
            memcpy(&norm, plain->data + it->first, sizeof norm);
            if (fabs(norm - r->norm) > 1e-9 * norm) {
                return rd_fail(&n->run, "norm %.17g, of the reference %.17g", norm, r->norm);
            }
            continue;
        }
        if (i + 1 == plain->count || strcmp(plain->items[i + 1].what, "result of reading") != 0) {
            continue;
        }
        int32_t code;
        memcpy(&code, plain->data + plain->items[i + 1].first, sizeof code);
        if (strcmp(it->what, "state") == 0) {
            expected = r->state[it->value][it->index];
        } else if (strcmp(it->what, "gradient") == 0) {
            expected = r->gradient[it->value];
        } else {
            expected = r->data[it->value];
        }
        if (code == (int32_t)MS_RESULT_OK && expected != NULL &&
            !same_numbers(n, it->what, it->value, plain->data + it->first, expected)) {
            return false;
        }
    }
    return true;
}

static bool reference_micro(trial *t, uint32_t micro) {
    rd_reference *r = t->reference;
    const bool mean = t->loss_factor == 0.0f && t->micros < t->graph->accumulation;
    if (r == NULL) {
        return true;
    }
    r->run.micro = micro;
    const float of_mean = mean ? (float)t->graph->accumulation / (float)t->micros : 1.0f;
    r->gradient_factor = r->given_factor > 0.0f ? r->given_factor * of_mean : mean ? of_mean : 0.0f;
    for (uint32_t i = 0; i < t->graph->layer_count; ++i) {
        r->run.op[i].seed = t->net[0]->run.op[i].seed;
    }
    if (!rd_reference_forward(r, MS_PHASE_FORWARD) || !rd_reference_backward(r)) {
        return rd_fail(&r->run, "a callback failed");
    }
    if (micro + 1 == t->micros) {
        rd_reference_update(r);
    }
    return true;
}

// ------------------------------------------------------------------------------------------------
// the events of a plan, carried out in memory of our own: every operand is checked to be live, to
// overlap nothing and to lie inside the arena; what is dropped is destroyed

enum { CELLS = 2048, PENDING = 256 };

/* A value in memory. */
typedef struct cell {
    uint32_t tensor; // id of the handle; 0: scratch
    uint64_t offset, bytes;
    unsigned char *outside; // memory of its own, not in the arena
    bool lasts;             // between steps
} cell;

typedef struct replay {
    rd_run run;
    const rd_net *net;
    ms_backend cpu;
    unsigned char *arena;
    uint64_t arena_bytes, device_bytes; // with the memory of the host, and without
    float loss_factor, learning_rate;
    uint32_t cell_count, index;
    cell cells[CELLS];
    bool fine, dry;
    bool fills; // the first visit, which finds out where lasting values lie
    /* Copies between host and device that were issued: every second one runs where it is
       awaited. */
    struct {
        void *target;
        const void *source;
        size_t bytes;
        bool out;
    } pending[PENDING];
    uint32_t pending_count;
} replay;

static replay replayed;

static bool replay_fail(replay *r, const char *what, const ms_event *event, uint32_t operand) {
    r->fine = false;
    return rd_fail(&r->run, "event %u (kind %d, %s), operand %u: %s", (unsigned)event->index,
                   (int)event->kind, event->name, (unsigned)operand, what);
}

static cell *replay_find(replay *r, const ms_event_operand *o) {
    for (uint32_t i = 0; i < r->cell_count; ++i) {
        cell *c = &r->cells[i];
        bool same = c->offset == o->offset && c->bytes == o->bytes;
        bool within =
            o->is_part && c->offset <= o->offset && o->offset + o->bytes <= c->offset + c->bytes;
        bool here = o->is_outside ? c->outside != NULL : c->outside == NULL && (same || within);
        if (c->tensor == o->tensor.id && here && (same || o->is_outside || within)) {
            return c;
        }
    }
    return NULL;
}

static unsigned char *replay_memory(replay *r, const cell *c) {
    return c->outside != NULL ? c->outside : r->arena + c->offset;
}

static bool is_operand(const ms_event *event, const cell *c) {
    for (uint32_t k = 0; k < event->operand_count; ++k) {
        const ms_event_operand *o = &event->operands[k];
        if (!o->is_outside && !o->is_new && o->offset == c->offset && o->bytes == c->bytes) {
            return true;
        }
    }
    return false;
}

/* Makes a cell for what is new, over an operand that it takes over or over nothing. */
static bool replay_add(replay *r, const ms_event *event, uint32_t operand) {
    const ms_event_operand *o = &event->operands[operand];
    cell *own = replay_find(r, o);
    if (own != NULL && own->tensor != 0 && !is_operand(event, own)) {
        return replay_fail(r, "is new, but there already", event, operand);
    }
    for (uint32_t i = 0; i < r->cell_count; ++i) {
        cell *c = &r->cells[i];
        bool apart = c->outside != NULL || o->offset + ((o->bytes + 63) & ~63u) <= c->offset ||
                     c->offset + ((c->bytes + 63) & ~63u) <= o->offset;
        if (apart) {
            continue;
        }
        if (c->lasts || c->offset != o->offset || !is_operand(event, c)) {
            char what[80];
            snprintf(what, sizeof what, "overlaps tensor %x of %u bytes at 0x%x",
                     (unsigned)c->tensor, (unsigned)c->bytes, (unsigned)c->offset);
            return replay_fail(r, what, event, operand);
        }
        c->tensor = UINT32_MAX; // taken over; to be removed after the event
    }
    assert_true(r->cell_count < CELLS);
    cell *c = &r->cells[r->cell_count++];
    memset(c, 0, sizeof *c);
    c->tensor = o->tensor.id;
    c->offset = o->offset;
    c->bytes = o->bytes;
    return true;
}

static bool replay_check(replay *r, const ms_event *event) {
    for (uint32_t k = 0; k < event->operand_count; ++k) {
        const ms_event_operand *o = &event->operands[k];
        const uint64_t whole = o->offset - (o->is_part ? o->begin : 0);
        bool inside = whole % 64 == 0 && o->offset + o->bytes <= r->arena_bytes;
        if (!o->is_outside && !inside) {
            return replay_fail(r, "lies outside the arena", event, k);
        }
        if (!o->is_new && replay_find(r, o) == NULL) {
            return replay_fail(r, "is not live", event, k);
        }
        if (!o->is_new && !o->is_written && o->accumulate) {
            return replay_fail(r, "is accumulated, but not written", event, k);
        }
    }
    uint64_t live = 0;
    for (uint32_t k = 0; k < event->operand_count; ++k) {
        bool again = false;
        for (uint32_t j = 0; j < k; ++j) { // several slots of one gradient
            again |= event->operands[j].is_new &&
                     event->operands[j].tensor.id == event->operands[k].tensor.id &&
                     event->operands[j].offset == event->operands[k].offset;
        }
        if (event->operands[k].is_new && !again && !replay_add(r, event, k)) {
            return false;
        }
    }
    for (uint32_t i = 0; i < r->cell_count; ++i) {
        const cell *c = &r->cells[i];
        bool counts = c->outside == NULL && c->tensor != UINT32_MAX && c->offset < r->device_bytes;
        live += counts ? (c->bytes + 63) & ~(uint64_t)63 : 0;
    }
    return live <= event->live_bytes || replay_fail(r, "more is live than is said", event, 0);
}

static void replay_forget(replay *r, uint32_t tensor) {
    uint32_t kept = 0;
    for (uint32_t i = 0; i < r->cell_count; ++i) {
        if (r->cells[i].tensor != tensor) {
            r->cells[kept++] = r->cells[i];
        }
    }
    r->cell_count = kept;
}

static bool replay_drop(replay *r, const ms_event *event) {
    for (uint32_t k = 0; k < event->operand_count; ++k) {
        cell *c = replay_find(r, &event->operands[k]);
        if (c == NULL || c->lasts) {
            return replay_fail(r, "is dropped, but not live", event, k);
        }
        rd_destroy(replay_memory(r, c), c->bytes);
        c->tensor = UINT32_MAX;
    }
    replay_forget(r, UINT32_MAX);
    return true;
}

static void *replay_data(replay *r, const ms_event_operand *o) {
    const cell *c = replay_find(r, o);
    for (uint32_t i = 0; c == NULL && i < r->cell_count; ++i) { // taken over by a result
        bool here = r->cells[i].outside == NULL && r->cells[i].offset == o->offset;
        c = here ? &r->cells[i] : NULL;
    }
    return c == NULL            ? NULL
           : c->outside != NULL ? c->outside + (o->is_part ? o->begin : 0)
                                : r->arena + o->offset;
}

static void replay_place(replay *r, rd_frame *f, const ms_event_operand *o) {
    static const int groups[] = {RD_GROUP_IN, RD_GROUP_OUT, RD_GROUP_SAVED, RD_GROUP_PARAM,
                                 RD_GROUP_STATE};
    void *data = replay_data(r, o);
    if (o->kind <= MS_OPERAND_STATE) {
        f->view[groups[o->kind]][o->slot].data = data;
    } else if (o->kind == MS_OPERAND_WORKSPACE) {
        f->call.workspace = data;
        f->call.workspace_bytes = o->bytes;
    } else {
        ms_view *views = o->kind == MS_OPERAND_GRAD_OUT  ? f->grad_out
                         : o->kind == MS_OPERAND_GRAD_IN ? f->grad_in
                                                         : f->grad_param;
        views[o->slot].data = data;
        views[o->slot].beta = o->accumulate ? 1.0f : 0.0f;
    }
}

static bool replay_layer(replay *r, const ms_event *event) {
    static const ms_phase phases[] = {MS_PHASE_FORWARD, MS_PHASE_RECOMPUTE, MS_PHASE_BACKWARD,
                                      MS_PHASE_EVAL};
    rd_frame f;
    rd_frame_init(&f, &r->run, event->layer_index, phases[event->kind]);
    for (uint32_t k = 0; k < event->operand_count; ++k) {
        replay_place(r, &f, &event->operands[k]);
    }
    f.call.loss_factor = r->loss_factor;
    f.repeats = event->by_forward;
    return rd_frame_call(&f) || replay_fail(r, "the callback failed", event, 0);
}

/* Which optimizer state a handle stands for. */
static void replay_update(replay *r, const ms_event *event) {
    ms_update_args args;
    rd_graph *g = r->run.graph;
    uint32_t param = 0;
    memset(&args, 0, sizeof args);
    while (r->net->handle[param].id != event->tensor.id) {
        param += 1;
    }
    for (uint32_t k = 0; k < event->operand_count; ++k) {
        const ms_event_operand *o = &event->operands[k];
        float *data = (float *)replay_data(r, o);
        if (o->tensor.id == event->tensor.id) {
            args.value = data;
        } else if (o->tensor.id == ms_gradient(r->net->model, event->tensor).id) {
            args.gradient = data;
        } else if (o->tensor.id == 0 && !o->is_new) { // and not scratch memory
            args.gradient_scale = &((const ms_norm *)(const void *)data)->scale;
        }
        for (int i = 0; i < RD_STATES; ++i) {
            ms_tensor state = ms_optimizer_state(r->net->model, event->tensor, i);
            args.state[i] = state.id != 0 && state.id == o->tensor.id ? data : args.state[i];
        }
    }
    rd_fill_update(&args, g, param, r->run.size, r->learning_rate, r->run.step + 1);
    rd_run_update(&r->cpu, g, param, &args);
}

static void replay_issue(replay *r, void *target, const void *source, size_t bytes, bool out) {
    assert_true(r->pending_count < PENDING);
    r->pending[r->pending_count].target = target;
    r->pending[r->pending_count].source = source;
    r->pending[r->pending_count].out = out;
    r->pending[r->pending_count++].bytes = bytes;
    if (r->pending_count % 2 == 1) { // at once; once more when it is awaited, which changes nothing
        memmove(target, source, bytes);
    }
}

/* All copies in the same direction up to the one that makes `target`, which must be among them. */
static bool replay_wait(replay *r, const void *target) {
    uint32_t end = r->pending_count, left = 0;
    while (end > 0 && r->pending[end - 1].target != target) {
        --end;
    }
    for (uint32_t i = 0; i < r->pending_count; ++i) {
        if (i < end && r->pending[i].out == r->pending[end - 1].out) {
            memmove(r->pending[i].target, r->pending[i].source, r->pending[i].bytes);
        } else {
            r->pending[left++] = r->pending[i];
        }
    }
    r->pending_count = left;
    return end > 0;
}

static bool replay_other(replay *r, const ms_event *event) {
    const ms_event_operand *o = event->operands;
    void *data = replay_data(r, &o[0]);
    void *second = event->operand_count > 1 ? replay_data(r, &o[1]) : NULL;
    float *floats = (float *)data;
    uint64_t count = o[0].bytes / sizeof(float);
    double *sum = (double *)(event->kind == MS_EVENT_NORM ? second : data);
    switch (event->kind) {
    case MS_EVENT_SEED:
        return r->cpu.fill_f32(r->cpu.user, data, r->loss_factor, count) == 0;
    case MS_EVENT_ZERO:
        memset(data, 0, (size_t)o[0].bytes);
        return true;
    case MS_EVENT_COPY:
        memmove(data, second, (size_t)o[0].bytes);
        return true;
    case MS_EVENT_COPY_IN:
    case MS_EVENT_COPY_OUT:
        for (uint32_t k = 0; k < event->operand_count; k += 2) {
            replay_issue(r, replay_data(r, &o[k]), replay_data(r, &o[k + 1]), (size_t)o[k].bytes,
                         event->kind == MS_EVENT_COPY_OUT);
        }
        return true;
    case MS_EVENT_WAIT: {
        bool awaits = false;
        for (uint32_t k = 0; k < event->operand_count; k += 2) {
            awaits |= replay_wait(r, replay_data(r, &o[k]));
        }
        return awaits || replay_fail(r, "no copy is awaited", event, 0);
    }
    case MS_EVENT_ADD:
        for (uint64_t i = 0; i < count; ++i) {
            floats[i] += ((const float *)second)[i];
        }
        return true;
    case MS_EVENT_NORM: {
        uint32_t nonfinite = 0;
        return r->cpu.add_squares(r->cpu.user, data, MS_DTYPE_F32, count, sum, 1, &nonfinite) == 0;
    }
    case MS_EVENT_CLIP: {
        float limits[1 + RD_GROUPS];
        const uint32_t norms = rd_norm_count(r->run.graph, limits);
        ms_step_state state;
        memset(&state, 0, sizeof state);
        return r->cpu.clip_scale(r->cpu.user, (ms_norm *)(void *)floats, limits, norms, &state,
                                 NULL, 0) == 0;
    }
    default:
        replay_update(r, event);
        return true;
    }
}

/* Whether a handle stands for what is borrowed. */
static bool is_lent(const replay *r, uint32_t id) {
    const rd_net *n = r->net;
    for (uint32_t i = 0; i < n->run.graph->value_count; ++i) {
        bool found = n->memory[i] != NULL && n->handle[i].id == id;
        found |= n->gradient_memory[i] != NULL && ms_gradient(n->model, n->handle[i]).id == id;
        for (int k = 0; k < RD_STATES; ++k) {
            found |= n->state_memory[i][k] != NULL &&
                     ms_optimizer_state(n->model, n->handle[i], k).id == id;
        }
        if (found) {
            return true;
        }
    }
    return false;
}

/* Whether a handle stands for what lives between steps. */
static bool is_lasting(const rd_net *n, uint32_t id) {
    const rd_graph *g = n->run.graph;
    for (uint32_t i = 0; i < g->value_count; ++i) {
        const rd_value *v = &g->value[i];
        bool found = v->role < RD_ACTIVATION && n->handle[i].id == id;
        for (int k = 0; k < RD_STATES && v->role == RD_PARAM; ++k) {
            found |= ms_optimizer_state(n->model, n->handle[i], k).id == id;
        }
        bool stays = n->gradient_memory[i] != NULL || g->accumulation > 1;
        if (found || (stays && ms_gradient(n->model, n->handle[i]).id == id)) {
            return true;
        }
    }
    return false;
}

/* Notes where a value lies that lasts, and what it holds. */
static void replay_fill(replay *r, const ms_event *event) {
    uint64_t data[RD_ELEMENTS];
    memset(data, 0, sizeof data);
    for (uint32_t k = 0; k < event->operand_count; ++k) {
        const ms_event_operand *o = &event->operands[k];
        if (o->tensor.id == 0 || replay_find(r, o) != NULL || !is_lasting(r->net, o->tensor.id) ||
            (!r->dry && ms_read(r->net->model, o->tensor, data) != MS_RESULT_OK)) {
            continue;
        }
        assert_true(r->cell_count < CELLS);
        cell *c = &r->cells[r->cell_count++];
        memset(c, 0, sizeof *c);
        const bool home = o->is_part && !o->is_new; // of which this is a part
        c->tensor = o->tensor.id;
        c->offset = home && !o->is_outside ? o->offset - o->begin : o->offset;
        c->bytes = home ? ms_tensor_bytes(r->net->model, o->tensor) : o->bytes;
        c->lasts = !o->is_new; // else a copy of it
        c->outside = o->is_outside ? (unsigned char *)rd_alloc(c->bytes) : NULL;
        memcpy(replay_memory(r, c), (unsigned char *)data + (home ? 0 : o->begin),
               (size_t)c->bytes);
    }
}

/* What lies on the host is replayed as if that memory followed the arena. */
static void replay_event(const ms_event *given, void *user) {
    replay *r = (replay *)user;
    static ms_event_operand operands[MSI_MAX_VIEWS + 1];
    ms_event on_one = *given;
    const ms_event *event = &on_one;
    memcpy(operands, given->operands, given->operand_count * sizeof operands[0]);
    for (uint32_t k = 0; k < given->operand_count; ++k) {
        if (operands[k].is_on_host) {
            operands[k].offset += r->device_bytes;
            operands[k].is_outside = is_lent(r, operands[k].tensor.id);
        }
    }
    on_one.operands = operands;
    if (r->fills) {
        replay_fill(r, event);
        return;
    }
    if (!r->fine) {
        return;
    }
    if (event->size != sizeof *event || event->live_bytes > r->arena_bytes) {
        replay_fail(r, "has a wrong size, or too many live bytes", event, 0);
        return;
    }
    if (event->kind == MS_EVENT_DROP) {
        r->fine = replay_drop(r, event);
        return;
    }
    if (event->kind > MS_EVENT_DROP) { // nothing to do; what it reads or writes is live
        r->fine = event->kind == MS_EVENT_VERDICT || replay_check(r, event);
        return;
    }
    r->fine = replay_check(r, event) &&
              (r->dry ||
               (event->kind <= MS_EVENT_EVAL ? replay_layer(r, event) : replay_other(r, event)));
    replay_forget(r, UINT32_MAX);
}

static void replay_keep_lasting(replay *r) {
    uint32_t lasting = 0;
    for (uint32_t i = 0; i < r->cell_count; ++i) {
        if (r->cells[i].lasts) {
            r->cells[lasting++] = r->cells[i];
        }
    }
    r->cell_count = lasting;
}

static void replay_end(void) {
    for (uint32_t i = 0; i < replayed.cell_count; ++i) {
        rd_free(replayed.cells[i].outside);
    }
    rd_free(replayed.arena);
    memset(&replayed, 0, sizeof replayed);
}

/* Between the writing of the inputs and the step: what lasts is copied. */
static bool replay_begin(const trial *t, rd_net *n, bool dry) {
    replay *r = &replayed;
    ms_memory_report report;
    if (!TRY(n, ms_report(n->model, &report))) {
        return false;
    }
    replay_end();
    rd_run_init(&r->run, n->run.graph, "replay", n->run.failure);
    r->dry = dry;
    memcpy(r->run.size, n->run.size, sizeof r->run.size);
    r->run.step = n->run.step;
    r->net = n;
    r->cpu = ms_backend_cpu();
    r->loss_factor = rd_loss_factor(n->run.graph, n->run.size, t->loss_factor);
    r->learning_rate = t->learning_rate;
    r->device_bytes = report.arena_bytes;
    r->arena_bytes = report.arena_bytes + report.host_bytes;
    r->arena = (unsigned char *)rd_alloc(r->arena_bytes);
    r->fills = r->fine = true;
    bool fine = TRY(n, ms_visit_events(n->model, MS_PROGRAM_TRAIN, replay_event, r)) &&
                TRY(n, ms_visit_events(n->model, MS_PROGRAM_EVAL, replay_event, r));
    replay_keep_lasting(r);
    return fine;
}

/* The tensor that an item was read from. */
static ms_tensor tensor_of(const replay *r, const item *it) {
    const ms_tensor handle = r->net->handle[it->value];
    return strcmp(it->what, "state") == 0
               ? ms_optimizer_state(r->net->model, handle, (int)it->index)
           : strcmp(it->what, "gradient") == 0 ? ms_gradient(r->net->model, handle)
                                               : handle;
}

/* What is left after the program must be what the step leaves for ms_read, with the same bits. */
static bool replay_compare(replay *r, const view *seen) {
    bool keeps_gradients = r->run.graph->optimizer.kind == MS_OPTIMIZER_NONE;
    for (uint32_t i = 0; i < seen->count && r->fine; ++i) {
        const item *it = &seen->items[i];
        const ms_tensor tensor = tensor_of(r, it);
        for (uint32_t k = 0; k < r->cell_count; ++k) {
            const cell *c = &r->cells[k];
            if (c->tensor == tensor.id && c->bytes == it->bytes && it->is_tensor &&
                memcmp(replay_memory(r, c), seen->data + it->first, it->bytes) != 0) {
                return rd_fail(&r->run, "%s %u differs from the model's", it->what,
                               (unsigned)it->value);
            }
        }
    }
    for (uint32_t k = 0; k < r->cell_count && !keeps_gradients; ++k) {
        bool named = r->cells[k].lasts || r->cells[k].tensor == 0;
        for (uint32_t i = 0; i < seen->count && !named; ++i) {
            named =
                seen->items[i].is_tensor && tensor_of(r, &seen->items[i]).id == r->cells[k].tensor;
        }
        if (!named) {
            return rd_fail(&r->run, "tensor %u is never dropped", (unsigned)r->cells[k].tensor);
        }
    }
    return r->fine;
}

/* Behind the step, whose seeds are known now: both programs. */
static bool replay_run(rd_net *n, const view *seen) {
    replay *r = &replayed;
    r->fills = false;
    for (uint32_t i = 0; i < n->run.graph->layer_count; ++i) {
        r->run.op[i].seed = n->run.op[i].seed;
    }
    n->run.seen[RD_REPLAYED] = 1;
    if (!TRY(n, ms_visit_events(n->model, MS_PROGRAM_TRAIN, replay_event, r)) ||
        !replay_compare(r, seen)) {
        return false;
    }
    replay_keep_lasting(r);
    return TRY(n, ms_visit_events(n->model, MS_PROGRAM_EVAL, replay_event, r)) && r->fine;
}

// ------------------------------------------------------------------------------------------------
// what is done to all models alike

static void begin_pass(rd_net *n, uint32_t micro) {
    n->run.micro = micro;
    for (uint32_t i = 0; i < n->run.graph->layer_count; ++i) {
        n->run.op[i].forwards = n->run.op[i].backwards = n->run.op[i].recomputes = 0;
    }
}

static bool check_forbidden(trial *t, uint32_t k) {
    for (uint32_t i = 0; i < t->graph->layer_count; ++i) {
        const rd_op *op = &t->net[k]->run.op[i];
        bool forbidden = t->is_off[k][i] || t->is_plain[k];
        if (forbidden && op->recomputes > 0 && !op->run->debug) {
            return rd_fail(op->run, "layer %u is recomputed, though that is forbidden",
                           (unsigned)i);
        }
    }
    return true;
}

static bool one_micro(trial *t, uint32_t k, uint32_t micro, bool in_three) {
    rd_net *n = t->net[k];
    double loss = 0.0;
    bool last = micro + 1 == t->graph->accumulation;
    begin_pass(n, micro);
    if (!rd_net_write(n, t->round + micro, false) ||
        (k == t->replay && k > 0 && !replay_begin(t, n, false))) {
        return false;
    }
    bool fine = in_three ? TRY(n, ms_forward(n->model, &loss)) && TRY(n, ms_backward(n->model)) &&
                               (!last || TRY(n, ms_update(n->model)))
                         : TRY(n, s_step(n->model, &loss));
    view_number(&seen_by[k], "loss", loss);
    return fine && msi_is_finite((double)loss) && check_forbidden(t, k);
}

static bool step_net(trial *t, uint32_t k, bool in_three) {
    view *to = &seen_by[k];
    rd_net *n = t->net[k];
    to->used = to->count = 0;
    for (uint32_t micro = 0; micro < t->micros; ++micro) {
        if (!one_micro(t, k, micro, in_three)) {
            return rd_fail(&n->run, "the step failed");
        }
        if (k == 0 && t->reference != NULL) {
            rd_reference_write(t->reference, t->round + micro, false);
            if (!reference_micro(t, micro)) {
                return false;
            }
        }
    }
    if (t->micros < t->graph->accumulation && !TRY(n, ms_update(n->model))) {
        return rd_fail(&n->run, "the step did not end early");
    }
    bool fine = view_outputs(to, n, false) && view_gradients(to, n) && view_norm(to, n) &&
                view_lasting(to, n);
    if (k == t->replay && k > 0) {
        fine = fine && replay_run(n, to);
    }
    n->run.step += 1;
    return fine;
}

static bool compare_all(trial *t) {
    for (uint32_t k = 1; k < t->net_count; ++k) {
        if (!views_agree(&t->net[k]->run, &seen_by[0], &seen_by[k])) {
            return false;
        }
    }
    return t->reference == NULL || reference_agrees(t, &seen_by[0]);
}

static bool step_neighbour(trial *t) {
    rd_net *n = t->neighbour;
    bool fine = true;
    for (uint32_t micro = 0; n != NULL && fine && micro < t->neighbour_graph->accumulation;
         ++micro) {
        begin_pass(n, micro);
        fine = rd_net_write(n, t->round + micro, false) && TRY(n, ms_step(n->model, NULL));
    }
    if (n != NULL) {
        n->run.step += 1;
    }
    return fine;
}

static bool step_all(trial *t) {
    bool in_three = t_chance(&t->rng, 0.5);
    const msi_timing *timing = t->net[t->net_count - 1]->model->run.timing;
    bool plans =
        timing != NULL && timing->warmup == MSI_WARMUP_PLAN; // at the beginning of the step
    bool simple = !t->graph->varies && t->graph->optimizer.skip_above_norm == 0.0f &&
                  t->graph->accumulation == 1 && t->arena == NULL && !plans && !t->mixed &&
                  t->graph->seen[RD_FROZEN_MEANWHILE] == 0; // which restarts AdamW's count
    t->replay = simple && t_chance(&t->rng, 0.2) ? t->net_count - 1 : 0;
    t->micros = t->graph->accumulation;
    if (t->micros > 1 && t_chance(&t->rng, 0.3)) {
        t->micros = 1 + t_below(&t->rng, t->micros - 1);
    }
    for (uint32_t k = 0; k < t->net_count; ++k) {
        if (!step_net(t, k, in_three) || !step_neighbour(t)) {
            return false;
        }
    }
    t->round += t->graph->accumulation;
    if (t->reference != NULL) {
        t->reference->run.step += 1;
    }
    return compare_all(t);
}

/* Forward alone: as an evaluation, or as a step that is given up. */
static bool eval_all(trial *t, bool abandons) {
    t->graph->seen[abandons ? RD_ABANDONED_STEP : RD_EVALUATED] = 1;
    for (uint32_t k = 0; k < t->net_count; ++k) {
        rd_net *n = t->net[k];
        double loss = 0.0;
        view *to = &seen_by[k];
        to->used = to->count = 0;
        begin_pass(n, 0);
        if (!rd_net_write(n, t->round, false) ||
            (abandons && !TRY(n, ms_forward(n->model, &loss))) ||
            !TRY(n, ms_eval(n->model, &loss))) {
            return false;
        }
        if (t->graph->has_no_loss && msi_is_finite(loss)) {
            return rd_fail(&n->run, "a loss of %g, where there is none", loss);
        }
        view_number(to, "loss", t->graph->has_no_loss ? 0.0 : loss);
        if (!view_outputs(to, n, true) || !view_lasting(to, n)) {
            return false;
        }
    }
    rd_reference *r = t->reference;
    if (r != NULL) {
        rd_reference_write(r, t->round, false);
        r->run.micro = 0;
        for (uint32_t i = 0; i < t->graph->layer_count; ++i) {
            r->run.op[i].seed = t->net[0]->run.op[i].seed;
        }
        if ((abandons && !rd_reference_forward(r, MS_PHASE_FORWARD)) ||
            !rd_reference_forward(r, MS_PHASE_EVAL)) {
            return false;
        }
    }
    t->round += 1;
    return compare_all(t);
}

/* beyond: to sizes at which a step is an error, if there are such. */
static bool reshape_all(trial *t, bool beyond) {
    int64_t size[RD_AXIS_LIMIT];
    rd_graph *g = t->graph;
    for (uint32_t i = 0; i < RD_AXIS_LIMIT; ++i) {
        const int64_t largest = beyond ? g->largest[i] : rd_largest_trained(g, i);
        size[i] = i < g->axis_count ? 1 + (int64_t)t_below(&t->rng, (uint32_t)largest) : g->size[i];
        size[i] = beyond && g->trains[i] > 0 ? largest : size[i];
    }
    g->seen[RD_RESHAPED] = 1;
    for (uint32_t k = 0; k < t->net_count; ++k) {
        rd_net *n = t->net[k];
        if (!TRY(n, ms_reshape(n->model, size))) {
            return false;
        }
        memcpy(n->run.size, size, sizeof size);
        if (!rd_net_write(n, t->round + 1000, true)) {
            return false;
        }
    }
    if (t->reference != NULL) {
        memcpy(t->reference->run.size, size, sizeof size);
        rd_reference_write(t->reference, t->round + 1000, true);
    }
    return true;
}

static void retune_all(trial *t) {
    float rate = 0.001f * (float)t_below(&t->rng, 30);
    float factor = t_chance(&t->rng, 0.5) ? 0.01f + 0.5f * (float)t_unit(&t->rng) : 0.0f;
    t->graph->seen[RD_LOSS_FACTOR] |= factor != 0.0f;
    t->learning_rate = rate;
    t->loss_factor = factor;
    for (uint32_t k = 0; k < t->net_count; ++k) {
        ms_set_learning_rate(t->net[k]->model, rate);
        t_set_loss_factor(t->net[k]->model, factor);
    }
    if (t->reference != NULL) {
        t->reference->learning_rate = rate;
        t->reference->loss_factor = factor;
    }
}

static bool any_lent(const rd_graph *g) {
    return (g->seen[RD_BORROWED_INPUT] | g->seen[RD_BORROWED_PARAM] | g->seen[RD_BORROWED_BUFFER] |
            g->seen[RD_BORROWED_GRADIENT] | g->seen[RD_BORROWED_STATE]) != 0;
}

/* The plans of a model are saved, and it loads them. */
static bool reload_plans(rd_net *n) {
    static t_file file;
    ms_memory_report before, after;
    ms_sink sink;
    ms_source source;
    t_file_clear(&file);
    sink.write = t_file_write;
    source.read = t_file_read;
    sink.user = source.user = &file;
    if (!TRY(n, ms_report(n->model, &before)) || !TRY(n, ms_plan_save(n->model, &sink))) {
        return false;
    }
    source.size = file.bytes;
    if (!TRY(n, ms_plan_load(n->model, &source)) || !TRY(n, ms_wrap(n->model)) ||
        !TRY(n, ms_report(n->model, &after))) {
        return false;
    }
    n->run.seen[RD_LOADED_PLAN] = 1;
    return before.plan_hash == after.plan_hash || rd_fail(&n->run, "the loaded plan is another");
}

/* What may happen to one model between steps, and must change nothing. */
static bool disturb(trial *t, uint32_t k) {
    rd_net *n = t->net[k];
    uint8_t *seen = t->graph->seen;
    if (any_lent(t->graph) && t_chance(&t->rng, 0.3)) {
        seen[RD_BORROWED_ELSEWHERE] = 1;
        if (!rd_lend_elsewhere(n)) {
            return false;
        }
    }
    if (k > 0 && t_chance(&t->rng, 0.1) && !t->mixed) {
        seen[RD_DETACHED] = 1;
        t->is_plain[k] = true;
        if (!TRY(n, ms_detach(n->model))) {
            return false;
        }
    } else if (k > 0 && t_chance(&t->rng, 0.15)) {
        seen[RD_WRAPPED_AGAIN] = 1;
        return wrap_within(t, k);
    } else if (k > 0 && !t->is_plain[k] && t->graph->seed % 4 == 1) {
        return reload_plans(n);
    }
    return true;
}

/* Other params are trained from here on, perhaps with other micro-batches. The reference does not
   follow. */
static bool retrain_all(trial *t) {
    rd_graph *g = t->graph;
    bool fine = true;
    g->seen[RD_FROZEN_MEANWHILE] = 1;
    rd_reference_destroy(t->reference);
    t->reference = NULL;
    g->accumulation = g->accumulation > 1 ? 1 + t_below(&t->rng, 4) : 1;
    for (uint32_t i = 0; i < g->value_count; ++i) {
        rd_value *v = &g->value[i];
        bool is_head = rd_has(&g->layer[g->layer_count - 2], RD_GROUP_PARAM, i);
        bool trainable = v->role == RD_PARAM && rd_is_float(v);
        if (trainable && !is_head && t_chance(&t->rng, 0.3)) {
            v->frozen = !v->frozen;
            for (uint32_t k = 0; k < t->net_count; ++k) {
                ms_set_frozen(t->net[k]->model, t->net[k]->handle[i], v->frozen);
            }
        }
    }
    for (uint32_t k = 0; k < t->net_count && fine; ++k) {
        ms_set_accumulation(t->net[k]->model, g->accumulation);
        if (k > 0) {
            force_nothing(t, k); // an update that was forced may be of a param that is frozen now
        }
        fine = wrap_net(t, k);
    }
    return fine;
}

static bool between_steps(trial *t) {
    bool fine = true;
    if (t_chance(&t->rng, 0.25)) {
        retune_all(t);
    }
    if (t->graph->axis_count > 0 && t_chance(&t->rng, 0.4)) {
        fine = reshape_all(t, false);
    }
    if (fine && t_chance(&t->rng, 0.1)) {
        fine = retrain_all(t);
    }
    for (uint32_t k = 0; k < t->net_count && fine; ++k) {
        fine = disturb(t, k);
    }
    if (fine && t->graph->seen[RD_LARGER_EVALS] != 0 && t->graph->seed % 2 == 0) {
        fine = reshape_all(t, true) && eval_all(t, false);
        for (uint32_t k = 0; k < t->net_count && fine && !t->graph->has_no_loss; ++k) {
            t_error(t->net[k]->model, ms_step(t->net[k]->model, NULL), MS_RESULT_ORDER);
        }
        fine = fine && reshape_all(t, false);
    }
    if (fine && t_chance(&t->rng, 0.25)) {
        fine = eval_all(t, t_chance(&t->rng, 0.4) && !t->graph->has_no_loss);
    }
    return fine;
}

/* Behind run_trial, whether it worked or not. */
static void trial_end(trial *t) {
    replay_end();
    ms_arena_destroy(t->arena);
    for (uint32_t k = 0; k < t->net_count; ++k) {
        rd_net_destroy(t->net[k]);
    }
    rd_net_destroy(t->neighbour);
    rd_reference_destroy(t->reference);
    if (t->failure[0] == 0 && (t->heap.live_count != 0 || t->heap.wrong_releases != 0)) {
        snprintf(t->failure, RD_TEXT, "%llu allocations are left",
                 (unsigned long long)t->heap.live_count);
    }
    free(t->graph);
    free(t->neighbour_graph);
}

static uint64_t totals[RD_FEATURE_COUNT], total_graphs, total_mapped;

/* Whether an update of the plan in force uses state on the host where it is. */
static bool has_mapped_state(const ms_model *m) {
    const msi_program *p = &m->run.plan->train;
    bool has = false;
    for (uint32_t now = 0; now < p->code.instructions.count; ++now) {
        has |= msi_updated_bytes(&m->graph, p, &p->code.instructions.items[now], true) > 0;
    }
    return has;
}

/* Runs one graph; t->failure says what went wrong. */
static bool run_trial(trial *t, uint64_t seed, rd_fault fault, bool debug, bool mixed) {
    bool fine = trial_begin(t, seed, fault, debug, mixed);
    total_mapped += fine && has_mapped_state(t->net[1]->model);
    uint32_t steps = 2 + t_below(&t->rng, STEPS - 1);
    t->round = 1;
    for (uint32_t step = 0; step < steps && fine; ++step) {
        fine = (t->graph->has_no_loss ? eval_all(t, false) : step_all(t)) && t->failure[0] == 0 &&
               between_steps(t);
    }
    return fine && t->failure[0] == 0;
}

// ------------------------------------------------------------------------------------------------
// tests

static void random_graphs_are_equal_bit_for_bit(void **state) {
    (void)state;
    static trial t;
    uint64_t first = t_environment("MEMSCALE_TEST_SEED", 1);
    uint64_t count = t_environment("MEMSCALE_TEST_DAGS", t_sweep(QUICK_GRAPHS, GRAPHS));
    for (uint64_t seed = first; seed < first + count; ++seed) {
        if (!run_trial(&t, seed, RD_FAULT_NONE, false, false)) {
            print_error("%s\nfailed: MEMSCALE_TEST_SEED=%llu MEMSCALE_TEST_DAGS=1\n", t.failure,
                        (unsigned long long)seed);
            rd_print(t.graph);
            fail();
        }
        for (int i = 0; i < RD_FEATURE_COUNT; ++i) {
            totals[i] += t.graph->seen[i];
        }
        total_graphs += 1;
        trial_end(&t);
        if (t.failure[0] != 0) {
            print_error("%s\nfailed: MEMSCALE_TEST_SEED=%llu MEMSCALE_TEST_DAGS=1\n", t.failure,
                        (unsigned long long)seed);
            fail();
        }
    }
}

/* Graphs whose plain plan is laid out better than the smallest one that the search finds. */
static void the_smallest_budget_is_that_of_a_plain_plan(void **state) {
    (void)state;
    static trial t;
    static const uint64_t seeds[] = {471, 5309};
    for (uint32_t i = 0; i < sizeof seeds / sizeof seeds[0]; ++i) {
        (void)run_trial(&t, seeds[i], RD_FAULT_NONE, false, false);
        trial_end(&t);
        assert_string_equal(t.failure, "");
    }
}

/* The same graphs without a loss, with values in 16 bits or without: evals agree. */
static void graphs_without_a_loss_are_evaluated(void **state) {
    (void)state;
    static trial t;
    uint64_t first = t_environment("MEMSCALE_TEST_SEED", 1);
    uint64_t count = t_environment("MEMSCALE_TEST_DAGS", t_sweep(QUICK_GRAPHS, GRAPHS / 4));
    drops_loss = true;
    for (uint64_t seed = first; seed < first + count; ++seed) {
        const bool fine = run_trial(&t, seed, RD_FAULT_NONE, false, seed % 4 == 0);
        if (!fine) {
            rd_print(t.graph);
        }
        for (uint32_t k = 0; k < t.net_count && fine; ++k) {
            double loss = 0.0;
            t_error(t.net[k]->model, ms_step(t.net[k]->model, &loss), MS_RESULT_ORDER);
        }
        trial_end(&t);
        if (t.failure[0] != 0) {
            print_error("%s\nfailed: MEMSCALE_TEST_SEED=%llu MEMSCALE_TEST_DAGS=1\n", t.failure,
                        (unsigned long long)seed);
            fail();
        }
    }
    drops_loss = false;
}

/* A net without a mesh catches no fish: each feature stands in its share of the graphs. */
static uint32_t count_ops(const msi_program *p, msi_op op) {
    uint32_t count = 0;
    for (uint32_t i = 0; i < p->code.instructions.count; ++i) {
        count += p->code.instructions.items[i].op == (uint8_t)op;
    }
    return count;
}

/* Params in 16 bits, with a master or without one. */
static uint32_t count_half_params(const msi_program *p, const msi_store *store, bool masters) {
    uint32_t half = 0, with_master = 0;
    for (uint32_t i = 0; i < store->residents.count; ++i) {
        half +=
            p->code.ranges.items[i].role == MSI_ROLE_VALUE && p->code.ranges.items[i].format != 0;
        with_master +=
            p->code.ranges.items[i].role == MSI_ROLE_MASTER && p->code.ranges.items[i].bytes > 0;
    }
    return masters ? with_master : half - with_master;
}

/* Values in 16 bits round, and nothing else that a plan does changes a bit of what comes of that. */
static void mixed_graphs_are_equal_bit_for_bit(void **state) {
    (void)state;
    static trial t;
    uint64_t first = t_environment("MEMSCALE_TEST_SEED", 1);
    uint64_t count = t_environment("MEMSCALE_TEST_DAGS", t_sweep(QUICK_GRAPHS, GRAPHS));
    uint64_t casts = 0, recomputes = 0, masters = 0, alone = 0;
    for (uint64_t seed = first; seed < first + count; ++seed) {
        bool fine = run_trial(&t, seed, RD_FAULT_NONE, seed % 4 == 0, true);
        if (!fine) {
            print_error("%s\n", t.failure);
            rd_print(t.graph);
        } else {
            const msi_program *p = &t.net[1]->model->run.plan->train;
            casts += count_ops(p, MSI_OP_CAST);
            recomputes += p->code.recompute_count;
            masters += count_half_params(p, t.net[1]->model->run.store, true);
            alone += count_half_params(p, t.net[1]->model->run.store, false);
        }
        trial_end(&t);
        if (t.failure[0] != 0) {
            print_error("%s\nfailed, mixed: MEMSCALE_TEST_SEED=%llu MEMSCALE_TEST_DAGS=1\n",
                        t.failure, (unsigned long long)seed);
            fail();
        }
    }
    assert_true(count < 50 || (casts > 2 * count && recomputes > count / 2));
    assert_true(count < 50 || (masters > count / 8 && alone > count / 8));
}

static void the_graphs_cover_the_contract(void **state) {
    (void)state;
    uint32_t lacking = 0;
    if (total_graphs < 500) {
        print_message("skipped: %llu graphs are too few\n", (unsigned long long)total_graphs);
        skip();
    }
    for (int i = 0; i < RD_FEATURE_COUNT; ++i) {
        if (totals[i] * 100 < rd_feature_share(i) * total_graphs) {
            print_error("%s: %llu of %llu graphs, expected %u in 100\n", rd_feature_name(i),
                        (unsigned long long)totals[i], (unsigned long long)total_graphs,
                        (unsigned)rd_feature_share(i));
            lacking += 1;
        }
    }
    assert_int_equal(lacking, 0);
    assert_true(total_graphs < 5000 || total_mapped * 1000 >= total_graphs);
}

/* How many graphs fail where layers do not keep to their word, and in how many of these debug mode
   says so. */
static uint32_t count_failures(rd_fault fault, bool debug, bool mixed, uint32_t *named) {
    static trial t;
    uint32_t failures = 0;
    *named = 0;
    for (uint64_t seed = 1; seed <= faulty_graphs(); ++seed) {
        failures += !run_trial(&t, seed, fault, debug, mixed);
        *named += strstr(t.failure, "MS_RESULT_CONTRACT") != NULL;
        trial_end(&t);
    }
    return failures;
}

static void planted_faults_are_seen(void **state) {
    (void)state;
    uint32_t named;
    assert_int_equal(count_failures(RD_FAULT_NONE, false, false, &named), 0);
    for (int fault = RD_FAULT_NONE + 1; fault < RD_FAULT_COUNT; ++fault) {
        uint32_t seen = count_failures((rd_fault)fault, false, false, &named);
        if (seen < faulty_graphs() / 20) {
            print_error("fault %d is seen in %u of %d graphs\n", fault, (unsigned)seen,
                        (int)faulty_graphs());
            fail();
        }
    }
}

/* Debug mode finds them in one step, at the layer. What it cannot see is a gradient that is
   overwritten: the layer does so each time. */
static void expect_named_faults(bool mixed) {
    uint32_t named;
    assert_int_equal(count_failures(RD_FAULT_NONE, true, mixed, &named), 0);
    for (int fault = RD_FAULT_NONE + 1; fault < RD_FAULT_COUNT; ++fault) {
        uint32_t seen = count_failures((rd_fault)fault, true, mixed, &named);
        if (fault != RD_FAULT_BETA && (named < faulty_graphs() / 20 || named * 10 < seen * 9)) {
            print_error("fault %d is seen in %u graphs%s, in %u of them by debug mode\n", fault,
                        (unsigned)seen, mixed ? " in 16 bits" : "", (unsigned)named);
            fail();
        }
    }
}

static void debug_mode_names_planted_faults(void **state) {
    (void)state;
    expect_named_faults(false);
    expect_named_faults(true);
}

/* In a dry run nothing is called, with callbacks or without, and its plan is whole. With callbacks
   it is the plan that a model with memory gets. */
static bool dry_run(uint64_t seed, bool bare, char *failure) {
    static trial t;
    ms_memory_report dry_report, report;
    ms_config config = t_config();
    rd_graph *g = rd_generate(seed);
    failure[0] = 0;
    memset(&t, 0, sizeof t);
    config.force_optimize = (seed & 1) != 0;
    rd_net *live = rd_net_create(g, &config, "live", failure, false);
    config.dry_run = true;
    rd_net *dry = rd_net_create(g, &config, "dry run", failure, bare);
    bool fine = TRY(dry, ms_wrap(dry->model)) && TRY(dry, ms_report(dry->model, &dry_report)) &&
                TRY(live, ms_wrap(live->model)) && TRY(live, ms_report(live->model, &report));
    if (fine && !bare &&
        memcmp(&dry_report, &report, offsetof(ms_memory_report, peak_layer)) != 0) {
        fine = rd_fail(&dry->run, "its report is another");
    }
    if (fine && ms_step(dry->model, NULL) != MS_RESULT_DRY_RUN) {
        fine = rd_fail(&dry->run, "ms_step does not refuse");
    }
    if (fine) {
        fine = replay_begin(&t, dry, true);
        replayed.fills = false;
        fine = fine &&
               TRY(dry, ms_visit_events(dry->model, MS_PROGRAM_TRAIN, replay_event, &replayed));
        replay_keep_lasting(&replayed);
        fine =
            fine && TRY(dry, ms_visit_events(dry->model, MS_PROGRAM_EVAL, replay_event, &replayed));
    }
    replay_end();
    rd_net_destroy(live);
    rd_net_destroy(dry);
    free(g);
    return fine && failure[0] == 0;
}

static void dry_runs_hand_out_whole_plans(void **state) {
    (void)state;
    char failure[RD_TEXT];
    for (uint64_t seed = 1; seed <= 4 * faulty_graphs(); ++seed) {
        if (!dry_run(seed, seed % 3 == 0, failure)) {
            print_error("graph %llu: %s\n", (unsigned long long)seed, failure);
            fail();
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(random_graphs_are_equal_bit_for_bit),
        cmocka_unit_test(the_smallest_budget_is_that_of_a_plain_plan),
        cmocka_unit_test(graphs_without_a_loss_are_evaluated),
        cmocka_unit_test(mixed_graphs_are_equal_bit_for_bit),
        cmocka_unit_test(the_graphs_cover_the_contract),
        cmocka_unit_test(dry_runs_hand_out_whole_plans),
        cmocka_unit_test(planted_faults_are_seen),
        cmocka_unit_test(debug_mode_names_planted_faults),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
