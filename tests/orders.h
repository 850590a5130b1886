/*  orders.h - which operations of a plan's programs run in an order, and which must: those that use
    the same bytes, of the device or of the host, one of them to write. Nothing is run: what is
    enqueued where follows from the programs, as the section >>execute enqueues it. Streams run in
    order; else an operation happens before another one if a chain of waits says so.

        o_order o;
        o_open(&o, model);
        o_step(&o); o_eval(&o); ...             what is enqueued, from call to call
        o_finish(&o);
        o_races(&o, NULL, NULL)                 0: whatever must run in an order does
        o_races(&o, &omission, NULL)            the same with a wait left out
        o_close(&o);

        o_expect_ordered(model, name)           all of this, for a step and an eval
        o_leave_out_each(model, &tally)         each wait of both is left out, one at a time
        o_expect_needed(&tally)
        o_omit(&omission)                       leaves it out of the plan

    Include it after the implementation of memscale.h and testing.h. */
#ifndef ORDERS_H
#define ORDERS_H

/* What a program can do without for a try: a WAIT; that a copy waits for what is computed
   (follows); that it records an event. */
typedef enum o_kind { O_WAIT, O_FOLLOWS, O_EVENT, O_KIND_COUNT } o_kind;

typedef struct o_omission {
    const msi_program *program;
    uint32_t instruction;
    o_kind kind;
} o_omission;

typedef struct o_access {
    uintptr_t begin, end;
    bool writes;
    bool on_host; // by a callback, at once
} o_access;

/* How much of each stream happens before something. */
typedef struct o_clock {
    uint64_t of[MS_STREAM_COUNT];
} o_clock;

/* An instruction that is run, or NULL: whatever is computed between programs. A WAIT has no
   accesses. */
typedef struct o_operation {
    const msi_program *program;
    const msi_instruction *instruction;
    uint32_t access_first, access_count;
    ms_stream_kind stream;
    bool on_host; // the host waits too
    o_clock clock;
    o_clock host; // what the host has awaited
} o_operation;

/* Operations that conflict: `first` is enqueued before `second`, on another stream. */
typedef struct o_conflict {
    uint32_t first, second;
    bool on_host; // `second` does not wait for its turn: the host must have awaited `first`
} o_conflict;

typedef struct o_order {
    const ms_model *model;
    o_operation *operations;
    o_access *accesses;
    o_conflict *conflicts;
    uint32_t operation_count, access_count, conflict_count;
    uint32_t operation_room, access_room, conflict_room;
} o_order;

/* Room for one more item. */
static inline void *o_grow(void *items, uint32_t count, uint32_t *room, size_t bytes) {
    if (count < *room) {
        return items;
    }
    *room = *room == 0 ? 256 : 2 * *room;
    void *grown = realloc(items, *room * bytes);
    assert_non_null(grown);
    return grown;
}

static inline void o_open(o_order *o, const ms_model *model) {
    memset(o, 0, sizeof *o);
    o->model = model;
}

static inline void o_close(o_order *o) {
    free(o->operations);
    free(o->accesses);
    free(o->conflicts);
    memset(o, 0, sizeof *o);
}

// ------------------------------------------------------------------------------------------------
// what operations use

static inline bool o_is_written(const o_order *o, const msi_instruction *i, uint32_t operand) {
    if (!msi_calls_layer((msi_op)i->op)) {
        return !msi_is_source((msi_op)i->op, operand);
    }
    const msi_layer *l = &o->model->graph.layers.items[i->target];
    uint32_t slot;
    const int group = msi_operand_group(l, i, operand, &slot);
    return msi_is_written(l, i, group, slot);
}

