/*  text.h - findings as text for a terminal. */
#ifndef MEMSCALE_ESTIMATE_TEXT_H
#define MEMSCALE_ESTIMATE_TEXT_H

#include "output.h"

/* The plans of the columns: plain, and each mode. */
typedef struct plans {
    const plan *of[COLUMNS];
} plans;

static plans columns_of(const findings *f, const plan *of_modes) {
    plans p;
    p.of[0] = &f->plain;
    for (int i = 0; i < MODES; i++) {
        p.of[i + 1] = &of_modes[i];
    }
    return p;
}

static void print_cells(const char *name, char cells[COLUMNS][32]) {
    printf("  %-22s", name);
    for (int c = 0; c < COLUMNS; c++) {
        printf(" %13s", cells[c]);
    }
    printf("\n");
}

/* A row: a category, or after these the gaps of the layout, or the whole, which is rounded up: it
   may be typed in again as a budget. */
static void print_bytes(const char *name, const plans *p, int row, unit u) {
    char cells[COLUMNS][32];
    for (int c = 0; c < COLUMNS; c++) {
        const ms_memory_report *r = &p->of[c]->report;
        const uint64_t bytes = row < ROWS    ? row_bytes(r->peak_bytes, row)
                               : row == ROWS ? r->gap_bytes
                                             : r->arena_bytes;
        const double value = (double)bytes / u.bytes;
        snprintf(cells[c], sizeof cells[c], "%.*f", u.digits,
                 row > ROWS ? rounded_up(value, u.digits) : value);
    }
    print_cells(name, cells);
}

static void print_ratios(const char *name, const plans *p) {
    char cells[COLUMNS][32];
    for (int c = 0; c < COLUMNS; c++) {
        snprintf(cells[c], sizeof cells[c], "%.3f",
                 p->of[c]->report.step_us / p->of[0]->report.step_us);
    }
    print_cells(name, cells);
}

static void print_share(char cell[32], double share) {
    snprintf(cell, 32, share < 0.0 ? "-" : "%.1f %%", 100.0 * share);
}

/* Of several ranks: how much of what belongs to params is divided among them, what each rank gathers
   and adds up, and for how much of a step it does. */
static void print_ranks(const estimate *e, const plans *p, unit u) {
    char cells[COLUMNS][32];
    for (int k = 0; k < SHARD_KINDS && e->options.ranks > 1; k++) {
        for (int c = 0; c < COLUMNS; c++) {
            print_share(cells[c], share_divided(&p->of[c]->shards[k]));
        }
        print_cells(shard_names[k].name, cells);
    }
    for (int row = 0; row < 3 && e->options.ranks > 1; row++) {
        static const char *const names[] = {"gathered for layers", "other exchanges",
                                            "network busy"};
        for (int c = 0; c < COLUMNS; c++) {
            const ms_memory_report *r = &p->of[c]->report;
            const uint64_t bytes[] = {r->gather_bytes, r->reduce_bytes};
            if (row < 2) {
                snprintf(cells[c], sizeof cells[c], "%.*f", u.digits, (double)bytes[row] / u.bytes);
            } else {
                print_share(cells[c], network_share(r));
            }
        }
        print_cells(names[row], cells);
    }
}

/* What the plans have on the host and copy in a step, for how much of the step the link is busy,
   how much of the time of these copies is hidden, and for how much of a whole step computing waits
   for them (and for the network): rows that there are only if some plan moves anything, or there are
   several ranks. */
static void print_host(const estimate *e, const plans *p, unit u) {
    static const char *const names[] = {"on the host", "copied in",     "copied out",
                                        "link busy",   "copies hidden", "waits for copies"};
    bool moves = false;
    for (int c = 0; c < COLUMNS; c++) {
        moves |= p->of[c]->report.host_bytes > 0;
    }
    for (int row = moves ? 0 : 4; row < 6 && (moves || e->options.ranks > 1); row++) {
        char cells[COLUMNS][32];
        for (int c = 0; c < COLUMNS; c++) {
            const ms_memory_report *r = &p->of[c]->report;
            const double shares[] = {link_share(r), r->hidden_share, r->stall_us / r->step_us};
            const uint64_t bytes[] = {r->host_bytes, r->to_device_bytes, r->to_host_bytes};
            if (row < 3) {
                snprintf(cells[c], sizeof cells[c], "%.*f", u.digits, (double)bytes[row] / u.bytes);
            } else {
                const bool copies = r->to_device_bytes + r->to_host_bytes > 0;
                const bool exchanges = row > 3 && r->gather_bytes + r->reduce_bytes > 0;
                print_share(cells[c], copies || exchanges ? shares[row - 3] : -1.0);
            }
        }
        print_cells(names[row], cells);
    }
}

