/*  plans.h - plans of a model by dry runs, and what is kept of them. */
#ifndef MEMSCALE_ESTIMATE_PLANS_H
#define MEMSCALE_ESTIMATE_PLANS_H

#include "device.h"
#include "model.h"
#include "training.h"

/* How many plans are made, for those who wait. */
typedef struct progress {
    bool is_shown;
    int done, most; // most: as far as it is known
    double start_s;
} progress;

typedef struct estimate {
    settings options;
    shape model;
    destination device;
    progress *shown; // NULL: nobody waits
} estimate;

/* Values of one category and size at the peak. */
typedef struct value_group {
    char name[NAME_BYTES]; // of the first
    ms_category category;
    uint64_t bytes, count;
    bool is_resident; // between steps
} value_group;

enum { MOST_GROUPS = 64, SHOWN_GROUPS = 3 };

/* Of what belongs to params, in elements of these: what lives between steps, and of how much of it each
   rank has only its part. */
typedef enum shard_kind { SHARD_STATE, SHARD_GRADIENT, SHARD_VALUE, SHARD_KINDS } shard_kind;

typedef struct shard_count {
    uint64_t all, divided;
} shard_count;

/* Times as predicted, in a micro-batch. */
typedef struct step_times {
    double recompute_us;
    double block_us; // one forward of all blocks
} step_times;

typedef struct plan {
    ms_memory_report report;
    step_times times;
    bool fits;
    uint64_t largest[MS_CATEGORY_COUNT]; // of each category, each at its own moment
    uint64_t trained_count;              // elements of the params that are not frozen
    value_group groups[MOST_GROUPS];
    int group_count;
    bool applies[MS_TECHNIQUE_COUNT]; // to some layer
    ms_dtype half;                    // of what mixed precision rounds; F32: it rounds nothing
    shard_count shards[SHARD_KINDS];
} plan;

/* A plan that is looked at. */
typedef struct plan_look {
    plan *of;
    const ms_model *model;
} plan_look;

static void show_progress(const progress *p) {
    if (p && p->is_shown) {
        fprintf(stderr, "\r%s: %d", options_program, p->done);
        if (p->done < p->most) {
            fprintf(stderr, " of %d", p->most);
        }
        fprintf(stderr, " plans, %.0f s ", seconds_now() - p->start_s);
        fflush(stderr);
    }
}

/* So many more plans are to be made. */
static void expect_plans(const estimate *e, int count) {
    if (e->shown) {
        e->shown->most = e->shown->done + count;
        show_progress(e->shown);
    }
}

static void count_plan(const estimate *e) {
    if (!e->shown) {
        return;
    }
#ifdef _OPENMP
#pragma omp critical
#endif
    {
        e->shown->done++;
        show_progress(e->shown);
    }
}

/* Leaves an empty line for what comes next. */
static void end_progress(const progress *p) {
    if (p && p->is_shown) {
        fprintf(stderr, "\r%60s\r", "");
    }
}

static void register_layers(const estimate *e, int64_t batch, nn_net *net) {
    const model_config *m = &e->model.of;
    nn_llama_config llama = m->llama;
    nn_transformer_config c;
    memset(&c, 0, sizeof c);
    c.vocabulary = llama.vocabulary;
    c.context = m->positions;
    c.layers = llama.layers;
    c.heads = llama.heads;
    c.channels = llama.channels;
    c.batch = llama.batch = batch;
    c.sequence = llama.sequence = e->options.sequence;
    c.adapter_rank = llama.adapter_rank = e->options.rank;
    (void)(m->family == MODEL_LLAMA  ? nn_llama(net, &llama)
           : m->family == MODEL_BERT ? nn_bert(net, &c)
                                     : nn_gpt2(net, &c));
}