static inline void o_use(o_order *o, const msi_program *p, const msi_instruction *i,
                         uint32_t operand) {
    const uint32_t index = p->code.operands.items[i->operand_first + operand].range;
    if (index == MSI_NONE) {
        return;
    }
    const msi_range *range = &p->code.ranges.items[index];
    const msi_tensor *tensor = &o->model->graph.tensors.items[range->tensor];
    const bool calls = msi_calls_layer((msi_op)i->op);
    const bool is_part = !calls && i->part_count > 1 && range->role != MSI_ROLE_NORM;
    const uint64_t whole = range->role < MSI_ROLE_RESIDENT_COUNT && tensor->bytes < range->bytes
                               ? tensor->bytes
                               : range->bytes;
    o->accesses =
        (o_access *)o_grow(o->accesses, o->access_count, &o->access_room, sizeof *o->accesses);
    o_access *a = &o->accesses[o->access_count++];
    a->begin = (uintptr_t)(calls ? msi_address(o->model, p, index)
                                 : msi_part_address(o->model, p, i, index));
    const msi_part part = msi_part_bytes(
        (msi_format)range->format, msi_part_of(tensor->bytes / sizeof(float), is_part ? i->part : 0,
                                               is_part ? i->part_count : 0));
    a->end = a->begin + (uintptr_t)(is_part ? part.count : whole);
    a->writes = o_is_written(o, i, operand);
    a->on_host = calls && index < o->model->run.store->residents.count &&
                 o->model->run.store->residents.items[index].is_shown;
}

/* Of a WAIT: whether callbacks use an end of the copy on the host. */
static inline bool o_waits_on_host(const o_order *o, const msi_program *p,
                                   const msi_instruction *i) {
    const msi_pair pair = msi_pair_of(o->model, p, i, 0);
    return msi_is_shown(o->model->run.store, &pair);
}

/* One more, which is computed. */
static inline o_operation *o_new(o_order *o) {
    o->operations = (o_operation *)o_grow(o->operations, o->operation_count, &o->operation_room,
                                          sizeof *o->operations);
    o_operation *op = &o->operations[o->operation_count++];
    memset(op, 0, sizeof *op);
    return op;
}

static inline void o_run(o_order *o, const msi_program *p, uint32_t begin, uint32_t end) {
    for (uint32_t now = begin; now < end; ++now) {
        const msi_instruction *i = &p->code.instructions.items[now];
        if (i->op == MSI_OP_NOTHING) {
            continue;
        }
        o_operation *op = o_new(o);
        op->program = p;
        op->instruction = i;
        op->stream = msi_engines[msi_ops[i->op].engine].stream;
        op->access_first = o->access_count;
        op->on_host = i->op == MSI_OP_WAIT && o_waits_on_host(o, p, i);
        for (uint32_t k = 0; k < i->operand_count && i->op != MSI_OP_WAIT; ++k) {
            o_use(o, p, i, k);
        }
        op->access_count = o->access_count - op->access_first;
    }
}

/* Whatever may happen between programs: something else is computed, in any memory. */
static inline void o_anything(o_order *o) {
    o_operation *op = o_new(o);
    o->accesses =
        (o_access *)o_grow(o->accesses, o->access_count, &o->access_room, sizeof *o->accesses);
    op->access_first = o->access_count++;
    op->access_count = 1;
    o->accesses[op->access_first].begin = 0;
    o->accesses[op->access_first].end = UINTPTR_MAX;
    o->accesses[op->access_first].writes = true;
    o->accesses[op->access_first].on_host = false;
}

/* All micro-batches of a step. */
static inline void o_step(o_order *o) {
    const msi_program *p = &o->model->run.plan->train;
    for (uint32_t micro = 1; micro < o->model->run.store->micro_count; ++micro) {
        o_run(o, p, 0, p->code.backward_end);
        o_anything(o);
    }
    o_run(o, p, 0, p->code.instructions.count);
    o_anything(o);
}

static inline void o_eval(o_order *o) {
    o_run(o, &o->model->run.plan->eval, 0, o->model->run.plan->eval.code.instructions.count);
    o_anything(o);
}

// ------------------------------------------------------------------------------------------------
// conflicts and orders

