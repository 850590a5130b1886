// Training with part of the memory on the host: GPT-2 on the CPU, whose "device" is linked to its host
// by two threads that copy at a given speed, as a link does that nothing computed delays. Each budget
// is planned with measured times; the predicted time of a step is compared with the measured one, and
// so is what of the copies hides. Or AdamW alone, of one param whose state streams, beside the same
// with all of it on the device. Give it fewer threads than cores (OMP_NUM_THREADS): copying needs one.
#include "bench.h"

#define MEMSCALE_IMPLEMENTATION
#include "memscale.h"
#include "nn.h"
#include "models.h"

#include <pthread.h>

// ------------------------------------------------------------------------------------------------
// the link: a CPU backend whose copies take as long as a link of a given speed would take

enum { LINK_JOBS = 512, LINK_EVENTS = 4096 };

typedef struct link_job {
    void *target;
    const void *source;
    uint64_t bytes;
    double enqueued_at;
} link_job;

typedef struct link_direction {
    pthread_t thread;
    link_job jobs[LINK_JOBS]; // a ring
    uint64_t enqueued, done;  // copies
    double free_at;           // when the link is done with those that were begun
    double busy_seconds;
    struct linked *of;
} link_direction;

typedef struct linked {
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    link_direction direction[MS_STREAM_COUNT]; // that of MS_STREAM_COMPUTE is not used
    struct {
        ms_stream_kind stream;
        uint64_t ticket;
    } events[LINK_EVENTS];
    double bytes_per_second;
    bool stops;
} linked;

static void sleep_until(double seconds) {
    const double left = seconds - bench_seconds();
    if (left > 0.0) {
        struct timespec t;
        t.tv_sec = (time_t)left;
        t.tv_nsec = (long)(1e9 * (left - (double)(time_t)left));
        nanosleep(&t, NULL);
    }
}

static void *link_run(void *argument) {
    link_direction *d = (link_direction *)argument;
    linked *l = d->of;
    pthread_mutex_lock(&l->mutex);
    while (!l->stops || d->done < d->enqueued) {
        if (d->done == d->enqueued) {
            pthread_cond_wait(&l->changed, &l->mutex);
            continue;
        }
        const link_job job = d->jobs[d->done % LINK_JOBS];
        pthread_mutex_unlock(&l->mutex);
        const double seconds = (double)job.bytes / l->bytes_per_second;
        d->free_at = (d->free_at > job.enqueued_at ? d->free_at : job.enqueued_at) + seconds;
        memcpy(job.target, job.source, (size_t)job.bytes);
        sleep_until(d->free_at);
        pthread_mutex_lock(&l->mutex);
        d->busy_seconds += seconds;
        d->done++;
        pthread_cond_broadcast(&l->changed);
    }
    pthread_mutex_unlock(&l->mutex);
    return NULL;
}

static int link_enqueue(linked *l, ms_stream_kind stream, void *target, const void *source,
                        uint64_t bytes) {
    link_direction *d = &l->direction[stream];
    pthread_mutex_lock(&l->mutex);
    while (d->enqueued - d->done == LINK_JOBS) {
        pthread_cond_wait(&l->changed, &l->mutex);
    }
    link_job *job = &d->jobs[d->enqueued++ % LINK_JOBS];
    job->target = target;
    job->source = source;
    job->bytes = bytes;
    job->enqueued_at = bench_seconds();
    pthread_cond_broadcast(&l->changed);
    pthread_mutex_unlock(&l->mutex);
    return 0;
}

static int link_copy_in(void *user, void *device, const void *host, uint64_t bytes) {
    return link_enqueue((linked *)user, MS_STREAM_TO_DEVICE, device, host, bytes);
}

static int link_copy_out(void *user, void *host, const void *device, uint64_t bytes) {
    return link_enqueue((linked *)user, MS_STREAM_TO_HOST, host, device, bytes);
}

static int link_record(void *user, ms_stream_kind stream, uint32_t event) {
    linked *l = (linked *)user;
    pthread_mutex_lock(&l->mutex);
    l->events[event % LINK_EVENTS].stream = stream;
    l->events[event % LINK_EVENTS].ticket = l->direction[stream].enqueued;
    pthread_mutex_unlock(&l->mutex);
    return 0;
}

