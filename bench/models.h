/*  models.h - what benchmarks of whole models share: published workloads, random batches, chains of
    empty layers. Include bench.h, memscale.h and nn.h first. */
#ifndef MEMSCALE_BENCH_MODELS_H
#define MEMSCALE_BENCH_MODELS_H

/* The figures are those that MemScale for Python published for one GPU of 24 GB. */
typedef struct bench_workload {
    const char *name, *preset;
    int64_t batch, sequence;
    double published_plain, published_optimized; // GB; 0: does not fit into 24 GB
} bench_workload;

static const bench_workload bench_workloads[] = {
    {"bert-base", "bert-base", 16, 128, 3.14, 0.84},
    {"bert-large", "bert-large", 16, 128, 7.60, 2.02},
    {"gpt2-medium", "gpt2-355M", 4, 512, 10.87, 2.61},
    {"gpt2-large", "gpt2-774M", 2, 512, 14.87, 4.68},
    {"gpt2-xl", "gpt2-1558M", 1, 512, 0.0, 9.25},
};
enum { BENCH_WORKLOADS = sizeof bench_workloads / sizeof bench_workloads[0] };

BENCH_API void bench_stop(const char *reason) {
    fflush(stdout);
    fprintf(stderr, "%s\n", reason);
    exit(1);
}

BENCH_API void bench_check(ms_model *model, ms_result result) {
    if (result != MS_RESULT_OK) {
        fflush(stdout);
        fprintf(stderr, "%s: %s\n", ms_result_name(result), ms_last_error(model));
        exit(1);
    }
}

/* Sizes of a preset of nn.h, or of "gpt2-tiny" and "bert-tiny"; false: unknown. */
BENCH_API bool bench_shape(const char *preset, nn_transformer_config *shape) {
    memset(shape, 0, sizeof *shape);
    if (strcmp(preset, "gpt2-tiny") == 0 || strcmp(preset, "bert-tiny") == 0) {
        shape->vocabulary = 256;
        shape->context = 64;
        shape->layers = 4;
        shape->heads = 2;
        shape->channels = 32;
        return true;
    }
    return nn_preset(preset, shape);
}

/* The same for programs that run a GPT-2 for at most 32 steps and 32 rounds; at a mistake it
   prints an error and ends the program with status 2. */
enum { BENCH_STEPS = 32 };

BENCH_API nn_transformer_config bench_gpt2_shape(const char *preset, int64_t batch,
                                                 int64_t sequence, int64_t steps, int64_t rounds) {
    nn_transformer_config shape;
    if (strncmp(preset, "gpt2-", 5) != 0 || !bench_shape(preset, &shape)) {
        fail_name("--preset", preset);
        exit(2);
    }
    if (check_most("--steps", steps, BENCH_STEPS) != 0 ||
        check_most("--rounds", rounds, BENCH_STEPS) != 0) {
        exit(2);
    }
    shape.batch = batch;
    shape.sequence = sequence;
    return shape;
}

/* A model of a preset, not wrapped. */
typedef struct bench_model {
    ms_model *model;
    nn_net *net;
    nn_transformer built;
    nn_transformer_config shape;
} bench_model;

/* A model without layers: settings of the net come before bench_model_build, which registers
   those of a preset. */
BENCH_API void bench_model_begin(bench_model *m, const ms_config *config, const nn_device *device) {
    memset(m, 0, sizeof *m);
    const ms_result created = ms_create(config, &m->model);
    bench_check(m->model, created);
    m->net = nn_create_on(m->model, device);
    if (!m->net) {
        bench_stop("no memory for a net");
    }
}

BENCH_API void bench_model_build(bench_model *m, const char *preset,
                                 const nn_transformer_config *shape) {
    m->shape = *shape;
    m->built = strncmp(preset, "bert", 4) == 0 ? nn_bert(m->net, shape) : nn_gpt2(m->net, shape);
}

BENCH_API bench_model bench_model_create(const ms_config *config, const nn_device *device,
                                         const char *preset, const nn_transformer_config *shape) {
    bench_model m;
    bench_model_begin(&m, config, device);
    bench_model_build(&m, preset, shape);
    return m;
}

BENCH_API void bench_model_destroy(bench_model *m) {
    ms_destroy(m->model);
    nn_destroy(m->net);
}

