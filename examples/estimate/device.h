/*  device.h - which device is planned for, and what training may take of it. */
#ifndef MEMSCALE_ESTIMATE_DEVICE_H
#define MEMSCALE_ESTIMATE_DEVICE_H

#include "settings.h"

enum { MOST_DEVICES = 256, MOST_NETWORKS = 32 };

/* The names of the built-in devices; returns how many there are. */
static int list_devices(const char *names[MOST_DEVICES]) {
    int count = 0;
    for (const ms_hardware *h; count < MOST_DEVICES; names[count++] = h->name) {
        h = ms_hardware_at((uint32_t)count);
        if (!h) {
            break;
        }
    }
    return count;
}

/* The names of the networks; returns how many there are. */
static int list_networks(const char *names[MOST_NETWORKS]) {
    int count = 0;
    while (count < MOST_NETWORKS && ms_network_at((uint32_t)count)) {
        names[count] = ms_network_at((uint32_t)count);
        count++;
    }
    return count;
}

typedef struct destination {
    ms_hardware hardware;
    const char *network; // as it was named; NULL: there is one rank
    const nn_device *kernels;
    ms_backend backend;
    uint64_t memory_bytes; // its free bytes, if known
    uint64_t budget_bytes;
    bool is_named;     // it has its own speeds, not those of its kind
    bool is_user_size; // the user gave the budget
} destination;

/* The workspace of ms_backend_cuda in each arena, for cuBLAS and for sums; the larger of its two
   sizes if the compute capability is unknown. */
static uint64_t cuda_workspace_bytes(const ms_hardware *h) {
    const bool is_older = h->compute_major != 0 && h->compute_major < 9;
    return ((uint64_t)(is_older ? 4 : 32) << 20) + 8192;
}

/* The dry run for a GPU uses the CPU's backend in place of that of CUDA. */
static void prepare_target(destination *t) {
    const bool on_cpu = t->hardware.kind == MS_DEVICE_CPU;
    t->kernels = on_cpu ? nn_cpu() : nn_cuda_dry();
    t->backend = ms_backend_cpu();
    if (!on_cpu) {
        t->backend.workspace_bytes = cuda_workspace_bytes(&t->hardware);
        t->backend.device_is_host = false;
    }
}

static int measure_cpu(destination *t) {
    ms_model *model;
    ms_config config;
    memset(&config, 0, sizeof config);
    if (ms_create(&config, &model) != MS_RESULT_OK) {
        const int failed = fail("%s", ms_last_error(model));
        ms_destroy(model);
        return failed;
    }
    const ms_result result = ms_hardware_report(model, &t->hardware);
    const int status = result == MS_RESULT_OK ? 0 : fail("%s", ms_last_error(model));
    ms_destroy(model);
    t->is_named = true;
    return status;
}

/* A number with a unit is a size. One without may be a part of a name, such as 3090. */
static int find_device(destination *t, const char *text) {
    const char *names[MOST_DEVICES];
    const double bytes = parse_number(text, true);
    const bool has_unit = bytes >= 0.0 && isalpha((unsigned char)text[strlen(text) - 1]);
    if (has_suffix(text, "cpu")) {
        return measure_cpu(t);
    }
    if (has_unit || (bytes >= 0.0 && strlen(text) < 3)) {
        t->hardware.kind = MS_DEVICE_DISCRETE;
        t->hardware.total_bytes = (uint64_t)bytes;
        snprintf(t->hardware.name, sizeof t->hardware.name, "a GPU");
        return bytes >= 1048576.0 ? 0
                                  : fail("--gpu %s: give its bytes, from 1M on, such as 24G", text);
    }
    const int found = find_name("--gpu", text, names, list_devices(names),
                                "give bytes such as 24G, or cpu, or one of");
    if (found >= 0) {
        t->hardware = *ms_hardware_at((uint32_t)found);
        t->is_named = true;
    }
    return found < 0;
}

static void take_speed(float given, double *speed) {
    *speed = given > 0.0f ? (double)given : *speed;
}

/* By its name, or its speed alone. */
static int choose_network(const settings *o, destination *t) {
    const char *names[MOST_NETWORKS];
    const bool on_cpu = t->hardware.kind == MS_DEVICE_CPU;
    const double speed = o->network ? parse_number(o->network, false) : -1.0;
    t->network = o->ranks < 2 ? NULL : o->network ? o->network : on_cpu ? "memory" : "pcie";
    if (t->network && speed > 0.0) {
        t->network = "as given";
        t->hardware.network_gb_per_s = speed;
    } else if (t->network && !ms_network_named(t->network, &t->hardware)) {
        fail("--network %s: give 1e9 bytes a second, or one of these, of which nvlink is that of "
             "V100, A100, H100, H200, B200 and those of their kind",
             t->network);
        print_names(stderr, names, list_networks(names), 0, "");
        return 1;
    }
    return 0;
}

/* Bytes, or a share of the memory. */
static int choose_budget(const settings *o, destination *t) {
    const double share = round((double)o->utilization * 1e6) / 1e6; // as it was typed
    t->is_user_size = o->budget_bytes > 0;
    t->budget_bytes =
        t->is_user_size ? o->budget_bytes : (uint64_t)((double)t->memory_bytes * share);
    if (!(o->utilization > 0.0f && o->utilization <= 1.0f)) {
        return fail("--utilization %g: above 0 and at most 1", (double)o->utilization);
    }
    return t->budget_bytes <= t->hardware.total_bytes
               ? 0
               : fail("--budget %llu: more than the %llu bytes of %s",
                      (unsigned long long)t->budget_bytes,
                      (unsigned long long)t->hardware.total_bytes, t->hardware.name);
}

static int choose_target(const settings *o, destination *t) {
    memset(t, 0, sizeof *t);
    if (find_device(t, o->gpu ? o->gpu : "RTX 3090") != 0) {
        return 1;
    }
    take_speed(o->tflops, &t->hardware.f32_tflops);
    take_speed(o->tf32_tflops, &t->hardware.tf32_tflops);
    take_speed(o->f16_tflops, &t->hardware.f16_tflops);
    take_speed(o->bandwidth, &t->hardware.memory_gb_per_s);
    take_speed(o->link, &t->hardware.to_device_gb_per_s);
    take_speed(o->link, &t->hardware.to_host_gb_per_s);
    if (choose_network(o, t) != 0) {
        return 1;
    }
    prepare_target(t);
    t->memory_bytes = t->hardware.free_bytes ? t->hardware.free_bytes : t->hardware.total_bytes;
    if (t->memory_bytes > (uint64_t)1 << 57) {
        return fail("--gpu %s: at most %lluG", o->gpu, 1ull << 27);
    }
    return choose_budget(o, t);
}

#endif // MEMSCALE_ESTIMATE_DEVICE_H