static int link_wait_on_host(void *user, uint32_t event) {
    linked *l = (linked *)user;
    pthread_mutex_lock(&l->mutex);
    const uint64_t ticket = l->events[event % LINK_EVENTS].ticket;
    link_direction *d = &l->direction[l->events[event % LINK_EVENTS].stream];
    while (d->done < ticket) {
        pthread_cond_wait(&l->changed, &l->mutex);
    }
    pthread_mutex_unlock(&l->mutex);
    return 0;
}

/* What is computed is done when it was enqueued, so copies need not wait for it. */
static int link_wait(void *user, ms_stream_kind stream, uint32_t event) {
    const linked *l = (const linked *)user;
    const bool computed = l->events[event % LINK_EVENTS].stream == MS_STREAM_COMPUTE;
    return stream != MS_STREAM_COMPUTE && computed ? 0 : link_wait_on_host(user, event);
}

static int link_synchronize(void *user) {
    linked *l = (linked *)user;
    pthread_mutex_lock(&l->mutex);
    for (int k = MS_STREAM_TO_DEVICE; k <= MS_STREAM_TO_HOST; k++) {
        while (l->direction[k].done < l->direction[k].enqueued) {
            pthread_cond_wait(&l->changed, &l->mutex);
        }
    }
    pthread_mutex_unlock(&l->mutex);
    return 0;
}

static void link_open(linked *l, double bytes_per_second) {
    memset(l, 0, sizeof *l);
    l->bytes_per_second = bytes_per_second;
    if (pthread_mutex_init(&l->mutex, NULL) != 0 || pthread_cond_init(&l->changed, NULL) != 0) {
        bench_stop("no mutex");
    }
    for (int k = MS_STREAM_TO_DEVICE; k <= MS_STREAM_TO_HOST; k++) {
        l->direction[k].of = l;
        if (pthread_create(&l->direction[k].thread, NULL, link_run, &l->direction[k]) != 0) {
            bench_stop("no thread");
        }
    }
}

static void link_close(linked *l) {
    pthread_mutex_lock(&l->mutex);
    l->stops = true;
    pthread_cond_broadcast(&l->changed);
    pthread_mutex_unlock(&l->mutex);
    for (int k = MS_STREAM_TO_DEVICE; k <= MS_STREAM_TO_HOST; k++) {
        pthread_join(l->direction[k].thread, NULL);
    }
    pthread_cond_destroy(&l->changed);
    pthread_mutex_destroy(&l->mutex);
}

static ms_backend link_backend(linked *l) {
    ms_backend b = ms_backend_cpu();
    b.name = "cpu with a link";
    b.user = l;
    b.open = NULL;
    b.close = NULL;
    b.prepare = NULL;
    b.query = NULL;
    b.has_copy_streams = true;
    b.copy_in = link_copy_in;
    b.copy_out = link_copy_out;
    b.record = link_record;
    b.wait = link_wait;
    b.wait_on_host = link_wait_on_host;
    b.synchronize = link_synchronize;
    return b;
}

// ------------------------------------------------------------------------------------------------
// training

typedef struct row {
    uint64_t budget_bytes;
    ms_memory_report report;
    double measured_ms, hidden_share;
} row;

static ms_hardware linked_device(double gb_per_s) {
    ms_hardware h;
    memset(&h, 0, sizeof h);
    snprintf(h.name, sizeof h.name, "CPU with a link");
    h.kind = MS_DEVICE_DISCRETE;
    h.total_bytes = h.free_bytes = (uint64_t)1 << 40;
    h.launch_us = 20.0; // a thread is woken up
    h.memory_gb_per_s = 10.0;
    h.f32_tflops = 0.1;
    h.to_device_gb_per_s = h.to_host_gb_per_s = gb_per_s;
    return h;
}

static double time_step(const bench_model *m) {
    const double start = bench_seconds();
    bench_write_batch(m);
    bench_check(m->model, ms_step(m->model, NULL));
    return 1e3 * (bench_seconds() - start);
}

