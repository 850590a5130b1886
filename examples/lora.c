/*  lora - trains adapters beside the frozen weights of a GPT-2, which stream from the host.

        build/examples/lora                                a few seconds, on the CPU
        build/examples/lora --preset 1558M --batch 1 --sequence 512 --dry
        build/cuda/examples/lora --device cuda --preset 355M --sequence 256

    From the GPT-2 of gpt2.c to fine-tuning: params that do not train, and where they live between
    their uses.

    A frozen weight has neither gradient nor optimizer state, and no step changes it. With its home
    on the host it comes to the device twice in a step, for forward and for backward, and is never
    copied back. What stays on the device are the adapters (Hu et al., "LoRA", 2021), with their
    gradients and their state, the activations, and the weights of the few layers that run.

    The same model is trained a second time with everything on the device. Losses and adapters must be
    equal, bit for bit. */
#ifndef _POSIX_C_SOURCE
#define _POSIX_C_SOURCE 200809L
#endif
#define MEMSCALE_IMPLEMENTATION
#include "memscale.h"
#include "nn.h"

#include "options.h"

#include "checkpoint.h"

typedef struct settings {
    const char *preset, *device;
    option_device place;
    int64_t batch, sequence, rank, steps, seed;
    bool dry, plan, debug;
    checkpoint saving;
} settings;

typedef struct adapted {
    ms_model *model;
    nn_net *net;
    nn_transformer gpt2;
    ms_memory_report report;
} adapted;

typedef struct program {
    settings options;
    nn_transformer_config shape;
    adapted plain, streamed;
    int32_t *tokens, *targets;
    uint64_t random; // of the batches
} program;

// ---- options ------------------------------------------------------------------------------------

enum { OPTIONS = 10 + CHECKPOINT_OPTION_COUNT };

static void list_options(settings *o, option_spec *specs) {
    const option_spec all[OPTIONS] = {
        {"--preset", "NAME", OPTION_TEXT, &o->preset,
         "small, 124M, 355M, 774M or 1558M; all with random weights"},
        {"--device", "NAME", OPTION_TEXT, &o->device, OPTION_DEVICE_HELP},
        {"--batch", "N", OPTION_COUNT, &o->batch, "sequences per step"},
        {"--sequence", "N", OPTION_COUNT, &o->sequence, "tokens per sequence"},
        {"--rank", "N", OPTION_COUNT, &o->rank, "of the adapters"},
        {"--steps", "N", OPTION_COUNT, &o->steps, "updates"},
        {"--seed", "N", OPTION_COUNT, &o->seed, "of weights and batches"},
        CHECKPOINT_OPTIONS(&o->saving),
        {"--dry", NULL, OPTION_FLAG, &o->dry, "plan only: allocate and train nothing"},
        {"--plan", NULL, OPTION_FLAG, &o->plan, "list the plan of the model that streams"},
        {"--debug", NULL, OPTION_FLAG, &o->debug, OPTION_DEBUG_HELP},
    };
    memcpy(specs, all, sizeof all);
}

static int choose_shape(program *p) {
    const settings *o = &p->options;
    nn_transformer_config *s = &p->shape;
    char name[64];
    snprintf(name, sizeof name, "gpt2-%.50s", o->preset);
    if (strcmp(o->preset, "small") == 0) {
        s->vocabulary = 256;
        s->context = nn_most(o->sequence, 64);
        s->layers = 6;
        s->heads = 4;
        s->channels = 128;
    } else if (!nn_preset(name, s)) {
        return fail("--preset %s: there are small, 124M, 355M, 774M and 1558M", o->preset);
    }
    if (o->sequence > s->context) {
        return fail("--sequence %lld: the model has %lld positions", (long long)o->sequence,
                    (long long)s->context);
    }
    s->batch = o->batch;
    s->sequence = o->sequence;
    s->adapter_rank = o->rank;
    return 0;
}

static int parse_options(program *p, int argc, char **argv) {
    settings *o = &p->options;
    option_spec specs[OPTIONS];
    o->preset = "small";
    o->device = "cpu";
    o->batch = 4;
    o->sequence = 64;
    o->rank = 8;
    o->steps = 40;
    o->seed = 1;
    list_options(o, specs);
    if (take_options("[options]\nTrains adapters beside frozen weights that stream from the host.",
                     specs, OPTIONS, argc, argv, NULL) != 0 ||
        checkpoint_check(&o->saving) != 0 || choose_device(&o->place, o->device) != 0) {
        return 1;
    }
    return choose_shape(p);
}

