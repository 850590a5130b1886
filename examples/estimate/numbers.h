/*  numbers.h - findings as JSON, for programs. */
#ifndef MEMSCALE_ESTIMATE_NUMBERS_H
#define MEMSCALE_ESTIMATE_NUMBERS_H

#include "json.h"
#include "output.h"

static void json_plan(json *j, const char *key, const findings *f, const plan *p) {
    const ms_memory_report *r = &p->report;
    json_open(j, key, '{');
    json_flag(j, "fits", p->fits);
    json_count(j, "peak_bytes", r->arena_bytes);
    for (int i = 0; i < ROWS; i++) {
        json_count(j, table_rows[i].key, row_bytes(r->peak_bytes, i));
    }
    json_count(j, "layout_gap_bytes", r->gap_bytes);
    json_count(j, "largest_gradients_bytes", row_bytes(p->largest, 1));
    json_count(j, "largest_activations_bytes", r->activation_peak_bytes);
    json_real(j, "step_us", r->step_us);
    json_real(j, "step_over_plain",
              p == &f->largest ? r->step_us / r->plain_step_us : over_plain(f, p));
    json_real(j, "stall_us", r->stall_us);
    json_real(j, "micro_batch_us", p->report.micro_us);
    json_real(j, "last_micro_batch_us", r->last_micro_us);
    json_real(j, "recompute_us", p->times.recompute_us);
    json_real(j, "recompute_over_block_forward", p->times.recompute_us / p->times.block_us);
    json_count(j, "host_bytes", r->host_bytes);
    json_count(j, "to_device_bytes", r->to_device_bytes);
    json_count(j, "to_host_bytes", r->to_host_bytes);
    json_real(j, "link_share", link_share(r));
    json_real(j, "hidden_share", r->hidden_share);
    for (int i = 0; i < SHARD_KINDS; i++) {
        json_count(j, shard_names[i].key, p->shards[i].divided);
    }
    json_count(j, "gather_bytes", r->gather_bytes);
    json_count(j, "reduce_bytes", r->reduce_bytes);
    json_real(j, "network_share", network_share(r));
    json_count(j, "recomputed_layers", r->recompute_count);
    json_flag(j, "early_update", r->early_update);
    json_close(j, '}');
}

/* What is alive at the peak, values of one category and size together. */
static void json_groups(json *j, const plan *p) {
    json_open(j, "values_at_peak", '[');
    for (int i = 0; i < p->group_count; i++) {
        const value_group *g = &p->groups[i];
        json_open(j, NULL, '{');
        json_text(j, "first", g->name);
        json_text(j, "category", ms_category_name(g->category));
        json_flag(j, "between_steps", g->is_resident);
        json_count(j, "bytes", g->bytes);
        json_count(j, "count", g->count);
        json_close(j, '}');
    }
    json_close(j, ']');
}

static void json_model(json *j, const estimate *e, const findings *f) {
    const shape *s = &e->model;
    const nn_llama_config *c = &s->of.llama;
    json_open(j, "model", '{');
    json_text(j, "name", s->name);
    json_text(j, "family", model_family_names[s->of.family]);
    json_count(j, "layers", (uint64_t)c->layers);
    json_count(j, "channels", (uint64_t)c->channels);
    json_count(j, "heads", (uint64_t)c->heads);
    json_count(j, "kv_heads", (uint64_t)c->kv_heads);
    json_count(j, "head_size", (uint64_t)c->head_size);
    json_count(j, "feed_forward", (uint64_t)c->feed_forward);
    json_count(j, "vocabulary", (uint64_t)c->vocabulary);
    json_count(j, "positions", (uint64_t)s->of.positions);
    json_count(j, "window", (uint64_t)c->window);
    json_count(j, "full_every", (uint64_t)c->full_every);
    json_flag(j, "tied_head", c->tied);
    json_flag(j, "qkv_bias", c->qkv_bias);
    json_flag(j, "qk_norm", c->qk_norm);
    json_flag(j, "post_norms", c->post_norms);
    json_text(j, "untrained", s->of.untrained);
    json_count(j, "params", f->plain.report.param_count);
    json_close(j, '}');
}