/* A model that is not wrapped; on failure prints the reason and returns NULL. */
static ms_model *register_model(const estimate *e, int64_t batch, ms_config *config, nn_net **net) {
    ms_model *model;
    const precision *p = precision_of(&e->options);
    config->backend = e->device.backend;
    config->dry_run = true;
    config->tf32 = p->tf32;
    config->mixed_precision = p->mixed;
    config->mixed_dtype = p->dtype;
    config->master_weights = p->masters;
    config->optimizer_8bit = e->options.state ? MS_SWITCH_OFF : MS_SWITCH_DEFAULT;
    config->offloading =
        config->offloading == MS_SWITCH_OFF ? MS_SWITCH_OFF : e->options.offloading;
    config->max_host_bytes = e->options.host_bytes;
    config->accumulation_steps = (uint32_t)batches_of_step(&e->options, batch);
    if (e->options.ranks > 1) { // a dry run calls none of its functions
        config->comm.size = sizeof config->comm;
        config->comm.count = (uint32_t)e->options.ranks;
        config->comm.on_device = !e->device.backend.device_is_host;
    }
    if (ms_create(config, &model) != MS_RESULT_OK) {
        fail("%s", ms_last_error(model));
        ms_destroy(model);
        return NULL;
    }
    *net = nn_create_on(model, e->device.kernels);
    if (!*net) {
        fail("no memory for a net");
        ms_destroy(model);
        return NULL;
    }
    ms_set_hardware(model, &e->device.hardware);
    nn_force_half(*net, p->mixed == MS_SWITCH_ON);
    nn_half_gradients(*net, has_half_gradients(&e->options));
    register_layers(e, batch, *net);
    set_optimizer(&e->options, model);
    return model;
}

/* All params, or those that nn_freeze leaves. */
static uint64_t count_trained(const estimate *e, const nn_net *net) {
    uint64_t count = 0;
    for (int64_t i = 0; i < nn_param_count(net); i++) {
        const nn_param_info *info = nn_param_at(net, i);
        const bool is_trained = !e->options.frozen || strstr(info->name, nn_adapter_mark);
        count += is_trained ? ms_shape_count(&info->shape) : 0;
    }
    return count;
}

static void keep_times(const ms_event *event, step_times *t) {
    t->recompute_us += event->kind == MS_EVENT_RECOMPUTE ? event->duration_us : 0.0;
    if (event->kind == MS_EVENT_FORWARD && event->name[0] == 'h' &&
        isdigit((unsigned char)event->name[1])) {
        t->block_us += event->duration_us;
    }
}

static void keep_event(const ms_event *event, void *user) {
    plan *p = (plan *)user;
    for (int c = 0; c < MS_CATEGORY_COUNT; c++) {
        if (event->live_bytes_of[c] > p->largest[c]) {
            p->largest[c] = event->live_bytes_of[c];
        }
    }
    if (event->kind != MS_EVENT_DROP) {
        keep_times(event, &p->times);
    }
}

static uint64_t group_bytes(const value_group *g) {
    return g->bytes * g->count;
}

static bool is_of_group(const value_group *g, const ms_lifetime *l) {
    return g->bytes == l->bytes && g->category == l->category && g->is_resident == l->is_resident;
}

/* The bytes of so many elements of a value are less where a rank has a part of them. */
static void keep_shard(const ms_lifetime *l, void *user) {
    const plan_look *look = (const plan_look *)user;
    static const struct {
        ms_category category;
        shard_kind kind;
    } kinds[] = {{MS_CATEGORY_OPTIMIZER, SHARD_STATE},
                 {MS_CATEGORY_GRADIENT, SHARD_GRADIENT},
                 {MS_CATEGORY_PARAM, SHARD_VALUE}};
    const ms_tensor param = ms_tensor_of(look->model, l->tensor);
    const uint64_t count = ms_tensor_count(look->model, param);
    const bool is_second = l->category == MS_CATEGORY_OPTIMIZER &&
                           ms_optimizer_state(look->model, param, 0).id != l->tensor.id;
    const uint64_t each = l->category != MS_CATEGORY_OPTIMIZER ? ms_dtype_bytes(l->dtype)
                          : l->format == MS_STATE_FORMAT_8BIT  ? 1
                          : l->format == MS_STATE_FORMAT_BF16  ? 2
                                                               : 4;
    for (int i = 0; i < SHARD_KINDS && l->is_resident && !is_second; i++) {
        shard_count *s = &look->of->shards[kinds[i].kind];
        if (l->category == kinds[i].category) {
            s->all += count;
            s->divided += l->bytes < count * each ? count : 0;
        }
    }
}

/* Counts a value at the peak. If there is no room for another group, a larger one replaces the
   smallest. */