/* Where a step has several micro-batches, the time of all of them and the update. */
static void print_whole_step(const estimate *e, const plans *p) {
    char cells[COLUMNS][32];
    for (int c = 0; c < COLUMNS; c++) {
        snprintf(cells[c], sizeof cells[c], "%s", show_time(p->of[c]->report.step_us).text);
    }
    if (batches_of_step(&e->options, e->options.batch) > 1) {
        print_cells("whole step", cells);
    }
}

/* The time of the recomputations in a micro-batch, as a multiple of one forward of all blocks. */
static void print_recomputed(const plans *p) {
    char cells[COLUMNS][32];
    for (int c = 0; c < COLUMNS; c++) {
        const step_times *t = &p->of[c]->times;
        snprintf(cells[c], sizeof cells[c], "%.3f", t->recompute_us / t->block_us);
    }
    print_cells("recomputed", cells);
}

static void print_table(const estimate *e, const findings *f) {
    const unit u = unit_for(f->plain.report.arena_bytes);
    const plans p = columns_of(f, f->at_budget), smallest = columns_of(f, f->smallest);
    char cells[COLUMNS][32];
    printf("\n%s, live at the peak  %13s", u.name, "plain");
    for (int i = 0; i < MODES; i++) {
        printf(" %13s", ms_mode_name(modes[i]));
    }
    printf("\n");
    for (int r = 0; r < ROWS; r++) {
        print_bytes(table_rows[r].name, &p, r, u);
    }
    print_bytes("lost to the layout", &p, ROWS, u);
    print_bytes("peak", &p, ROWS + 1, u);
    for (int c = 0; c < COLUMNS; c++) {
        snprintf(cells[c], sizeof cells[c], "%s", p.of[c]->fits ? "yes" : "no");
    }
    print_cells("fits the budget", cells);
    for (int c = 0; c < COLUMNS; c++) {
        snprintf(cells[c], sizeof cells[c], "%s", show_time(p.of[c]->report.step_us).text);
    }
    print_cells("step (roofline)", cells);
    print_whole_step(e, &p);
    print_ratios("step over plain", &p);
    print_recomputed(&p);
    print_ranks(e, &p, u);
    print_host(e, &p, u);
    print_bytes("smallest peak there is", &smallest, ROWS + 1, u);
    print_ratios("its step over plain", &smallest);
    print_ranks(e, &smallest, u);
    print_host(e, &smallest, u);
}

/* Lists the modes that plan as `first` does; returns their number. */
static int print_followers(const findings *f, int first) {
    int count = 0;
    for (int i = first + 1; i < MODES; i++) {
        if (f->same_as[i] == first) {
            printf("%s%s", count++ ? " and " : "", ms_mode_name(modes[i]));
        }
    }
    return count;
}

/* Says why the columns of some modes are equal. */
static void print_same(const findings *f) {
    bool any = false;
    for (int i = 0; i < MODES; i++) {
        const int count = print_followers(f, i);
        if (count > 0) {
            printf(" plan%s as %s does. ", count == 1 ? "s" : "", ms_mode_name(modes[i]));
        }
        any |= count > 0;
    }
    printf("%s", any ? "\n" : "");
}

enum { TEXT_WIDTH = 100, TEXT_INDENT = 10 };

/* A line that is being written: its characters, and spaces that no word has followed yet. */
typedef struct text_line {
    int at, gap;
} text_line;

/* printf, with the words that have no room in the line below its first column of text. No line
   breaks at \1, which is a space. */
