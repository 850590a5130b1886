/*  test_between.c - what is read and written between any two calls. Two models of one random graph,
    a plain one on the CPU and one that moves values, changes its plan, is suspended, or works late,
    take the same random walk: forward, backward and update, steps whole and in slices, evals, other
    budgets and sizes. In between, whatever may be read is the same in both, whatever is written is
    what the next call uses, and what is forbidden is an error that changes nothing.
    MEMSCALE_TEST_DAGS sets how many graphs there are, MEMSCALE_TEST_SEED which is the first. */
#define T_OFFLOADS
#include "private.h"
#include "toy_layers.h"
#include "random_dag.h"
#include "random_tiles.h"
#include "virtual.h"
#include "late_dag.h"
#include "slices.h"

enum { QUICK_GRAPHS = 48, GRAPHS = 1500, MOVES = 40, BUDGETS = 4, TRAIL = 40, WIDEST = 1024 };

static uint64_t first_seed(void) {
    return t_environment("MEMSCALE_TEST_SEED", 1);
}

static uint64_t end_seed(void) {
    return first_seed() + t_environment("MEMSCALE_TEST_DAGS", t_sweep(QUICK_GRAPHS, GRAPHS));
}

typedef enum stage { IDLE, AFTER_FORWARD, AFTER_BACKWARD } stage;

/* Both models: number 0 is the plain one. The graph is one of `dag` and `rows`. */
typedef struct walk {
    rd_graph *dag;
    rt_graph *rows;
    rd_net *of_dag[2];
    rt_net *of_rows[2];
    ms_model *m[2];
    const ms_tensor *handle[2];
    uint32_t value_count, micros, micro, steps_due; // steps that layers have not been told of
    uint64_t seed, round, budget[BUDGETS];
    int64_t size[MS_LIMIT_AXES], largest[MS_LIMIT_AXES];
    stage at;
    bool codes;       // state is in 8 bits
    bool half;        // and values in 16
    ms_config config; // of the moved model
    v_layer *layers;  // or NULL: it does not run late
    bool is_new;      // the moved model has loaded, and run nothing since
    uint32_t saves;   // from which it went on
    bool tainted;     // tiles have added to gradients of a step, and no backward has followed
    t_rng rng;
    char failure[RD_TEXT], trail[TRAIL];
    uint32_t *writes; // between backward and update, of params and state
} walk;

typedef union bytes {
    uint64_t align;
    float number[WIDEST];
    uint8_t byte[WIDEST * 8];
} bytes;

static void stop(const walk *w, const char *what, const char *why) {
    fail_msg("MEMSCALE_TEST_SEED=%llu, after %s: %s: %s %s", (unsigned long long)w->seed, w->trail,
             what, why, w->failure);
}

static void expect(const walk *w, int k, ms_result result, ms_result expected, const char *call) {
    if (result != expected || w->failure[0] != 0) {
        char why[RD_TEXT];
        snprintf(why, sizeof why, "%s model: %s, not %s: %.300s", k ? "moved" : "plain",
                 ms_result_name(result), ms_result_name(expected), ms_last_error(w->m[k]));
        stop(w, call, why);
    }
}

#define EXPECT(w, k, call, expected) expect((w), (k), (call), (expected), #call)
#define OK(w, k, call)               EXPECT(w, k, call, MS_RESULT_OK)
#define REFUSED(w, k, call)          EXPECT(w, k, call, MS_RESULT_ORDER)

/* The trail has the latest calls. */
static void note(walk *w, char call) {
    size_t used = strlen(w->trail);
    if (used + 1 == TRAIL) {
        memmove(w->trail, w->trail + 1, used--);
    }
    w->trail[used] = call;
    w->trail[used + 1] = 0;
}

/* Whether the moved model has updated params in backward, which the plain one never does. */
static bool has_begun(const walk *w) {
    return w->at == AFTER_BACKWARD && w->m[1]->run.updates_done > 0;
}

// ------------------------------------------------------------------------------------------------
// tensors

static const msi_tensor *tensor_of(const walk *w, uint32_t value) {
    return &w->m[0]->graph.tensors.items[msi_index(&w->m[0]->graph, w->handle[0][value])];
}

/* A value (role -2), its gradient (-1) or its optimizer state. */
static ms_tensor handle_of(const walk *w, int k, uint32_t value, int role) {
    const ms_tensor handle = w->handle[k][value];
    return role == -2   ? handle
           : role == -1 ? ms_gradient(w->m[k], handle)
                        : ms_optimizer_state(w->m[k], handle, role);
}

static bool is_kept(const msi_tensor *t) {
    return t->kind == MSI_KIND_INPUT || t->kind == MSI_KIND_PARAM || t->kind == MSI_KIND_BUFFER;
}

static int state_count(const walk *w, const msi_tensor *t) {
    return t->kind == MSI_KIND_PARAM && msi_learns(t)
               ? (int)msi_state_count(&w->m[0]->optimizers, t)
               : 0;
}

static bool is_lent_gradient(const msi_tensor *t) {
    return t->kind == MSI_KIND_PARAM && msi_learns(t) && msi_is_borrowed(t, MSI_ROLE_GRADIENT);
}