static inline bool o_conflicts(const o_order *o, const o_operation *a, const o_operation *b,
                               bool *on_host) {
    bool conflicts = false;
    *on_host = false;
    for (uint32_t i = 0; i < a->access_count; ++i) {
        const o_access *x = &o->accesses[a->access_first + i];
        for (uint32_t k = 0; k < b->access_count; ++k) {
            const o_access *y = &o->accesses[b->access_first + k];
            if ((x->writes || y->writes) && x->begin < y->end && y->begin < x->end) {
                conflicts = true;
                *on_host |= y->on_host;
            }
        }
    }
    return conflicts;
}

static inline void o_finish(o_order *o) {
    for (uint32_t a = 0; a < o->operation_count; ++a) {
        for (uint32_t b = a + 1; b < o->operation_count; ++b) {
            const o_operation *x = &o->operations[a], *y = &o->operations[b];
            bool on_host;
            if (x->stream == y->stream || !o_conflicts(o, x, y, &on_host)) {
                continue;
            }
            o->conflicts = (o_conflict *)o_grow(o->conflicts, o->conflict_count, &o->conflict_room,
                                                sizeof *o->conflicts);
            o_conflict *pair = &o->conflicts[o->conflict_count++];
            pair->first = a;
            pair->second = b;
            pair->on_host = on_host;
        }
    }
}

static inline void o_join(o_clock *to, const o_clock *other) {
    for (int k = 0; k < MS_STREAM_COUNT; ++k) {
        to->of[k] = other->of[k] > to->of[k] ? other->of[k] : to->of[k];
    }
}

enum { O_EVENTS = 4096 };

/* Gives each operation what happens before it, itself included. */
static inline void o_set_clocks(o_order *o, const o_omission *without) {
    o_clock on[MS_STREAM_COUNT], events[O_EVENTS], host;
    memset(on, 0, sizeof on);
    memset(events, 0, sizeof events);
    memset(&host, 0, sizeof host);
    for (uint32_t k = 0; k < o->operation_count; ++k) {
        o_operation *op = &o->operations[k];
        const msi_instruction *i = op->instruction;
        if (i == NULL) {
            on[MS_STREAM_COMPUTE].of[MS_STREAM_COMPUTE] += 1;
            op->clock = on[MS_STREAM_COMPUTE];
            continue;
        }
        const bool omits = without != NULL && without->program == op->program &&
                           i == &op->program->code.instructions.items[without->instruction];
        o_clock *stream = &on[op->stream];
        assert_true(i->event == MSI_NO_EVENT || i->event < O_EVENTS);
        if (i->op == MSI_OP_WAIT) {
            if (!(omits && without->kind == O_WAIT)) {
                o_join(stream, &events[i->event]);
                o_join(&host, op->on_host ? &events[i->event] : &host);
            }
            continue;
        }
        o_join(stream, &host);
        if (i->follows && !(omits && without->kind == O_FOLLOWS)) {
            o_join(stream, &on[MS_STREAM_COMPUTE]);
        }
        stream->of[op->stream] += 1;
        op->clock = *stream;
        op->host = host;
        if (op->stream != MS_STREAM_COMPUTE && i->event != MSI_NO_EVENT &&
            !(omits && without->kind == O_EVENT)) {
            events[i->event] = *stream;
        }
    }
}

/* How many conflicting pairs run in any order; `pair` gets the first. */
static inline uint32_t o_races(o_order *o, const o_omission *without, o_conflict *pair) {
    uint32_t count = 0;
    o_set_clocks(o, without);
    for (uint32_t k = 0; k < o->conflict_count; ++k) {
        const o_operation *first = &o->operations[o->conflicts[k].first];
        const o_operation *second = &o->operations[o->conflicts[k].second];
        const o_clock *known = o->conflicts[k].on_host ? &second->host : &second->clock;
        if (known->of[first->stream] < first->clock.of[first->stream]) {
            if (pair != NULL && count == 0) {
                *pair = o->conflicts[k];
            }
            count += 1;
        }
    }
    return count;
}

