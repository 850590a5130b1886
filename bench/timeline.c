// The memory of one training step over time, as a picture (SVG): the plain plan beside the plan for
// a budget, both on one scale, stacked by category, with their peaks; below them what runs when, what
// is copied and, on the same scale, what is on the host. With --html, a page that says what lives
// where the pointer is, and why. All of it is simulated, for a device that need not be there.
#include "bench.h"

#include <math.h>
#define MEMSCALE_IMPLEMENTATION
#include "memscale.h"
#include "options.h" // of models, now that there is memscale.h
#include "nn.h"
#include "models.h"
#include "estimate/page.h"
#include "estimate/svg.h"

enum { COLUMNS_MAX = 1600, NAME_MAX = 96 };

/* The picture, in pixels. */
static const double picture_width = 1200.0;
static const double left_end = 78.0, right_end = 1180.0, gap = 26.0;
static const double top = 132.0, bottom = 500.0, strip_top = 536.0, strip_height = 14.0;
static const double strip_gap = 4.0; // from the strip of one stream to the next

static const char *const categories[MS_CATEGORY_COUNT] = {
    "#8e6bbf",                                  // inputs
    "#44546a", "#c9a227", "#8ea3bd", "#e08b27", // params, buffers, optimizer state, gradients
    "#2f7fc1", "#c2453d", "#45a17a", "#a5a5a5"  // activations, their gradients, saved, workspace
};

/* From the bottom up: what is kept between steps comes first. */
static const ms_category order[MS_CATEGORY_COUNT] = {
    MS_CATEGORY_PARAM,      MS_CATEGORY_OPTIMIZER,
    MS_CATEGORY_BUFFER,     MS_CATEGORY_INPUT,
    MS_CATEGORY_GRADIENT,   MS_CATEGORY_SAVED,
    MS_CATEGORY_ACTIVATION, MS_CATEGORY_ACTIVATION_GRADIENT,
    MS_CATEGORY_WORKSPACE};

/* What runs, for the strips below. */
enum { RUN_FORWARD, RUN_RECOMPUTE, RUN_BACKWARD, RUN_UPDATE, RUN_OTHER, RUN_COUNT };

static const struct {
    const char *name, *colour;
} runs[RUN_COUNT] = {{"forward", "#9bb7d4"},
                     {"recompute", "#d9730d"},
                     {"backward", "#52708f"},
                     {"update", "#2e8b57"},
                     {"other", "#d0d0d0"}};

/* Copies, by stream; that of computing is not used. */
static const struct {
    const char *name, *colour;
} copies[MS_STREAM_COUNT] = {{"", ""},
                             {"copy to the device", "#a3552f"},
                             {"copy to the host", "#7a5aa6"},
                             {"network", "#b08d2f"}};

/* What is live at a moment, and what runs. */
typedef struct column {
    uint64_t bytes, bytes_of[MS_CATEGORY_COUNT];
    uint64_t host_bytes_of[MS_CATEGORY_COUNT];
    /* Of the time that the column covers. */
    double us[RUN_COUNT], copies_us[MS_STREAM_COUNT];
} column;

/* The left or the right half of the picture. */
typedef struct half {
    const char *title;
    ms_config config;
    ms_memory_report report;
    column columns[COLUMNS_MAX];
    int column_count;
    double left, right;
    double us_per_column;
    uint64_t peak_bytes;
    double peak_us;
    char peak_name[NAME_MAX];
    double *start_us; // of each instruction, and the end
    uint64_t host_bytes;
} half;

typedef struct scale {
    double us, bytes; // at the right end and at the top
    double pixels_per_us;
    double gb;                    // bytes of the unit
    bool moves;                   // something is copied
    double host_top, host_bottom; // of the part about the host; equal: there is none
    double legend, height;        // of what is drawn last; of the picture
} scale;

// ---- what is drawn ------------------------------------------------------------------------------