/* Random numbers that keep losses finite; of tiles whole ones, whose sums are exact. */
static void fill(const walk *w, uint32_t value, int role, bytes *to) {
    t_rng rng = t_seed(w->round * 7919 + value * 11 + (uint64_t)(role + 2));
    const uint64_t count = ms_tensor_count(w->m[0], w->handle[0][value]);
    const bool squares =
        msi_desc_of(&w->m[0]->optimizers, tensor_of(w, value))->kind == MS_OPTIMIZER_ADAFACTOR;
    if (role == -2 && w->dag) {
        rd_initial(w->dag, value, w->size, w->round, to->byte);
        return;
    }
    for (uint64_t i = 0; i < count; ++i) {
        const float unit = (float)t_unit(&rng);
        to->number[i] = w->rows ? (float)t_below(&rng, 9) - (role < 1 ? 4.0f : -1.0f)
                        : role == 1 || (role == 0 && squares) ? 0.5f + unit
                                                              : 0.5f * unit - 0.25f;
    }
}

/* Whether a model has so many bits of it as were written. */
static bool is_exact(const walk *w, int k, uint32_t value, int role) {
    const uint32_t t = msi_index(&w->m[k]->graph, w->handle[k][value]);
    const msi_role of = role == -2   ? MSI_ROLE_VALUE
                        : role == -1 ? MSI_ROLE_GRADIENT
                                     : (msi_role)(MSI_ROLE_STATE0 + role);
    const msi_resident *r = msi_find_value(w->m[k]->run.store, t, of);
    return r != NULL && r->format == MSI_FORMAT_F32;
}

static void write_one(walk *w, uint32_t value, int role) {
    static bytes data, back;
    const size_t size = (size_t)ms_tensor_bytes(w->m[0], handle_of(w, 0, value, role));
    fill(w, value, role, &data);
    for (int k = 0; k < 2; ++k) {
        const ms_tensor handle = handle_of(w, k, value, role);
        OK(w, k, ms_write(w->m[k], handle, data.byte));
        if (w->m[k]->run.store != NULL && t_chance(&w->rng, 0.5)) {
            OK(w, k, ms_read(w->m[k], handle, back.byte));
            if (is_exact(w, k, value, role) && memcmp(data.byte, back.byte, size) != 0) {
                stop(w, ms_tensor_name(w->m[k], handle), "other bits than were written are read");
            }
        }
    }
}

/* Writes what there is of a value, each with this chance. A first moment without the second one, which
   may be zero, would make an update of any size. */
static void write_value(walk *w, uint32_t value, double chance) {
    const msi_tensor *t = tensor_of(w, value);
    const bool is_param = t->kind == MSI_KIND_PARAM;
    bool has_moment = false;
    for (int role = -2; role < state_count(w, t); ++role) {
        const bool may = role == -1 ? is_lent_gradient(t) : is_kept(t);
        if (may && !(is_param && has_begun(w)) && (t_chance(&w->rng, chance) || has_moment)) {
            write_one(w, value, role);
            has_moment = role == 0;
            *w->writes += is_param && w->at == AFTER_BACKWARD;
            w->tainted |= w->at == AFTER_FORWARD && w->m[1]->run.plan->train.code.sweeps;
            w->at = w->at == AFTER_FORWARD ? IDLE : w->at;
        }
    }
}

static void write_some(walk *w, double chance) {
    note(w, 'w');
    w->round += 1;
    for (uint32_t value = 0; value < w->value_count; ++value) {
        write_value(w, value, chance);
    }
}

/* Inputs are those of the pass, and params whole numbers where sums have to be exact. */
static void write_given(walk *w, bool all) {
    w->round += 1;
    for (uint32_t value = 0; value < w->value_count; ++value) {
        const msi_tensor *t = tensor_of(w, value);
        const bool is_new = t->kind == MSI_KIND_INPUT && (!t->written || t_chance(&w->rng, 0.7));
        if (is_new || (is_kept(t) && (all || (w->rows && t->kind == MSI_KIND_PARAM)))) {
            write_one(w, value, -2);
        }
    }
}

/* Whether a gradient means something now, and the same in every plan. */
static bool has_gradients(const walk *w) {
    return w->at == AFTER_BACKWARD || (w->at == IDLE && w->micro > 0 && !w->tainted);
}

/* What both have to tell, or neither. */
static bool is_told_alike(const walk *w, const msi_tensor *t, int role) {
    const uint32_t index = (uint32_t)(t - w->m[0]->graph.tensors.items);
    return role == -1
               ? is_lent_gradient(t) && has_gradients(w)
               : is_kept(t) || (!w->is_new && (t->is_output || index == w->m[0]->graph.loss));
}

