/*  page.h - plans as one HTML page, which a browser shows without a network: the memory of a step
    over time, what lives there, since when, until when and why, and what the streams do meanwhile.

    Include memscale.h first. The page holds its data as JSON, in an element with the id "data".
    Everything in it comes from public functions: ms_report, ms_visit_events, ms_visit_lifetimes and
    ms_visit_decisions. The same plans give the same page, byte for byte.

    "#plan=1&hover=400,300" at the end of the page's address chooses a plan, by its number from 0 on,
    and places the pointer, in pixels. */
#ifndef MEMSCALE_ESTIMATE_PAGE_H
#define MEMSCALE_ESTIMATE_PAGE_H

#include <stdlib.h>

#include "json.h"
#include "page_text.h"

#if defined(__GNUC__)
#define PAGE_API static __attribute__((unused))
#else
#define PAGE_API static
#endif

// ---- a plan -------------------------------------------------------------------------------------

typedef struct page {
    json out;
    ms_result result; // the first that was not MS_RESULT_OK
} page;

/* The layer that makes a tensor, or the first that uses it, by the number of its handle. */
typedef struct page_owner {
    uint64_t tensor;
    uint32_t layer;
} page_owner;

typedef struct page_visit {
    page *to;
    const ms_model *model;
    page_owner *owners;
    uint32_t owner_count, owner_most;
    uint32_t written; // instructions
    double end_us;    // of the last one
    bool has_stream[MS_STREAM_COUNT];
} page_visit;

PAGE_API const page_owner *page_find_owner(const page_visit *v, ms_tensor handle) {
    const uint64_t tensor = ms_tensor_of(v->model, handle).id;
    for (uint32_t i = 0; i < v->owner_count; i++) {
        if (v->owners[i].tensor == tensor) {
            return &v->owners[i];
        }
    }
    return NULL;
}

/* In the order of the program, so that what makes a tensor comes before what reads it. */
PAGE_API void page_note_owners(const ms_event *event, void *user) {
    page_visit *v = (page_visit *)user;
    v->has_stream[event->stream] |= event->kind < MS_EVENT_DROP;
    for (uint32_t k = 0; k < event->operand_count && event->kind == MS_EVENT_FORWARD; k++) {
        const ms_tensor t = event->operands[k].tensor;
        if (t.id && v->owner_count < v->owner_most && !page_find_owner(v, t)) {
            v->owners[v->owner_count].tensor = ms_tensor_of(v->model, t).id;
            v->owners[v->owner_count++].layer = event->layer_index;
        }
    }
}

/* The layer that runs; otherwise that of the tensor. -1: none. */
PAGE_API double page_layer_of(const page_visit *v, const ms_event *event) {
    const page_owner *owner = event->tensor.id ? page_find_owner(v, event->tensor) : NULL;
    return event->layer_index != UINT32_MAX ? (double)event->layer_index
           : owner                          ? (double)owner->layer
                                            : -1.0;
}

/* kind, stream, layer or -1, start, duration, name, bytes of a copy, part */
PAGE_API void page_write_instruction(page_visit *v, const ms_event *event, uint64_t bytes,
                                     const char *part) {
    json *j = &v->to->out;
    json_open_row(j, NULL);
    json_count(j, NULL, (uint64_t)event->kind);
    json_count(j, NULL, (uint64_t)event->stream);
    json_real(j, NULL, page_layer_of(v, event));
    json_real(j, NULL, event->start_us);
    json_real(j, NULL, event->duration_us);
    json_text(j, NULL, event->name);
    json_count(j, NULL, bytes);
    json_text(j, NULL, part);
    json_close_row(j);
    v->written++;
}

/* Instructions that do nothing have no event: they are written as DROP, so that each instruction is
   in the place of its index. */
PAGE_API void page_write_gap(page_visit *v, uint32_t end) {
    ms_event nothing;
    memset(&nothing, 0, sizeof nothing);
    nothing.kind = MS_EVENT_DROP;
    nothing.stream = MS_STREAM_COMPUTE;
    nothing.layer_index = UINT32_MAX;
    nothing.start_us = v->end_us;
    nothing.name = "";
    while (v->written < end) {
        page_write_instruction(v, &nothing, 0, "");
    }
}