// ---- models -------------------------------------------------------------------------------------

static bool is_adapter(const nn_param_info *param) {
    return strstr(param->name, ".adapter.") != NULL;
}

/* Gives the frozen matrices their home on the host. A plan for a budget would choose by itself how
   many of them, on a device with memory of its own; here all are forced, on any device. Biases and
   the weights of normalizations are not worth a copy. */
static void stream_weights(const adapted *a) {
    for (int64_t i = 0; i < nn_param_count(a->net); i++) {
        const nn_param_info *param = nn_param_at(a->net, i);
        if (!is_adapter(param) && param->shape.rank > 1) {
            ms_set_tensor_technique(a->model, param->tensor, MS_TECHNIQUE_OFFLOADING, MS_SWITCH_ON);
        }
    }
}

/* Resumes a run, or writes initial params. What the model that streams has saved is loaded into the
   plain one too: where values are at home makes no difference. */
static int start_model(program *p, adapted *a) {
    settings *o = &p->options;
    if (ms_save_extra(a->model, "random", &p->random, sizeof p->random) != MS_RESULT_OK) {
        return fail("%s", ms_last_error(a->model));
    }
    if (checkpoint_load(&o->saving, a->model) != 0) {
        return 1;
    }
    if (!o->saving.is_resumed && nn_init(a->net, (uint64_t)o->seed) != MS_RESULT_OK) {
        return fail("%s", ms_last_error(a->model));
    }
    return 0;
}

static int make_model(program *p, adapted *a, bool streams) {
    ms_config config = {0};
    config.backend = p->options.place.backend;
    config.memory_budget_bytes = UINT64_MAX; // what is forced holds, whatever the budget
    config.dry_run = p->options.dry;
    config.log = log_warnings;
    config.debug = p->options.debug;
    config.seed = (uint64_t)p->options.seed;
    if (ms_create(&config, &a->model) != MS_RESULT_OK) {
        return fail("%s", ms_last_error(a->model));
    }
    a->net = nn_create_on(a->model, p->options.place.kernels);
    if (!a->net) {
        return fail("no memory for a net");
    }
    a->gpt2 = nn_gpt2(a->net, &p->shape); // with an adapter_rank it freezes all but the adapters
    if (streams) {
        stream_weights(a);
    }
    if (ms_wrap(a->model) != MS_RESULT_OK || ms_report(a->model, &a->report) != MS_RESULT_OK) {
        return fail("%s", ms_last_error(a->model));
    }
    return p->options.dry ? 0 : start_model(p, a);
}

static void free_model(adapted *a) {
    ms_destroy(a->model);
    nn_destroy(a->net);
}

static void print_models(const program *p) {
    const ms_memory_report *plain = &p->plain.report, *r = &p->streamed.report;
    uint64_t trained = 0;
    for (int64_t i = 0; i < nn_param_count(p->plain.net); i++) {
        const nn_param_info *param = nn_param_at(p->plain.net, i);
        trained += is_adapter(param) ? ms_shape_count(&param->shape) : 0;
    }
    printf("model     %lld layers, %lld channels: %.2f M params, %.2f M of them in adapters of "
           "rank %lld\n",
           (long long)p->shape.layers, (long long)p->shape.channels,
           (double)plain->param_count / 1e6, (double)trained / 1e6, (long long)p->options.rank);
    printf("plain     arena %.2f MiB\n", rounded_up(mebibytes(plain->arena_bytes), 2));
    printf("streamed  arena %.2f MiB, and %.2f MiB on the host\n",
           rounded_up(mebibytes(r->arena_bytes), 2), rounded_up(mebibytes(r->host_bytes), 2));
    printf("copies    %.2f MiB to the device in a step, %.2f MiB to the host; %.0f %% of their "
           "time is predicted to be hidden\n",
           mebibytes(r->to_device_bytes), mebibytes(r->to_host_bytes), 100.0 * r->hidden_share);
}

// ---- training -----------------------------------------------------------------------------------

/* Each sequence counts on from a random byte: the target of a token is its successor. */
static void draw_batch(program *p) {
    const int64_t sequence = p->shape.sequence;
    for (int64_t b = 0; b < p->shape.batch; b++) {
        p->random = nn_mix(p->random);
        const uint64_t first = p->random % 256;
        for (int64_t t = 0; t < sequence; t++) {
            p->tokens[b * sequence + t] = (int32_t)((first + (uint64_t)t) % 256);
            p->targets[b * sequence + t] = (int32_t)((first + (uint64_t)t + 1) % 256);
        }
    }
}

