/*  picture.h - a picture of plans over budgets, as SVG. */
#ifndef MEMSCALE_ESTIMATE_PICTURE_H
#define MEMSCALE_ESTIMATE_PICTURE_H

#include "output.h"
#include "svg.h"
#include "sweep.h"

enum { SWEEP_WIDTH = 860, SWEEP_HEIGHT = 690 };

/* A panel of the picture: where it is, and the values at its edges. */
typedef struct panel {
    double left, right, top, bottom;
    double x_low, x_high, y_low, y_high;
} panel;

static double panel_x(const panel *p, double x) {
    return p->left + (x - p->x_low) / (p->x_high - p->x_low) * (p->right - p->left);
}

static double panel_y(const panel *p, double y) {
    return p->bottom - (y - p->y_low) / (p->y_high - p->y_low) * (p->bottom - p->top);
}

/* Ticks of both axes with their numbers, and thin grid lines. */
static void draw_grid(FILE *file, const panel *p) {
    char text[32];
    const double x_step = svg_step(p->x_high - p->x_low, 8.0);
    const double y_step = svg_step(p->y_high - p->y_low, 8.0);
    for (double x = ceil(p->x_low / x_step) * x_step; x <= p->x_high + 1e-9; x += x_step) {
        svg_line(file, panel_x(p, x), p->top, panel_x(p, x), p->bottom, "class=\"grid\"");
        snprintf(text, sizeof text, "%.*f", svg_digits(x_step), fabs(x) < 1e-9 ? 0.0 : x);
        svg_text(file, panel_x(p, x), p->bottom + 17.0, "class=\"tick\" text-anchor=\"middle\"",
                 text);
    }
    for (double y = ceil(p->y_low / y_step) * y_step; y <= p->y_high + 1e-9; y += y_step) {
        svg_line(file, p->left, panel_y(p, y), p->right, panel_y(p, y), "class=\"grid\"");
        snprintf(text, sizeof text, "%.*f", svg_digits(y_step), fabs(y) < 1e-9 ? 0.0 : y);
        svg_text(file, p->left - 8.0, panel_y(p, y) + 4.0, "class=\"tick\" text-anchor=\"end\"",
                 text);
    }
    fprintf(file, "<rect x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"%.1f\" class=\"frame\"/>\n",
            p->left, p->top, p->right - p->left, p->bottom - p->top);
}

static void draw_axis_name(FILE *file, const panel *p, const char *name) {
    svg_upright(file, p->left - 58.0, 0.5 * (p->top + p->bottom), name);
}

static const char *const sweep_colours[MODES] = {"#1f6fb4", "#d9730d", "#2e8b57"};

/* values over budgets, in the colour of the mode; a dot for each plan. A plan is good for every
   budget up to the next dot, so that the curve has steps. */
static void draw_curve(FILE *file, const panel *p, const sweep *s, const double *values,
                       double x_unit, double y_unit) {
    const char *colour = sweep_colours[s->mode];
    fprintf(file, "<path fill=\"none\" stroke=\"%s\" stroke-width=\"2\" d=\"", colour);
    for (int i = 0; i < s->count; i++) {
        fprintf(file, "%s%.1f%s%.1f", i ? "H" : "M", panel_x(p, s->budget[i] / x_unit),
                i ? "V" : " ", panel_y(p, values[i] / y_unit));
    }
    fprintf(file, "\"/>\n");
    for (int i = 0; i < s->count; i++) {
        fprintf(file, "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"2.6\" fill=\"%s\"/>\n",
                panel_x(p, s->budget[i] / x_unit), panel_y(p, values[i] / y_unit), colour);
    }
}

/* Budgets below the smallest plan of all. */
static void draw_infeasible(FILE *file, const panel *p, double least) {
    const double right = panel_x(p, least);
    fprintf(file,
            "<rect x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"%.1f\" fill=\"url(#hatch)\"/>\n",
            p->left, p->top, right - p->left, p->bottom - p->top);
    svg_line(file, right, p->top, right, p->bottom, "class=\"edge\"");
}