// ------------------------------------------------------------------------------------------------
// what can be left out

/* The next omission after this one in its program, beginning with instruction 0 and O_WAIT.
   false: there is none. */
static inline bool o_find(o_omission *at) {
    const msi_program *p = at->program;
    for (; at->instruction < p->code.instructions.count; ++at->instruction, at->kind = O_WAIT) {
        const msi_instruction *i = &p->code.instructions.items[at->instruction];
        const bool copies = msi_is_issued((msi_op)i->op);
        for (; at->kind < O_KIND_COUNT; at->kind = (o_kind)(at->kind + 1)) {
            if ((at->kind == O_WAIT && i->op == MSI_OP_WAIT) ||
                (at->kind == O_FOLLOWS && copies && i->follows) ||
                (at->kind == O_EVENT && copies && i->event != MSI_NO_EVENT)) {
                return true;
            }
        }
    }
    return false;
}

static inline void o_next(o_omission *at) {
    at->kind = (o_kind)(at->kind + 1);
}

/* Leaves it out of the plan that is run. */
static inline void o_omit(const o_omission *at) {
    msi_instruction *i = &at->program->code.instructions.items[at->instruction];
    if (at->kind == O_WAIT) {
        i->op = (uint8_t)MSI_OP_NOTHING;
    } else if (at->kind == O_FOLLOWS) {
        i->follows = false;
    } else {
        i->event = MSI_NO_EVENT;
    }
}

typedef struct o_tally {
    uint32_t count[O_KIND_COUNT], needless[O_KIND_COUNT];
} o_tally;

static inline void o_leave_out(o_order *o, const msi_program *p, o_tally *t) {
    o_omission at = {p, 0, O_WAIT};
    for (; o_find(&at); o_next(&at)) {
        t->count[at.kind] += 1;
        t->needless[at.kind] += o_races(o, &at, NULL) == 0;
    }
}

/* A step and an eval. */
static inline void o_list(o_order *o, const ms_model *m) {
    o_open(o, m);
    o_anything(o);
    o_step(o);
    o_eval(o);
    o_finish(o);
}

static inline void o_leave_out_each(const ms_model *m, o_tally *t) {
    o_order o;
    o_list(&o, m);
    o_leave_out(&o, &m->run.plan->train, t);
    o_leave_out(&o, &m->run.plan->eval, t);
    o_close(&o);
}

/* Whatever was left out, something ran in any order; of copies that follow, one in many thousands may
   be needless, where a wait was removed that it was for (1 of 55,154 was seen). */
static inline void o_expect_needed(const o_tally *t) {
    static const char *const names[] = {"waits", "copies that follow what is computed", "events"};
    for (int k = 0; k < O_KIND_COUNT; ++k) {
        print_message("%s: %u left out, %u of them needless\n", names[k], (unsigned)t->count[k],
                      (unsigned)t->needless[k]);
        assert_true(t->count[k] > 0 &&
                    t->needless[k] <= (k == O_FOLLOWS ? t->count[k] / 10000 : 0));
    }
}

/* The number of an operation's instruction. */
static inline unsigned o_number(const o_operation *op) {
    return op->program == NULL ? 0
                               : (unsigned)(op->instruction - op->program->code.instructions.items);
}

static inline const char *o_name(const o_operation *op) {
    return op->program == NULL ? "between programs" : msi_ops[op->instruction->op].name;
}

static inline void o_expect_ordered(const ms_model *m, const char *name) {
    o_order o;
    o_conflict pair;
    o_list(&o, m);
    if (o_races(&o, NULL, &pair) > 0) {
        const o_operation *a = &o.operations[pair.first], *b = &o.operations[pair.second];
        fail_msg("%s: %u (%s) and %u (%s) run in any order", name, o_number(a), o_name(a),
                 o_number(b), o_name(b));
    }
    o_close(&o);
}

#endif // ORDERS_H