PAGE_API void page_write_event(const ms_event *event, void *user) {
    page_visit *v = (page_visit *)user;
    uint64_t bytes = 0;
    char part[64] = "";
    if (event->kind >= MS_EVENT_DROP) {
        return;
    }
    for (uint32_t k = 0; k < event->operand_count && event->stream != MS_STREAM_COMPUTE; k++) {
        bytes += event->operands[k].is_written ? event->operands[k].bytes : 0;
    }
    if (event->row_total > 0) {
        snprintf(part, sizeof part, "%llu rows from %llu on", (unsigned long long)event->row_count,
                 (unsigned long long)event->row_begin);
    } else if (event->part_count > 0) {
        snprintf(part, sizeof part, "%u of %u", event->part + 1, event->part_count);
    }
    page_write_gap(v, event->index);
    page_write_instruction(v, event, bytes, part);
    v->end_us = event->start_us + event->duration_us;
}

/* "gradient of h0.fc", for people; a name may be cut. */
PAGE_API void page_name_value(const page_visit *v, const ms_lifetime *l, char *name, size_t bytes) {
    const ms_tensor t = l->tensor.id ? ms_tensor_of(v->model, l->tensor) : l->tensor;
    int state = 0;
    switch (l->category) {
    case MS_CATEGORY_OPTIMIZER:
        while (state < MS_LIMIT_OPTIMIZER_STATE - 1 &&
               ms_optimizer_state(v->model, t, state).id != l->tensor.id) {
            state++;
        }
        snprintf(name, bytes, "state %d of %s", state + 1, l->name);
        return;
    case MS_CATEGORY_GRADIENT:
    case MS_CATEGORY_ACTIVATION_GRADIENT:
        snprintf(name, bytes, "gradient of %s", l->name);
        return;
    case MS_CATEGORY_WORKSPACE:
        snprintf(name, bytes, "workspace of %s", l->name[0] ? l->name : "the library");
        return;
    case MS_CATEGORY_INPUT:
    case MS_CATEGORY_PARAM:
    case MS_CATEGORY_BUFFER:
    case MS_CATEGORY_ACTIVATION:
    case MS_CATEGORY_SAVED:
    case MS_CATEGORY_COUNT:
        break;
    }
    snprintf(name, bytes, "%s", l->name);
}

PAGE_API const char *page_format(const ms_lifetime *l) {
    switch (l->format) {
    case MS_STATE_FORMAT_BF16:
        return "bf16";
    case MS_STATE_FORMAT_8BIT:
        return "8 bits";
    case MS_STATE_FORMAT_F32:
    case MS_STATE_FORMAT_COUNT:
        break;
    }
    return l->category == MS_CATEGORY_WORKSPACE ? "" : ms_dtype_name(l->dtype);
}

/* name, category, bytes, first and last instruction, whether it lives between steps, whether on the
   host, layer or -1, format */
PAGE_API void page_write_lifetime(const ms_lifetime *l, void *user) {
    const page_visit *v = (const page_visit *)user;
    json *j = &v->to->out;
    const page_owner *owner = l->tensor.id ? page_find_owner(v, l->tensor) : NULL;
    char name[256];
    if (l->is_outside && !l->is_on_host) {
        return; // the trainer's own memory
    }
    page_name_value(v, l, name, sizeof name);
    json_open_row(j, NULL);
    json_text(j, NULL, name);
    json_count(j, NULL, (uint64_t)l->category);
    json_count(j, NULL, l->bytes);
    json_count(j, NULL, l->first);
    json_count(j, NULL, l->last);
    json_count(j, NULL, l->is_resident);
    json_count(j, NULL, l->is_on_host);
    json_real(j, NULL,
              owner               ? (double)owner->layer
              : l->first_layer.id ? (double)ms_layer_index(v->model, l->first_layer)
                                  : -1.0);
    json_text(j, NULL, page_format(l));
    json_close_row(j);
}

/* An array for each layer; in it, of each technique: whether it is applied, the number of the rule,
   bytes and time if it is, bytes and time if not, tiles and their rows */