static void draw_start(FILE *file) {
    svg_begin(file, SWEEP_WIDTH, SWEEP_HEIGHT,
              ".title{font-size:17px;font-weight:bold;fill:#222}.name{font-size:13px;"
              "fill:#333}.note{font-size:12px;fill:#444}.tick{font-size:12px;fill:#555}"
              ".grid{stroke:#e4e4e4}.frame{fill:none;stroke:#888}.edge{stroke:#999}"
              ".same{stroke:#999;stroke-dasharray:5 4}.budget{stroke:#b02a37;stroke-dasharray:7 4;"
              "stroke-width:1.5}.halo{paint-order:stroke;stroke:#fff;stroke-width:4px}");
    fprintf(file,
            "<defs><pattern id=\"hatch\" width=\"8\" height=\"8\" "
            "patternUnits=\"userSpaceOnUse\" patternTransform=\"rotate(45)\"><rect width=\"8\" "
            "height=\"8\" fill=\"#f6f6f6\"/><line x1=\"0\" y1=\"0\" x2=\"0\" y2=\"8\" "
            "stroke=\"#c9c9c9\" stroke-width=\"2\"/></pattern></defs>\n"
            "<rect width=\"%d\" height=\"%d\" fill=\"#fff\"/>\n",
            SWEEP_WIDTH, SWEEP_HEIGHT);
}

static void draw_head(FILE *file, const estimate *e, const findings *f) {
    char text[256];
    snprintf(text, sizeof text, "%s, batch %lld x %lld tokens%s, %s, %s", e->model.name,
             (long long)e->options.batch, (long long)e->options.sequence, show_ranks(e).text,
             precision_of(&e->options)->name, optimizers[optimizer_of(&e->options)].title);
    svg_text(file, 80.0, 30.0, "class=\"title\"", text);
    snprintf(text, sizeof text, "%.1f M params; predicted for %s, %s; the plain step takes %s",
             (double)f->plain.report.param_count / 1e6, e->device.hardware.name,
             show_bytes(e->device.memory_bytes).text, show_time(f->plain.report.step_us).text);
    svg_text(file, 80.0, 50.0, "class=\"name\"", text);
}

/* The names of the curves, side by side above the panels. */
static void draw_legend(FILE *file, const findings *f, const bool *is_drawn) {
    double x = 80.0;
    for (int i = 0; i < MODES; i++) {
        char text[64] = "";
        for (int k = i; k < MODES && is_drawn[i]; k++) {
            if (k == i || f->same_as[k] == i) {
                const size_t used = strlen(text);
                snprintf(text + used, sizeof text - used, "%s%s", used ? ", " : "",
                         ms_mode_name(modes[k]));
            }
        }
        if (is_drawn[i]) {
            fprintf(file,
                    "<line x1=\"%.1f\" y1=\"68\" x2=\"%.1f\" y2=\"68\" stroke=\"%s\" "
                    "stroke-width=\"3\"/>\n",
                    x, x + 24.0, sweep_colours[modes[i]]);
            svg_text(file, x + 30.0, 72.0, "class=\"name\"", text);
            x += 60.0 + 8.2 * (double)strlen(text);
        }
    }
}

/* The plain plan, named beside the frame. */
static void draw_plain(FILE *file, const panel *p, double x, double y, const char *text) {
    svg_ring(file, panel_x(p, x), panel_y(p, y), 6.0);
    svg_text(file, p->right + 12.0, panel_y(p, y) - 2.0, "class=\"note\"", "plain");
    svg_text(file, p->right + 12.0, panel_y(p, y) + 13.0, "class=\"note\"", text);
}