static void say(text_line *line, const char *format, ...) {
    char text[512];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    for (const char *c = text; *c;) {
        line->gap += (int)strspn(c, " ");
        c += strspn(c, " ");
        const int length = (int)strcspn(c, " \n");
        if (length > 0) {
            const bool breaks = line->gap > 0 && line->at + line->gap + length > TEXT_WIDTH;
            const int spaces = breaks ? TEXT_INDENT : line->gap;
            printf("%s%*s", breaks ? "\n" : "", spaces, "");
            line->at = (breaks ? 0 : line->at) + spaces + length;
            line->gap = 0;
        }
        for (const char *end = c + length; c < end; c++) {
            putchar(*c == '\1' ? ' ' : *c);
        }
        if (*c == '\n') {
            putchar(*c++);
            line->at = line->gap = 0;
        }
    }
}

/* What the family of Llama has beside the sizes of all models. */
static void print_llama(text_line *at, const nn_llama_config *c) {
    say(at, " (%lld of keys)", (long long)c->kv_heads);
    if (c->head_size * c->heads != c->channels) {
        say(at, " of %lld", (long long)c->head_size);
    }
    if (c->window > 0) {
        say(at, ", a window of %lld", (long long)c->window);
    }
    if (c->window > 0 && c->full_every > 0) {
        say(at, " but in every %lld%s layer", (long long)c->full_every,
            c->full_every == 2   ? "nd"
            : c->full_every == 3 ? "rd"
                                 : "th");
    }
    say(at, ", feed-forward %lld%s%s%s", (long long)c->feed_forward,
        c->qkv_bias ? ", biases of qkv" : "", c->qk_norm ? ", norms of queries and keys" : "",
        c->post_norms ? ", norms after both parts of a block" : "");
}

static void print_model(text_line *at, const estimate *e, const findings *f) {
    const shape *s = &e->model;
    const nn_llama_config *c = &s->of.llama;
    const uint64_t all = f->plain.report.param_count, trained = f->plain.trained_count;
    say(at, "model     %s: %lld layers, %lld channels, %lld heads", s->name, (long long)c->layers,
        (long long)c->channels, (long long)c->heads);
    if (s->of.family == MODEL_LLAMA) {
        print_llama(at, c);
    }
    say(at, ", vocabulary %lld: %.2f M params\n", (long long)c->vocabulary, (double)all / 1e6);
    if (s->of.untrained[0]) {
        say(at, "          planned, but nn_llama does not compute it: %s\n", s->of.untrained);
    }
    if (e->options.frozen) {
        say(at,
            "          of these %.2f M are trained: adapters of rank %lld; all others are "
            "frozen\n",
            (double)trained / 1e6, (long long)e->options.rank);
    }
}

static void print_training(text_line *at, const settings *o) {
    const long long count = (long long)batches_of_step(o, o->batch);
    say(at, "training  ");
    if (count > 1) {
        say(at, "%lld micro-batches of ", count);
    } else {
        say(at, "batch ");
    }
    say(at, "%lld x %lld tokens", (long long)o->batch, (long long)o->sequence);
    if (o->ranks > 1) {
        say(at, " on each of %lld ranks", (long long)o->ranks);
    }
    if (o->tokens || o->ranks > 1) {
        say(at, " (%lld a step)", count * (long long)(o->batch * o->sequence * o->ranks));
    }
    say(at, ", %s, %s%s%s\n", precision_of(o)->name, optimizers[optimizer_of(o)].title,
        o->clip > 0.0f ? ", clipped by the norm of all gradients" : "",
        count > 1 ? "; a step below is one of them and the update" : "");
}