PAGE_API void page_write_decision(const ms_decision *d, void *user) {
    const page_visit *v = (const page_visit *)user;
    json *j = &v->to->out;
    uint64_t rule = 0;
    while (ms_rule_at((uint32_t)rule) != d->rule) {
        rule++;
    }
    if (d->technique == 0) {
        json_open_row(j, NULL);
    }
    json_open(j, NULL, '[');
    json_count(j, NULL, d->is_applied);
    json_count(j, NULL, rule);
    json_count(j, NULL, d->saved_bytes);
    json_real(j, NULL, d->added_us);
    json_count(j, NULL, d->refused_bytes);
    json_real(j, NULL, d->refused_us);
    json_count(j, NULL, d->tile_count);
    json_count(j, NULL, d->tile_rows);
    json_close(j, ']');
    if (d->technique + 1 == MS_TECHNIQUE_COUNT) {
        json_close_row(j);
    }
}

PAGE_API void page_write_layer(const ms_decision *d, void *user) {
    const page_visit *v = (const page_visit *)user;
    if (d->technique == 0) {
        json_text(&v->to->out, NULL, ms_layer_name(v->model, d->layer));
    }
}

PAGE_API void page_write_report(json *j, const ms_memory_report *r) {
    json_count(j, "budget_bytes", r->budget_bytes);
    json_count(j, "arena_bytes", r->arena_bytes);
    json_count(j, "lower_bound_bytes", r->lower_bound_bytes);
    json_count(j, "gap_bytes", r->gap_bytes);
    json_count(j, "host_bytes", r->host_bytes);
    json_count(j, "peak_instruction", r->peak_instruction);
    json_open_row(j, "peak_bytes");
    for (int c = 0; c < MS_CATEGORY_COUNT; c++) {
        json_count(j, NULL, r->peak_bytes[c]);
    }
    json_close_row(j);
    json_real(j, "step_us", r->step_us);
    json_real(j, "plain_step_us", r->plain_step_us);
    json_real(j, "stall_us", r->stall_us);
    json_count(j, "recompute_count", r->recompute_count);
    json_text(j, "mode", ms_mode_name(r->mode));
    json_text(j, "found_by", r->found_by);
}

PAGE_API void page_keep(page *p, ms_result result) {
    p->result = p->result == MS_RESULT_OK ? result : p->result;
}

PAGE_API void page_write_visits(page_visit *v, const ms_memory_report *r) {
    json *j = &v->to->out;
    page_keep(v->to, ms_visit_events(v->model, MS_PROGRAM_TRAIN, page_note_owners, v));
    json_open_row(j, "streams");
    for (int k = 0; k < MS_STREAM_COUNT; k++) {
        if (v->has_stream[k]) {
            json_count(j, NULL, (uint64_t)k);
        }
    }
    json_close_row(j);
    json_open_row(j, "layers");
    page_keep(v->to, ms_visit_decisions(v->model, page_write_layer, v));
    json_close_row(j);
    json_open(j, "decisions", '[');
    page_keep(v->to, ms_visit_decisions(v->model, page_write_decision, v));
    json_close(j, ']');
    json_open(j, "instructions", '[');
    page_keep(v->to, ms_visit_events(v->model, MS_PROGRAM_TRAIN, page_write_event, v));
    page_write_gap(v, r->instruction_count);
    json_close(j, ']');
    json_open(j, "values", '[');
    page_keep(v->to, ms_visit_lifetimes(v->model, MS_PROGRAM_TRAIN, page_write_lifetime, v));
    json_close(j, ']');
}

/* Adds the plan of a wrapped model. */
PAGE_API void page_add_plan(page *p, const char *name, const char *note, const ms_model *model) {
    ms_memory_report r;
    page_visit v;
    memset(&v, 0, sizeof v);
    page_keep(p, ms_report(model, &r));
    if (p->result != MS_RESULT_OK) {
        return;
    }
    v.to = p;
    v.model = model;
    v.owner_most = r.tensor_count;
    v.owners = (page_owner *)malloc((size_t)r.tensor_count * sizeof *v.owners + 1);
    if (!v.owners) {
        p->result = MS_RESULT_OUT_OF_MEMORY;
        return;
    }
    json_open(&p->out, NULL, '{');
    json_text(&p->out, "name", name);
    json_text(&p->out, "note", note);
    page_write_report(&p->out, &r);
    page_write_visits(&v, &r);
    json_close(&p->out, '}');
    free(v.owners);
}