static void read_one(walk *w, uint32_t value, int role) {
    static bytes data[2];
    const msi_tensor *t = tensor_of(w, value);
    const bool learns = t->kind == MSI_KIND_PARAM && msi_learns(t);
    const size_t size = (size_t)ms_tensor_bytes(w->m[0], w->handle[0][value]);
    ms_result result[2];
    for (int k = 0; k < 2; ++k) {
        const ms_tensor handle = handle_of(w, k, value, role);
        result[k] = ms_read(w->m[k], handle, data[k].byte);
        if (result[k] != MS_RESULT_OK || (is_kept(t) && role != -1)) {
            EXPECT(w, k, result[k], is_kept(t) && role != -1 ? MS_RESULT_OK : MS_RESULT_ORDER);
        }
    }
    const bool same_results = result[0] == result[1];
    const bool is_early = role == -1 && result[1] == MS_RESULT_ORDER && has_begun(w);
    if (!same_results && is_told_alike(w, t, role) && !is_early) {
        stop(w, ms_tensor_name(w->m[0], w->handle[0][value]), "only one of the models tells it");
    }
    if (role == -1 && w->at == AFTER_BACKWARD && result[0] == MS_RESULT_OK && !is_early) {
        EXPECT(w, 1, result[1], MS_RESULT_OK);
    }
    const bool compares = role == -1 ? has_gradients(w) : !(learns && has_begun(w));
    if (result[0] == MS_RESULT_OK && result[1] == MS_RESULT_OK && compares &&
        memcmp(data[0].byte, data[1].byte, size) != 0) {
        char what[64];
        snprintf(what, sizeof what, "%s, role %d", ms_tensor_name(w->m[0], w->handle[0][value]),
                 role);
        stop(w, what, "the models differ");
    }
}

static void read_some(walk *w, double chance) {
    note(w, 'r');
    for (uint32_t value = 0; value < w->value_count; ++value) {
        const msi_tensor *t = tensor_of(w, value);
        for (int role = -2; role < state_count(w, t); ++role) {
            const bool may = role != -1 || (t->kind == MSI_KIND_PARAM && msi_learns(t));
            if (may && t_chance(&w->rng, chance)) {
                read_one(w, value, role);
            }
        }
    }
}

// ------------------------------------------------------------------------------------------------
// files in memory

typedef struct saved {
    uint8_t *data;
    size_t bytes, room;
} saved;

static int save_to_memory(void *user, const void *data, size_t size) {
    saved *s = (saved *)user;
    if (s->bytes + size > s->room) {
        s->room = 2 * (s->bytes + size);
        s->data = (uint8_t *)realloc(s->data, s->room);
        assert_non_null(s->data);
    }
    memcpy(s->data + s->bytes, data, size);
    s->bytes += size;
    return 0;
}

static int load_from_memory(void *user, uint64_t offset, void *data, size_t size) {
    const saved *s = (const saved *)user;
    if (offset > s->bytes || size > s->bytes - offset) {
        return 1;
    }
    memcpy(data, s->data + offset, size);
    return 0;
}

// ------------------------------------------------------------------------------------------------
// what is forbidden, and changes nothing

static void refuse_writes(walk *w, int k, ms_result expected) {
    static bytes data;
    memset(&data, 0x3f, sizeof data);
    for (uint32_t value = 0; value < w->value_count; ++value) {
        if (is_kept(tensor_of(w, value)) && t_chance(&w->rng, 0.3)) {
            EXPECT(w, k, ms_write(w->m[k], w->handle[k][value], data.byte), expected);
        }
    }
}

/* What needs the model between steps. */
static void refuse_steps(walk *w, int k) {
    double loss;
    uint64_t budget;
    ms_verify_report verified;
    ms_nonfinite nonfinite;
    ms_model *m = w->m[k];
    saved none = {NULL, 0, 0};
    const ms_sink sink = {save_to_memory, &none};
    const ms_source source = {load_from_memory, &none, 0};
    REFUSED(w, k, ms_save(m, &sink));
    REFUSED(w, k, ms_load(m, &source, NULL));
    REFUSED(w, k, ms_forward(m, &loss));
    REFUSED(w, k, ms_step(m, NULL));
    REFUSED(w, k, ms_eval(m, &loss));
    REFUSED(w, k, ms_verify(m, NULL, NULL, &verified));
    REFUSED(w, k, ms_find_nonfinite(m, &nonfinite));
    if (!msi_is_suspended(m)) {
        REFUSED(w, k, ms_wrap(m));
        REFUSED(w, k, ms_detach(m));
        if (m->graph.axis_count > 0) {
            REFUSED(w, k, ms_reshape(m, w->size));
        }
        REFUSED(w, k, ms_smallest_budget(m, &budget));
    }
}

static void try_forbidden(walk *w) {
    static bytes data;
    note(w, 'x');
    memset(&data, 0x3f, sizeof data);
    for (int k = 0; k < 2; ++k) {
        ms_model *m = w->m[k];
        for (uint32_t value = 0; value < w->value_count; ++value) {
            const msi_tensor *t = tensor_of(w, value);
            if (!is_kept(t)) {
                EXPECT(w, k, ms_write(m, w->handle[k][value], data.byte), MS_RESULT_INVALID);
            } else if (t->kind == MSI_KIND_PARAM && !is_lent_gradient(t)) {
                EXPECT(w, k, ms_write(m, handle_of(w, k, value, -1), data.byte), MS_RESULT_INVALID);
            }
        }
        if (w->at != AFTER_FORWARD) {
            REFUSED(w, k, ms_backward(m));
        }
        if (w->at != AFTER_BACKWARD && w->micro == 0) {
            REFUSED(w, k, ms_update(m));
        }
        REFUSED(w, k, ms_resume(m));
    }
    if (has_begun(w)) {
        refuse_steps(w, 1);
        if (w->m[1]->config.clock != NULL) {
            REFUSED(w, 1, ms_step_slice(w->m[1], 1, NULL));
        }
    }
}