/* In which formats numbers are in memory. */
static void print_formats(text_line *at, const settings *o) {
    const precision *p = precision_of(o);
    const char *dtype = name_of_dtype(p->dtype), *state = has_half_state(o) ? "bf16" : "f32";
    const bool chooses = p->mixed == MS_SWITCH_DEFAULT, codes = has_state(o) && !o->state;
    const bool has_masters = p->mixed == MS_SWITCH_ON && p->masters != MS_SWITCH_OFF;
    const char *also = chooses && codes ? "; AGGRESSIVE may round all of these, state to 8 bits"
                       : chooses        ? "; AGGRESSIVE may round the first two to 16 bits"
                       : codes          ? "; AGGRESSIVE may round state to 8 bits"
                                        : "";
    say(at, "          %sparams %s%s, gradients %s",
        o->frozen && has_masters ? "frozen params f32, trained " : "", dtype,
        p->mixed != MS_SWITCH_ON ? ""
        : has_masters            ? " with masters in f32"
                                 : " without masters",
        has_half_gradients(o) ? dtype : "f32");
    if (has_state(o)) {
        say(at, ", optimizer state %s", state);
    }
    say(at, "%s\n", also);
    if (p->mixed == MS_SWITCH_ON) {
        say(at, "          activations %s; f32: biases, norms, statistics, losses%s\n", dtype,
            has_half_gradients(o) ? ", and gradients of these and of token tables" : "");
    }
}

/* What the figures depend on beside the sizes: when params are updated. */
static void print_assumption(text_line *at, const estimate *e, const findings *f) {
    const uint64_t late = f->late.report.arena_bytes;
    if (needs_all_gradients(&e->options)) {
        say(at, "assumes   all gradients are kept until the end of the step, for clipping, "
                "accumulation or f16\n");
    } else if (late != 0) {
        say(at,
            "assumes   no clipping and no accumulation, so that the modes update params inside "
            "backward;\n          with --clip the smallest peak is %s, which %s\n",
            show_bytes(late).text, f->late.fits ? "fits too" : "does not fit");
    } else {
        say(at, "assumes   no clipping and no accumulation\n");
    }
}

static void print_speed(text_line *at, const char *name, double speed, const char *unit_name) {
    if (speed > 0.0) {
        say(at, "%s\1%g\1%s, ", name, speed, unit_name);
    }
}

static void print_device(text_line *at, const destination *t) {
    const ms_hardware *h = &t->hardware;
    say(at, "device    %s, %s", h->name, show_bytes(h->total_bytes).text);
    if (h->free_bytes) {
        say(at, ", of which %s are free", show_bytes(h->free_bytes).text);
    }
    say(at, "\nspeeds    ");
    print_speed(at, "F32", h->f32_tflops, "TFLOP/s");
    print_speed(at, "TF32", h->tf32_tflops, "TFLOP/s");
    print_speed(at, "BF16\1and\1F16", h->f16_tflops, "TFLOP/s");
    print_speed(at, "memory", h->memory_gb_per_s, "GB/s");
    print_speed(at, "link", h->to_device_gb_per_s, "GB/s");
    say(at, "%s\n",
        h->is_measured ? "measured here"
        : t->is_named  ? "as stated; kernels seldom reach them"
                       : "where not given, those of a common discrete GPU");
}

static void print_network(text_line *at, const destination *t) {
    const ms_hardware *h = &t->hardware;
    if (t->network) {
        say(at, "network   %s: ", t->network);
        print_speed(at, "each\1rank", h->network_gb_per_s, "GB/s");
        say(at, "%g us at least%s\n", h->network_us > 0.0 ? h->network_us : 20.0,
            h->network_is_link ? ", by the link that copies take too" : "");
    }
}

static void print_head(const estimate *e, const findings *f) {
    text_line at = {0, 0};
    printf("memscale.h %d.%d.%d, what training takes: planned by a dry run\n\n",
           MEMSCALE_VERSION_MAJOR, MEMSCALE_VERSION_MINOR, MEMSCALE_VERSION_PATCH);
    print_model(&at, e, f);
    print_training(&at, &e->options);
    print_assumption(&at, e, f);
    print_formats(&at, &e->options);
    print_device(&at, &e->device);
    print_network(&at, &e->device);
    printf("budget    %s", show_bytes(e->device.budget_bytes).text);
    if (!e->device.is_user_size) {
        printf(", %.0f %% of the memory",
               100.0 * (double)e->device.budget_bytes / (double)e->device.memory_bytes);
    }
    if (e->options.host_bytes) {
        printf("; on the host %s", show_bytes(e->options.host_bytes).text);
    }
    printf("\n");
}