static int run_of(ms_event_kind kind) {
    switch (kind) {
    case MS_EVENT_FORWARD:
        return RUN_FORWARD;
    case MS_EVENT_RECOMPUTE:
        return RUN_RECOMPUTE;
    case MS_EVENT_BACKWARD:
        return RUN_BACKWARD;
    case MS_EVENT_UPDATE:
        return RUN_UPDATE;
    default:
        return RUN_OTHER;
    }
}

static int column_at(const half *h, double us) {
    const int i = (int)(us / h->us_per_column);
    return i < h->column_count ? i : h->column_count - 1;
}

/* A column shows its moment with the most bytes, so that no peak gets lost. */
static void add_event(const ms_event *event, void *user) {
    static const char *const names[RUN_COUNT] = {"forward", "recomputation", "backward", "update",
                                                 "the library's work"};
    half *h = (half *)user;
    const double end_us = event->start_us + event->duration_us;
    if (event->kind >= MS_EVENT_DROP) { // instructions only
        return;
    }
    const int run = run_of(event->kind);
    const int last = column_at(h, end_us);
    h->start_us[event->index] = event->start_us;
    for (int i = column_at(h, event->start_us); i <= last; i++) {
        column *c = &h->columns[i];
        const double low = h->us_per_column * i, high = low + h->us_per_column;
        const double from = event->start_us > low ? event->start_us : low;
        const double to = end_us < high ? end_us : high;
        double *us =
            event->stream == MS_STREAM_COMPUTE ? &c->us[run] : &c->copies_us[event->stream];
        *us += to > from ? to - from : 0.0;
        if (event->live_bytes > c->bytes) {
            c->bytes = event->live_bytes;
            memcpy(c->bytes_of, event->live_bytes_of, sizeof c->bytes_of);
        }
    }
    if (event->live_bytes > h->peak_bytes) {
        h->peak_bytes = event->live_bytes;
        h->peak_us = 0.5 * (event->start_us + end_us);
        snprintf(h->peak_name, sizeof h->peak_name, "%s of %s", names[run], event->name);
    }
}

/* What is on the host, from the first instruction that has it to the last. */
static void add_lifetime(const ms_lifetime *l, void *user) {
    half *h = (half *)user;
    if (!l->is_on_host) {
        return;
    }
    const int first = l->is_resident ? 0 : column_at(h, h->start_us[l->first]);
    const int last = l->is_resident ? h->column_count - 1 : column_at(h, h->start_us[l->last + 1]);
    for (int i = first; i <= last; i++) {
        h->columns[i].host_bytes_of[l->category] += l->bytes;
    }
}

/* A moment between two instructions shows what was live before it. */
static void fill_gaps(half *h) {
    for (int i = 1; i < h->column_count; i++) {
        if (h->columns[i].bytes == 0) {
            h->columns[i].bytes = h->columns[i - 1].bytes;
            memcpy(h->columns[i].bytes_of, h->columns[i - 1].bytes_of, sizeof h->columns->bytes_of);
        }
    }
}

/* Fills the columns of a half. */
static void walk_half(half *h, ms_model *model) {
    const size_t count = (size_t)h->report.instruction_count + 1;
    h->start_us = (double *)malloc(count * sizeof *h->start_us);
    if (!h->start_us) {
        bench_stop("no memory for the times of the instructions");
    }
    h->start_us[h->report.instruction_count] = h->report.step_us;
    bench_check(model, ms_visit_events(model, MS_PROGRAM_TRAIN, add_event, h));
    bench_check(model, ms_visit_lifetimes(model, MS_PROGRAM_TRAIN, add_lifetime, h));
    fill_gaps(h);
    free(h->start_us);
    for (int i = 0; i < h->column_count; i++) {
        uint64_t bytes = 0;
        for (int c = 0; c < MS_CATEGORY_COUNT; c++) {
            bytes += h->columns[i].host_bytes_of[c];
        }
        h->host_bytes = bytes > h->host_bytes ? bytes : h->host_bytes;
    }
}

