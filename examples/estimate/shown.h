/*  shown.h - plans that are made once more to be shown: as a list, or as a page for a browser. */
#ifndef MEMSCALE_ESTIMATE_SHOWN_H
#define MEMSCALE_ESTIMATE_SHOWN_H

#include "output.h"
#include "page.h"
#include "sweep.h"

/* The plan of a mode within the budget; where none fits, the smallest. */
static ms_model *wrap_mode(const estimate *e, const findings *f, int mode, nn_net **net) {
    ms_config config;
    memset(&config, 0, sizeof config);
    config.mode = modes[mode];
    config.force_optimize = !f->smallest[mode].fits;
    config.memory_budget_bytes = config.force_optimize ? (uint64_t)1 << 60 : e->device.budget_bytes;
    return wrap_model(e, &config, net);
}

static void write_text(const char *text, size_t length, void *user) {
    fwrite(text, 1, length, (FILE *)user);
}

/* Lists the plan of --mode or of the advised mode. */
static int list_plan(const estimate *e, const findings *f) {
    nn_net *net;
    const int mode = shown_mode(e, f);
    ms_model *model = wrap_mode(e, f, mode, &net);
    if (!model) {
        return 1;
    }
    printf("\nplan      the %s of mode %s\n\n",
           f->smallest[mode].fits ? "fastest found" : "smallest", ms_mode_name(modes[mode]));
    const ms_result result = e->options.full_plan ? ms_print_plan_full(model, write_text, stdout)
                                                  : ms_print_plan(model, write_text, stdout);
    const int status = result == MS_RESULT_OK ? 0 : fail("%s", ms_last_error(model));
    ms_destroy(model);
    nn_destroy(net);
    return status;
}

/* Adds the plan of a mode to a page, or the plain plan (mode -1). */
static int add_to_page(const estimate *e, const findings *f, page *p, int mode) {
    nn_net *net;
    ms_config config = plain_config();
    char note[512];
    const plan *of = mode < 0 ? &f->plain : &f->at_budget[mode];
    ms_model *model = mode < 0 ? wrap_model(e, &config, &net) : wrap_mode(e, f, mode, &net);
    if (!model) {
        return 1;
    }
    snprintf(note, sizeof note, "%s the budget; %.3f times the plain step%s%s",
             of->fits ? "Fits" : "Does not fit", over_plain(f, of),
             is_rounded(f, of) ? "; it rounds to " : "; the same numbers as the plain plan",
             show_rounding(f, of).text);
    page_add_plan(p, mode < 0 ? "plain" : ms_mode_name(modes[mode]), note, model);
    ms_destroy(model);
    nn_destroy(net);
    count_plan(e);
    return 0;
}

/* The modes that plan differently, after the plain plan; returns the number of the one that is
   advised, or -1 after an error. */
static int add_all_to_page(const estimate *e, const findings *f, page *p) {
    int shown = 0, count = 1, status = add_to_page(e, f, p, -1);
    for (int i = 0; i < MODES && status == 0; i++) {
        if (f->same_as[i] == i) {
            status = add_to_page(e, f, p, i);
            shown = i == f->same_as[shown_mode(e, f)] ? count : shown;
            count++;
        }
    }
    return status == 0 ? shown : -1;
}

static int write_page(const estimate *e, const findings *f, const all_sweeps *all) {
    page p;
    page_curve curves[MODES];
    char title[160], subtitle[256];
    int count = 0;
    FILE *file = open_file(e->options.html);
    if (!file) {
        return 1;
    }
    snprintf(title, sizeof title, "%s, batch %lld x %lld tokens%s, %s, %s", e->model.name,
             (long long)e->options.batch, (long long)e->options.sequence, show_ranks(e).text,
             precision_of(&e->options)->name, optimizers[optimizer_of(&e->options)].title);
    snprintf(subtitle, sizeof subtitle,
             "%.1f M params; predicted for %s, %s, by memscale.h %d.%d.%d: no number is measured",
             (double)f->plain.report.param_count / 1e6, e->device.hardware.name,
             show_bytes(e->device.memory_bytes).text, MEMSCALE_VERSION_MAJOR,
             MEMSCALE_VERSION_MINOR, MEMSCALE_VERSION_PATCH);
    page_begin(&p, file, title, subtitle);
    expect_plans(e, COLUMNS);
    const int shown = add_all_to_page(e, f, &p);
    for (int i = 0; i < MODES; i++) {
        const sweep *s = &all->of[i];
        if (all->is_drawn[i]) {
            const page_curve curve = {ms_mode_name(s->mode), s->budget, s->peak, s->ratio,
                                      s->count};
            curves[count++] = curve;
        }
    }
    page_end(&p, shown < 0 ? 0 : shown, e->device.budget_bytes, curves, count);
    end_progress(e->shown);
    return close_file(file, e->options.html,
                      shown < 0                  ? 1
                      : p.result == MS_RESULT_OK ? 0
                                                 : fail("the plans cannot be written"));
}

#endif // MEMSCALE_ESTIMATE_SHOWN_H