static int train_step(const program *p, const adapted *a, double *loss) {
    ms_set_learning_rate(a->model, 0.006f);
    return ms_write(a->model, a->gpt2.tokens, p->tokens) != MS_RESULT_OK ||
                   ms_write(a->model, a->gpt2.targets, p->targets) != MS_RESULT_OK ||
                   ms_step(a->model, loss) != MS_RESULT_OK
               ? fail("%s", ms_last_error(a->model))
               : 0;
}

static int train(program *p) {
    checkpoint *saving = &p->options.saving;
    const int64_t steps = p->options.steps;
    for (int64_t step = saving->step + 1; step <= steps && !saving->is_stopped; step++) {
        double plain, streamed;
        draw_batch(p);
        if (train_step(p, &p->plain, &plain) != 0 || train_step(p, &p->streamed, &streamed) != 0) {
            return 1;
        }
        if (memcmp(&plain, &streamed, sizeof plain) != 0) {
            return fail("step %lld: loss %.17g, of the plain model %.17g", (long long)step,
                        streamed, plain);
        }
        if (step == 1 || step % 10 == 0) {
            printf("step %5lld  loss %.4f\n", (long long)step, streamed);
        }
        if (checkpoint_step(saving, p->streamed.model, step, step == steps) != 0) {
            return 1;
        }
    }
    return 0;
}

/* Compares all params; the frozen ones must not have changed, so they are equal too. */
static int check_params(const program *p, int64_t first) {
    const int64_t count = nn_param_count(p->plain.net);
    int result = 0;
    for (int64_t i = 0; i < count && result == 0; i++) {
        const nn_param_info *a = nn_param_at(p->plain.net, i);
        const nn_param_info *b = nn_param_at(p->streamed.net, i);
        const size_t elements = (size_t)ms_shape_count(&a->shape);
        float *values = (float *)malloc(2 * elements * sizeof *values);
        if (!values) {
            return fail("no memory for %s", a->name);
        }
        if (ms_read(p->plain.model, a->tensor, values) != MS_RESULT_OK ||
            ms_read(p->streamed.model, b->tensor, values + elements) != MS_RESULT_OK) {
            result = fail("%s cannot be read", a->name);
        } else if (memcmp(values, values + elements, elements * sizeof *values) != 0) {
            result = fail("%s differs from that of the plain model", a->name);
        }
        free(values);
    }
    if (result == 0) {
        printf("check     %lld losses and %lld params are those of the plain model, bit for bit\n",
               (long long)(p->options.saving.step - first), (long long)count);
    }
    return result;
}

static void print_piece(const char *text, size_t length, void *user) {
    fwrite(text, 1, length, (FILE *)user);
}

static int run(program *p) {
    printf("memscale.h %d.%d.%d, adapters beside frozen weights that stream from the host\n\n",
           MEMSCALE_VERSION_MAJOR, MEMSCALE_VERSION_MINOR, MEMSCALE_VERSION_PATCH);
    p->random = nn_mix((uint64_t)p->options.seed);
    if (make_model(p, &p->plain, false) != 0 || make_model(p, &p->streamed, true) != 0) {
        return 1;
    }
    print_models(p);
    if (p->options.plan) {
        printf("\n");
        if (ms_print_plan(p->streamed.model, print_piece, stdout) != MS_RESULT_OK) {
            return fail("there is no plan");
        }
    }
    if (p->options.dry) {
        return 0;
    }
    const size_t count = (size_t)(p->shape.batch * p->shape.sequence);
    p->tokens = (int32_t *)malloc(count * sizeof *p->tokens);
    p->targets = (int32_t *)malloc(count * sizeof *p->targets);
    if (!p->tokens || !p->targets) {
        return fail("no memory for a batch");
    }
    const int64_t first = p->options.saving.step;
    checkpoint_print(&p->options.saving);
    printf("\n");
    if (train(p) != 0) {
        return 1;
    }
    print_debugged(p->options.debug);
    return check_params(p, first);
}

int main(int argc, char **argv) {
    program p;
    memset(&p, 0, sizeof p);
    if (parse_options(&p, argc, argv) != 0) {
        return 2;
    }
    const int result = run(&p);
    free_model(&p.streamed);
    free_model(&p.plain);
    free(p.tokens);
    free(p.targets);
    return result;
}