/* Plans one half; columns come later, once the scale is known. */
static bench_model plan_half(half *h, const ms_hardware *device, const bench_workload *w,
                             const nn_transformer_config *shape) {
    h->config.dry_run = true;
    bench_model m = bench_model_create(&h->config, nn_cpu(), w->preset, shape);
    if (device) {
        ms_set_hardware(m.model, device);
    }
    bench_check(m.model, ms_wrap(m.model));
    bench_check(m.model, ms_report(m.model, &h->report));
    return m;
}

// ---- SVG ----------------------------------------------------------------------------------------

static void svg_rect(FILE *file, double x, double y, double width, double height,
                     const char *style) {
    fprintf(file, "<rect x=\"%.2f\" y=\"%.2f\" width=\"%.2f\" height=\"%.2f\" %s/>\n", x, y, width,
            height, style);
}

static void begin(FILE *file, double height) {
    svg_begin(file, picture_width, height,
              ".title{font-size:17px;font-weight:bold;fill:#222}"
              ".half{font-size:14px;font-weight:bold;fill:#222}.name{font-size:13px;fill:#333}"
              ".note{font-size:12px;fill:#333}.tick{font-size:12px;fill:#555}"
              ".grid{stroke:#000;stroke-opacity:0.10}.frame{fill:none;stroke:#888}"
              ".budget{stroke:#b02a37;stroke-dasharray:7 4;stroke-width:1.5}"
              ".red{font-size:12px;fill:#b02a37}"
              ".halo{paint-order:stroke;stroke:#fff;stroke-width:4px}");
    svg_rect(file, 0, 0, picture_width, height, "fill=\"#fff\"");
}

static double y_of(const scale *s, double bytes) {
    return bottom - (bottom - top) * bytes / s->bytes;
}

/* One step of an outline: to a height, then along; nothing where the height stays. */
static void draw_step(FILE *file, double *y, double to_y, double x) {
    if (fabs(*y - to_y) >= 0.005) {
        fprintf(file, "H%.2fV%.2f", x, to_y);
        *y = to_y;
    }
}

static uint64_t bytes_of(const column *c, bool on_host, ms_category category) {
    return on_host ? c->host_bytes_of[category] : c->bytes_of[category];
}

/* The stack: each category is the area between the sums up to it. */
static void draw_stack(FILE *file, const half *h, const scale *s, bool on_host) {
    double below[COLUMNS_MAX];
    const double width = h->us_per_column * s->pixels_per_us;
    const double down = on_host ? s->host_bottom - bottom : 0.0;
    memset(below, 0, sizeof below);
    for (int k = 0; k < MS_CATEGORY_COUNT; k++) {
        const ms_category c = order[k];
        double y = y_of(s, below[0]) + down;
        fprintf(file, "<path fill=\"%s\" d=\"M%.2f %.2f", categories[c], h->left, y);
        for (int i = 0; i < h->column_count; i++) {
            const uint64_t bytes = bytes_of(&h->columns[i], on_host, c);
            draw_step(file, &y, y_of(s, below[i] + (double)bytes) + down, h->left + width * i);
        }
        fprintf(file, "H%.2f", h->right);
        for (int i = h->column_count - 1; i >= 0; i--) {
            draw_step(file, &y, y_of(s, below[i]) + down, h->left + width * (i + 1));
            below[i] += (double)bytes_of(&h->columns[i], on_host, c);
        }
        fprintf(file, "H%.2fZ\"/>\n", h->left);
    }
}