// ------------------------------------------------------------------------------------------------
// calls

/* Layers that run late look at numbers that are about to change. */
static void settle(walk *w) {
    OK(w, 1, ms_synchronize(w->m[1]));
    for (int k = 0; k < 2 && w->rows; ++k) {
        if (w->of_rows[k]->fault != NULL) {
            stop(w, "a callback", w->of_rows[k]->fault);
        }
    }
}

static void begin_pass(walk *w) {
    settle(w);
    w->is_new = false;
    for (int k = 0; k < 2 && w->dag; ++k) {
        rd_run *run = &w->of_dag[k]->run;
        run->step += w->steps_due;
        run->micro = w->micro;
        for (uint32_t i = 0; i < w->dag->layer_count; ++i) {
            run->op[i].forwards = run->op[i].backwards = run->op[i].recomputes = 0;
        }
    }
    w->steps_due = 0;
}

static void drop_step(walk *w) {
    w->micro = w->at == AFTER_BACKWARD ? 0 : w->micro;
    w->tainted |= w->at == AFTER_FORWARD && w->m[1]->run.plan->train.code.sweeps;
    w->at = IDLE;
}

static void note_update(walk *w) {
    w->steps_due += 1;
    w->micro = 0;
    w->at = IDLE;
}

static void same_loss(const walk *w, const double *loss) {
    if (memcmp(&loss[0], &loss[1], sizeof loss[0]) != 0) {
        stop(w, "the loss", "the models differ");
    }
}

/* What a sweep has added without a backward has no place in an update: the step is given up. */
static void give_up_tainted(walk *w) {
    ms_cancel(w->m[0]);
    EXPECT(w, 0, ms_forward(w->m[0], NULL), MS_RESULT_CANCELLED);
    w->micro = 0;
    w->tainted = false;
}

/* The next pass begins. If a sweep was dropped, the step begins anew in both. */
static void begin(walk *w) {
    drop_step(w);
    if (w->tainted && w->micro > 0) {
        REFUSED(w, 1, ms_forward(w->m[1], NULL));
        give_up_tainted(w);
    }
    w->tainted = false;
    write_given(w, false);
    begin_pass(w);
}

static void forward(walk *w) {
    double loss[2];
    const bool waits = t_chance(&w->rng, 0.5);
    begin(w);
    note(w, 'F');
    for (int k = 0; k < 2; ++k) {
        OK(w, k, ms_forward(w->m[k], waits ? &loss[k] : NULL));
    }
    if (waits) {
        same_loss(w, loss);
    }
    w->at = AFTER_FORWARD;
}

static void backward(walk *w) {
    note(w, 'B');
    for (int k = 0; k < 2; ++k) {
        OK(w, k, ms_backward(w->m[k]));
    }
    const bool last = w->micro + 1 == w->micros;
    w->micro += !last;
    w->at = last ? AFTER_BACKWARD : IDLE;
}

static void update(walk *w) {
    note(w, 'U');
    for (int k = 0; k < 2; ++k) {
        OK(w, k, ms_update(w->m[k]));
    }
    note_update(w);
}

// ------------------------------------------------------------------------------------------------
// a run that is saved, and goes on in another model

/* Makes the model that moves values, by a plan that is another one each time. */
static void make_moved(walk *w) {
    rd_graph *g = w->dag;
    g->move = w->layers ? ld_move : NULL;
    g->mover = w->layers;
    w->of_dag[1] = rd_net_create(g, &w->config, "moved", w->failure, false);
    g->move = NULL;
    w->m[1] = w->of_dag[1]->model;
    w->handle[1] = w->of_dag[1]->handle;
    rd_force_moves(w->of_dag[1], &w->rng);
}

/* Forces formats, the same in both models; which state can be in codes is known after ms_wrap. */
static void force_formats(walk *w, int k, bool wraps) {
    if (w->half) {
        rd_force_half(w->of_dag[k], w->seed);
    }
    if (w->codes || wraps) {
        OK(w, k, ms_wrap(w->m[k]));
    }
    if (w->codes) {
        rd_force_codes(w->of_dag[k], w->seed);
    }
}

/* What layers expect goes on in a new net. */
static void hand_over(rd_run *to, const rd_run *from) {
    to->step = from->step;
    to->micro = from->micro;
    memcpy(to->size, from->size, sizeof to->size);
    for (uint32_t i = 0; i < from->graph->layer_count; ++i) {
        to->op[i].drawn = from->op[i].drawn;
        to->op[i].drawn_step = from->op[i].drawn_step;
        to->op[i].drawn_micro = from->op[i].drawn_micro;
    }
}

/* The moved model ends, and its run goes on in a new one, from what it saved: now and then beside a
   sink that fails, which changes nothing. */