// ---- the file -----------------------------------------------------------------------------------

/* The plans of a mode over budgets. */
typedef struct page_curve {
    const char *mode;
    const double *budget, *peak, *ratio; // bytes, bytes, step over that of the plain plan
    int count;
} page_curve;

PAGE_API void page_write_text(FILE *file, const char *const *parts) {
    for (; *parts; parts++) {
        fputs(*parts, file);
    }
}

#define PAGE_NAME(constant, text) text,
PAGE_API void page_write_names(json *j) {
    static const char *const kinds[] = {MEMSCALE_EVENTS(PAGE_NAME)};
    static const char *const streams[] = {MEMSCALE_STREAMS(PAGE_NAME)};
    json_open_row(j, "kinds");
    for (int k = 0; k < MS_EVENT_COUNT; k++) {
        json_text(j, NULL, kinds[k]);
    }
    json_close_row(j);
    json_open_row(j, "streams");
    for (int k = 0; k < MS_STREAM_COUNT; k++) {
        json_text(j, NULL, streams[k]);
    }
    json_close_row(j);
    json_open_row(j, "categories");
    for (int k = 0; k < MS_CATEGORY_COUNT; k++) {
        json_text(j, NULL, ms_category_name((ms_category)k));
    }
    json_close_row(j);
    json_open_row(j, "techniques");
    for (int k = 0; k < MS_TECHNIQUE_COUNT; k++) {
        json_text(j, NULL, ms_technique_name((ms_technique)k));
    }
    json_close_row(j);
    json_open(j, "rules", '[');
    for (uint32_t k = 0; ms_rule_at(k); k++) {
        const ms_rule *rule = ms_rule_at(k);
        json_open_row(j, NULL);
        json_text(j, NULL, rule->id);
        json_text(j, NULL, rule->condition);
        json_text(j, NULL, rule->reason);
        json_close_row(j);
    }
    json_close(j, ']');
}
#undef PAGE_NAME

/* Begins a page; then page_add_plan for each plan, the plain one first, and page_end. */
PAGE_API void page_begin(page *p, FILE *file, const char *title, const char *subtitle) {
    memset(p, 0, sizeof *p);
    p->out.file = file;
    p->result = MS_RESULT_OK;
    fputs("<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<style>\n", file);
    page_write_text(file, page_style);
    fputs("</style>\n</head>\n<body>\n", file);
    page_write_text(file, page_body);
    fputs("<script type=\"application/json\" id=\"data\">\n", file);
    json_open(&p->out, NULL, '{');
    json_text(&p->out, "title", title);
    json_text(&p->out, "subtitle", subtitle);
    page_write_names(&p->out);
    json_open(&p->out, "plans", '[');
}

PAGE_API void page_write_numbers(json *j, const char *key, const double *numbers, int count) {
    json_open_row(j, key);
    for (int i = 0; i < count; i++) {
        json_real(j, NULL, numbers[i]);
    }
    json_close_row(j);
}

/* Ends it: the number of the plan that is shown first, the budget (0: none), and the plans over
   budgets, if there are any. */
PAGE_API void page_end(page *p, int shown, uint64_t budget_bytes, const page_curve *curves,
                       int curve_count) {
    json *j = &p->out;
    json_close(j, ']');
    json_count(j, "shown", (uint64_t)shown);
    json_count(j, "budget_bytes", budget_bytes);
    json_open(j, "sweep", '[');
    for (int i = 0; i < curve_count; i++) {
        json_open(j, NULL, '{');
        json_text(j, "mode", curves[i].mode);
        page_write_numbers(j, "budget", curves[i].budget, curves[i].count);
        page_write_numbers(j, "peak", curves[i].peak, curves[i].count);
        page_write_numbers(j, "ratio", curves[i].ratio, curves[i].count);
        json_close(j, '}');
    }
    json_close(j, ']');
    json_close(j, '}');
    fputs("\n</script>\n<script>\n", j->file);
    page_write_text(j->file, page_script);
    fputs("</script>\n</body>\n</html>\n", j->file);
}

#endif // MEMSCALE_ESTIMATE_PAGE_H