/* What runs when, each column shared by time. */
static void draw_strip(FILE *file, const half *h, const scale *s) {
    const double width = h->us_per_column * s->pixels_per_us;
    for (int run = 0; run < RUN_COUNT; run++) {
        fprintf(file, "<path fill=\"%s\" d=\"", runs[run].colour);
        for (int i = 0; i < h->column_count; i++) {
            double before = 0.0, all = 0.0;
            for (int k = 0; k < RUN_COUNT; k++) {
                before += k < run ? h->columns[i].us[k] : 0.0;
                all += h->columns[i].us[k];
            }
            if (h->columns[i].us[run] > 0.0) {
                fprintf(file, "M%.2f %.2fh%.2fv%.2fh%.2fZ", h->left + width * i,
                        strip_top + strip_height * before / all, width,
                        strip_height * h->columns[i].us[run] / all, -width);
            }
        }
        fprintf(file, "\"/>\n");
    }
    svg_rect(file, h->left, strip_top, h->right - h->left, strip_height, "class=\"frame\"");
}

/* What is copied when, in each direction: a column is as high as its share of the time. */
static void draw_copies(FILE *file, const half *h, const scale *s) {
    const double width = h->us_per_column * s->pixels_per_us;
    for (int k = MS_STREAM_TO_DEVICE; k <= MS_STREAM_TO_HOST && s->moves; k++) {
        const double y = strip_top + k * (strip_height + strip_gap) + strip_height;
        fprintf(file, "<path fill=\"%s\" d=\"", copies[k].colour);
        for (int i = 0; i < h->column_count; i++) {
            const double share = h->columns[i].copies_us[k] / h->us_per_column;
            const double high = strip_height * (share < 1.0 ? share : 1.0);
            if (high > 0.05) {
                fprintf(file, "M%.2f %.2fh%.2fv%.2fh%.2fZ", h->left + width * i, y, width, -high,
                        -width);
            }
        }
        fprintf(file, "\"/>\n");
        svg_rect(file, h->left, y - strip_height, h->right - h->left, strip_height,
                 "class=\"frame\"");
    }
}

static void draw_host(FILE *file, const half *h, const scale *s) {
    char text[96];
    if (h->host_bytes == 0) {
        return;
    }
    const double step = svg_step(s->bytes / s->gb, 8.0);
    draw_stack(file, h, s, true);
    for (double bytes = 0.0; bytes <= (double)h->host_bytes; bytes += step * s->gb) {
        const double y = y_of(s, bytes) + s->host_bottom - bottom;
        svg_line(file, h->left, y, h->right, y, "class=\"grid\"");
        snprintf(text, sizeof text, "%.*f", svg_digits(step), bytes / s->gb);
        svg_text(file, h->left - 8.0, y + 4.0, "class=\"tick halo\" text-anchor=\"end\"", text);
    }
    svg_rect(file, h->left, s->host_top, h->right - h->left, s->host_bottom - s->host_top,
             "class=\"frame\"");
    snprintf(text, sizeof text, "on the host: at most %.2f %s", (double)h->host_bytes / s->gb,
             s->gb > 1e8 ? "GB" : "MB");
    svg_text(file, h->left, s->host_top - 8.0, "class=\"half\"", text);
}

static void draw_axes(FILE *file, const half *h, const scale *s, bool has_numbers) {
    char text[64];
    const double y_step = svg_step(s->bytes / s->gb, 8.0);
    const double ms = 1e-3 * h->report.step_us;
    const double x_step = svg_step(1e-3 * s->us, 12.0);
    for (double y = 0.0; y <= s->bytes / s->gb; y += y_step) {
        svg_line(file, h->left, y_of(s, y * s->gb), h->right, y_of(s, y * s->gb), "class=\"grid\"");
        snprintf(text, sizeof text, "%.*f", svg_digits(y_step), y);
        if (has_numbers) {
            svg_text(file, h->left - 8.0, y_of(s, y * s->gb) + 4.0,
                     "class=\"tick\" text-anchor=\"end\"", text);
        }
    }
    for (double x = 0.0; x <= ms * (1.0 + 1e-9); x += x_step) {
        const double at = h->left + 1e3 * x * s->pixels_per_us;
        svg_line(file, at, bottom, at, bottom + 5.0, "stroke=\"#888\"");
        snprintf(text, sizeof text, "%.*f", svg_digits(x_step), x);
        svg_text(file, at, bottom + 18.0, "class=\"tick\" text-anchor=\"middle\"", text);
    }
    svg_rect(file, h->left, top, h->right - h->left, bottom - top, "class=\"frame\"");
}