/* The arena with early updates and without recomputation, less half of its activations. */
BENCH_API uint64_t bench_half_budget(const ms_backend *backend, const nn_device *device,
                                     const char *preset, const nn_transformer_config *shape) {
    ms_memory_report report;
    ms_config config;
    memset(&config, 0, sizeof config);
    config.backend = *backend;
    config.dry_run = true;
    config.memory_budget_bytes = (uint64_t)1 << 50;
    config.early_update = MS_SWITCH_ON;
    config.checkpointing = MS_SWITCH_OFF;
    bench_model m = bench_model_create(&config, device, preset, shape);
    bench_check(m.model, ms_wrap(m.model));
    bench_check(m.model, ms_report(m.model, &report));
    bench_model_destroy(&m);
    return report.arena_bytes - report.activation_peak_bytes / 2;
}

/* Random tokens, each the target of the one before it; segment 0. */
BENCH_API void bench_write_batch(const bench_model *m) {
    const size_t count = (size_t)(m->shape.batch * m->shape.sequence);
    int32_t *ids = (int32_t *)calloc(count + 1, sizeof *ids);
    if (!ids) {
        bench_stop("no memory for a batch");
    }
    if (m->built.segments.id) {
        bench_check(m->model, ms_write(m->model, m->built.segments, ids));
    }
    uint32_t state = 1;
    for (size_t i = 0; i <= count; i++) {
        state = state * 1664525u + 1013904223u; // Knuth, "Seminumerical Algorithms", section 3.3.4
        ids[i] = (int32_t)((state >> 8) % (uint32_t)m->shape.vocabulary);
    }
    bench_check(m->model, ms_write(m->model, m->built.tokens, ids));
    bench_check(m->model, ms_write(m->model, m->built.targets, ids + 1));
    free(ids);
}

BENCH_API int bench_nothing(const ms_call *call) {
    (void)call;
    return 0;
}

/* A chain of layers that do nothing: x = f(x, w), x (64), w (64); without params x = f(x), except
   for one in the first layer, and ready to be trained. The output of the last layer is the loss, one
   float. */
BENCH_API ms_model *bench_chain(const ms_config *config, int64_t layers, bool params,
                                ms_layer_fn zero_loss) {
    ms_model *model;
    const ms_result created = ms_create(config, &model);
    bench_check(model, created);
    const float zeros[64] = {0.0f};
    ms_layer_desc layer;
    memset(&layer, 0, sizeof layer);
    layer.backward = bench_nothing;
    layer.out[0] = ms_input(model, "x", MS_DTYPE_F32, ms_shape1(64));
    if (!params) {
        bench_check(model, ms_write(model, layer.out[0], zeros));
    }
    for (int64_t i = 0; i < layers; i++) {
        const bool last = i + 1 == layers;
        layer.forward = last ? zero_loss : bench_nothing;
        layer.in[0] = layer.out[0];
        layer.out[0] = ms_activation(model, "x", MS_DTYPE_F32, ms_shape1(last ? 1 : 64));
        if (params || i == 0) {
            layer.param[0] = ms_param(model, "w", MS_DTYPE_F32, ms_shape1(64));
            if (!params) {
                bench_check(model, ms_write(model, layer.param[0], zeros));
            }
        } else {
            layer.param[0].id = 0;
        }
        ms_register_layer(model, &layer);
    }
    ms_set_loss(model, layer.out[0]);
    return model;
}

/* Microseconds of the host per instruction of a step, with that chain; as many forwards in all. */
BENCH_API double bench_instruction(const ms_config *config, int64_t layers, int64_t forwards,
                                   ms_layer_fn zero_loss) {
    const int steps = (int)(forwards / layers) + 1;
    ms_model *model = bench_chain(config, layers, false, zero_loss);
    ms_memory_report report;
    bench_check(model, ms_wrap(model));
    bench_check(model, ms_report(model, &report));
    bench_check(model, ms_step(model, NULL));
    bench_check(model, ms_synchronize(model));
    const double start = bench_seconds();
    for (int i = 0; i < steps; i++) {
        bench_check(model, ms_step(model, NULL));
    }
    const double seconds = bench_seconds() - start;
    ms_destroy(model);
    return 1e6 * seconds / steps / report.instruction_count;
}

#endif // MEMSCALE_BENCH_MODELS_H