static void json_training(json *j, const settings *o, uint64_t trained_count) {
    static const char *const switches[] = {"default", "on", "off"};
    const precision *p = precision_of(o);
    const int64_t count = batches_of_step(o, o->batch);
    json_open(j, "training", '{');
    json_count(j, "batch", (uint64_t)o->batch);
    json_count(j, "sequence", (uint64_t)o->sequence);
    json_text(j, "precision", p->name);
    json_text(j, "mixed_precision", switches[p->mixed]);
    json_flag(j, "master_weights", p->mixed == MS_SWITCH_ON && p->masters != MS_SWITCH_OFF);
    json_text(j, "gradients", has_half_gradients(o) ? name_of_dtype(p->dtype) : "f32");
    json_text(j, "optimizer", optimizers[optimizer_of(o)].title);
    json_text(j, "state", !has_state(o) ? "none" : has_half_state(o) ? "bf16" : "f32");
    json_text(j, "state_in_8_bits", switches[o->state ? MS_SWITCH_OFF : MS_SWITCH_DEFAULT]);
    json_flag(j, "clip", o->clip > 0.0f);
    json_count(j, "accumulation_steps", (uint64_t)count);
    json_count(j, "ranks", (uint64_t)o->ranks);
    json_count(j, "tokens", (uint64_t)(count * o->batch * o->sequence * o->ranks));
    json_count(j, "adapter_rank", (uint64_t)o->rank);
    json_count(j, "trained_params", trained_count);
    json_close(j, '}');
}

static void json_device(json *j, const destination *t, uint64_t host_bytes) {
    static const char *const kinds[] = {"cpu", "discrete", "integrated"};
    json_open(j, "device", '{');
    json_text(j, "name", t->hardware.name);
    json_text(j, "kind", kinds[t->hardware.kind]);
    json_flag(j, "speeds_are_its_own", t->is_named);
    json_real(j, "f32_tflops", t->hardware.f32_tflops);
    json_real(j, "tf32_tflops", t->hardware.tf32_tflops);
    json_real(j, "f16_tflops", t->hardware.f16_tflops);
    json_real(j, "memory_gb_per_s", t->hardware.memory_gb_per_s);
    json_real(j, "link_gb_per_s", t->hardware.to_device_gb_per_s);
    if (t->network) {
        json_text(j, "network", t->network);
        json_real(j, "network_gb_per_s", t->hardware.network_gb_per_s);
        json_real(j, "network_us", t->hardware.network_us);
        json_flag(j, "network_is_link", t->hardware.network_is_link);
    }
    json_count(j, "memory_bytes", t->memory_bytes);
    json_count(j, "budget_bytes", t->budget_bytes);
    if (host_bytes) {
        json_count(j, "max_host_bytes", host_bytes);
    }
    json_close(j, '}');
}

static void json_advice(json *j, const findings *f) {
    json_open(j, "advice", '{');
    json_real(j, "pressure", f->pressure);
    json_text(j, "mode", f->plain.fits ? "none" : ms_mode_name(modes[f->advised]));
    const bool rounds = !f->plain.fits && !f->searched && f->rounding >= 0;
    json_flag(j, "batch_fits", !f->searched);
    json_flag(j, "keeps_numbers", f->plain.fits || !is_rounded(f, advised_plan(f)));
    if (rounds) {
        json_text(j, "rounding_mode", ms_mode_name(modes[f->rounding]));
        json_text(j, "rounds_to", show_rounding(f, &f->at_budget[f->rounding]).text);
    }
    if (f->searched) {
        json_count(j, "largest_batch", (uint64_t)f->largest_batch);
    }
    if (f->largest_batch > 0) {
        json_plan(j, "largest_batch_plan", f, &f->largest);
    }
    json_groups(j, advised_plan(f));
    json_close(j, '}');
}

static void write_json(const estimate *e, const findings *f, FILE *file) {
    json j = {file, 0, false, false};
    char version[32];
    snprintf(version, sizeof version, "%d.%d.%d", MEMSCALE_VERSION_MAJOR, MEMSCALE_VERSION_MINOR,
             MEMSCALE_VERSION_PATCH);
    json_open(&j, NULL, '{');
    json_text(&j, "memscale", version);
    json_model(&j, e, f);
    json_training(&j, &e->options, f->plain.trained_count);
    json_device(&j, &e->device, e->options.host_bytes);
    json_plan(&j, "plain", f, &f->plain);
    if (f->late.report.arena_bytes != 0) {
        json_plan(&j, "smallest_with_clipping", f, &f->late);
    }
    json_open(&j, "modes", '{');
    for (int i = 0; i < MODES; i++) {
        json_open(&j, ms_mode_name(modes[i]), '{');
        json_plan(&j, "at_budget", f, &f->at_budget[i]);
        json_plan(&j, "smallest", f, &f->smallest[i]);
        json_close(&j, '}');
    }
    json_close(&j, '}');
    json_advice(&j, f);
    json_close(&j, '}');
    fputc('\n', file);
}

#endif // MEMSCALE_ESTIMATE_NUMBERS_H