static void draw_peak(FILE *file, const half *h, const scale *s) {
    char text[NAME_MAX + 64];
    const double peak = (double)h->peak_bytes;
    const double x = h->left + h->peak_us * s->pixels_per_us, y = y_of(s, peak);
    const bool to_left = x > 0.5 * (h->left + h->right);
    const char *const anchor =
        to_left ? "class=\"note halo\" text-anchor=\"end\"" : "class=\"note halo\"";
    svg_ring(file, x, y, 4.5);
    snprintf(text, sizeof text, "peak %.2f %s: %s", peak / s->gb, s->gb > 1e8 ? "GB" : "MB",
             h->peak_name);
    svg_text(file, to_left ? x - 10.0 : x + 10.0, y - 10.0, anchor, text);
}

static void draw_half(FILE *file, const half *h, const scale *s, bool is_first) {
    char text[160];
    const char *const unit = s->gb > 1e8 ? "GB" : "MB";
    draw_stack(file, h, s, false);
    draw_axes(file, h, s, is_first);
    draw_strip(file, h, s);
    draw_copies(file, h, s);
    draw_host(file, h, s);
    snprintf(text, sizeof text, "%s: arena %.2f %s, step %.1f ms", h->title,
             (double)h->report.arena_bytes / s->gb, unit, 1e-3 * h->report.step_us);
    svg_text(file, h->left, top - 10.0, "class=\"half\"", text);
}

static void draw_budget(FILE *file, const half *h, const scale *s) {
    char text[64];
    const double y = y_of(s, (double)h->report.budget_bytes);
    svg_line(file, h->left, y, h->right, y, "class=\"budget\"");
    snprintf(text, sizeof text, "budget %.2f %s", (double)h->report.budget_bytes / s->gb,
             s->gb > 1e8 ? "GB" : "MB");
    svg_text(file, h->right - 6.0, y - 6.0, "class=\"red halo\" text-anchor=\"end\"", text);
}

/* The categories that occur, then what runs. */
static void draw_legend(FILE *file, const half *halves, const scale *s) {
    double x = left_end;
    for (int k = 0; k < MS_CATEGORY_COUNT; k++) {
        const ms_category c = order[k];
        uint64_t most = 0;
        char style[32];
        for (int i = 0; i < 2 * COLUMNS_MAX; i++) {
            const half *h = &halves[i / COLUMNS_MAX];
            const column *at = &h->columns[i % COLUMNS_MAX];
            most = at->bytes_of[c] > most ? at->bytes_of[c] : most;
            most = at->host_bytes_of[c] > most ? at->host_bytes_of[c] : most;
        }
        if (most * 500 < halves[0].report.lower_bound_bytes) {
            continue; // too thin to be seen
        }
        snprintf(style, sizeof style, "fill=\"%s\"", categories[c]);
        svg_rect(file, x, 79.0, 13.0, 13.0, style);
        svg_text(file, x + 18.0, 90.0, "class=\"name\"", ms_category_name(c));
        x += 44.0 + 7.0 * (double)strlen(ms_category_name(c));
    }
    x = left_end;
    for (int k = 0; k < RUN_COUNT + (s->moves ? MS_STREAM_COUNT - 1 : 0); k++) {
        char style[32];
        const bool is_run = k < RUN_COUNT;
        const char *name = is_run ? runs[k].name : copies[k - RUN_COUNT + 1].name;
        snprintf(style, sizeof style, "fill=\"%s\"",
                 is_run ? runs[k].colour : copies[k - RUN_COUNT + 1].colour);
        svg_rect(file, x, s->legend - 11.0, 13.0, 13.0, style);
        svg_text(file, x + 18.0, s->legend, "class=\"name\"", name);
        x += 44.0 + 7.0 * (double)strlen(name);
    }
}