static void restart(walk *w) {
    static bytes data;
    saved file = {NULL, 0, 0};
    const ms_sink sink = {save_to_memory, &file};
    if (!w->dag || w->at != IDLE || w->tainted) {
        if (w->at != IDLE) {
            REFUSED(w, 1, ms_save(w->m[1], &sink));
        }
        return;
    }
    note(w, 'L');
    OK(w, 1, ms_save(w->m[1], &sink));
    rd_net *old = w->of_dag[1];
    static rd_run run;
    run = old->run;
    rd_net_destroy(old);
    make_moved(w);
    hand_over(&w->of_dag[1]->run, &run);
    force_formats(w, 1, false);
    ms_set_budget(w->m[1], w->budget[t_below(&w->rng, BUDGETS)]);
    ms_result wrapped = ms_wrap(w->m[1]);
    if (wrapped == MS_RESULT_BUDGET) { // other values are forced to move now
        ms_set_budget(w->m[1], t_config().memory_budget_bytes);
        wrapped = ms_wrap(w->m[1]);
    }
    OK(w, 1, wrapped);
    if (w->m[1]->graph.axis_count > 0) {
        OK(w, 1, ms_reshape(w->m[1], w->size));
    }
    const ms_source source = {load_from_memory, &file, file.bytes};
    OK(w, 1, ms_load(w->m[1], &source, NULL));
    for (uint32_t value = 0; value < w->value_count; ++value) {
        if (tensor_of(w, value)->kind == MSI_KIND_INPUT && tensor_of(w, value)->written) {
            OK(w, 0, ms_read(w->m[0], w->handle[0][value], data.byte));
            OK(w, 1, ms_write(w->m[1], w->handle[1][value], data.byte));
        }
    }
    free(file.data);
    w->is_new = true;
    w->saves += 1;
    read_some(w, 1.0);
}

/* Ends a step after some of its micro-batches. */
static void end_early(walk *w) {
    note(w, 'u');
    drop_step(w);
    if (w->tainted) {
        REFUSED(w, 1, ms_update(w->m[1]));
        give_up_tainted(w);
        return;
    }
    for (int k = 0; k < 2; ++k) {
        OK(w, k, ms_update(w->m[k]));
    }
    note_update(w);
}

static void note_step(walk *w) {
    if (w->micro + 1 == w->micros) {
        note_update(w);
    } else {
        w->micro += 1;
    }
}

static void step(walk *w) {
    double loss[2];
    begin(w);
    note(w, 'S');
    for (int k = 0; k < 2; ++k) {
        OK(w, k, ms_step(w->m[k], &loss[k]));
    }
    same_loss(w, loss);
    note_step(w);
}

/* The moved model is between slices: what the step has not changed is as it was, and as in the
   plain model, which has not begun the step. */
static void between_slices(walk *w) {
    static bytes data[2];
    ms_model *m = w->m[1];
    const bool updates = m->run.updates_done > 0;
    for (uint32_t value = 0; value < w->value_count; ++value) {
        const msi_tensor *t = tensor_of(w, value);
        const bool stays =
            t->kind == MSI_KIND_INPUT || (t->kind == MSI_KIND_PARAM && !msi_learns(t));
        for (int role = -2; role < state_count(w, t); ++role) {
            if (role == -1 || !is_kept(t) || t->kind == MSI_KIND_BUFFER ||
                !t_chance(&w->rng, 0.2)) {
                continue;
            }
            const size_t size = (size_t)ms_tensor_bytes(m, w->handle[1][value]);
            EXPECT(w, 1, ms_read(m, handle_of(w, 1, value, role), data[1].byte),
                   updates && !stays ? MS_RESULT_ORDER : MS_RESULT_OK);
            if (!updates || stays) {
                OK(w, 0, ms_read(w->m[0], handle_of(w, 0, value, role), data[0].byte));
                if (memcmp(data[0].byte, data[1].byte, size) != 0) {
                    stop(w, ms_tensor_name(m, w->handle[1][value]), "differs between slices");
                }
            }
        }
    }
    if (t_chance(&w->rng, 0.3)) {
        refuse_writes(w, 1, MS_RESULT_ORDER);
        refuse_steps(w, 1);
        REFUSED(w, 1, ms_backward(m));
        REFUSED(w, 1, ms_update(m));
    }
}

/* What a suspended model refuses. */
static void suspend(walk *w) {
    static bytes data;
    ms_model *m = w->m[1];
    const bool lends = t_chance(&w->rng, 0.5);
    void *memory = lends ? malloc((size_t)ms_suspended_bytes(m) + 1) : NULL;
    OK(w, 1, ms_suspend(m, memory));
    refuse_writes(w, 1, MS_RESULT_ORDER);
    refuse_steps(w, 1);
    REFUSED(w, 1, ms_backward(m));
    REFUSED(w, 1, ms_update(m));
    REFUSED(w, 1, ms_suspend(m, NULL));
    for (uint32_t value = 0; value < w->value_count; ++value) {
        if (is_kept(tensor_of(w, value)) && t_chance(&w->rng, 0.3)) {
            REFUSED(w, 1, ms_read(m, w->handle[1][value], data.byte));
        }
    }
    OK(w, 1, ms_resume(m));
    free(memory);
}

/* How many slices there are depends on threads that copy: they have random numbers of their own, so
   that the walk after them is the same each time. */
static void step_in_slices(walk *w) {
    double loss[2];
    ms_result result = MS_RESULT_MORE;
    begin(w);
    note(w, 'P');
    const t_rng rng = w->rng;
    w->rng = t_seed(w->seed * 31 + w->round);
    for (uint32_t k = 0; result == MS_RESULT_MORE && k < 100000; ++k) {
        result = ms_step_slice(w->m[1], t_below(&w->rng, 40), &loss[1]);
        if (result == MS_RESULT_MORE && !w->m[1]->run.slices.is_enqueued &&
            t_chance(&w->rng, 0.1)) {
            between_slices(w);
        }
        if (result == MS_RESULT_MORE && t_chance(&w->rng, 0.03)) {
            suspend(w);
        }
    }
    w->rng = rng;
    OK(w, 1, result);
    OK(w, 0, ms_step(w->m[0], &loss[0]));
    same_loss(w, loss);
    note_step(w);
}