static void print_fit(const char *before, const findings *f, int mode) {
    const plan *p = &f->at_budget[mode];
    printf("          %s: %s fits, in %.3f times the plain step, %s\n", before,
           ms_mode_name(modes[mode]), over_plain(f, p), show_time(p->report.step_us).text);
}

/* The fastest plan that keeps the numbers, and the fastest that rounds, if it is faster. */
static void print_fits(const findings *f) {
    if (f->advised != f->rounding) {
        print_fit("same numbers", f, f->advised);
    } else {
        printf("          same numbers: no mode fits\n");
    }
    if (f->rounding >= 0) {
        print_fit("rounding", f, f->rounding);
        printf("              it rounds to %s\n",
               show_rounding(f, &f->at_budget[f->rounding]).text);
    } else {
        printf("          rounding: no faster\n");
    }
}

static void print_advice(const estimate *e, const findings *f) {
    const char *of = e->device.is_user_size ? "the budget" : "the memory";
    if (f->pressure < 100.0) {
        printf("\nadvice    plain takes %.2f of %s: ", f->pressure, of);
    } else {
        printf("\nadvice    plain takes over 100 times %s: ", of);
    }
    if (f->plain.fits) {
        printf("no mode is needed; CONSERVATIVE would give more headroom\n");
        return;
    }
    if (!f->searched) {
        printf("a mode is needed\n");
        print_fits(f);
        return;
    }
    if (f->largest_batch == 0) {
        const ms_memory_report *r = &f->single.report;
        printf("no mode is enough\n"
               "          not even one sequence fits: it takes %s, of which params and optimizer "
               "state are %s\n",
               show_bytes(r->arena_bytes).text,
               show_bytes(row_bytes(r->peak_bytes, 0) + row_bytes(r->peak_bytes, 2)).text);
        return;
    }
    printf("%s, and a smaller batch\n", ms_mode_name(modes[f->advised]));
    const ms_memory_report *r = &f->largest.report;
    printf("          the largest batch that fits is %lld: %s, %s a step, %.3f of its plain "
           "step%s\n",
           (long long)f->largest_batch, show_bytes(r->arena_bytes).text, show_time(r->step_us).text,
           r->step_us / r->plain_step_us,
           precision_of(&e->options)->mixed == MS_SWITCH_ON ? " in f32" : "");
}

/* The largest groups of those that are resident, or of the others. */
static void print_groups(const plan *p, bool is_resident, const char *title) {
    bool shown[MOST_GROUPS] = {false};
    printf("  %s\n", title);
    for (int k = 0; k < SHOWN_GROUPS; k++) {
        int most = -1;
        for (int i = 0; i < p->group_count; i++) {
            const value_group *g = &p->groups[i];
            const bool is_more = most < 0 || group_bytes(g) > group_bytes(&p->groups[most]);
            most = g->is_resident == is_resident && !shown[i] && is_more ? i : most;
        }
        if (most >= 0) {
            const value_group *g = &p->groups[most];
            shown[most] = true;
            printf("    %12s  %4llu x %-12s %-20s %s%s\n", show_bytes(group_bytes(g)).text,
                   (unsigned long long)g->count, show_bytes(g->bytes).text,
                   ms_category_name(g->category), g->name, g->count > 1 ? ", ..." : "");
        }
    }
}

/* Who needs most. */
static void print_largest(const findings *f) {
    const plan *p = advised_plan(f);
    printf("\nThe largest values at the peak of %s (--plan=full lists all, and when they live):\n",
           p == &f->plain ? "the plain plan"
           : p->fits      ? ms_mode_name(modes[f->advised])
                          : "the smallest plan");
    print_groups(p, true, "between steps too");
    print_groups(p, false, "within a step");
}

static void print_text(const estimate *e, const findings *f) {
    print_head(e, f);
    print_table(e, f);
    printf("\nAt other moments of the plain step there are up to %s of gradients and\n%s of "
           "activations.\n",
           show_bytes(row_bytes(f->plain.largest, 1)).text,
           show_bytes(f->plain.report.activation_peak_bytes).text);
    print_same(f);
    print_largest(f);
    print_advice(e, f);
}

#endif // MEMSCALE_ESTIMATE_TEXT_H