static void keep_value(const ms_lifetime *l, void *user) {
    plan *p = (plan *)user;
    int i = 0, least = 0;
    for (; i < p->group_count && !is_of_group(&p->groups[i], l); i++) {
        least = group_bytes(&p->groups[i]) < group_bytes(&p->groups[least]) ? i : least;
    }
    const bool is_full = i == MOST_GROUPS;
    const bool is_half = l->dtype == MS_DTYPE_BF16 || l->dtype == MS_DTYPE_F16;
    p->half = is_half && l->category != MS_CATEGORY_INPUT ? l->dtype : p->half;
    value_group *g = &p->groups[is_full ? least : i];
    if (!l->is_at_peak || (is_full && l->bytes <= group_bytes(g))) {
        return;
    }
    if (i == p->group_count) {
        p->group_count += !is_full;
        snprintf(g->name, sizeof g->name, "%s", l->name);
        g->category = l->category;
        g->bytes = l->bytes;
        g->count = 0;
        g->is_resident = l->is_resident;
    }
    g->count++;
}

static void keep_decision(const ms_decision *d, void *user) {
    plan *p = (plan *)user;
    p->applies[d->technique] |= d->is_applied;
}

/* What is to be known of a plan; prints the reason and returns 1 if it cannot be had. */
static int look_at_plan(ms_model *model, plan *p) {
    plan_look look = {p, model};
    ms_result result = ms_report(model, &p->report);
    p->report.peak_layer = ""; // belongs to the model
    if (result == MS_RESULT_OK) {
        result = ms_visit_events(model, MS_PROGRAM_TRAIN, keep_event, p);
    }
    if (result == MS_RESULT_OK) {
        result = ms_visit_lifetimes(model, MS_PROGRAM_TRAIN, keep_value, p);
    }
    if (result == MS_RESULT_OK) {
        result = ms_visit_lifetimes(model, MS_PROGRAM_TRAIN, keep_shard, &look);
    }
    if (result == MS_RESULT_OK) {
        result = ms_visit_decisions(model, keep_decision, p);
    }
    return result == MS_RESULT_OK ? 0 : fail("%s", ms_last_error(model));
}

/* Returns 0, with p->fits false if no plan fits the budget; or prints the reason and returns 1. */
static int make_plan(const estimate *e, int64_t batch, ms_config *config, plan *p) {
    nn_net *net;
    memset(p, 0, sizeof *p);
    ms_model *model = register_model(e, batch, config, &net);
    if (!model) {
        return 1;
    }
    const ms_result result = ms_wrap(model);
    int status = 0;
    p->fits = result == MS_RESULT_OK;
    p->trained_count = count_trained(e, net);
    if (p->fits) {
        status = look_at_plan(model, p);
    } else if (result != MS_RESULT_BUDGET) {
        status = fail("%s", ms_last_error(model));
    }
    ms_destroy(model);
    nn_destroy(net);
    count_plan(e);
    return status;
}

/* As trainers do it: everything is kept, and all params are updated after backward. */
static ms_config plain_config(void) {
    ms_config config;
    memset(&config, 0, sizeof config);
    config.checkpointing = MS_SWITCH_OFF;
    config.early_update = config.offloading = MS_SWITCH_OFF;
    config.memory_budget_bytes = (uint64_t)1 << 60;
    return config;
}

static int plan_plain(const estimate *e, int64_t batch, plan *p) {
    ms_config config = plain_config();
    const int status = make_plan(e, batch, &config, p);
    p->fits = p->report.arena_bytes <= e->device.budget_bytes;
    return status;
}

static int plan_smallest_with(const estimate *e, int64_t batch, ms_mode mode, ms_switch early,
                              plan *p) {
    ms_config config;
    memset(&config, 0, sizeof config);
    config.mode = mode;
    config.early_update = early;
    config.force_optimize = true;
    config.memory_budget_bytes = (uint64_t)1 << 60;
    const int status = make_plan(e, batch, &config, p);
    p->fits = p->report.arena_bytes <= e->device.budget_bytes;
    return status;
}

static int plan_smallest(const estimate *e, int64_t batch, ms_mode mode, plan *p) {
    return plan_smallest_with(e, batch, mode, MS_SWITCH_DEFAULT, p);
}

static int plan_budget(const estimate *e, int64_t batch, ms_mode mode, uint64_t budget, plan *p) {
    ms_config config;
    memset(&config, 0, sizeof config);
    config.mode = mode;
    config.memory_budget_bytes = budget;
    return make_plan(e, batch, &config, p);
}

static ms_model *wrap_model(const estimate *e, ms_config *config, nn_net **net) {
    ms_model *model = register_model(e, e->options.batch, config, net);
    if (model && ms_wrap(model) != MS_RESULT_OK) {
        fail("%s", ms_last_error(model));
        ms_destroy(model);
        nn_destroy(*net);
        return NULL;
    }
    return model;
}

#endif // MEMSCALE_ESTIMATE_PLANS_H