static void eval(walk *w) {
    double loss[2];
    drop_step(w);
    write_given(w, false);
    begin_pass(w);
    note(w, 'E');
    for (int k = 0; k < 2; ++k) {
        OK(w, k, ms_eval(w->m[k], &loss[k]));
    }
    same_loss(w, loss);
}

/* Un-forces layers whose rows cannot be parted. A budget that was found for other sizes may be too
   small for these: then the least one is large enough. */
static void wrap_moved(walk *w, uint64_t budget) {
    uint64_t smallest;
    ms_set_budget(w->m[1], budget);
    ms_result result = ms_wrap(w->m[1]);
    for (uint32_t i = 0; w->rows && i < w->rows->layer_count && result == MS_RESULT_INVALID; ++i) {
        ms_set_layer_technique(w->m[1], w->of_rows[1]->layer[i], MS_TECHNIQUE_TILING,
                               MS_SWITCH_DEFAULT);
        result = ms_wrap(w->m[1]);
    }
    if (result == MS_RESULT_BUDGET) {
        OK(w, 1, ms_smallest_budget(w->m[1], &smallest));
        if (smallest <= budget) {
            stop(w, "ms_wrap", "refuses the smallest budget");
        }
        ms_set_budget(w->m[1], smallest);
        result = ms_wrap(w->m[1]);
    }
    OK(w, 1, result);
}

/* Detaches the moved model, or tries to: sums of scaled gradients are not mixed with others, and
   what is refused changes nothing. */
static void detach(walk *w) {
    const bool scaled =
        w->micro > 0 && w->at != AFTER_BACKWARD && w->m[1]->run.plan->train.code.scales_loss;
    if (scaled) {
        REFUSED(w, 1, ms_detach(w->m[1]));
    } else {
        drop_step(w);
        OK(w, 0, ms_wrap(w->m[0]));
        OK(w, 1, ms_detach(w->m[1]));
    }
    read_some(w, 0.3);
}

/* Another budget; the plain model drops its step by wrapping again. */
static void wrap(walk *w) {
    note(w, 'W');
    settle(w);
    const ms_optimizer_desc *o = &w->m[1]->optimizers.groups.items[0].desc;
    const bool rounds = w->codes && (o->state_format[0] || o->state_format[1]); // codes, to BF16
    if (!rounds && t_chance(&w->rng, 0.3)) {
        detach(w);
    }
    drop_step(w);
    OK(w, 0, ms_wrap(w->m[0]));
    wrap_moved(w, w->budget[t_below(&w->rng, BUDGETS)]);
}

static void reshape(walk *w) {
    note(w, 'R');
    settle(w);
    drop_step(w);
    for (uint32_t i = 0; i < w->m[0]->graph.axis_count; ++i) {
        w->size[i] = 1 + (int64_t)t_below(&w->rng, (uint32_t)w->largest[i]);
    }
    for (int k = 0; k < 2; ++k) {
        OK(w, k, ms_reshape(w->m[k], w->size));
        if (w->dag) {
            memcpy(w->of_dag[k]->run.size, w->size, sizeof w->of_dag[k]->run.size);
        }
    }
    if (w->rows) {
        w->rows->batch = w->size[0];
    }
    w->round += 1;
    for (uint32_t value = 0; value < w->value_count; ++value) {
        const msi_tensor *t = tensor_of(w, value);
        if (t->kind == MSI_KIND_INPUT || t->kind == MSI_KIND_BUFFER) {
            write_one(w, value, -2);
        }
    }
}

/* Whether the next call has an instruction before which it can end. */
static bool has_next(const walk *w, int k) {
    const msi_program *p = &w->m[k]->run.plan->train;
    return w->at == IDLE ||
           (w->at == AFTER_FORWARD ? p->code.forward_end < p->code.backward_end
                                   : p->code.backward_end < p->code.instructions.count);
}

/* The next call is cancelled before its first instruction: the step counts as not begun. */
static void cancel(walk *w) {
    if (!has_next(w, 0) || !has_next(w, 1)) {
        return;
    }
    if (w->at == IDLE) {
        begin(w);
    }
    note(w, 'C');
    settle(w);
    for (int k = 0; k < 2; ++k) {
        ms_model *m = w->m[k];
        ms_cancel(m);
        EXPECT(w, k,
               w->at == IDLE            ? ms_forward(m, NULL)
               : w->at == AFTER_FORWARD ? ms_backward(m)
                                        : ms_update(m),
               MS_RESULT_CANCELLED);
    }
    w->micro = 0;
    w->tainted = false;
    w->at = IDLE;
}

// ------------------------------------------------------------------------------------------------
// walks

/* Of few graphs, since plans for budgets take most of the time. */
static bool has_budgets(const walk *w) {
    return w->seed % 16 == 4;
}