static void measure(row *r, linked *l, const nn_transformer_config *shape, double gb_per_s,
                    int steps) {
    double ms[BENCH_STEPS];
    ms_config config;
    const ms_hardware device = linked_device(gb_per_s);
    memset(&config, 0, sizeof config);
    config.backend = link_backend(l);
    config.memory_budget_bytes = r->budget_bytes;
    config.offloading = MS_SWITCH_ON;
    config.max_host_bytes = (uint64_t)1 << 40;
    config.empirical_profiling = MS_SWITCH_ON;
    config.warmup_steps = 3;
    bench_model m = bench_model_create(&config, nn_cpu(), "gpt2", shape);
    ms_set_hardware(m.model, &device);
    bench_check(m.model, ms_wrap(m.model));
    bench_check(m.model, nn_init(m.net, 1));
    for (int i = 0; i < 6; i++) { // one before the samples, and two by the new plan
        time_step(&m);
    }
    bench_check(m.model, ms_report(m.model, &r->report));
    for (int i = 0; i < steps; i++) {
        ms[i] = time_step(&m);
    }
    r->measured_ms = bench_median(ms, steps);
    bench_model_destroy(&m);
}

static uint64_t plain_arena(const nn_transformer_config *shape) {
    ms_memory_report report;
    ms_config config;
    memset(&config, 0, sizeof config);
    config.dry_run = true;
    config.memory_budget_bytes = (uint64_t)1 << 50;
    bench_model m = bench_model_create(&config, nn_cpu(), "gpt2", shape);
    bench_check(m.model, ms_wrap(m.model));
    bench_check(m.model, ms_report(m.model, &report));
    bench_model_destroy(&m);
    return report.plain_bytes;
}

// ------------------------------------------------------------------------------------------------
// AdamW alone

static int write_loss(const ms_call *call) {
    ((float *)call->out[0].data)[0] = 1.0f;
    return 0;
}

static int leave_gradient(const ms_call *call) { // the update reads it, whatever it is
    (void)call;
    return 0;
}

/* Time of a step of a model with one param, whose layer does nothing. */
static double time_update(linked *l, int64_t count, bool streams, double gb_per_s, int steps,
                          ms_memory_report *report) {
    double ms[BENCH_STEPS];
    ms_model *m;
    ms_config config;
    ms_layer_desc d;
    const ms_hardware device = linked_device(gb_per_s);
    memset(&config, 0, sizeof config);
    memset(&d, 0, sizeof d);
    config.backend = link_backend(l);
    config.memory_budget_bytes = (uint64_t)1 << 40;
    config.max_host_bytes = (uint64_t)1 << 40;
    config.offloading = streams ? MS_SWITCH_ON : MS_SWITCH_OFF;
    bench_check(NULL, ms_create(&config, &m));
    d.name = "nothing";
    d.forward = write_loss;
    d.backward = leave_gradient;
    d.param[0] = ms_param(m, "param", MS_DTYPE_F32, ms_shape1(count));
    d.out[0] = ms_activation(m, "loss", MS_DTYPE_F32, ms_shape1(1));
    ms_register_layer(m, &d);
    ms_set_loss(m, d.out[0]);
    ms_set_hardware(m, &device);
    if (streams) {
        ms_set_tensor_technique(m, ms_optimizer_state(m, d.param[0], 0), MS_TECHNIQUE_OFFLOADING,
                                MS_SWITCH_ON);
    }
    bench_check(m, ms_wrap(m));
    float *ones = (float *)calloc((size_t)count, sizeof(float));
    if (!ones) {
        bench_stop("no memory");
    }
    bench_check(m, ms_write(m, d.param[0], ones));
    free(ones);
    for (int i = -2; i < steps; i++) {
        const double start = bench_seconds();
        bench_check(m, ms_step(m, NULL));
        bench_check(m, ms_synchronize(m));
        ms[i < 0 ? 0 : i] = 1e3 * (bench_seconds() - start);
    }
    bench_check(m, ms_report(m, report));
    ms_destroy(m);
    return bench_median(ms, steps);
}

static void compare_updates(linked *l, int64_t count, double gb_per_s, int steps, bool tsv) {
    ms_memory_report r;
    const double resident_ms = time_update(l, count, false, gb_per_s, steps, &r);
    const double streamed_ms = time_update(l, count, true, gb_per_s, steps, &r);
    const double link_ms = (double)r.to_device_bytes / gb_per_s * 1e-6;
    const double least_ms = link_ms > resident_ms ? link_ms : resident_ms;
    bench_table table = bench_table_begin(
        tsv,
        tsv ? "in_bytes out_bytes arena_bytes link_ms resident_ms predicted_ms streamed_ms ratio"
            : "in out arena link resident predicted streamed ratio");
    bench_bytes(&table, r.to_device_bytes);
    bench_bytes(&table, r.to_host_bytes);
    bench_bytes(&table, r.arena_bytes);
    bench_value(&table, link_ms, 1);
    bench_value(&table, resident_ms, 1);
    bench_value(&table, 1e-3 * r.step_us, 1);
    bench_value(&table, streamed_ms, 1);
    bench_value(&table, streamed_ms / least_ms, 3);
    if (!tsv) {
        printf("ms of a step (median of %d); ratio: streamed over the larger of link and "
               "resident\n",
               steps);
    }
}