/* Where the device's own budget lies, if that is in the picture; its name is above the frame. */
static void draw_budget(FILE *file, const panel *p, double budget, const char *text) {
    if (budget > p->x_low && budget < p->x_high) {
        const double x = panel_x(p, budget);
        svg_line(file, x, p->top, x, p->bottom, "class=\"budget\"");
        svg_text(file, x, p->top - 6.0, "class=\"note\" text-anchor=\"middle\"", text);
    }
}

/* The smallest and the largest of a number over all plans, and one more. */
static void widen(double value, double *least, double *most) {
    *least = value < *least ? value : *least;
    *most = value > *most ? value : *most;
}

static void draw_sweep(const estimate *e, const findings *f, const sweep *sweeps,
                       const bool *is_drawn, FILE *file) {
    const unit u = unit_for(f->plain.report.arena_bytes);
    const double most = (double)f->plain.report.arena_bytes / u.bytes;
    double least = most, largest = most, fastest = 1.0, slowest = 1.0;
    char text[64];
    for (int i = 0; i < MODES; i++) {
        for (int k = 0; k < (is_drawn[i] ? sweeps[i].count : 0); k++) {
            widen(sweeps[i].budget[k] / u.bytes, &least, &largest);
            widen(sweeps[i].ratio[k], &fastest, &slowest);
        }
    }
    const double span = most - least > 0.02 * most ? most - least : 0.1 * most;
    const double left = least > 0.14 * span ? least - 0.14 * span : 0.0;
    panel peak = {80.0, 770.0, 112.0, 360.0, left, most + 0.04 * span, left, most + 0.08 * span};
    panel time = {80.0, 770.0, 406.0, 610.0, left, most + 0.04 * span, 1.0, 1.0};
    const double range = slowest - fastest > 0.02 ? slowest - fastest : 0.02;
    time.y_low = fastest - 0.1 * range;
    time.y_high = fastest + 1.12 * range;
    draw_start(file);
    draw_head(file, e, f);
    draw_legend(file, f, is_drawn);
    draw_grid(file, &peak);
    draw_grid(file, &time);
    draw_infeasible(file, &peak, least);
    draw_infeasible(file, &time, least);
    svg_line(file, peak.left, peak.bottom, peak.right, peak.top, "class=\"same\"");
    snprintf(text, sizeof text, "budget %s", show_bytes(e->device.budget_bytes).text);
    draw_budget(file, &peak, (double)e->device.budget_bytes / u.bytes, text);
    draw_budget(file, &time, (double)e->device.budget_bytes / u.bytes, "");
    for (int i = 0; i < MODES; i++) {
        if (is_drawn[i]) {
            draw_curve(file, &peak, &sweeps[i], sweeps[i].peak, u.bytes, u.bytes);
            draw_curve(file, &time, &sweeps[i], sweeps[i].ratio, u.bytes, 1.0);
        }
    }
    draw_plain(file, &peak, most, most, show_bytes(f->plain.report.arena_bytes).text);
    draw_plain(file, &time, most, 1.0, show_time(f->plain.report.step_us).text);
    snprintf(text, sizeof text, "peak, %s", u.name);
    draw_axis_name(file, &peak, text);
    draw_axis_name(file, &time, "step time over plain");
    snprintf(text, sizeof text, "budget, %s", u.name);
    svg_text(file, 0.5 * (peak.left + peak.right), 650.0, "class=\"name\" text-anchor=\"middle\"",
             text);
    svg_text(file, peak.left, 676.0, "class=\"note\"",
             "hatched: no plan fits; grey dashes: peak = budget; a dot is a plan");
    svg_end(file);
}

static int write_sweep(const estimate *e, const findings *f, const all_sweeps *all) {
    FILE *file = open_file(e->options.sweep);
    if (!file) {
        return 1;
    }
    draw_sweep(e, f, all->of, all->is_drawn, file);
    return close_file(file, e->options.sweep, 0);
}

#endif // MEMSCALE_ESTIMATE_PICTURE_H