static void move(walk *w) {
    const uint32_t chance = t_below(&w->rng, 100);
    if (chance < 5) {
        note(w, 's');
        suspend(w);
    } else if (w->at == AFTER_BACKWARD && (chance < 80 || has_begun(w))) {
        update(w);
    } else if (w->at != AFTER_BACKWARD && w->micro > 0 && chance < 12) {
        end_early(w);
    } else if (w->at == AFTER_FORWARD && chance < 80) {
        backward(w);
    } else if (chance < 45) {
        forward(w);
    } else if (chance < 58) {
        step(w);
    } else if (chance < 70 && w->m[1]->config.clock) {
        step_in_slices(w);
    } else if (chance < 80) {
        eval(w);
    } else if (chance < 90) {
        wrap(w);
    } else if (chance < 93 && w->m[0]->graph.axis_count > 0) {
        reshape(w);
    } else if (chance < 97) {
        restart(w);
    } else {
        cancel(w);
    }
}

static void gap(walk *w) {
    if (t_chance(&w->rng, w->at == AFTER_FORWARD ? 0.1 : 0.5)) {
        write_some(w, w->at == AFTER_BACKWARD ? 0.7 : 0.3);
    }
    if (t_chance(&w->rng, 0.4)) {
        read_some(w, t_chance(&w->rng, 0.5) ? 1.0 : 0.1);
    }
    if (t_chance(&w->rng, 0.2)) {
        try_forbidden(w);
    }
}

static void find_budgets(walk *w) {
    ms_memory_report report;
    uint64_t smallest;
    if (!has_budgets(w)) {
        for (int i = 0; i < BUDGETS; ++i) {
            w->budget[i] = t_config().memory_budget_bytes;
        }
        OK(w, 1, ms_wrap(w->m[1]));
        return;
    }
    OK(w, 1, ms_smallest_budget(w->m[1], &smallest));
    OK(w, 1, ms_wrap(w->m[1]));
    t_report(w->m[1], &report);
    const uint64_t most = report.arena_bytes > smallest ? report.arena_bytes : smallest;
    for (int i = 0; i < BUDGETS; ++i) {
        w->budget[i] = smallest + (most - smallest) * (uint64_t)i / (BUDGETS - 1);
    }
}

static void run(walk *w) {
    w->trail[0] = 0;
    find_budgets(w);
    write_given(w, true);
    for (int i = 0; i < MOVES; ++i) {
        move(w);
        gap(w);
    }
    while (w->at != IDLE) {
        w->at == AFTER_FORWARD ? backward(w) : update(w);
    }
    read_some(w, 1.0);
}

/* Of both, and what differs between them. */
static void choose_config(walk *w, ms_config *plain, ms_config *moved) {
    const ms_switch early = t_chance(&w->rng, 0.7) ? MS_SWITCH_OFF : MS_SWITCH_DEFAULT;
    plain->checkpointing = plain->early_update = MS_SWITCH_OFF;
    moved->early_update = early;
    moved->offloading = has_budgets(w) ? MS_SWITCH_ON : MS_SWITCH_DEFAULT;
    moved->force_optimize = w->seed % 8 == 2;
    plain->master_weights = moved->master_weights =
        w->seed % 4 == 1 ? MS_SWITCH_OFF : MS_SWITCH_DEFAULT;
    plain->loss_scaling.initial = moved->loss_scaling.initial = 16.0f;
    if (w->seed % 2) {
        s_slice(moved, w->seed);
    }
}

static void walk_dag(uint64_t seed, const ms_backend *backend, v_layer *layers, uint32_t *writes) {
    static walk w;
    ms_config plain = t_config(), moved = t_config();
    t_heap heap;
    rd_graph *g = rd_generate(seed);
    memset(&w, 0, sizeof w);
    memset(&heap, 0, sizeof heap);
    w.rng = t_seed(seed ^ 0xbe7);
    w.seed = seed;
    w.writes = writes;
    w.dag = layers ? ld_make_late(g, layers) : g;
    w.layers = layers;
    w.micros = g->accumulation ? g->accumulation : 1;
    w.value_count = g->value_count;
    memcpy(w.size, g->size, sizeof g->size);
    memset(g->trains, 0, sizeof g->trains); // steps at every size
    memcpy(w.largest, g->largest, sizeof g->largest);
    choose_config(&w, &plain, &moved);
    moved.allocator = t_heap_allocator(&heap);
    w.half = t_chance(&w.rng, 0.4);
    w.codes = t_chance(&w.rng, 0.4);
    if (backend) {
        moved.backend = *backend;
        moved.prefetch_depth = (uint32_t)(seed % 4);
    } else {
        moved.debug = seed % 8 == 0;
    }
    if (w.codes) {
        rd_random_formats(g, &w.rng);
    }
    if (w.half) {
        rd_random_dtypes(g, seed + 99);
        plain.mixed_dtype = moved.mixed_dtype =
            seed % 3 == 0 && t_is_built_in((int)g->optimizer.kind) ? MS_DTYPE_F16 : MS_DTYPE_BF16;
    }
    w.config = moved;
    make_moved(&w);
    w.of_dag[0] = rd_net_create(g, &plain, "plain", w.failure, false);
    w.m[0] = w.of_dag[0]->model;
    w.handle[0] = w.of_dag[0]->handle;
    for (int k = 0; k < 2; ++k) {
        force_formats(&w, k, t_chance(&w.rng, 0.5)); // or what is written first is kept for ms_wrap
        if (!rd_net_write(w.of_dag[k], 0, false)) {
            stop(&w, "the first values", "");
        }
    }
    OK(&w, 0, ms_wrap(w.m[0]));
    run(&w);
    rd_net_destroy(w.of_dag[1]);
    rd_net_destroy(w.of_dag[0]);
    if (w.failure[0] != 0 || heap.live_count != 0 || heap.wrong_releases != 0) {
        stop(&w, "the end", "");
    }
    free(g);
}