int main(int argc, char **argv) {
    static const double shares[] = {1.0, 0.7, 0.5, 0.3};
    enum { ROWS = sizeof shares / sizeof shares[0] };
    row rows[ROWS];
    static linked l;
    bool tsv = false;
    const char *preset = "gpt2-124M";
    int64_t batch = 4, sequence = 64, steps = 4, speed = 2000, update = 0;
    const option_spec options[] = {
        {"--tsv", NULL, OPTION_FLAG, &tsv, "tab-separated output"},
        {"--preset", "NAME", OPTION_TEXT, &preset, "gpt2-124M, -355M, -774M, -1558M, or gpt2-tiny"},
        {"--batch", "N", OPTION_COUNT, &batch, "sequences in a batch"},
        {"--sequence", "N", OPTION_COUNT, &sequence, "tokens in a sequence"},
        {"--link", "N", OPTION_COUNT, &speed, "MB per second of the link, in each direction"},
        {"--steps", "N", OPTION_COUNT, &steps, "timed steps of each budget, 32 at most"},
        {"--update", "N", OPTION_COUNT, &update,
         "AdamW alone, of a param of so many million elements"},
    };
    if (take_options("[options]\nGPT-2 on the CPU, with a link to its host of a given speed.",
                     options, OPTIONS_IN(options), argc, argv, NULL) != 0) {
        return 2;
    }
    const nn_transformer_config shape = bench_gpt2_shape(preset, batch, sequence, steps, 1);
    const double gb_per_s = 1e-3 * (double)speed;
    link_open(&l, 1e9 * gb_per_s);
    if (update > 0) {
        compare_updates(&l, update << 20, gb_per_s, (int)steps, tsv);
        link_close(&l);
        return 0;
    }
    const uint64_t plain = plain_arena(&shape);
    for (int k = 0; k < ROWS; k++) {
        rows[k].budget_bytes = (uint64_t)(shares[k] * (double)plain);
        measure(&rows[k], &l, &shape, gb_per_s, (int)steps);
    }
    link_close(&l);

    bench_table table = bench_table_begin(
        tsv,
        tsv ? "budget_bytes arena_bytes host_bytes in_bytes out_bytes predicted_ms measured_ms "
              "ratio predicted_hidden measured_hidden"
            : "budget arena host in out predicted measured ratio hidden measured");
    for (int k = 0; k < ROWS; k++) {
        const ms_memory_report *r = &rows[k].report;
        const double copies_ms = (double)(r->to_device_bytes + r->to_host_bytes) / gb_per_s * 1e-6;
        const double computed_ms = 1e-3 * (r->step_us - r->stall_us);
        const double exposed = rows[k].measured_ms - computed_ms;
        bench_bytes(&table, rows[k].budget_bytes);
        bench_bytes(&table, r->arena_bytes);
        bench_bytes(&table, r->host_bytes);
        bench_bytes(&table, r->to_device_bytes);
        bench_bytes(&table, r->to_host_bytes);
        bench_value(&table, 1e-3 * r->step_us, 1);
        bench_value(&table, rows[k].measured_ms, 1);
        bench_value(&table, rows[k].measured_ms / (1e-3 * r->step_us), 3);
        bench_value(&table, r->hidden_share, 3);
        bench_value(&table,
                    copies_ms <= 0.0 ? 0.0 : 1.0 - (exposed > 0.0 ? exposed : 0.0) / copies_ms, 3);
    }
    if (!tsv) {
        printf(
            "predicted, measured: ms of a step (median of %lld); ratio: measured over predicted\n"
            "hidden: share of the time of copies that is hidden, as predicted; measured: from the\n"
            "measured step and what of it is computed\n",
            (long long)steps);
    }
    return 0;
}