static void draw(FILE *file, const half *halves, const scale *s, const char *title,
                 const char *subtitle) {
    char text[64];
    begin(file, s->height);
    svg_text(file, left_end, 30.0, "class=\"title\"", title);
    svg_text(file, left_end, 52.0, "class=\"name\"", subtitle);
    draw_legend(file, halves, s);
    for (int i = 0; i < 2; i++) {
        draw_half(file, &halves[i], s, i == 0);
    }
    draw_budget(file, &halves[1], s);
    for (int i = 0; i < 2; i++) {
        draw_peak(file, &halves[i], s);
    }
    snprintf(text, sizeof text, "live bytes, %s", s->gb > 1e8 ? "GB" : "MB");
    svg_upright(file, left_end - 48.0, 0.5 * (top + bottom), text);
    svg_text(file, right_end, s->legend, "class=\"name\" text-anchor=\"end\"", "time, ms");
    svg_end(file);
}

// ---- the command line ---------------------------------------------------------------------------

static const bench_workload *find_workload(const char *name) {
    for (int i = 0; i < BENCH_WORKLOADS; i++) {
        if (strcmp(bench_workloads[i].name, name) == 0) {
            return &bench_workloads[i];
        }
    }
    fail("--model %s: there are bert-base, bert-large, gpt2-medium, gpt2-large and gpt2-xl", name);
    exit(2);
}

/* Both halves on one scale: their widths are their times. */
static scale fit(half *halves) {
    scale s;
    memset(&s, 0, sizeof s);
    const uint64_t plain = halves[0].report.lower_bound_bytes;
    s.us = halves[0].report.step_us + halves[1].report.step_us;
    s.bytes = 1.12 * (double)plain;
    s.gb = plain > 500000000 ? 1e9 : 1e6;
    s.pixels_per_us = (right_end - left_end - gap) / s.us;
    double left = left_end;
    for (int i = 0; i < 2; i++) {
        half *h = &halves[i];
        h->left = left;
        h->right = left + h->report.step_us * s.pixels_per_us;
        left = h->right + gap;
        h->column_count = (int)(1.25 * (h->right - h->left)) + 1;
        h->us_per_column = h->report.step_us / h->column_count;
    }
    return s;
}

/* Once it is known what is copied and how much is on the host: where that is drawn, from the top. */
static void place(scale *s, const half *halves) {
    uint64_t most = 0;
    for (int i = 0; i < 2; i++) {
        const ms_memory_report *r = &halves[i].report;
        s->moves |= r->to_device_bytes + r->to_host_bytes > 0;
        most = halves[i].host_bytes > most ? halves[i].host_bytes : most;
    }
    s->legend = strip_top + strip_height + (s->moves ? 2.0 * (strip_height + strip_gap) : 0.0);
    s->host_top = s->host_bottom = s->legend;
    if (most > 0) {
        s->host_top += 40.0;
        s->host_bottom = s->host_top + (bottom - top) * (double)most / s->bytes;
    }
    s->legend = s->host_bottom + 35.0;
    s->height = s->legend + 35.0;
}

static FILE *open_file(const char *path) {
    FILE *file = fopen(path, "wb");
    if (!file) {
        bench_stop("the picture cannot be written");
    }
    return file;
}

static void close_file(FILE *file, const char *path) {
    const bool written = !ferror(file);
    if (fclose(file) != 0 || !written) {
        bench_stop("the picture cannot be written");
    }
    printf("%s is written\n", path);
}

/* Both plans as a page for a browser. */
static void write_page(const char *path, const half *halves, const bench_model *models,
                       const char *title, const char *subtitle) {
    page p;
    FILE *file = open_file(path);
    page_begin(&p, file, title, subtitle);
    for (int i = 0; i < 2; i++) {
        page_add_plan(&p, halves[i].title, "Predicted.", models[i].model);
    }
    page_end(&p, 1, halves[1].report.budget_bytes, NULL, 0);
    if (p.result != MS_RESULT_OK) {
        bench_stop("the plans cannot be written");
    }
    close_file(file, path);
}