/* That the walks did what they are for; of a few graphs one may not. */
static void expect_writes(uint32_t writes) {
    print_message("%u params and states were written between backward and update\n",
                  (unsigned)writes);
    assert_true(writes > 0 || end_seed() - first_seed() < 10);
}

static void what_is_written_between_calls_is_used(void **state) {
    (void)state;
    uint32_t writes = 0;
    for (uint64_t seed = first_seed(); seed < end_seed(); ++seed) {
        walk_dag(seed, NULL, NULL, &writes);
    }
    expect_writes(writes);
}

/* On streams that run in an adversarial order. */
static void what_is_written_between_calls_of_a_device_is_used(void **state) {
    (void)state;
    static v_layer layers[RD_LAYERS];
    uint32_t writes = 0;
    for (uint64_t seed = first_seed(); seed < end_seed(); ++seed) {
        v_device device;
        v_open(&device, seed);
        const ms_backend backend = v_backend(&device);
        walk_dag(seed, &backend, layers, &writes);
        assert_int_equal(device.engine.pending, 0);
        assert_int_equal(device.callback_error, 0);
        assert_int_equal(device.overtaken, 0);
        v_close(&device);
    }
    expect_writes(writes);
}

static ms_layer_desc run_late(void *layers, uint32_t layer, const ms_layer_desc *desc) {
    return v_wrap(desc, (v_layer *)layers + layer);
}

static void force_tiles(walk *w) {
    rt_net *n = w->of_rows[1];
    const rt_graph *g = w->rows;
    for (uint32_t i = 0; i < g->layer_count; ++i) {
        if (g->layer[i].tiled) {
            ms_set_layer_technique(n->model, n->layer[i], MS_TECHNIQUE_TILING, MS_SWITCH_ON);
        }
    }
    for (uint32_t v = 0; v < g->value_count; ++v) {
        if (g->value[v].role != RT_INPUT && t_chance(&w->rng, 0.3)) {
            ms_set_tensor_technique(n->model, n->handle[v], MS_TECHNIQUE_OFFLOADING, MS_SWITCH_ON);
        }
    }
    wrap_moved(w, t_config().memory_budget_bytes);
}

static void walk_rows(uint64_t seed, const ms_backend *backend, v_layer *layers, uint32_t *writes) {
    static walk w;
    ms_config plain = t_config(), moved = t_config();
    t_heap heap;
    rt_graph *g = rt_generate(seed);
    memset(&w, 0, sizeof w);
    memset(&heap, 0, sizeof heap);
    w.rng = t_seed(seed ^ 0xbe7);
    w.seed = seed;
    w.writes = writes;
    w.rows = g;
    w.micros = g->micro_count;
    w.value_count = g->value_count;
    w.size[0] = g->batch;
    w.largest[0] = g->batch + 2;
    choose_config(&w, &plain, &moved);
    moved.allocator = t_heap_allocator(&heap);
    moved.backend = backend ? *backend : moved.backend;
    for (uint32_t i = 0; i < g->layer_count; ++i) {
        g->layer[i].desc.dtypes.accepts = 0;
    }
    w.of_rows[0] = rt_net_create(g, &plain, NULL, NULL);
    w.of_rows[1] = rt_net_create(g, &moved, layers ? run_late : NULL, layers);
    for (int k = 0; k < 2; ++k) {
        w.m[k] = w.of_rows[k]->model;
        w.handle[k] = w.of_rows[k]->handle;
    }
    OK(&w, 0, ms_wrap(w.m[0]));
    force_tiles(&w);
    run(&w);
    rt_net_destroy(w.of_rows[1]);
    rt_net_destroy(w.of_rows[0]);
    assert_true(heap.live_count == 0 && heap.wrong_releases == 0);
    free(g);
}

/* Gradients of a sweep are there after forward. */
static void what_is_written_between_calls_in_tiles_is_used(void **state) {
    (void)state;
    static v_layer layers[RT_LAYERS];
    uint32_t writes = 0;
    for (uint64_t seed = first_seed(); seed < end_seed(); ++seed) {
        v_device device;
        v_open(&device, seed);
        const ms_backend backend = v_backend(&device);
        const bool late = seed % 4 < 2;
        walk_rows(seed, late ? &backend : NULL, late ? layers : NULL, &writes);
        assert_int_equal(device.engine.pending, 0);
        v_close(&device);
    }
    expect_writes(writes);
}

int main(void) {
    t_hook.part_bytes = 128; // so that state comes in parts
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_is_written_between_calls_is_used),
        cmocka_unit_test(what_is_written_between_calls_of_a_device_is_used),
        cmocka_unit_test(what_is_written_between_calls_in_tiles_is_used),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