int main(int argc, char **argv) {
    static half halves[2];
    const char *model = "gpt2-medium", *device = "RTX 3090";
    option_budget budget = {0, 0.7, NULL};
    option_words pictures = {{NULL}, 0};
    const char *path = NULL, *html = NULL;
    int64_t batch = 0, sequence = 0;
    const option_spec options[] = {
        {"--model", "NAME", OPTION_TEXT, &model,
         "bert-base, bert-large, gpt2-medium, gpt2-large or gpt2-xl"},
        {"--budget", "SIZE", OPTION_BUDGET, &budget,
         "bytes such as 6G, a share of the plain arena, or plain, half or smallest"},
        {"--device", "NAME", OPTION_TEXT, &device, "a built-in device, or cpu"},
        {"--batch", "N", OPTION_COUNT, &batch, "sequences in a batch, if not the workload's"},
        {"--sequence", "N", OPTION_COUNT, &sequence, "tokens in a sequence, if not the workload's"},
        {"--out", "FILE", OPTION_TEXT, &path,
         "the picture, timeline.svg unless --html is given; also as the last argument"},
        {"--html", "FILE", OPTION_TEXT, &html,
         "a page for a browser, which says what lives where the pointer is"},
    };
    if (take_options("[options] [picture.svg]\nDraws the memory of a training step over time.",
                     options, OPTIONS_IN(options), argc, argv, &pictures) != 0) {
        return 2;
    }
    if (pictures.count > 1 || (pictures.count == 1 && path)) {
        fail("%s: there is one picture, and its name is given already",
             pictures.items[pictures.count - 1]);
        return 2;
    }
    path = pictures.count == 1 ? pictures.items[0] : path;
    const bench_workload *w = find_workload(model);
    const ms_hardware *hardware = strcmp(device, "cpu") == 0 ? NULL : ms_hardware_find(device);
    if (!hardware && strcmp(device, "cpu") != 0) {
        fail("--device %s: no built-in device has this name, or several have: name one, such as "
             "H200, "
             "or cpu",
             device);
        return 2;
    }
    nn_transformer_config shape;
    bench_shape(w->preset, &shape);
    shape.batch = batch ? batch : w->batch;
    shape.sequence = sequence ? sequence : w->sequence;

    bench_model models[2];
    halves[0].title = "plain";
    halves[1].title = "planned";
    halves[0].config.memory_budget_bytes = (uint64_t)1 << 50;
    models[0] = plan_half(&halves[0], hardware, w, &shape);
    if (choose_bytes(&budget, models[0].model, &halves[1].config.memory_budget_bytes) != 0) {
        return 1;
    }
    models[1] = plan_half(&halves[1], hardware, w, &shape);
    scale s = fit(halves);
    for (int i = 0; i < 2; i++) {
        walk_half(&halves[i], models[i].model);
    }
    place(&s, halves);
    char title[160], subtitle[160];
    snprintf(title, sizeof title, "%s, %lld x %lld tokens, AdamW: memory during a training step",
             w->name, (long long)shape.batch, (long long)shape.sequence);
    snprintf(subtitle, sizeof subtitle,
             "simulated for %s; the planned step has %.0f %% of the plain arena and takes %.1f %% "
             "longer",
             hardware ? hardware->name : "a CPU",
             100.0 * (double)halves[1].report.arena_bytes / (double)halves[0].report.arena_bytes,
             100.0 * (halves[1].report.step_us / halves[0].report.step_us - 1.0));
    printf("%s\n%s\n", title, subtitle);
    if (path || !html) {
        path = path ? path : "timeline.svg";
        FILE *file = open_file(path);
        draw(file, halves, &s, title, subtitle);
        close_file(file, path);
    }
    if (html) {
        write_page(html, halves, models, title, subtitle);
    }
    for (int i = 0; i < 2; i++) {
        bench_model_destroy(&models[i]);
    }
    return 0;
}
